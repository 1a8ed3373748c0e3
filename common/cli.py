"""The `lopa` command: one function a subcommand, each of which only reads its arguments and calls what does the work.

Modules are imported inside the commands: `lopa --help` has no reason to load torch, and `common` may not depend on the
packages above it (a command that lives in one of those is reached with importlib).
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from common.config import DeviceProfile, RunConfig, find_config, load_profile, load_profile_and_run
from common.engine import EngineError
from common.stop import Stopped, die_with_launcher, end_undisturbed, stop_on_signals
from common.version import LOPA_VERSION

app = typer.Typer(
    name="lopa",
    help="Decode text with diffusion language models, several lookahead branches at a time (LoPA).",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ProfileOption = Annotated[
    str, typer.Option("--profile", "-p", help="What runs the model: a YAML file, or a name from configs/profiles.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="What is decoded: a YAML file, or a name from configs/runs.")
]
SetOption = Annotated[
    Optional[list[str]],  # noqa: UP045  typer reads this at run time, on Python 3.10 too
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. decode.num_lookahead=7. Repeatable."),
]
OptionalText = Optional[str]  # noqa: UP045
OptionalCount = Optional[int]  # noqa: UP045
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Drop earlier results instead of resuming them.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lopa {LOPA_VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def run(
    run: RunArgument,
    profile: ProfileOption,
    set: SetOption = None,
    overwrite: OverwriteOption = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed requests once more.")] = False,
) -> None:
    """Decode a JSONL file of requests; start it again to resume.

    Results go to output.path of the run file, one line a request, and metrics beside it. For a profile of several
    processes use scripts/run_batch.sh, which starts them.
    """
    from common.batch import metrics_path, require_some_finished, run_batch
    from common.evaluate import GeneratorOnDemand
    from common.report import print_summary

    device_profile, run_config = _load(profile, run, set or [])
    with GeneratorOnDemand(device_profile, run_config) as build:
        metrics = run_batch(device_profile, run_config, build, overwrite=overwrite, retry_errors=retry_errors)
    if metrics is not None and run_config.output is not None:
        print_summary(f"{run_config.output.path} (metrics: {metrics_path(run_config.output)})", metrics)
        require_some_finished(run_config, metrics)


@app.command()
def evaluate(
    run: RunArgument,
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="Settings to compare: a YAML file of configs/sweeps.")],
    profile: ProfileOption,
    set: SetOption = None,
    overwrite: OverwriteOption = False,
    show: Annotated[int, typer.Option(min=0, help="Print this many solved problems of the last setting.")] = 0,
) -> None:
    """Decode one input under several settings and print a row for each: accuracy, TPF, steps, TPS, latency.

    The model is loaded once. Every setting has its own output file in a folder named after output.path, so a sweep
    that was stopped goes on where it was.
    """
    from common.evaluate import GeneratorOnDemand, evaluate_sweep, load_sweep

    device_profile, run_config = _load(profile, run, set or [])
    settings = load_sweep(find_config("sweeps", sweep), run_config.decode)
    with GeneratorOnDemand(device_profile, run_config) as build:
        evaluate_sweep(device_profile, run_config, settings, build, overwrite=overwrite, num_shown=show)


@app.command()
def estimate(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A YAML file, or a name from configs/profiles.")],
    run: RunArgument,
    set: SetOption = None,
    rows: Annotated[
        OptionalCount, typer.Option(min=1, help="Rows of a step, of all bp ranks; k + 1 a request if unset.")
    ] = None,
    window: Annotated[
        OptionalCount, typer.Option(min=1, help="Positions of a row; usual for the strategy if unset.")
    ] = None,
    prefix: Annotated[int, typer.Option(min=0, help="Cached positions in front of the window.")] = 1024,
    tpf: Annotated[float, typer.Option(min=0.1, help="Tokens a step, for the tokens per second.")] = 10.0,
    hardware: Annotated[OptionalText, typer.Option(help="YAML file, or name from configs/hardware.")] = None,
) -> None:
    """Predict the time of one step from its operations, by part; nothing is run and no weights are needed.

    Says what bounds each part, what W8A8, merging, fusing and overlapping change, and which mesh of the same devices
    would be fastest. Of the run's model only config.json is read.
    """
    from common.estimate.scenario import Options
    from common.estimate.tables import estimate_tables

    device_profile, run_config = load_profile_and_run(
        find_config("profiles", profile), find_config("runs", run), set or []
    )
    options = Options(rows=rows, window=window, prefix=prefix, tokens_per_step=tpf)
    typer.echo(estimate_tables(device_profile, run_config, options, hardware))


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A float checkpoint folder.")],
    out: Annotated[str, typer.Option("--out", help="The folder to write; must not exist, or be empty.")],
    scheme: Annotated[str, typer.Option(help="w8a8_dynamic, or w8a8 with calibrated input scales.")] = "w8a8_dynamic",
    calibration: Annotated[
        OptionalText, typer.Option(metavar="FILE.jsonl", help="Prompts for the float model: for w8a8 and --smooth.")
    ] = None,
    lora: Annotated[OptionalText, typer.Option(metavar="DIR", help="A LoRA folder, merged first.")] = None,
    smooth: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, max=1, metavar="ALPHA", help="SmoothQuant's migration strength, 0 to 1; 0.5 is usual."),
    ] = None,
    exclude: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="PATTERN", help="Linears that stay float, e.g. 'layers.0.*', '*.down_proj'. Repeatable."),
    ] = None,
    report: Annotated[
        OptionalText, typer.Option(metavar="RUN", help="Compare with the float model on this run: tokens, accuracy.")
    ] = None,
    profile: Annotated[str, typer.Option("--profile", "-p", help="Runs models to calibrate and compare.")] = "cpu",
    set: SetOption = None,
) -> None:
    """Write an 8-bit folder in msmodelslim's layout, and say what it cost, linear by linear."""
    from common.quantize_command import QuantizeRequest, quantize_model

    profile_path = find_config("profiles", profile)
    if report is None:
        device_profile, run_config = load_profile(profile_path, set or []), None
    else:
        device_profile, run_config = load_profile_and_run(profile_path, find_config("runs", report), set or [])
    request = QuantizeRequest(
        model, out, device_profile, scheme, calibration, lora, smooth, tuple(exclude or ()), run_config
    )
    typer.echo(quantize_model(request))


@app.command()
def parity(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Golden traces, JSON.")],
) -> None:
    """Replay traces of the published implementation step by step and compare everything.

    Exit 1 if one differs, 2 if one cannot be replayed; the others are replayed all the same.
    """
    from common.parity import replay_files

    raise typer.Exit(replay_files(files))


@app.command()
def doctor(
    profile: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--profile", "-p", help="Also say whether this profile can run here; exit 2 if not."),
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Also run each operation of an Ascend profile; exit 2 if one is wrong.")
    ] = False,
) -> None:
    """Show what this machine has: devices, driver or CANN, torch, collectives, Triton."""
    from common.doctor import examine, run_selftest

    device_profile = None if profile is None else load_profile(find_config("profiles", profile))
    exit_code = examine(device_profile)
    if selftest:
        exit_code = exit_code or run_selftest(device_profile)
    raise typer.Exit(exit_code)


def _load(profile: str, run: str, overrides: list[str]) -> tuple[DeviceProfile, RunConfig]:
    device_profile, run_config = load_profile_and_run(
        find_config("profiles", profile), find_config("runs", run), overrides
    )
    # run_batch.sh has exported them already; torch, which reads some of them when it loads, is not loaded yet.
    for name, value in device_profile.environment.items():
        os.environ.setdefault(name, value)
    from common.launch import check_started, require_devices

    require_devices(device_profile)
    check_started(device_profile)
    return device_profile, run_config


def fail(sentence: str) -> int:
    """Say why this process ends, as one line, also to the launcher if there is one; the exit code."""
    from common.launch import global_rank, num_started
    from common.supervise import write_error_file

    write_error_file(sentence)
    where = f"rank {global_rank()}: " if num_started() > 1 else ""
    print(f"lopa: {where}{sentence}", file=sys.stderr, flush=True)
    return 2


def main() -> None:
    """The console script: errors of users and machines end in one sentence; only defects show a traceback."""
    # With torch-npu installed but no CANN, importing torch would fail with torch-npu's traceback; engines import it.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    die_with_launcher()
    stop_on_signals()
    level = logging.WARNING if os.environ.get("RANK", "0") != "0" else logging.INFO
    logging.basicConfig(format="lopa: %(message)s", level=logging.WARNING)
    for package in ("common", "graphs", "quant", "lopa_cuda", "lopa_ascend"):
        logging.getLogger(package).setLevel(level)
    try:
        app()
    except Stopped as stopped:  # which has silenced further signals
        if not stopped.is_reported and os.environ.get("RANK", "0") == "0":
            print(f"lopa: {stopped}", file=sys.stderr, flush=True)
        sys.exit(stopped.exit_code)
    except (ValueError, EngineError, OSError) as error:
        end_undisturbed()  # before the sentence is written
        if os.environ.get("LOPA_TRACEBACK"):
            raise
        sys.exit(fail(" ".join(str(error).split())))
    finally:
        end_undisturbed()


if __name__ == "__main__":
    main()
