"""Small Python functions: filter, map and reduce over a list, scalar pipelines, two-way branches.

A problem is first a list of operations; `evaluate` runs those directly, and the source is rendered from them in a
random style, so the source can be checked against the operations.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

from .draft import T


class Operation(NamedTuple):
    """Phrase of the prompt, and a Python expression of `{v}`: a condition for a filter, a value for a map."""

    phrase: str
    expression: str


class CodeProblem(NamedTuple):
    question: str
    source: str
    entry_point: str
    specification: tuple[str, ...]
    takes_list: bool


ONES = "x v n item num value a e".split()  # noqa: SIM905
LISTS = "nums values xs items numbers data arr seq".split()  # noqa: SIM905
TOTALS = "result total out res acc answer".split()  # noqa: SIM905
VERBS = "compute solve process apply run get find make calc handle".split()  # noqa: SIM905
NOUNS = "list values result items numbers total pipeline answer data score output steps".split()  # noqa: SIM905


def _pick(rng: random.Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


# What an operation is called, in one or several ways, and its expression, in one or several; {c} and {d} are numbers.
Kind = tuple[str | tuple[str, ...], str | tuple[str, ...]]
FILTERS: tuple[Kind, ...] = (
    (("the even values", "only even numbers"), "{v} % 2 == 0"),
    (("the odd values", "only odd numbers"), "{v} % 2 == 1"),
    (("the positive values", "only positive numbers"), "{v} > 0"),
    (("the negative values", "only negative numbers"), "{v} < 0"),
    (("values greater than {c}", "numbers above {c}"), "{v} > {c}"),
    (("values less than {c}", "numbers below {c}"), "{v} < {c}"),
    (("values of at least {c}", "numbers not below {c}"), "{v} >= {c}"),
    (("multiples of {d}", "numbers divisible by {d}"), "{v} % {d} == 0"),
    (("numbers not divisible by {d}", "values that are no multiple of {d}"), "{v} % {d} != 0"),
)
MAPS: tuple[Kind, ...] = (
    (("add {c}", "increase by {c}"), "{v} + {c}"),
    (("subtract {c}", "decrease by {c}"), "{v} - {c}"),
    (("multiply by {c}", "scale by {c}"), "{v} * {c}"),
    ("square it", ("{v} ** 2", "{v} * {v}")),
    ("take the absolute value", "abs({v})"),
    (("negate it", "flip the sign"), "-{v}"),
    (("take the remainder modulo {c}", "reduce modulo {c}"), "{v} % {c}"),
    (("divide by {c} rounding down", "floor divide by {c}"), "{v} // {c}"),
    (("cap it at {c}", "take the minimum with {c}"), "min({v}, {c})"),
    (("raise it to at least {c}", "take the maximum with {c}"), "max({v}, {c})"),
)


def _operation(rng: random.Random, kinds: Sequence[Kind], num_numbers: int) -> Operation:
    c = int(rng.random() * num_numbers) + 2
    drawn = (part if isinstance(part, str) else _pick(rng, part) for part in _pick(rng, kinds))
    return Operation(*(part.format(v="{v}", c=c, d=c % 8 + 2) for part in drawn))


def _filter(rng: random.Random) -> Operation:
    return _operation(rng, FILTERS, 19)


def _map(rng: random.Random) -> Operation:
    return _operation(rng, MAPS, 14)


REDUCTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("return the sum", "return their total"), "sum({v})"),
    (("return how many there are", "return the count"), "len({v})"),
    (("return the largest or 0 if none", "return the maximum, 0 if empty"), "max({v}, default=0)"),
    (("return the smallest or 0 if none", "return the minimum, 0 if empty"), "min({v}, default=0)"),
    (("return the list", "return them all"), "{v}"),
    (("return them sorted", "return a sorted list"), "sorted({v})"),
    (("return them sorted from high to low", "return them in descending order"), "sorted({v}, reverse=True)"),
    (("return them in reverse order", "return the reversed list"), "{v}[::-1]"),
    (("return the first three", "return the first 3 of them"), "{v}[:3]"),
    (("return the last two", "return the last 2 of them"), "{v}[-2:]"),
    (("return the distinct values sorted", "return the sorted distinct values"), "sorted(set({v}))"),
)

COMMENTS = {
    "filter": ("keep what we need", "filter the values", "select items", "drop the rest"),
    "map": ("change each value", "apply the step", "transform items", "update the values"),
    "end": ("done", "final result", "give it back", "hand over the answer"),
}


_PLAIN_STYLE = 23  # a seed: no comment, no docstring, no type; comprehensions

DOCSTRINGS = (
    "Return the result.", "Apply all steps.", "Work on the input.",
    "Run the steps in order and return what they yield.",
    "Take the input and apply each step to it.", "Give back the value that was asked for.",
    "Do what the text says, one step at a time.",
)  # fmt: skip


class _Source:
    """Lines of one function in one style."""

    def __init__(self, rng: random.Random, name: str, argument: str, hint: str) -> None:
        self.rng = rng
        self.has_comments = rng.random() < 0.5
        typed = rng.random() < 0.3
        self.lines = [f"def {name}({argument}: {hint}):" if typed else f"def {name}({argument}):"]
        if rng.random() < 0.5:
            self.add(f'"""{_pick(rng, DOCSTRINGS)}"""')

    def add(self, line: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + line)

    def remark(self, kind: str) -> None:
        if self.has_comments and self.rng.random() < 0.8:
            self.add("# " + _pick(self.rng, COMMENTS[kind]))

    def text(self) -> str:
        return "\n".join(self.lines)


def _name(rng: random.Random) -> str:
    return f"{_pick(rng, VERBS)}_{_pick(rng, NOUNS)}"


def _render_comprehension(rng: random.Random, code: _Source, xs: str, keep: str, change: str, reduction: str) -> None:
    v, out = _pick(rng, ONES), _pick(rng, TOTALS)
    value = change.format(v=v) if change else v
    condition = f" if {keep.format(v=v)}" if keep else ""
    inner = f"[{value} for {v} in {xs}{condition}]"
    if rng.random() < 0.5:
        code.remark("map" if change else "filter")
        code.add(f"{out} = {inner}")
        code.remark("end")
        code.add(f"return {reduction.format(v=out)}")
    else:
        code.add(f"return {reduction.format(v=inner)}")


def _render_stages(rng: random.Random, code: _Source, xs: str, keep: str, change: str, reduction: str) -> None:
    v, out = _pick(rng, ONES), _pick(rng, TOTALS)
    current = xs
    if keep:
        code.remark("filter")
        code.add(f"{out} = [{v} for {v} in {current} if {keep.format(v=v)}]")
        current = out
    if change:
        code.remark("map")
        code.add(f"{out} = [{change.format(v=v)} for {v} in {current}]")
        current = out
    code.remark("end")
    code.add(f"return {reduction.format(v=current)}")


def _render_loop(rng: random.Random, code: _Source, xs: str, keep: str, change: str, reduction: str) -> None:
    v, out = _pick(rng, ONES), _pick(rng, TOTALS)
    value = change.format(v=v) if change else v
    start, update = {"sum({v})": ("0", f"{out} += {value}"), "len({v})": ("0", f"{out} += 1")}.get(
        reduction, ("[]", f"{out}.append({value})")
    )
    code.add(f"{out} = {start}")
    code.add(f"for {v} in {xs}:")
    if keep:
        code.add(f"if {keep.format(v=v)}:", 2)
    code.add(update, 3 if keep else 2)
    code.remark("end")
    code.add(f"return {out if start == '0' else reduction.format(v=out)}")


def _compose(inner: str, outer: str) -> str:
    return outer.replace("{v}", inner if outer.endswith(")") else f"({inner})")


def _list_problem(rng: random.Random, style: random.Random) -> CodeProblem:
    keep = [_filter(rng) for _ in range(_pick(rng, (0, 1, 1, 1, 2)))]
    change = [_map(rng) for _ in range(_pick(rng, (1, 1, 2) if not keep else (0, 1, 1, 1, 2)))]
    phrases, reduction = _pick(rng, REDUCTIONS)
    name, xs = _name(rng), _pick(rng, LISTS)
    steps = []
    if keep:
        steps.append(_pick(rng, ("keep ", "select ")) + " that are also ".join(k.phrase for k in keep))
    if change:
        steps.append(
            _pick(rng, ("{} for each", "to each: {}", "{} everywhere")).format(" and ".join(m.phrase for m in change))
        )
    text = _pick(rng, (", ", ", then ")).join([*steps, _pick(rng, phrases)])
    opening = _pick(
        rng,
        (
            "Write {f} for a list {xs}: ",
            "Write a function {f}({xs}): ",
            "In Python, define {f}({xs}): ",
            "Given a list {xs}, write {f}: ",
        ),
    )
    condition = " and ".join(k.expression for k in keep)
    value = functools.reduce(_compose, (m.expression for m in change)) if change else ""
    code = _Source(style, name, xs, "list")
    render = _pick(style, (_render_comprehension, _render_stages, _render_loop))
    render(style, code, xs, condition, value, reduction)
    question = opening.format(f=name, xs=xs) + text + "."
    return CodeProblem(question, code.text(), name, (condition, *(m.expression for m in change), reduction), True)


def _scalar_problem(rng: random.Random, style: random.Random) -> CodeProblem:
    steps = [_map(rng) for _ in range(_pick(rng, (2, 3, 3, 4)))]
    name, v = _name(rng), _pick(rng, ("n", "x", "value", "num", "k"))
    opening = _pick(
        rng, ("Write {f}({v}): ", "Write a function {f}({v}) with these steps: ", "In Python, define {f}({v}): ")
    )
    text = _pick(rng, (", then ", ", ", "; ")).join(s.phrase for s in steps)
    ending = _pick(rng, (".", ". Return the result.", ", and return it."))
    code = _Source(style, name, v, "int")
    out = _pick(style, (v, v, *TOTALS))
    current = v
    for step in steps[:-1]:
        code.remark("map")
        code.add(f"{out} = {step.expression.format(v=current)}")
        current = out
    last = steps[-1].expression.format(v=current)
    if style.random() < 0.5:
        code.add(f"return {last}")
    else:
        code.add(f"{out} = {last}")
        code.remark("end")
        code.add(f"return {out}")
    question = opening.format(f=name, v=v) + text + ending
    return CodeProblem(question, code.text(), name, tuple(s.expression for s in steps), False)


def _branch_problem(rng: random.Random, style: random.Random) -> CodeProblem:
    test, yes, no = _filter(rng), _map(rng), _map(rng)
    name, v = _name(rng), _pick(rng, ("n", "x", "value", "num", "k"))
    condition = {"t": test.phrase, "y": yes.phrase, "n": no.phrase, "f": name, "v": v}
    question = _pick(rng, (
        "Write {f}({v}): for {t} {y}, otherwise {n}.", "Define {f}({v}) in Python: {y} for {t} and {n} for all others.",
        "Write a function {f}({v}). For {t}: {y}. Else: {n}. Return the result.",
    )).format(**condition)  # fmt: skip
    when, then, other = (op.expression.format(v=v) for op in (test, yes, no))
    code = _Source(style, name, v, "int")
    form = style.random()
    if form < 0.4:
        code.add(f"if {when}:")
        code.add(f"return {then}", 2)
        code.add(f"return {other}")
    elif form < 0.7:
        out = _pick(style, TOTALS)
        code.add(f"if {when}:")
        code.add(f"{out} = {then}", 2)
        code.add("else:")
        code.add(f"{out} = {other}", 2)
        code.add(f"return {out}")
    else:
        code.add(f"return {then} if {when} else {other}")
    return CodeProblem(question, code.text(), name, (test.expression, yes.expression, no.expression, "branch"), False)


def make_code(rng: random.Random, plain: bool = False) -> CodeProblem:
    """Return a problem. plain: its source is written in the one style there is for its kind."""
    share = rng.random()
    style = random.Random(_PLAIN_STYLE) if plain else rng
    if share < 0.6:
        return _list_problem(rng, style)
    return _scalar_problem(rng, style) if share < 0.8 else _branch_problem(rng, style)


def evaluate(problem: CodeProblem, argument: object) -> object:
    """What the operations of the problem yield, computed without its source."""
    names = {"__builtins__": {"abs": abs, "min": min, "max": max, "sum": sum, "len": len, "sorted": sorted, "set": set}}

    def run(expression: str, value: object) -> object:
        return eval(expression.format(v="value_"), names, {"value_": value})

    if problem.takes_list:
        assert isinstance(argument, list)
        condition, *changes, reduction = problem.specification
        values = [v for v in argument if not condition or run(condition, v)]
        for change in changes:
            values = [run(change, v) for v in values]
        return run(reduction, values)
    if problem.specification[-1] == "branch":
        test, yes, no, _ = problem.specification
        return run(yes if run(test, argument) else no, argument)
    for expression in problem.specification:
        argument = run(expression, argument)
    return argument


def fixed_inputs(rng: random.Random, takes_list: bool) -> list[object]:
    """12 arguments, the empty list and zero among them."""
    if not takes_list:
        return [0, 1, -3, *(rng.randint(-40, 60) for _ in range(9))]
    return [[], [5], *([rng.randint(-20, 40) for _ in range(rng.randint(3, 9))] for _ in range(10))]
