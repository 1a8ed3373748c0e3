"""The programs in `examples` run as they are, from the checkout; so do the pages' commands that need no device."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from started import python

from tests.engine.serving.served import Served

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Commands of the pages that run anywhere, unless they name what a reader has.
_ANYWHERE = re.compile(r"(?m)^(lopa (?:chat|estimate|parity|trace|run (?:--profile cpu )?demo)\b.*)$")
_READERS = ("MODEL", "my_run", "checkpoints/", '"..."', "prompts.jsonl", "lopa chat")


def commands() -> list[str]:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    found = {line.partition(" #")[0].strip() for line in _ANYWHERE.findall(pages)}
    return sorted(line for line in found if not any(words in line for words in _READERS))


def output_of(name: str, *arguments: str) -> str:
    return printed_by(str(EXAMPLES / name), *arguments)


def printed_by(*arguments: str) -> str:
    done = python(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.glob("*.py"))


def test_a_platform_of_ones_own() -> None:
    assert output_of("third_platform.py").startswith("64 tokens in ")


@pytest.mark.slow
def test_the_step_loop() -> None:
    lines = output_of("step.py").splitlines()
    assert {"    first has ended", "    second has ended", "    third has ended"} <= set(lines)


@pytest.mark.slow
def test_a_batch() -> None:
    printed = output_of("batch.py")
    assert "#### 17" in printed and printed.count(" passes") == 3


@pytest.mark.slow
def test_a_policy() -> None:
    every, patient = output_of("policy.py").splitlines()
    assert every.startswith("all: ") and patient.startswith("patient(plenty=6): ")
    branches = [int(line.split()[-2]) for line in (every, patient)]
    assert branches[1] < branches[0]


@pytest.mark.slow
def test_a_chart(tmp_path: Path) -> None:
    assert output_of("chart.py", str(tmp_path / "sweep")).count(" tokens a pass, ") == 8


@pytest.mark.slow
def test_a_client(tmp_path: Path) -> None:
    with Served(tmp_path / "log", "--set", "decode.num_lookahead=2") as server:
        printed = output_of("client.py", server.url)
    assert "#### 17" in printed and "stop: {" in printed


def test_a_client_without_a_server() -> None:
    done = python(str(EXAMPLES / "client.py"), "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert "lopa serve demo" in done.stderr and done.stderr.count("\n") == 1


def test_a_client_without_its_library(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("from openai_is_not_here import OpenAI\n")
    done = python("-c", f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); "
                  f"runpy.run_path({str(EXAMPLES / 'client.py')!r}, run_name='__main__')")  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "No module named 'openai_is_not_here': pip install openai\n"


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_pages(line: str, tmp_path: Path) -> None:
    name, *arguments = shlex.split(line.replace("out.html", str(tmp_path / "out.html")))[1:]
    files = [file for part in arguments for file in (sorted(map(str, ROOT.glob(part))) if "*" in part else [part])]
    more = ["--set", "input.limit=2", "--set", f"output.path={tmp_path}/out.jsonl"] if name == "run" else []
    printed_by("-m", "common.commands", name, *files, *more)
