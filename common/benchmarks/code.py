"""From what a model has written to the program that is run: fenced block, longest valid span, entry point."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence

_FENCE = re.compile(r"```[ \t]*(?:[A-Za-z0-9_+-]*)[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
_MARK = "```"
_BARE = re.compile(r"\A[^`]*```[ \t]*(?:\n|\Z)")
_OPENS = re.compile(r"(?:async\s+def|def|class|import|from)\s|@|[A-Za-z_]\w*\s*(?::[^=]*)?=")
_MOST_LINES = 400  # of what is looked through for a span; an answer has fewer
_MOST_CHARACTERS = 50_000


def program_of(text: str, entry_point: str, prompt: str = "", *, is_fence_open: bool = False) -> str:
    """The program that an answer makes.

    prompt: code that the answer may go on with or repeat, such as a function's head; it comes first in any case. Of the
    fenced blocks it is the first that defines the entry point, else the first. Without one it is the text. Of text that
    is no program it is the longest run of lines that is. is_fence_open: the answer begins inside of a fenced block.
    """
    code = text.split(_MARK, 1)[0] if is_fence_open else _fenced(text, entry_point)
    if prompt and not _defines(code, entry_point):
        return _valid_beginning(prompt, code)
    span = code if _wrong_line(code) is None else _longest_valid_span(code, entry_point)
    return f"{prompt}\n{span}" if prompt else span


def _fenced(text: str, entry_point: str) -> str:
    blocks: list[str] = _FENCE.findall(text)
    if not blocks or _closes_first(text):
        return text.split(_MARK, 1)[0]
    return next((block for block in blocks if _defines(block, entry_point)), blocks[0])


def _closes_first(text: str) -> bool:
    """Whether the first fence ends a block that was never opened: it is one too many, and names no language."""
    return text.count(_MARK) % 2 == 1 and text[: text.index(_MARK)].strip() != "" and _BARE.search(text) is not None


def _defines(code: str, entry_point: str) -> bool:
    name = re.escape(entry_point)
    return re.search(rf"(?m)^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*=", code) is not None


def _valid_beginning(prompt: str, code: str) -> str:
    """The prompt and as many lines of its completion as make a program; all of them where none do."""
    lines = code.split("\n")
    count = _num_valid(lines, prompt)
    return prompt + "\n".join(lines[:count] if count else lines)


def _longest_valid_span(code: str, entry_point: str) -> str:
    """All of the code where no span of it is a program that defines the entry point."""
    lines = code.split("\n")[:_MOST_LINES]
    best = ""
    for start, line in enumerate(lines):
        if _OPENS.match(line) and _defines("\n".join(lines[start:]), entry_point):
            count = _num_valid(lines[start:], "")
            span = "\n".join(lines[start : start + count])
            if len(span) > len(best) and _defines(span, entry_point):
                best = span
    return best or code


def _num_valid(lines: Sequence[str], head: str) -> int:
    """How many of the first lines make a program behind the head: cut in front of what is wrong until nothing is."""
    num_head, count = head.count("\n"), min(len(lines), _MOST_LINES)
    while count > 0:
        wrong = _wrong_line(head + "\n".join(lines[:count]))
        if wrong is None:
            return count
        count = min(count, wrong - num_head) - 1
    return 0


def _wrong_line(code: str) -> int | None:
    """The number of the line where the code stops to be a program, None if it is one; 0 where nobody can tell."""
    if len(code) > _MOST_CHARACTERS:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0
    return None
