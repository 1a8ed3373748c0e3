"""Loops are compiled before the first request, whatever it asks for and whoever looks on, and wherever their machine
code cannot be kept."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from started import ROOT, python

from common.compiled import IS_COMPILED

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the loops are not compiled")

AFTER = """
from numba.core import event
from common.config import DecodeConfig
from common.decoding.scheduling import warm
from common.policies.settings import STRATEGIES

class Compiled(event.Listener):
    def on_start(self, event):
        names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

names, seen = [], []
warm.warm_up()
event.register("numba:compile", Compiled())
short = {"block_size": 8, "max_new_tokens": 16}
for strategy in STRATEGIES:
    fills = {"fill_rule": "entropy"} if strategy == "multi_block" else {}
    for temperature in (0.0, 0.8)[: 1 if strategy == "levenshtein" else 2]:
        warm._decoded(DecodeConfig(**short, num_lookahead=0, strategy=strategy, temperature=temperature, **fills), 2)
for rules in ({"spawn_rule": "near(probability=0.2)"}, {"spawn_rule": "nested", "branch_score": "exact"},
              {"spawn_rule": "nested", "branch_score": "subset"}, {"branch_score": "hedged"}):
    warm._decoded(DecodeConfig(**short, num_lookahead=3, **rules), 2)
warm._decoded(DecodeConfig(**short, num_lookahead=3), 2, warm._ANY_TEXT)
warm._decoded(DecodeConfig(**short, num_lookahead=3, temperature=0.8), 2, observer=seen.append)
print(names, len(seen) > 4)
"""
USED = """
from common.decoding.scheduling import warm
from common.compiled import machine_code_folder
warm.warm_up = lambda: None
print("folder", repr(machine_code_folder()))
"""

KEPT = """
from pathlib import Path
from common.compiled import all_kept, machine_code_folder
print(machine_code_folder(), all_kept(Path(machine_code_folder())).name)
"""


def test_requests_have_nothing_compiled() -> None:
    done = python("-c", AFTER, check=True)
    assert done.stdout == "[] True\n"


def test_another_checkout_of_the_same_sources_is_told_to_compile(tmp_path: Path) -> None:
    """Numba keeps machine code by the place of a source: what one checkout has compiled the other one lacks."""
    copytree(ROOT / "common", tmp_path / "common", ignore=ignore_patterns("__pycache__"))
    env = {"LOPA_LOOPS_FOLDER": str(tmp_path / "loops")}
    first, again = (python("-c", KEPT, env=env, check=True).stdout.split() for _ in range(2))
    other = python("-c", KEPT, cwd=tmp_path, env={**env, "PYTHONPATH": str(tmp_path)}, check=True).stdout.split()
    assert first == again
    assert other[0] == first[0], "the folder goes by what the sources say"
    assert other[1] != first[1], "a mark goes by where they are"


@pytest.mark.parametrize("kind", ["a file", "below a file", "full"])
def test_a_folder_that_cannot_be_written_is_told_of(kind: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    folder = {"a file": taken, "below a file": taken / "below", "full": tmp_path}[kind]
    lines = ["import shutil", "from types import SimpleNamespace"]
    lines += ["shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 20)"] * (kind == "full")
    done = python("-c", "\n".join(lines) + USED, env={"LOPA_LOOPS_FOLDER": str(folder)}, check=True)
    assert done.stdout == "folder ''\n"
    assert "cannot be kept there" in done.stderr and "set LOPA_LOOPS_FOLDER" in done.stderr
    assert str(folder) in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_loops_run_where_their_machine_code_is_not_kept(tmp_path: Path) -> None:
    """Each function has machine code with a way in from Python and without, which must not be taken for one another."""
    taken = tmp_path / "taken"
    taken.write_text("")
    script = "from common.decoding.scheduling import warm; warm.warm_up(); warm.warm_up(); print('done')"
    done = python("-c", script, env={"LOPA_LOOPS_FOLDER": str(taken)}, check=True)
    assert done.stdout == "done\n"


def test_loops_run_as_python_where_a_variable_keeps_numba_from_loading() -> None:
    script = "from common.compiled import IS_COMPILED; print(IS_COMPILED)"
    done = python("-c", script, env={"NUMBA_NUM_THREADS": "0"})
    assert done.stdout == "False\n", done.stderr
    assert "numba cannot be loaded (Number of threads specified must be > 0.): correct the variables" in done.stderr
