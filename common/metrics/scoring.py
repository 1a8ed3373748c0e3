"""Is an answer right? Math by its final number, code by running it on fixed inputs. Plain Python, no torch.

Generated code runs in a fresh interpreter (`python -I`) in an empty temporary folder, with limits on wall and CPU time,
memory, file size, open files and, for users other than root, processes. It is NOT a sandbox: the network and whatever
files the user may read or delete stay within reach. Score the output of models you do not trust in a container.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

TIME_LIMIT_S = 2
MEMORY_LIMIT_BYTES = 512 * 2**20
FILE_LIMIT_BYTES = 64 * 2**10
RESULT_LIMIT_BYTES = 64 * 2**10

_FINAL = re.compile(r"####\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Sets the limits on itself first; what the code prints is dropped, the results leave through a descriptor of their own.
_RUNNER = """
import json, os, resource, sys
job = json.loads(sys.stdin.buffer.read())
results = os.dup(1)
silence = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(silence, descriptor)
for name, limit in job["limits"].items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
names = {"__name__": "answer"}
exec(compile(job["source"], "answer", "exec"), names)
values = [names[job["entry_point"]](*arguments) for arguments in job["inputs"]]
with open(results, "w") as stream:
    stream.write(json.dumps(values)[:job["result_limit"]])
"""


def extract_final(text: str) -> Decimal | None:
    """The number after the last `####`."""
    matches = _FINAL.findall(text)
    return Decimal(matches[-1].replace(",", "")) if matches else None


def score_math(text: str, final: str | int | float) -> bool:
    found = extract_final(text)
    return found is not None and found == Decimal(str(final).replace(",", ""))


def score_code(text: str, problem: Mapping[str, Any]) -> bool:
    """Whether `entry_point` yields `expected` on every one of `inputs` (lists of positional arguments)."""
    values = _run(_source(text), problem["entry_point"], problem["inputs"])
    return values is not None and _same(values, list(problem["expected"]))


def score(problem: Mapping[str, Any], text: str) -> bool:
    """By `kind`; a problem without one is math, its result in `final` or behind the `####` of its `answer`."""
    if problem.get("kind", "math") == "code":
        return score_code(text, problem)
    final = problem["final"] if "final" in problem else extract_final(problem["answer"])
    if final is None:
        raise ValueError(f"no '#### N' in the answer of {problem.get('id', problem['question'])!r}")
    return score_math(text, str(final))


def standard_error(num_correct: int, num_problems: int) -> float:
    """Of the share num_correct / num_problems, binomial."""
    share = num_correct / num_problems
    return math.sqrt(share * (1 - share) / num_problems)


def _source(text: str) -> str:
    fenced = _FENCE.search(text)
    return fenced.group(1) if fenced else text


def _same(left: object, right: object) -> bool:
    """Equal in value and type: True is not 1, but 2.0 is not 2 either."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and left == right


def _limits() -> dict[str, int]:
    return {
        "RLIMIT_AS": MEMORY_LIMIT_BYTES,
        "RLIMIT_CPU": TIME_LIMIT_S,
        "RLIMIT_FSIZE": FILE_LIMIT_BYTES,
        "RLIMIT_NOFILE": 32,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }


def _run(source: str, entry_point: str, inputs: object) -> list[object] | None:
    """The results in order; None where the code fails, exceeds a limit or yields what JSON cannot hold."""
    job = {"source": source, "entry_point": entry_point, "inputs": inputs, "limits": _limits()}
    job["result_limit"] = RESULT_LIMIT_BYTES
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(json.dumps(job).encode(), timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            _end(process)
    try:
        values = json.loads(output) if process.returncode == 0 else None
    except ValueError:
        return None
    return values if isinstance(values, list) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
