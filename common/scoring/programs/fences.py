"""Fenced blocks of code in an answer, as Markdown has them and as models write them.

A fence may stand in a list or a quotation, after text or a line of code, and lack its end. HTML's `<code>` counts
where there is no fence. Lines end with \\n here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.scoring.programs.syntax import dedented, is_program

_AT_START = re.compile(r"(?P<lead>(?:[ \t]|>|[-*+][ \t]|\d{1,9}[.)][ \t])*)(?P<mark>`{3,}|~{3,})(?P<rest>.*)")
_BEHIND_TEXT = re.compile(r"(?P<lead>)[^`]*(?P<mark>`{3,})(?P<rest>.*)")
_LANGUAGE = re.compile(r"[ \t]*[\w+#.-]*[ \t]*")
_CODE = re.compile(
    r"[ \t]*(?:\w+[ \t]+)??((?:(?:async[ \t]+)?def|class|import|return)[ \t].*|from[ \t]+[\w.]+[ \t]+import\b.*|@\w.*)"
)
_HTML = re.compile(r"<code[^<>]*>(.*?)(?:</code>|\Z)", re.DOTALL | re.IGNORECASE)
_QUOTE = re.compile(r"[ \t]*> ?")
_MOST_BLOCKS, _MOST_ENDS = 50, 6  # of a text, and of a block those of which the first that leaves a program is taken
_TAB = 4


@dataclass(frozen=True, slots=True)
class Fenced:
    """blocks: what the fences hold, without their indentation. before: the text in front of the first, outside: all
    that is in none. is_first_bare: the first names no language."""

    blocks: tuple[str, ...]
    before: str
    outside: str
    is_first_bare: bool = False


@dataclass(frozen=True, slots=True)
class _Opening:
    """code: what follows the mark on its line and is code. is_whole: the block ends on that line."""

    before: str
    mark: str
    num_quotes: int
    width: int
    code: str
    is_bare: bool
    is_whole: bool


def fenced(text: str) -> Fenced:
    lines, index = text.split("\n"), 0
    blocks: list[str] = []
    outside: list[str] = []
    before, is_bare = text, False
    while index < len(lines):
        opening = _opening(lines[index]) if len(blocks) < _MOST_BLOCKS else None
        if opening is None:
            outside.append(lines[index])
            index += 1
            continue
        outside.append(opening.before)
        if not blocks:
            before, is_bare = "\n".join(outside), opening.is_bare
        code, index = _block(lines, index, opening)
        blocks.append(code)
        if "```" in code and not is_program(code):
            blocks += fenced(code).blocks  # such as an answer that is all in a block of Markdown
    if not blocks:
        blocks = [dedented(html.unescape(code)) for code in _HTML.findall(text)]
    return Fenced(tuple(blocks), before, "\n".join(outside), is_bare)


def until_fence(text: str) -> tuple[str, str]:
    """Return what an open block holds that the text begins in, a program or the body of a function, and what follows
    it."""
    lines = ["```", *text.split("\n")]
    for head in ("def _():", ""):
        code, index = _block(lines, 0, _Opening("", "```", 0, 0, head, True, False))
        if is_program(code):
            break
    return code.removeprefix(f"{head}\n"), "\n".join(lines[index:])


def _opening(line: str) -> _Opening | None:
    found = _AT_START.match(line)
    is_behind_text = found is None
    found = found or _BEHIND_TEXT.match(line)
    if found is None:
        return None
    mark, lead, rest = found["mark"], found["lead"], found["rest"]
    is_whole = mark in rest
    code = _CODE.fullmatch(rest.split(mark, 1)[0])
    if code is None and (is_whole or (is_behind_text and not _LANGUAGE.fullmatch(rest))):
        return None  # code within a sentence
    inner = lead.rpartition(">")[2]
    width = len(inner.removeprefix(" ") if ">" in lead else inner.expandtabs(_TAB))
    before = line[: found.start("mark")] if is_behind_text else ""
    return _Opening(before, mark, lead.count(">"), width, code[1] if code else "", not rest.strip(), is_whole)


def _block(lines: Sequence[str], index: int, opening: _Opening) -> tuple[str, int]:
    """Return the code of the block that opens on this line, and the line after it: up to the first end that leaves a
    program; where none does, up to the first."""
    if opening.is_whole:
        return opening.code, index + 1
    first = [opening.code] if opening.code else []
    found: tuple[str, int] | None = None
    for number, head, is_again in _ends(lines[index + 1 :], opening):
        code, is_right = _without_lead(first, [*lines[index + 1 : index + 1 + number], *head], opening)
        following = index + 1 + number + (not is_again)
        if is_right:
            return code, following
        found = found or (code, following)
    assert found is not None, "a text has an end"
    return found


def _ends(lines: Sequence[str], opening: _Opening) -> Iterator[tuple[int, list[str], bool]]:
    """Yield where the block may end: on which line, what of that line belongs to it, and whether another block begins
    there. The end of the text is the last."""
    num_found = 0
    for number, line in enumerate(lines):
        head, mark, rest = line.partition(opening.mark)
        if not mark or "#" in head:
            continue
        is_own_line = not head.strip(" \t>")
        rest = rest.lstrip(mark[0])
        if mark[0] == "~" and not is_own_line:
            continue
        num_found += 1
        is_again = is_own_line and bool(rest.strip()) and _LANGUAGE.fullmatch(rest) is not None
        yield number, ["" if is_own_line else head], is_again
        if num_found == _MOST_ENDS:
            break
    yield len(lines), [], False


def _without_lead(first: list[str], lines: Sequence[str], opening: _Opening) -> tuple[str, bool]:
    """Return the code of these lines without the indentation of their fence, and whether it is a program. Where it is
    none, the lines may not have followed the fence's indentation."""
    for _ in range(opening.num_quotes):
        lines = [_QUOTE.sub("", line, count=1) if _QUOTE.match(line) else line for line in lines]
    code = dedented("\n".join([*first, *(_cut(line, opening.width) for line in lines)]))
    if is_program(code) or not opening.width:
        return code, is_program(code)
    as_it_is = dedented("\n".join([*first, *lines]))
    return (as_it_is, True) if is_program(as_it_is) else (code, False)


def _cut(line: str, width: int) -> str:
    if not width:
        return line
    code = line.lstrip(" \t")
    return line[: len(line) - len(code)].expandtabs(_TAB)[width:] + code
