"""Results of MATH in a form in which equal ones are mostly the same text.

The substitutions are those of Lewkowycz et al. 2022 (Minerva), appendix D, as corrected in lm-eval 0.4.13 (MIT).
"""

from __future__ import annotations

import re

_SUBSTITUTED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples",
)  # fmt: skip
_REMOVED = (
    "\\ldots", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
_UNIT = re.compile("|".join(rf"(?<!\\)\b{unit}\b" for unit in _UNITS))
_NEW_ROW = re.compile(r"\s*\\\\\s*")  # of a matrix; the space after it is no space of its own
_COMMAND = re.compile(r"(\\[a-zA-Z]+)")
_REWRITTEN = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),  # \fracab is \frac{a}{b}
    (re.compile(r"(sqrt)(\[[^\]]*\])(\w)"), r"\1\2{\3}"),
    (re.compile(r"(sqrt)(?!\[)([^{])"), r"sqrt{\2}"),
)
_GROUPED = re.compile(r"-?\d{1,3}(,\d{3})+")


def boxed(text: str) -> str | None:
    """Return what the last \\boxed (or, without one, \\fbox) of a text holds; None without one that ends."""
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].split("$", 1)[0]
    start = max(text.rfind("\\boxed{"), -1)
    start = start if start >= 0 else text.rfind("\\fbox{")
    if start < 0:
        return None
    begin = text.index("{", start)
    depth = 0
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[begin + 1 : index]
    return None


def normalized(result: str) -> str:
    """Return a result without units, sentence, markup and the left side of an equation."""
    result = _UNIT.sub("", _NEW_ROW.sub(r"\\\\", result.split("=")[-1]))
    for before, after in _SUBSTITUTED:
        result = result.replace(before, after)
    result = _without_glued_units(result)
    for removed in _REMOVED:
        result = result.replace(removed, "")
    for pattern, written in _REWRITTEN:
        result = pattern.sub(written, result)
    result = result.replace("$", "")
    return result.replace(",", "") if _GROUPED.fullmatch(result) else result


def _without_glued_units(result: str) -> str:
    """Remove units that touch what they followed, since spaces are gone by now; commands such as \\left keep their
    letters."""
    parts = _COMMAND.split(result)
    for index in range(0, len(parts), 2):
        for unit in _UNITS:
            parts[index] = parts[index].replace(unit, "")
    return "".join(parts)
