"""The engine reproduces the published implementation step for step, and parity notices when it does not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.evaluation import replay_files
from common.evaluation.parity import cpu_profile, first_difference
from common.evaluation.trace import Trace, read_trace

HERE = Path(__file__).parent
TRACES = sorted(HERE.glob("*.json"))
SHORT = json.loads((HERE / "11_low_threshold_k3.json").read_text())
DECODE, STEPS = SHORT["decode"], SHORT["steps"]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_step_of_the_trace_is_reproduced(path: Path) -> None:
    trace = read_trace(path)
    assert first_difference(trace, HERE / trace.model, cpu_profile()) is None


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
    elif what == "branches":
        step["num_branches"] += 1
    elif what == "confidence":
        step["lookahead"][0][2] += 0.002
    elif what == "anchor":
        step["branch_scores"][0][1] = True


@pytest.mark.parametrize(
    "what", ["score", "winner", "fill", "lookahead", "window", "steps", "token", "branches", "confidence", "anchor"]
)
def test_a_trace_that_differs_is_noticed(what: str) -> None:
    tree = json.loads((HERE / "03_full_k3.json").read_text())
    _spoil(tree, what)
    trace = Trace.model_validate(tree)
    assert first_difference(trace, HERE / trace.model, cpu_profile()) is not None


@pytest.mark.parametrize("kept", [0, 3, 28, 30])
def test_steps_that_are_missing_or_too_many_are_noticed(kept: int) -> None:
    tree = json.loads((HERE / "03_full_k3.json").read_text())
    tree["steps"] = (tree["steps"] + tree["steps"][-1:])[:kept]
    trace = Trace.model_validate(tree)
    assert first_difference(trace, HERE / trace.model, cpu_profile()) == f"29 steps, the trace holds {kept}"


def write_trace(folder: Path, name: str, **changes: Any) -> Path:
    """A short trace with other values under some keys, and its model; `...` leaves a key out."""
    shutil.copytree(HERE / SHORT["model"], folder / SHORT["model"], dirs_exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in {**SHORT, **changes}.items() if value is not ...}))
    return path


def test_replay_files_exits_with_one_on_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_trace(tmp_path, "good.json")
    bad = write_trace(tmp_path, "bad.json", steps=[*STEPS[:2], {**STEPS[2], "window_lengths": [1]}, *STEPS[3:]])
    assert replay_files([good]) == 0
    assert replay_files([good, bad]) == 1
    assert "bad.json: step 3: window lengths" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generated": ...}, "generated: this key is missing"),
        ({"generated": None}, "generated: write it as a list"),
        ({"model": 3}, "model: write it as text"),
        ({"model": "absent"}, "absent: no such folder"),
        ({"decode": [1]}, "decode: write it as a section of settings"),
        ({"decode": {**DECODE, "num_lookahed": 3}}, "decode: num_lookahed: unknown key; did you mean"),
        ({"decode": {**DECODE, "mask_token_id": None}}, "decode: mask_token_id is missing"),
        ({"decode": {**DECODE, "mask_token_id": 320}}, "decode.mask_token_id: 320 is not one of the model's 320"),
        ({"decode": {**DECODE, "num_lookahead": "auto"}}, "decode: num_lookahead: the run's pace says"),
        ({"prompt": "hello"}, "prompt: write it as a list"),
        ({"prompt": []}, "prompt: write at least 1"),
        ({"prompt": [-1]}, "prompt: -1 is not one of"),
        ({"prompt": [99999999]}, "prompt: 99999999 is not one of"),
        ({"prompt": [5] * 9999}, "prompt: the prompt has 9999 tokens"),
        ({"steps": [7]}, "steps.0: write it as a section of settings"),
        ({"steps": [{key: STEPS[0][key] for key in STEPS[0] if key != "filled"}]}, "steps.0.filled: this key is"),
        ({"steps": [{**STEPS[0], "filled": {"x": 1}}]}, "steps.0.filled.x"),
        ({"steps": [{**STEPS[0], "filled": {"24": True}}]}, "steps.0.filled.24: set it to a whole number"),
    ],
)
def test_a_trace_that_makes_no_sense_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], message: str
) -> None:
    path = write_trace(tmp_path, "x.json", **changes)
    assert replay_files([path]) == 2
    (record,) = caplog.records
    sentence = record.getMessage()
    assert sentence.startswith(f"{path}: ") and message in sentence and "\n" not in sentence


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 999, b"\xff"], ids=["empty", "cut", "deep", "binary"])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_trace(path)


def test_what_is_no_file_is_named_without_a_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert replay_files([tmp_path, tmp_path / "pipe", tmp_path / "absent", tmp_path / "\0"]) == 2
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    whats = ("a folder", "no regular file", "no such file", "no such file")
    assert said == [f"{what}; name a trace, a JSON file" for what in whats]


def test_the_traces_after_one_that_cannot_be_replayed_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    absent, homeless = tmp_path / "absent.json", write_trace(tmp_path, "homeless.json", model="absent")
    good = write_trace(tmp_path, "good.json")
    assert replay_files([absent, homeless, good]) == 2
    assert capsys.readouterr().out == "good.json: ok, 9 steps\n1 passed, 0 failed, 2 not replayed\n"
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [str(absent), str(homeless)]
