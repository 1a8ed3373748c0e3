"""`lopa quantize`: a float checkpoint in, a quantized folder and a report of what it cost out.

prompts -> decode with the float model, observed -> ranges      (static scheme, smoothing, output errors)
model + LoRA + ranges -> quant.quantize.quantize_folder -> OUT -> errors by layer
RUN -> common.commands.quantize.compare -> agreement and accuracy beside the float model
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from common.batch import prompt_or_reason, read_lines, require_shareable
from common.checkpoint import LoraSource, SafetensorsFolder, load_model_config
from common.commands.quantize.compare import Comparison, compare_models
from common.config import DecodeConfig, DeviceProfile, GraphConfig, InputConfig, RunConfig
from common.decoding import GenerationRequest, Rejection
from common.errors import ConfigError
from common.generate import Generator, build_generator
from common.platforms import platform_of
from common.processes import resolve_mesh
from common.tables import markdown
from quant.calibration import Calibration, calibrate
from quant.names import LINEARS, LinearName, excluded_linears
from quant.quantize import FolderScheme, quantize_folder

_SAMPLES = 64  # rows of every linear's input that are kept for output errors
_REPORT_FILE = "quantization_report.json"
_FAMILIES = ("dream", "sdar", "fast_dllm_v2", "stable_diffcoder")  # whose tensors have the names that `quant` knows
_COLUMNS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """profile: runs the models for calibration and report. run: how, and on what the report is made; None: no report,
    and calibration decodes with default settings."""

    model: str
    out: str
    profile: DeviceProfile
    scheme: str = "w8a8_dynamic"
    calibration: str | None = None
    lora: str | None = None
    smooth: float | None = None
    exclude: Sequence[str] = ()
    run: RunConfig | None = None


def quantize_model(request: QuantizeRequest) -> str:
    """Write the folder; the report as text, also in quantization_report.json there. Raises ConfigError or
    QuantizationError, as far as possible before anything is run."""
    _check(request)
    ranges = None if request.calibration is None else _calibrate(request, request.calibration)
    found = quantize_folder(
        request.model,
        request.out,
        _scheme(request),
        calibration=ranges,
        exclude=request.exclude,
        smooth_alpha=request.smooth,
        lora=None if request.lora is None else _merging(request.model, request.lora),
    )
    comparison = None if request.run is None else _compare(request, request.run)
    result = {**_settings(request), **found.as_dict(), "comparison": comparison and comparison.as_dict()}
    (Path(request.out) / _REPORT_FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sections = [_errors(found), "" if comparison is None else comparison.table()]
    return "\n\n".join(section for section in sections if section)


def _check(request: QuantizeRequest) -> None:
    """Refuse at once what would else be found out after the models have run."""
    _check_names(request)
    out = Path(request.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not empty; remove it or write elsewhere")
    needs = "scheme w8a8" if request.scheme == "w8a8" else "smoothing" if request.smooth is not None else None
    if needs and request.calibration is None:
        raise ConfigError(f"{needs} needs --calibration FILE.jsonl, prompts like those that the model will see")
    if request.run is not None:
        if request.run.input is None:
            raise ConfigError("the run file of --report has no input section: add input.path, a JSONL file of problems")
        require_shareable(request.run.input, 2)  # both models read it
        read_lines(request.run.input)
    if request.calibration is None and request.run is None:
        return
    if platform_of(request.profile).engine != "lopa_cuda" or resolve_mesh(request.profile).num_processes > 1:
        raise ConfigError(
            f"profile {request.profile.name}: calibration and report run in one process of engine lopa_cuda: "
            "use --profile cpu or h200_tp1_bp1"
        )


def _scheme(request: QuantizeRequest) -> FolderScheme:
    known: tuple[FolderScheme, ...] = get_args(FolderScheme)
    found = next((scheme for scheme in known if scheme == request.scheme), None)
    if found is None:
        raise ConfigError(f"scheme {request.scheme!r} is not known: use {' or '.join(known)}")
    return found


def _check_names(request: QuantizeRequest) -> None:
    """quantize_folder checks the same, but only once it is called."""
    _scheme(request)
    config = load_model_config(request.model)
    if config.family not in _FAMILIES:
        raise ConfigError(
            f"{request.model}: 8-bit folders of the family {config.family} are not implemented, only of "
            f"{', '.join(_FAMILIES)}"
        )
    every = [LinearName(layer, kind) for layer in range(config.num_layers) for kind in LINEARS]
    excluded_linears(every, request.exclude)


def _calibrate(request: QuantizeRequest, path: str) -> Calibration:
    """From decoding the file's prompts without lookahead, in plain operators: graphs and fused kernels do not call the
    modules that are observed."""
    plain = {"kernels": "torch", "graph": GraphConfig(), "quantization": None}
    profile = request.profile.model_copy(update=plain)
    base = request.run or RunConfig(model=request.model)
    decode = DecodeConfig.model_validate({**base.decode.model_dump(), "num_lookahead": 0})
    template = base.input.prompt_template if base.input is not None else None
    source = InputConfig(path=path, prompt_template=template)
    lines = read_lines(source)
    run = base.model_copy(update={"model": request.model, "lora_path": request.lora, "decode": decode})
    with build_generator(profile, run) as generator:
        requests = []
        for line in lines:
            prompt = prompt_or_reason(line, source, generator.tokenizer)
            if isinstance(prompt, str):
                raise ConfigError(f"{path}: {prompt}")
            requests.append(GenerationRequest(line.key, prompt))
        engine: Any = generator.engine
        runs = [lambda: _decode(generator, requests, path)]
        return calibrate(engine.model, runs, num_samples=_SAMPLES)


def _decode(generator: Generator, requests: Sequence[GenerationRequest], path: str) -> None:
    for result in generator.generate(requests):
        if isinstance(result, Rejection):
            raise ConfigError(f"{path}: prompt {result.id}: {result.reason}")


def _merging(model: str, lora: str) -> Callable[[str, Tensor], Tensor]:
    """quant.quantize.MergeLora."""
    merged = LoraSource(SafetensorsFolder(model), lora, load_model_config(model))
    return lambda name, _: merged.read(name)


def _compare(request: QuantizeRequest, run: RunConfig) -> Comparison:
    plain = run.model_copy(update={"model": request.model, "lora_path": request.lora})
    quantized = run.model_copy(update={"model": request.out, "lora_path": None})
    return compare_models(request.profile, plain, quantized)


def _settings(request: QuantizeRequest) -> dict[str, Any]:
    names = ("model", "lora", "calibration", "smooth", "exclude")
    return {name: getattr(request, name) for name in names}


def _errors(found: Any) -> str:
    """Relative errors in percent, a row a layer; what stayed float has none."""
    sections = [_error_table("weights", {own.name: own.weight_error for own in found.linears})]
    measured = {own.name: own.output_error for own in found.linears if own.output_error is not None}
    if measured:
        sections.append(_error_table("outputs on the calibration's samples", measured))
    before, after = _size(found.bytes_before), _size(found.bytes_after)
    sections.append(f"{len(found.linears)} linears in {found.scheme}; {before} before, {after} after.")
    return "\n\n".join(sections)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _error_table(what: str, error_of: dict[str, float]) -> str:
    rows: dict[int, dict[str, str]] = {}
    for name, error in error_of.items():
        parts = name.split(".")  # model.layers.3.self_attn.q_proj
        rows.setdefault(int(parts[2]), {})[parts[-1]] = f"{100 * error:.3f}"
    cells = [[str(layer), *[own.get(column, "-") for column in _COLUMNS]] for layer, own in sorted(rows.items())]
    return f"Relative error of {what}, %:\n\n" + markdown(["layer", *_COLUMNS], cells)
