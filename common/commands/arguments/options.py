"""What several commands share: their options, what is done before any of them loads torch, and a model that is loaded
when a run turns out to need it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Optional

import typer

from common.commands.arguments.found import load_both
from common.config import DecodeConfig, DeviceProfile, RunConfig, as_yaml, given_value, shipped_names
from common.errors import ConfigError, as_shell, one_line, placed, why_no_file
from common.hub import known_as
from common.platforms import platform_of
from common.processes import apply_environment, check_started, global_rank, num_started_here, resolve_mesh
from common.user_files import is_file, write_whole

if TYPE_CHECKING:
    from common.generate import Generator

ProfileOption = Annotated[
    Optional[str],  # noqa: UP045  typer reads this at run time, on Python 3.10 too
    typer.Option(
        "--profile", "-p", metavar="PROFILE", autocompletion=lambda incomplete: _completed("profiles", incomplete),
        help="What runs the model: a YAML file, or a name from configs/profiles; this machine's if not given.",
    ),
]  # fmt: skip
MODEL_HELP = (
    "A model's folder, hf://OWNER/NAME, or demo (it ships). Or a run: a YAML file, or a name from configs/runs."
)
HUB_KEYS = ("model", "tokenizer", "lora_path")  # of a run, that a hub's name may stand for
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=lambda incomplete: _completed("runs", incomplete)),
]
SetOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. decode.num_lookahead=7. Repeatable."),
]
SaveRunOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--save-run", metavar="FILE.yaml", help="Also write these settings to a run file, which repeats this command."
    ),
]
OptionalText = Optional[str]  # noqa: UP045
OptionalCount = Optional[int]  # noqa: UP045
_READS = "which reads the number from the profile"
_ONE_PROCESS = "this command runs in one process, so name a profile of one with --profile, such as cpu"
ALLOWED = "input.run_generated_code=true"
AllowCodeOption = Annotated[
    bool, typer.Option("--allow-code-execution", help=f"Run answers that are programs, to mark them: --set {ALLOWED}.")
]
# For a command that reads its own arguments, since some of its options take lists.
RAW_ARGUMENTS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Drop earlier results instead of resuming the run.")]


def _completed(kind: Literal["profiles", "runs"], begun: str) -> list[str]:
    """Return what the shell offers to complete; it knows files itself."""
    return [name for name in shipped_names(kind) if name.startswith(begun)]


class Parser(argparse.ArgumentParser):
    """Reads a command's own arguments; what is wrong is said in one printable line."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


class WholeNumber:
    """The type of an argument that is counted from `least` to `most`, for argparse."""

    def __init__(self, most: int, least: int = 1) -> None:
        self._most, self._least = most, least

    def __call__(self, text: str) -> int:
        is_short = text.isdecimal() and len(text) < 10
        if not is_short or not self._least <= int(text) <= self._most:
            given = given_value(text)
            raise argparse.ArgumentTypeError(f"{given}: give whole numbers from {self._least} to {self._most}")
        return int(text)


def add_model_and_settings(parser: argparse.ArgumentParser, **of_model: Any) -> None:
    """Add MODEL, --profile and --set to a command that reads its own arguments. of_model: for argparse, of MODEL."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP, **of_model)
    parser.add_argument("--profile", "-p", metavar="PROFILE", help="what runs the model; this machine's if not given")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting; repeatable"
    )


def allowing(overrides: list[str] | None, is_allowed: bool) -> list[str]:
    """The overrides, with --allow-code-execution among them if it was given."""
    return [*(overrides or []), *[ALLOWED] * is_allowed]


def save_run_file(path: Path | None, run: RunConfig) -> None:
    """Write the run with all its settings, those of a preset too; nothing where no path was given. Raises ConfigError
    for a file that is there."""
    if path is None or global_rank():
        return
    name = as_shell([str(path)])  # in one line, as its line ends would end the comment
    if path.exists():
        what = f"it is there already; start it (lopa run {name}), or" if is_file(path) else f"{why_no_file(path)};"
        raise ConfigError(f"--save-run {path}: {what} choose another name")
    # A repository by its name, at this very commit.
    named = {key: known_as(folder) for key in HUB_KEYS if (folder := getattr(run, key)) is not None}
    started_by = f"# Start it by `lopa run {name}`, `lopa serve {name}` or `lopa chat {name}`.\n"
    try:
        write_whole(path, (started_by + as_yaml(run.model_copy(update=named))).encode())
    except OSError as error:
        raise ConfigError(f"--save-run {path}: it cannot be written ({error.strerror}); choose another place") from None


def load_to_run(
    profile: str | None, model: str, overrides: list[str] | None, start_many: str | None = None
) -> tuple[DeviceProfile, RunConfig]:
    """Profile and run as `load_both` finds them, and this process made ready for them. Raises ConfigError or
    MissingCapability.

    start_many: the script that starts this command in several processes; None: there is none.
    """
    device_profile, run_config = load_both(profile, model, overrides)
    make_ready(device_profile, start_many)
    return device_profile, run_config


def make_ready(device_profile: DeviceProfile, start_many: str | None = None, *, starts_others: bool = False) -> None:
    """Make this process ready to run the profile's engine. Raises ConfigError or MissingCapability.

    start_many: as for `load_to_run`. starts_others: this process starts those that run it.
    """
    # run_batch.sh has exported them already; torch, which reads some of them when it loads, is not loaded yet.
    apply_environment(device_profile.environment)
    platform = platform_of(device_profile)
    if platform.needs_devices_at_start:
        here = num_started_here() or resolve_mesh(device_profile).num_processes
        platform.require_devices(device_profile, here)
    if not starts_others:
        check_started(device_profile, _ONE_PROCESS if start_many is None else f"start it with {start_many}, {_READS}")


class GeneratorOnDemand:
    """Loads the model when a run turns out to need it, once, and closes it at the end: the `build` of run_batch.

    settings: name -> decode settings that the model will be used with; they are checked before it is loaded. source:
    the file that they come from.
    """

    def __init__(
        self, profile: DeviceProfile, run: RunConfig, settings: Mapping[str, DecodeConfig] | None = None,
        source: Path | None = None,
    ) -> None:  # fmt: skip
        self._profile, self._run, self._settings, self._source = profile, run, settings or {}, source
        self._generator: Generator | None = None

    def __call__(self) -> Generator:
        if self._generator is None:
            # Here: a run that turns out to be done has no reason to load torch.
            from common.generate import build_generator, check_settings

            with placed(self._source) if self._source else nullcontext():
                check_settings(self._settings, self._profile, self._run)
            self._generator = build_generator(self._profile, self._run)
        return self._generator

    def __enter__(self) -> GeneratorOnDemand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After a failure the peers may be gone, and leaving a process group would wait for them.
        if self._generator is not None and error is None:
            self._generator.close()
