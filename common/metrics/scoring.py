"""Is an answer right? Math by its final number, code by running it on fixed inputs. Plain Python, no torch.

Generated code runs in a fresh interpreter in an empty folder, without the run's environment, open files or terminal,
with limits on wall and CPU time, memory, file size, open files, processes and threads. Promised, whatever it does: the
run goes on; a program that fails or exceeds a limit is wrong; the verdict comes soon after the time limit, at worst, on
a machine that stalls, in some 20 s; the run reads at most 64 KiB of it; and no process and no folder of it stays, also
if the run is killed meanwhile.

The machine decides how much a program can do to break that on purpose, and `isolation()` says which level it allows:
- `namespaces`: nothing but reading the interpreter's and the system's libraries, and writing 16 MiB that vanish.
- `seccomp`: it reads, writes and deletes what the user may, so also the run's files, or makes folders elsewhere. It
  can start, signal or trace no process, use no network and leave nothing in memory.
- `subreaper`: it can also signal the user's processes, the run among them, use the network, and leave queues and
  shared memory behind. Root can start any number of processes, which are ended with it.
- `limits`: what root starts in a session of its own is not found.

All of them share the kernel with the run. Score the output of models that you do not trust in a virtual machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from common.metrics.isolation import isolation
from common.metrics.numbers import final_number, read_number
from common.metrics.program_text import program_of
from common.metrics.programs import Level, run_program


def answer_of(text: str) -> str:
    """Return what follows a model's thoughts, `<think> ... </think>`; drafts in them are no answers."""
    return text.rpartition("</think>")[2]


def score_math(text: str, final: object) -> bool:
    """Whether the number that a text ends with has the value of `final`. Raises ValueError for a `final` that is no
    number, whatever the text is."""
    expected = _number(final)
    return final_number(text) == expected


def score_code(text: str, problem: Mapping[str, Any], level: Level | None = None) -> bool:
    """Whether `entry_point` yields `expected` on every one of `inputs` (lists of positional arguments).

    Raises ValueError for a problem that no program could solve, NotStarted where no program can be run. `level`: as in
    `isolation()`, the machine's strongest unless given.
    """
    _check_code(problem)
    program = program_of(text, problem["entry_point"])
    values = run_program(program, problem["entry_point"], problem["inputs"], level or isolation().level)
    return values is not None and _same(values, problem["expected"])


def score(problem: Mapping[str, Any], text: str) -> bool:
    """By `kind`; a problem without one is math, its result in `final` or behind the `####` of its `answer`.

    Raises ValueError, with the reason, for a problem that answers cannot be compared with.
    """
    text = answer_of(text)
    if problem.get("kind", "math") == "code":
        return score_code(text, problem)
    final = problem["final"] if "final" in problem else final_number(problem["answer"])
    if final is None and "final" not in problem:
        raise ValueError(f"no '#### N' in the answer of {problem.get('id', problem.get('question'))!r}")
    return score_math(text, final)


def standard_error(num_correct: int, num_problems: int) -> float:
    """Of the share num_correct / num_problems, binomial."""
    share = num_correct / num_problems
    return math.sqrt(share * (1 - share) / num_problems)


def _number(final: object) -> Fraction:
    number = read_number(str(final)) if isinstance(final, (str, int, float, Fraction)) else None
    if number is None:
        raise ValueError(f"`final` is no number: {final!r:.100}")
    return number


def _check_code(problem: Mapping[str, Any]) -> None:
    inputs, expected = problem["inputs"], problem["expected"]
    if not isinstance(problem["entry_point"], str):
        raise ValueError(f"`entry_point` is no name: {problem['entry_point']!r:.100}")
    if not isinstance(inputs, list) or not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError(f"`inputs` is no list of lists of arguments: {inputs!r:.100}")
    if not isinstance(expected, list) or len(expected) != len(inputs) or not inputs:
        raise ValueError(f"`expected` is no list with a result for each of {len(inputs)} inputs: {expected!r:.100}")


def _same(left: object, right: object) -> bool:
    """Equal in value and type, all the way down: True is not 1, and 2.0 is not 2 either."""
    pairs = [(left, right)]
    while pairs:
        one, other = pairs.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(one[key], other[key]) for key in one]
        elif one != other:
            return False
    return True
