"""`lopa quantize`: write an 8-bit folder."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from common.commands.arguments.found import load_both, load_profile_or_found
from common.commands.arguments.options import ModelArgument, OptionalText, ProfileOption, SetOption
from common.config import folder_of, load_run
from common.errors import ConfigError, as_shell
from common.processes import inform


def quantize(
    model: ModelArgument,
    out: Annotated[str, typer.Option("--out", help="The folder to write; must not exist, or be empty.")],
    scheme: Annotated[str, typer.Option(help="w8a8_dynamic, or w8a8 with calibrated input scales.")] = "w8a8_dynamic",
    calibration: Annotated[
        OptionalText,
        typer.Option(metavar="FILE.jsonl", help="Prompts that the float model answers for w8a8 and --smooth."),
    ] = None,
    lora: Annotated[
        OptionalText, typer.Option(metavar="DIR", help="The folder of a LoRA to merge before quantizing.")
    ] = None,
    smooth: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, max=1, metavar="ALPHA", help="SmoothQuant's migration strength, 0 to 1; 0.5 is usual."),
    ] = None,
    exclude: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="PATTERN", help="Linears that stay float, e.g. 'layers.0.*', '*.down_proj'. Repeatable."),
    ] = None,
    report: Annotated[
        OptionalText,
        typer.Option(metavar="RUN", help="Compare tokens and accuracy with the float model's on this run."),
    ] = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Write an 8-bit folder in msmodelslim's layout, and say what it cost, linear by linear.

    MODEL must have float weights. If it is a run, calibration uses its settings, or those of the run after --report.
    """
    from common.commands.quantize.model import QuantizeRequest, quantize_model

    if any(one.partition("=")[0] == "quantization" for one in set or ()):
        raise ConfigError("--set quantization: it says how a profile runs a model; what is written, --scheme says")
    named = load_run(model)
    if report is None and calibration is None:
        device_profile, base = load_profile_or_found(profile, set or []), named
    else:
        device_profile, base = load_both(profile, report or model, set)
    request = QuantizeRequest(
        named.model, out, device_profile, scheme, calibration, folder_of(lora) if lora else named.lora_path, smooth,
        tuple(exclude or ()), None if report is None else base, base,
    )  # fmt: skip
    inform(quantize_model(request))
    inform(f"written: {out}; start it as any model: {as_shell(['lopa', 'run', str(out)])} PROMPT")
