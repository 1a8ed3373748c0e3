"""`lopa run`: answer a prompt, or decode a file of requests.

As in all commands, rooms are imported inside: `lopa --help` has no reason to load torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from common.commands.arguments.found import load_both
from common.commands.arguments.options import (
    AllowCodeOption,
    GeneratorOnDemand,
    ModelArgument,
    OptionalCount,
    OptionalText,
    OverwriteOption,
    ProfileOption,
    SaveRunOption,
    SetOption,
    allowing,
    make_ready,
    save_run_file,
)
from common.config import DeviceProfile, RunConfig, find_config, short_name
from common.errors import ConfigError

STANDARD_INPUT = "-"
_FLAGS = {"output.path": "--output", "input.limit": "--limit"}  # that set these keys
_OF_INPUT_FILES = {
    "input",
    "input.path",
    "input.limit",
    "input.num_fewshot",
    "input.fewshot_path",
    "input.run_generated_code",
    "input.settings_field",
    "input.target_field",
}  # settings that do nothing to one prompt; the others say how it is asked, or where its answer ends
_OF_FILES = (".json", ".txt", ".csv", ".tsv", ".gz", ".yaml", ".yml")  # one word that ends so is no question


def run(
    model: ModelArgument,
    prompt: Annotated[
        OptionalText,
        typer.Argument(
            metavar="PROMPT",
            help="A text, or a JSONL or Parquet file of requests; - is standard input. Without it the run's input.",
        ),
    ] = None,
    profile: ProfileOption = None,
    set: SetOption = None,
    overwrite: OverwriteOption = False,
    allow_code_execution: AllowCodeOption = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed requests once more.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print every number, with what it means.")] = False,
    ray: Annotated[
        OptionalText,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Decode a file on the Ray cluster at this address; local starts one on this machine.",
        ),
    ] = None,
    replicas: Annotated[
        OptionalCount,
        typer.Option(
            "--replicas", metavar="N", min=1, help="With --ray: the number of actors, each with devices of its own."
        ),
    ] = None,
    save_run: SaveRunOption = None,
) -> None:
    """Answer one prompt, or decode a file of requests; start it again to resume.

    A line or row of a file has `prompt`, `messages` or `question`, or is one of an OpenAI batch file. Answers go to
    --output, one line for each request (a Parquet file is written at the end), with metrics beside it. For a profile
    of several processes, such as cuda_bp2 for two GPUs, use scripts/run_batch.sh PROFILE MODEL; with DRY_RUN=true in
    front it prints the commands and starts nothing.
    """
    if overwrite and retry_errors:
        raise ConfigError("--retry-errors: --overwrite decodes all requests once more: leave one of them out")
    if replicas is not None and ray is None:
        raise ConfigError("--replicas: they are actors on a Ray cluster; give its address, or local, with --ray")
    question = None if prompt is None or _is_file(prompt) else prompt
    if question is not None:
        flags = {
            "--ray": ray, "--overwrite": overwrite, "--retry-errors": retry_errors,
            "--allow-code-execution": allow_code_execution, "--details": details,
        }  # fmt: skip
        _require_no_file_options(set or [], flags)
    else:
        set = allowing([*(set or []), *_files(model, prompt, set or [])], allow_code_execution)
    device_profile, run_config = load_both(profile, model, set, takes_many=prompt != question)
    if ray is None:  # else the devices are those of other processes
        make_ready(device_profile, "scripts/run_batch.sh" if question is None else None)
    save_run_file(save_run, run_config)
    if question is not None:
        _answer(question, device_profile, run_config)
    else:
        options = {"overwrite": overwrite, "retry_errors": retry_errors, "details": details}
        _decode_file(device_profile, run_config, ray, replicas, **options)


def _decode_file(
    profile: DeviceProfile,
    run: RunConfig,
    ray: str | None,
    replicas: int | None,
    *,
    overwrite: bool,
    retry_errors: bool,
    details: bool,
) -> None:
    """Decode the run's input, here or on a Ray cluster, and print what became of it. Raises as the command does."""
    from common.batch import kept_as_lines, metrics_path, print_summary, require_some_finished, run_batch, write_table
    from common.serving import openai_records

    run, table = kept_as_lines(run, overwrite=overwrite)
    options = {"overwrite": overwrite, "retry_errors": retry_errors}
    if ray is None:
        with GeneratorOnDemand(profile, run) as build:
            metrics = run_batch(profile, run, build, openai=openai_records, **options)
    else:
        from common.cluster import run_on_ray

        metrics = run_on_ray(profile, run, ray, replicas, **options)
    if metrics is not None and run.output is not None:
        if table is not None:
            write_table(Path(run.output.path), table)
        title = f"results in {table or run.output.path}, metrics in {metrics_path(run.output)}"
        print_summary(title, metrics, details=details)
        require_some_finished(run, metrics)


def _require_no_file_options(given: Sequence[str], flags: Mapping[str, object]) -> None:
    """ConfigError for what would have no effect on one prompt."""
    found = [flag for flag, value in flags.items() if value]
    for key in (one.partition("=")[0] for one in given):
        if key.partition(".")[0] == "output" or key in _OF_INPUT_FILES:
            found.append(_FLAGS.get(key, f"--set {key}"))
    if found:
        raise ConfigError(
            f"{found[0]}: the answer to one prompt is printed; give a JSONL file of requests, or leave it out"
        )


def _answer(prompt: str, profile: DeviceProfile, run: RunConfig) -> None:
    from common.commands.filling import answer

    with GeneratorOnDemand(profile, run) as build:
        answer(build(), {"question": prompt})


def _is_file(prompt: str) -> bool:
    if prompt == STANDARD_INPUT or prompt.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        return True
    if prompt.endswith(_OF_FILES) and not any(map(str.isspace, prompt)):
        return True
    try:
        is_folder, exists = Path(prompt).is_dir(), Path(prompt).exists()
    except (OSError, ValueError):  # a text that no file can be called
        return False
    if is_folder and os.sep in prompt:
        raise ConfigError(f"{prompt}: a folder; give a text to answer, or a JSONL file of requests")
    return exists and not is_folder


def _files(model: str, file: str | None, given: Sequence[str]) -> list[str]:
    """Overrides that name input and output. Raises ConfigError where there is nothing to decode."""
    keys = {one.partition("=")[0] for one in given}
    if file is None:
        if find_config("runs", model).is_dir() and not keys & {"input", "input.path"}:
            raise ConfigError(f"run {model}: give what is to be answered after it: a text, or a JSONL file of requests")
        return []
    if keys & {"input", "input.path"}:
        raise ConfigError(f"{file} and --set input.path are two inputs: leave one of them out")
    stem = "stdin" if file == STANDARD_INPUT else Path(file.removesuffix(".gz")).stem
    output = f"output.path=outputs/{short_name(model)}_{stem}.jsonl"
    return [f"input.path={file}", *([] if keys & {"output", "output.path"} else [output])]
