"""The process that renders chat templates: a template is a program of whoever made the checkpoint.

JSON lines come in, JSON lines go out: after the imports {"ready": true}, then {"text"} or {"error", "is_rejection"}
for each {"template", "special_tokens", "messages", "variables"}. What a template can take is bounded here, but for the
time on the clock, which the parent watches. Started as a script, so that it imports nothing of the engine.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

CPU_SECONDS = 5
MEMORY_BYTES = 2**30
LONGEST_TEXT = 4 * 2**20  # characters

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    _die_with(parent)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        _renderer("{}")
    except Exception as error:
        print(json.dumps({"error": _describe(error)}), file=answers, flush=True)
        return
    _limit_memory()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        _limit_time()
        print(json.dumps(_answer(line)), file=answers, flush=True)


def _answer(line: str) -> dict[str, Any]:
    """The text, or what is wrong and whether the template rejects the messages or fails."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    try:
        request = json.loads(line)
        text = _renderer(json.dumps(request["special_tokens"])).apply_chat_template(
            _fitted(request["messages"], request["template"]),
            chat_template=request["template"],
            tokenize=False,
            add_generation_prompt=True,
            **request["variables"],
        )
    except (TemplateError, TypeError, ValueError) as error:
        return {"error": _describe(error), "is_rejection": not isinstance(error, (TemplateSyntaxError, SecurityError))}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB", "is_rejection": False}
    except Exception as error:
        return {"error": _describe(error), "is_rejection": False}
    if len(text) > LONGEST_TEXT:
        return {"error": f"it makes a text of {len(text)} characters, more than {LONGEST_TEXT}", "is_rejection": False}
    return {"text": text}


def _fitted(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages as the template can read them, and otherwise as they came.

    Parts of a content become one text where no loop goes over them. A content that is missing or null is an empty text
    where the template does not ask for that. A developer is the system where the template does not know that role.
    The arguments of calls become objects.
    """
    reads_parts, asks_for_none = _reads(template)
    fitted = []
    for given in messages:
        message, content = dict(given), given.get("content")
        if content is None and not asks_for_none:
            message["content"] = ""
        elif isinstance(content, list) and not reads_parts:
            message["content"] = "".join(part["text"] for part in content)
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
        fitted.append(message)
    return fitted


def _with_object(call: Any) -> Any:
    """Return the call with its arguments as the object that their text is, which templates write as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


@lru_cache(maxsize=8)
def _reads(template: str) -> tuple[bool, bool]:
    """Whether the template goes over the parts of a content, and whether it asks if a content is none."""
    from jinja2 import nodes

    tree = _parsed(template)
    names = {"content"}
    for _ in range(2):  # a name may be given on to another
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    items = [item.node for kind in (nodes.Getattr, nodes.Getitem) for item in tree.find_all(kind)]
    parts = any(
        isinstance(item, nodes.Getitem) and _is_number(item.arg) and _is_content(item.node, names) for item in items
    )
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    for compare in tree.find_all(nodes.Compare):
        if any(isinstance(operand.expr, nodes.Const) and operand.expr.value is None for operand in compare.ops):
            asked.append(compare.expr)
    return loops or parts, any(_is_content(node, names) for node in asked)


def _parsed(template: str) -> Any:
    from jinja2 import Environment
    from jinja2.ext import Extension

    class Generation(Extension):  # transformers' own tag
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(template)


def _is_content(node: Any, names: set[str]) -> bool:
    """Whether this part of a template is a message's content. names: of what it is assigned to."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Call):
        is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
        return is_get and any(isinstance(given, nodes.Const) and given.value == "content" for given in node.args)
    if isinstance(node, nodes.Filter):
        return node.name in ("list", "default", "d", "selectattr", "rejectattr") and _is_content(node.node, names)
    if isinstance(node, nodes.Or):
        return _is_content(node.left, names) or _is_content(node.right, names)
    return isinstance(node, nodes.CondExpr) and any(_is_content(one, names) for one in (node.expr1, node.expr2))


def _is_number(node: Any) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Const) and isinstance(node.value, int)


def _describe(error: Exception) -> str:
    """Return a short line."""
    return (str(error).strip() or repr(error)).splitlines()[0][:300]


def _die_with(parent: int) -> None:
    """End with the parent, even where that was killed with -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def _limit_time() -> None:
    """Limit the processor time from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_SECONDS, hard))


@lru_cache(maxsize=1)
def _renderer(special_tokens: str) -> Any:
    import jinja2  # noqa: F401  # transformers would miss it at the first template only
    import tokenizers
    import transformers

    no_vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
    return fast_tokenizer(tokenizer_object=no_vocabulary, **json.loads(special_tokens))


if __name__ == "__main__":
    main(int(sys.argv[-1]))
