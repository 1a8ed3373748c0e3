"""One problem in the making: random choices, facts of the question, lines of the worked solution."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LEADS = ("", "", "", "Then ", "Next, ", "Now ", "So ")
OPENINGS = (
    "Let us go step by step.", "We follow the numbers one by one.", "First we write down what is known.",
    "Here is a way to solve it.", "We work it out in order.", "The text gives us all numbers.",
)  # fmt: skip
CLOSINGS = (
    "The answer is {final}.", "So the answer is {final}.", "That gives {final} in all.", "In the end it is {final}.",
    "Final result: {final}.", "We end up with {final}.", "This is the number we need: {final}.",
)  # fmt: skip


class Person(NamedTuple):
    name: str
    he: str
    him: str

    @property
    def He(self) -> str:
        return self.he.capitalize()


_GIRLS = "Mia Ada Lena Nora Ivy Zoe Ruth Maya Tara Elif Hana June Vera Rosa Aiko Nina Clara Sana".split()  # noqa: SIM905
_BOYS = "Tom Ben Omar Leo Max Ravi Hugo Ivan Noah Sam Kofi Yuki Paul Dan Emil Jon Theo Luis".split()  # noqa: SIM905
PEOPLE = tuple(Person(n, "she", "her") for n in _GIRLS) + tuple(Person(n, "he", "him") for n in _BOYS)


class MathProblem(NamedTuple):
    question: str
    answer: str
    final: int


_RESULT_OF = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


class Draft:
    """Collects a problem.

    Notation and voice are chosen once per problem: whether steps are numbered, and which of a line's phrasings are
    preferred. Other leads, and the phrasing of one line in five, are chosen anew. So a solution holds choices that
    settle many later tokens at once, beside choices that settle few. A line names what it takes from the question, then
    computes: a branch that reads a relation wrongly is unsure of the words, not only of the number.

    plain: a solution has none of this: each kind of line has one phrasing, and holds its computation alone.
    """

    __slots__ = ("break_lines", "facts", "lines", "num_steps", "plain", "rng", "tight", "times", "voice", "words")

    def __init__(self, rng: random.Random, plain: bool = False) -> None:
        self.rng, self.plain = rng, plain
        self.facts: list[str] = []
        self.lines: list[str] = []
        self.words: dict[str, object] = {}  # that any template may name
        self.tight = rng.random() < 0.75
        self.times = "*" if rng.random() < 0.6 else "x"
        self.break_lines = rng.random() < 0.7
        self.voice = rng.randrange(60)
        self.num_steps = 0 if rng.random() < 0.5 else None  # None: not numbered
        if plain:
            self.tight, self.times, self.break_lines = True, "*", True

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def people(self, count: int) -> list[Person]:
        """Draw people, the first of whom the problem is about."""
        first, *others = self.rng.sample(PEOPLE, count)
        self.words |= {"name": first.name, "he": first.he, "He": first.He, "him": first.him}
        return [first, *others]

    def compute(self, task: tuple[int, str, int], templates: Sequence[str], given: str = "", **values: object) -> int:
        """Add a line as `work` does, with the task's equation as {e}, and return its result."""
        left, sign, right = task
        result = _RESULT_OF[sign](left, right)
        shown = self.times if sign == "*" else sign
        equation = f"{left}{shown}{right}={result}" if self.tight else f"{left} {shown} {right} = {result}"
        self.work(templates, given, e=equation, **values)
        return result

    def sum_of(self, terms: Sequence[int]) -> str:
        """Three terms and more are added from the left: 2+3+4=5+4=9."""
        plus, equals = ("+", "=") if self.tight else (" + ", " = ")
        sums = [plus.join(map(str, (sum(terms[:i]), *terms[i:]))) for i in range(1, len(terms) + 1)]
        return equals.join(sums)

    def tell(self, templates: Sequence[str], **values: object) -> None:
        self.facts.append(self.pick(templates).format(**{**self.words, **values}))

    def work(self, templates: Sequence[str], given: str = "", **values: object) -> None:
        """Add a line to the solution: `given` is what it takes from the question, if anything."""
        values = {**self.words, **values}
        if self.plain:
            line = templates[-1].format(**values)
            self.lines.append(f"{line[0].upper()}{line[1:]}.")
            return
        if not self.lines and self.chance(0.5):
            self.lines.append(self.pick(OPENINGS))
        lead = self.pick(LEADS)
        if self.num_steps is not None:
            self.num_steps += 1
            lead = f"Step {self.num_steps}: "
        template = templates[self.voice % len(templates)] if self.chance(0.8) else self.pick(templates)
        body = (f"{given}, so {template}" if given else template).format(**values)
        self.lines.append(f"{lead}{body}." if lead else f"{body[0].upper()}{body[1:]}.")

    def finish(self, final: int) -> MathProblem:
        if not self.plain:
            self.lines.append(CLOSINGS[self.voice % len(CLOSINGS)].format(final=final))
        solution = ("\n" if self.break_lines else " ").join(self.lines)
        return MathProblem(" ".join(self.facts), f"{solution}\n#### {final}", final)
