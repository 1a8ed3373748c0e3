"""Several decode settings on one input and one loaded model, each a batch run of its own; a table of all of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.batch import (
    TextGenerator,
    input_and_output,
    markdown,
    print_table,
    read_lines,
    read_records,
    run_batch,
    sweep_table,
    write_whole,
)
from common.config import DecodeConfig, DeviceProfile, RunConfig, slug
from common.errors import ConfigError
from common.metrics import DEFINITIONS, area_under_accuracy
from common.processes import global_rank


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
        output = target.model_copy(update={"path": str(folder / f"{slug(name)}.jsonl"), "metrics_path": None})
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


def _publish(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    headings, cells = sweep_table("setting", rows)
    area = area_under_accuracy([row["metrics"] for row in rows])
    result = {"rows": rows, "area_under_accuracy": area, "definitions": DEFINITIONS}
    write_whole(folder / "sweep.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    write_whole(folder / "sweep.md", markdown(headings, cells))
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
