"""What tests of batch runs share: files in, a scripted run, records out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripted import ScriptedGenerator

from common.batch import run_batch
from common.config import DecodeConfig, DeviceProfile, OutputConfig, RunConfig, Sweep, SweepLaunch, SweepPoint, slug
from common.decoding import Completion, GenerationRequest, Rejection

RUN = {"model": "m"}  # the shortest that a run is known by
Lines = list[dict[str, Any] | str]


def write_input(run: RunConfig, lines: Iterable[dict[str, Any] | str]) -> None:
    assert run.input is not None
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    Path(run.input.path).write_text(text)


def output_path(run: RunConfig) -> Path:
    assert run.output is not None
    return Path(run.output.path)


def records(run: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output_path(run).read_text().splitlines()]


def execute(profile: DeviceProfile, run: RunConfig, **options: bool) -> dict[str, Any] | None:
    return run_batch(profile, run, lambda: ScriptedGenerator(profile, run), **options)


def sweep_of(profile: DeviceProfile, run: RunConfig, settings: Mapping[str, DecodeConfig]) -> Sweep:
    """A sweep of one launch over the run's input, as `load_sweep` makes it of a file."""
    folder = output_path(run).with_suffix("")
    points = []
    for name, decode in settings.items():
        output = OutputConfig(path=str(folder / f"{slug(name)}.jsonl"))
        own = run.model_copy(update={"decode": decode, "output": output})
        points.append(SweepPoint(name, Path("profile.yaml"), Path("run.yaml"), profile, own))
    return Sweep(Path("sweep.yaml"), folder, tuple(settings), (SweepLaunch(tuple(points)),))


def without_this_start(metrics: dict[str, Any] | None) -> dict[str, Any]:
    """What a start says that finds everything done: all but what one start did."""
    assert metrics is not None and "this_start" in metrics
    rest: dict[str, Any] = json.loads(json.dumps(metrics))
    del rest["this_start"]
    return rest


class Interrupted(Exception):
    pass


class StopsAfter(ScriptedGenerator):
    """Fails like a dying process once it has finished some requests."""

    num_requests = 2

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
        for number, result in enumerate(super().generate(requests)):
            if number == self.num_requests:
                raise Interrupted
            yield result
