"""The engine reproduces the published implementation step for step, and parity notices when it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.config import ConfigError
from common.parity import cpu_profile, first_difference, read_trace, replay_files

HERE = Path(__file__).parent
TRACES = sorted(HERE.glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_step_of_the_trace_is_reproduced(path: Path) -> None:
    trace = read_trace(path)
    assert first_difference(trace, HERE / trace["model"], cpu_profile()) is None


def _spoil(trace: dict[str, Any], what: str) -> None:
    step = trace["steps"][4]
    if what == "score":
        step["branch_scores"][0][0] += 0.002
    elif what == "winner":
        step["winner_is_anchor"] = not step["winner_is_anchor"]
    elif what == "fill":
        step["filled"] = {"30": 1}
    elif what == "lookahead":
        step["lookahead"][0][1] += 1
    elif what == "window":
        step["window_lengths"][0] += 1
    elif what == "steps":
        trace["num_forward_steps"] += 1
    elif what == "token":
        trace["generated"][-1] += 1


@pytest.mark.parametrize("what", ["score", "winner", "fill", "lookahead", "window", "steps", "token"])
def test_a_trace_that_differs_is_noticed(what: str) -> None:
    trace = read_trace(HERE / "03_full_k3.json")
    _spoil(trace, what)
    assert first_difference(trace, HERE / trace["model"], cpu_profile()) is not None


def test_replay_files_exits_with_one_on_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(HERE / "11_low_threshold_k3.json")
    shutil.copytree(HERE / trace["model"], tmp_path / trace["model"])
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(trace))
    trace["steps"][2]["window_lengths"][0] += 1
    bad.write_text(json.dumps(trace))
    assert replay_files([good]) == 0
    assert replay_files([good, bad]) == 1
    assert "bad.json: step 3: window lengths" in capsys.readouterr().out


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"model": "model_a"}')
    with pytest.raises(ConfigError, match="not a trace, it lacks decode"):
        read_trace(path)
