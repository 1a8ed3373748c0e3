"""What several commands share: their options, what is done before any of them loads torch, and a model that is loaded
when a run turns out to need it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from common.config import DecodeConfig, DeviceProfile, RunConfig, find_config, load_profile_and_run
from common.errors import placed
from common.platforms import platform_of
from common.processes import apply_environment, check_started, num_started_here, resolve_mesh

if TYPE_CHECKING:
    from common.generate import Generator

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
_READS = "which reads the number from the profile"
_ONE_PROCESS = "this command runs in one process, so name a profile of one with --profile, such as cpu"
ALLOWED = "input.run_generated_code=true"
AllowCodeOption = Annotated[
    bool,
    typer.Option("--allow-code-execution", help=f"Run answers that are programs, to mark them: --set {ALLOWED}."),
]
# For a command that reads its own arguments, since some of its options take lists.
RAW_ARGUMENTS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Drop earlier results instead of resuming them.")]


class WholeNumber:
    """The type of an argument that is counted from `least` to `most`, for argparse."""

    def __init__(self, most: int, least: int = 1) -> None:
        self._most, self._least = most, least

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or not self._least <= int(text) <= self._most:
            raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from {self._least} to {self._most}")
        return int(text)


def allowing(overrides: list[str] | None, is_allowed: bool) -> list[str]:
    """The overrides, with --allow-code-execution among them if it was given."""
    return [*(overrides or []), *[ALLOWED] * is_allowed]


def load_both(profile: str, run: str, overrides: list[str] | None) -> tuple[DeviceProfile, RunConfig]:
    """Both files. Raises ConfigError."""
    return load_profile_and_run(find_config("profiles", profile), find_config("runs", run), overrides or [])


def load_to_run(
    profile: str, run: str, overrides: list[str] | None, start_many: str | None = None
) -> tuple[DeviceProfile, RunConfig]:
    """Both files, and this process made ready to run them. Raises ConfigError or MissingCapability.

    start_many: the script that starts this command in several processes; None: there is none.
    """
    device_profile, run_config = load_both(profile, run, overrides)
    make_ready(device_profile, start_many)
    return device_profile, run_config


def make_ready(device_profile: DeviceProfile, start_many: str | None = None) -> None:
    """This process made ready to run the profile's engine. Raises ConfigError or MissingCapability.

    start_many: as for `load_to_run`.
    """
    # run_batch.sh has exported them already; torch, which reads some of them when it loads, is not loaded yet.
    apply_environment(device_profile.environment)
    platform = platform_of(device_profile)
    if platform.needs_devices_at_start:
        here = num_started_here() or resolve_mesh(device_profile).num_processes
        platform.require_devices(device_profile, here)
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
