"""The commands with the shipped model, started in a folder that is no checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import started

ROOT = Path(__file__).parents[3]
QUESTION = "Tom has 12 apples and buys 5 more. How many apples does he have now?"


def lopa(tmp_path: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return started.lopa(*arguments, cwd=tmp_path, input=typed, env={"CUDA_VISIBLE_DEVICES": ""})


def test_one_prompt_is_answered(tmp_path: Path) -> None:
    done = lopa(tmp_path, "run", "demo", QUESTION, "--save-run", "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("#### 17")
    first, last = done.stderr.splitlines()
    assert first.startswith("lopa: demo on cpu (profile cpu) in float32: strategy d2f, k = 7, 1 request at once")
    assert " tokens in " in last and " forward passes, " in last
    assert lopa(tmp_path, "run", "mine.yaml", QUESTION).stdout == done.stdout


@pytest.mark.slow
def test_a_chat_through_a_pipe_prints_whole_answers(tmp_path: Path) -> None:
    done = lopa(tmp_path, "chat", "demo", typed=f"\n{QUESTION}\n{'x' * 5000}\n{QUESTION}\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#### 17") == 2
    assert "░" not in done.stdout + done.stderr
    assert done.stderr.count("lopa: ") == 2 and "shorten the prompt" in done.stderr


@pytest.mark.slow
def test_a_trace_tells_its_passes(tmp_path: Path) -> None:
    done = lopa(tmp_path, "trace", "demo", QUESTION)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("#### 17")
    assert "pass 1: the anchor won" in done.stderr and "pass 2: lookahead" in done.stderr
    assert lopa(tmp_path, "trace", QUESTION).stdout == done.stdout


@pytest.mark.slow
def test_prompts_of_ones_own_are_decoded_anywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    done = lopa(tmp_path, "run", "demo", "mine.jsonl")
    assert done.returncode == 0, done.stderr
    assert "#### 17" in (tmp_path / "outputs" / "demo_mine.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo_block", "demo"])
def test_a_folder_is_enough(tmp_path: Path, model: str) -> None:
    done = lopa(tmp_path, "run", str(ROOT / "models" / model), QUESTION, "-k", "2")
    assert done.returncode == 0, done.stderr
    assert "k = 2, 1 request at once" in done.stderr and "#### " in done.stdout


@pytest.mark.slow
def test_the_demo_says_what_to_look_at_first(tmp_path: Path) -> None:
    done = lopa(tmp_path, "demo", "--num-problems", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("2 word problems that the model has not seen")
    assert "Seconds favour k = 0 here" in done.stderr.split("lopa:")[0]
    assert "LoPA, k = 7" in done.stdout
