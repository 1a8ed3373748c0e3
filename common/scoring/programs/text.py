"""Make the program that is run of what a model has written: fenced block, longest valid span, entry point."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence

from common.scoring.programs.fences import Fenced, fenced, until_fence
from common.scoring.programs.syntax import dedented, is_program, parsed, wrong_line

_OPENS = re.compile(r"(?:async\s+def|def|class|import|from)\s|@|[A-Za-z_]\w*\s*(?::[^=]*)?=")
_RETURNS = re.compile(r"(?m)^[ \t]*(?:return|yield|raise)\b")
_IMPORT = re.compile(r"(?m)^(?:import|from)[ \t].*$")
_FUTURE = re.compile(r"(?m)^from[ \t]+__future__[ \t]+import[ \t].*\n?")
_MOST_LINES = 400  # of what is looked through for a span; an answer has fewer
_INDENT = "    "


def program_of(text: str, entry_point: str, prompt: str = "", *, is_fence_open: bool = False) -> str:
    """Return the program that an answer makes.

    The program is the first fenced block that defines the entry point (one that is a program, if several do), with what
    it uses of the imports and definitions of the others; else, with a prompt, the first that returns something, else
    the first block. Without blocks it is the text, or the longest run of its lines that is a program. prompt: code that
    the answer may go on with or repeat, such as a function's head; it comes first in any case. is_fence_open: the
    answer begins inside of a fenced block.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if is_fence_open:
        code, rest = until_fence(text)
        code = code if code.strip() or not rest.strip() else _chosen(rest, entry_point, prompt)
    else:
        code = _chosen(text, entry_point, prompt)
    return _future_first(_with_prompt(prompt, code, entry_point))


def _with_prompt(prompt: str, code: str, entry_point: str) -> str:
    if prompt and not _defines(code, entry_point):
        return _completed(prompt, code)
    span = code if wrong_line(code) is None else _longest_valid_span(code, entry_point)
    if not prompt:
        return span
    head = prompt if wrong_line(prompt) is None else f"{prompt.rstrip()}\n{_indent_of(prompt)}pass\n"
    return f"{head}\n{span}"


def _chosen(text: str, entry_point: str, prompt: str) -> str:
    if wrong_line(prompt + text if not _defines(text, entry_point) else text) is None:
        return _without_remarks(text) if _defines(text, entry_point) else text
    found = fenced(text)
    blocks = found.blocks
    if not blocks or (_closes_first(found) and _is_code(found.before, entry_point, prompt)):
        return _without_remarks(found.before)
    defining = [block for block in blocks if _defines(block, entry_point)]
    if defining:
        chosen = next((block for block in defining if wrong_line(block) is None), defining[0])
        others = [*_IMPORT.findall(found.outside), *(block for block in blocks if block is not chosen)]
        return _with_used(chosen, others)
    if _defines(found.outside, entry_point):
        return _without_remarks(found.outside)
    if _is_code(found.before, entry_point, prompt):
        return found.before
    return next((block for block in blocks if prompt and _RETURNS.search(block) and is_program(block)), blocks[0])


def _closes_first(found: Fenced) -> bool:
    """Whether the first fence may end a block that was never opened: it is one too many, and names no language."""
    return found.is_first_bare and found.before.strip() != ""


def _is_code(text: str, entry_point: str, prompt: str) -> bool:
    """Whether text without a fence is the program, or goes on with the prompt in the lines of its function."""
    if _defines(text, entry_point):
        return True
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    return bool(prompt) and first[:1] in (" ", "\t") and _num_valid(lines, prompt) > lines.index(first)


def _defines(code: str, entry_point: str) -> bool:
    name = re.escape(entry_point)
    pattern = rf"(?m)^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*(?::[^=\n]+)?=(?!=)"
    return re.search(pattern, code) is not None


def _completed(prompt: str, code: str) -> str:
    """Return the prompt and as many lines of its completion as make a program; all of them where none do. A completion
    that lacks the indentation of the body gets it."""
    indent = _indent_of(prompt)
    bodies = [code, textwrap.indent(dedented(code), indent), indent + code.lstrip()]
    counted = [(_num_valid(body.split("\n"), prompt), -index) for index, body in enumerate(bodies)]
    count, index = max(counted)
    return prompt + "\n".join(bodies[-index].split("\n")[:count] if count else code.split("\n"))


def _indent_of(prompt: str) -> str:
    last = prompt.rstrip().rsplit("\n", 1)[-1]
    return last[: len(last) - len(last.lstrip())] or _INDENT


def _without_remarks(text: str) -> str:
    """Return a text that is a program without words in front of it and after it that happen to be Python."""
    tree = parsed(text)
    if isinstance(tree, int):
        return text
    lines = text.split("\n")
    for node in tree.body:
        is_word = isinstance(node, ast.AnnAssign) and node.value is None
        is_word |= isinstance(node, ast.Expr) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        if is_word:
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(lines)


def _with_used(code: str, others: Sequence[str]) -> str:
    """Return the code after those imports and definitions of other pieces that it uses and does not have itself."""
    tree = parsed(code)
    if isinstance(tree, int):
        return code
    nodes = [node for piece in others for node in _definitions(piece)]
    missing = _names(tree) - {name for node in ast.walk(tree) for name in _bound(node)}
    used: list[str] = []
    while found := [node for node in nodes if missing.intersection(_bound(node))]:
        node = found[-1]
        used.insert(0, ast.unparse(node))
        missing = (missing | _names(node)) - set(_bound(node))
        nodes = [other for other in nodes if not set(_bound(other)) & set(_bound(node))]
    return "\n".join([*used, code])


def _definitions(code: str) -> Iterator[ast.stmt]:
    tree = parsed(code)
    if isinstance(tree, ast.Module):
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        yield from (node for node in tree.body if isinstance(node, kinds))


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bound(node: ast.AST) -> list[str]:
    """Return the names that a node binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return [node.arg] if isinstance(node, ast.arg) else []


def _future_first(program: str) -> str:
    """Move imports from __future__ in front of everything."""
    return "".join(f"{line.rstrip()}\n" for line in _FUTURE.findall(program)) + _FUTURE.sub("", program)


def _longest_valid_span(code: str, entry_point: str) -> str:
    """Return the longest span that is a program and defines the entry point, else all of the code."""
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
    """Count the first lines that make a program after the head: cut in front of what is wrong until nothing is."""
    num_head, count = head.count("\n"), min(len(lines), _MOST_LINES)
    while count > 0:
        wrong = wrong_line(head + "\n".join(lines[:count]))
        if wrong is None:
            return count
        count = min(count, wrong - num_head) - 1
    return 0
