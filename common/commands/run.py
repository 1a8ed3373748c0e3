"""`lopa run`: decode a file of requests.

As in all commands, rooms are imported inside: `lopa --help` has no reason to load torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from common.commands.options import (
    AllowCodeOption,
    GeneratorOnDemand,
    OverwriteOption,
    ProfileOption,
    RunArgument,
    SetOption,
    allowing,
    load_to_run,
)


def run(
    run: RunArgument,
    profile: ProfileOption,
    set: SetOption = None,
    overwrite: OverwriteOption = False,
    allow_code_execution: AllowCodeOption = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed requests once more.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print every number, with what it means.")] = False,
) -> None:
    """Decode a JSONL file of requests; start it again to resume.

    Results go to output.path of the run file, one line a request, and metrics beside it. For a profile of several
    processes use scripts/run_batch.sh, which starts them.
    """
    from common.batch import metrics_path, print_summary, require_some_finished, run_batch

    overrides = allowing(set, allow_code_execution)
    device_profile, run_config = load_to_run(profile, run, overrides, "scripts/run_batch.sh")
    with GeneratorOnDemand(device_profile, run_config) as build:
        metrics = run_batch(device_profile, run_config, build, overwrite=overwrite, retry_errors=retry_errors)
    if metrics is not None and run_config.output is not None:
        title = f"results in {run_config.output.path}, metrics in {metrics_path(run_config.output)}"
        print_summary(title, metrics, details=details)
        require_some_finished(run_config, metrics)
