"""Several decode settings on one input and one loaded model, each a batch run of its own; a table of all of them.

A sweep file names settings one by one (`rows`), spans a grid (`grid`), or both; every key is one of `decode`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import Field, ValidationError

from common.batch import TextGenerator, input_and_output, run_batch
from common.config import ConfigError, DecodeConfig, DeviceProfile, Frozen, RunConfig, load_yaml
from common.inputs import read_lines
from common.launch import global_rank
from common.metrics import DEFINITIONS, area_under_accuracy
from common.output import read_records
from common.report import markdown, print_table, sweep_table


class SweepRow(Frozen):
    name: str
    decode: dict[str, Any] = Field(default_factory=dict)


class SweepConfig(Frozen):
    """Settings to compare, over those of the run file; `configs/sweeps/*.yaml`."""

    rows: tuple[SweepRow, ...] = ()
    grid: dict[str, list[Any]] = Field(default_factory=dict)


class GeneratorOnDemand:
    """Loads the model when a run turns out to need it, once, and closes it at the end: the `build` of run_batch."""

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        self._profile, self._run = profile, run
        self._generator: Any = None

    def __call__(self) -> Any:
        from common.generate import build_generator

        if self._generator is None:
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


def load_sweep(path: Path, base: DecodeConfig) -> dict[str, DecodeConfig]:
    """Name -> settings, in the file's order. Raises ConfigError naming file, row and fix."""
    sweep = load_yaml(path, SweepConfig)
    rows = [*sweep.rows, *_grid_rows(sweep.grid)]
    if not rows:
        raise ConfigError(f"{path}: no settings to compare; add rows or a grid")
    names = [row.name for row in rows]
    if len({_slug(name) for name in names}) < len(names):
        raise ConfigError(f"{path}: two settings have the same name; each one names an output file")
    return {row.name: _settings(path, row, base) for row in rows}


def evaluate_sweep(
    profile: DeviceProfile,
    run: RunConfig,
    settings: Mapping[str, DecodeConfig],
    build: Callable[[], Any],
    *,
    overwrite: bool = False,
    num_shown: int = 0,
) -> list[dict[str, Any]]:
    """Run every setting; on rank 0 print and write the table, and return its rows."""
    _, target = input_and_output(run)
    folder = Path(target.path).with_suffix("")
    if folder.is_file():
        raise ConfigError(f"output.path {target.path}: results go to the folder {folder}, which is a file; change it")
    rows: list[dict[str, Any]] = []
    row_run = run
    for name, decode in settings.items():
        output = target.model_copy(update={"path": str(folder / f"{_slug(name)}.jsonl"), "metrics_path": None})
        row_run = run.model_copy(update={"decode": decode, "output": output})
        metrics = run_batch(profile, row_run, _with_decode(build, decode), overwrite=overwrite)
        if metrics is not None:
            rows.append({"name": name, "decode": decode.model_dump(mode="json"), "metrics": metrics})
    if global_rank() == 0:
        if num_shown:
            _print_solved(row_run, num_shown)
        _publish(folder, rows)
    return rows


def _with_decode(build: Callable[[], Any], decode: DecodeConfig) -> Callable[[], TextGenerator]:
    def build_row() -> TextGenerator:
        generator: TextGenerator = build().with_decode(decode)
        return generator

    return build_row


def _grid_rows(grid: Mapping[str, Sequence[Any]]) -> list[SweepRow]:
    if not grid:
        return []
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [
        SweepRow(name=", ".join(f"{key}={value}" for key, value in point.items()), decode=point) for point in points
    ]


def _settings(path: Path, row: SweepRow, base: DecodeConfig) -> DecodeConfig:
    try:
        return DecodeConfig.model_validate({**base.model_dump(), **row.decode})
    except ValidationError as error:
        from common.config_errors import explain

        raise ConfigError(f"{explain(error, path, DecodeConfig)} (row {row.name!r})") from None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _publish(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    headings, cells = sweep_table("setting", rows)
    area = area_under_accuracy([row["metrics"] for row in rows])
    result = {"rows": rows, "area_under_accuracy": area, "definitions": DEFINITIONS}
    (folder / "sweep.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "sweep.md").write_text(markdown(headings, cells), encoding="utf-8")
    remarks = [] if area is None else [f"AUP {area:.1f}: {DEFINITIONS['area_under_accuracy'].removeprefix('AUP: ')}"]
    print_table(headings, cells, [*remarks, f"written to {folder}/sweep.md and {folder}/sweep.json"])


def _print_solved(run: RunConfig, count: int) -> None:
    source, target = input_and_output(run)
    question_of = {line.key: line.fields.get("question", "") for line in read_lines(source)}
    solved = (record for record in read_records(Path(target.path)) if record.get("correct"))
    for record in itertools.islice(solved, count):
        print(f"\n{question_of.get(str(record['id']), '')}\n\n{record['text'].strip()}")
        print(f"-- {record['effective_tokens']} tokens in {record['steps']} forward passes")
    print()
