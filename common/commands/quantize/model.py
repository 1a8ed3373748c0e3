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
from common.checkpoint import LoraSource, SafetensorsFolder, load_model_config, quantizable
from common.commands.quantize.compare import Comparison, compare_models
from common.config import DecodeConfig, DeviceProfile, GraphConfig, InputConfig, RunConfig
from common.decoding import GenerationRequest, Rejection
from common.errors import ConfigError
from common.generate import Generator, build_generator
from common.platforms import platform_of
from common.processes import resolve_mesh
from common.tables import markdown
from quant.calibration import Calibration, calibrate
from quant.quantize import FolderScheme, chosen_linears, quantize_folder
from quant.report import LinearReport, QuantReport

_SAMPLES = 64  # rows of every linear's input that are kept for output errors
_REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """profile: runs the models for calibration and report. run: how, and on what the report is made; None: no report.
    base: how the calibration's prompts are decoded where no run says so; None: with default settings."""

    model: str
    out: str
    profile: DeviceProfile
    scheme: str = "w8a8_dynamic"
    calibration: str | None = None
    lora: str | None = None
    smooth: float | None = None
    exclude: Sequence[str] = ()
    run: RunConfig | None = None
    base: RunConfig | None = None


def quantize_model(request: QuantizeRequest) -> str:
    """Write the folder; the report as text, also in quantization_report.json there. Raises ConfigError or
    QuantizationError, as far as possible before anything is run."""
    _check(request)
    ranges = None if request.calibration is None else _calibrate(request, request.calibration)
    found = quantize_folder(
        request.model,
        request.out,
        quantizable(load_model_config(request.model)),
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
    """Check scheme and patterns before anything is loaded, as quantize_folder does later. Raises ConfigError or what
    that raises."""
    _scheme(request)
    layout = quantizable(load_model_config(request.model))
    chosen_linears(layout, request.exclude, is_calibrated=request.calibration is not None)


def _calibrate(request: QuantizeRequest, path: str) -> Calibration:
    """Observe the model while it decodes the file's prompts without lookahead, in plain operators: graphs and fused
    kernels do not call the modules that are observed."""
    plain = {"kernels": "torch", "graph": GraphConfig(), "quantization": None}
    profile = request.profile.model_copy(update=plain)
    base = request.run or request.base or RunConfig(model=request.model)
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
    """Return a `quant.quantize.MergeLora`, which reads a weight by its name with the adapter added."""
    merged = LoraSource(SafetensorsFolder(model), lora, load_model_config(model))
    return lambda name, _: merged.read(name)


def _compare(request: QuantizeRequest, run: RunConfig) -> Comparison:
    plain = run.model_copy(update={"model": request.model, "lora_path": request.lora})
    quantized = run.model_copy(update={"model": request.out, "lora_path": None})
    return compare_models(request.profile, plain, quantized)


def _settings(request: QuantizeRequest) -> dict[str, Any]:
    names = ("model", "lora", "calibration", "smooth", "exclude")
    return {name: getattr(request, name) for name in names}


def _errors(found: QuantReport) -> str:
    """Relative errors in percent, a row a layer; what stayed float has none, and of experts the worst one counts."""
    measured = [(own, own.output_error) for own in found.linears if own.output_error is not None]
    sections = [_error_table("weights", [(own, own.weight_error) for own in found.linears])]
    if measured:
        sections.append(_error_table("outputs on the calibration's samples", measured))
    before, after = _size(found.bytes_before), _size(found.bytes_after)
    sections.append(f"{len(found.linears)} linears in {found.scheme}; {before} before, {after} after.")
    return "\n\n".join(sections)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _error_table(what: str, errors: Sequence[tuple[LinearReport, float]]) -> str:
    rows: dict[int, dict[str, float]] = {}
    for own, error in errors:
        row, column = rows.setdefault(own.layer, {}), own.name.rpartition(".")[2]
        row[column] = max(error, row.get(column, 0.0))
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [
        [str(layer), *(f"{100 * row[column]:.3f}" if column in row else "-" for column in columns)]
        for layer, row in sorted(rows.items())
    ]
    return f"Relative error of {what}, %:\n\n" + markdown(["layer", *columns], cells)
