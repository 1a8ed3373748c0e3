"""What a benchmark is: its fields, its prompt, its stop strings and its rules of what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Marks = dict[str, bool]  # rule -> right or wrong, the rule that decides first


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the model completes, or with a chat template the user's message. `begun` begins the answer."""

    text: str
    begun: str = ""


def _nothing(_: Row) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """fields: what a row has to have, and the type of each. shot_fields: what a solved row has to have in addition.

    ask: the question of a row. solve: what follows it in a solved row, the separator before the next one included.
    begin: how the answer begins already. mark: raises ValueError for a row that answers cannot be compared with.
    require_result: raises that ValueError before anything is decoded.
    kind: what accuracy is told apart by, "" for one number. is_test: whether a row is to be asked.
    own_shots: the file of configs/fewshot that is used where none is named.
    program: the reference as a whole program, where answers are programs. scored_by: what marks depend on beside this
    package, with versions; raises ConfigError where this machine lacks it.
    """

    fields: Mapping[str, type]
    ask: Callable[[Row], str]
    mark: Callable[[Row, str], Marks]
    stop: tuple[str, ...]
    shot_fields: Mapping[str, type]
    solve: Callable[[Row], str]
    num_fewshot: int = 0
    own_shots: str | None = None
    begin: Callable[[Row], str] = _nothing
    require_result: Callable[[Row], object] = _nothing
    kind: Callable[[Row], str] = _nothing
    is_test: Callable[[Row], bool] = bool
    program: Callable[[Row], str] | None = None
    scored_by: Callable[[], str] = str

    @property
    def runs_code(self) -> bool:
        """Whether marking runs what a model wrote."""
        return self.program is not None
