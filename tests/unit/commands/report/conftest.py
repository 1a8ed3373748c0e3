"""The results of a sweep over a scripted model, and a bench beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedGenerator

from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.evaluation import evaluate_sweep
from tests.unit.batch.batch_files import sweep_of, write_input
from tests.unit.batch.conftest import run
from tests.unit.serving.page.conftest import browser, page

__all__ = ["browser", "page", "run"]

BENCH: dict[str, Any] = {
    "conditions": {"engine": "lopa_cuda", "device": "NVIDIA", "mesh": {"dp": 1, "bp": 1, "tp": 1}, "output": "x"},
    "floors": {},
    "shapes": [
        {"rows": 1, "width": 64, "device_ms": 4.1, "layers_ms": 3.6, "head_ms": 0.3, "gather_ms": 0.0, "call_ms": 4.2,
         "weight_floor_ms": 3.35, "matrix_floor_ms": 1.1},
    ],
    "steps": [{"accepted": 3, "median_ms": {"schedule": 0.1, "forward": 4.0, "select": 0.1, "commit": 0.0,
                                            "advance": 0.1, "device": 3.9, "outside_device": 0.4, "step": 4.4}}],
}  # fmt: skip


@pytest.fixture
def results(cpu: DeviceProfile, run: RunConfig) -> Path:
    """A sweep of two values of k at two thresholds, and a bench."""
    write_input(run, [{"id": n, "question": f"#### {n}", "final": 4} for n in range(3, 7)])
    settings = {
        f"tau {tau}, k {k}": DecodeConfig(skip_threshold=tau, num_lookahead=k) for tau in (0.8, 0.9) for k in (0, 7)
    }
    sweep = sweep_of(cpu, run, settings)
    evaluate_sweep(sweep, lambda: ScriptedGenerator(cpu, run))
    (sweep.folder / "bench.json").write_text(json.dumps(BENCH))
    return sweep.folder
