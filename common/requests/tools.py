"""Tools that a conversation offers, and which of them an answer has to call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.constraints import Format, of_calls
from common.errors import ConfigError
from common.requests.refusal import RequestError

_MOST_TOOLS = 128
_ANY_ARGUMENTS = {"type": "object"}


def why_no_tools(tools: object) -> str | None:
    """Say what is wrong with a list of tools, and where; None: nothing."""
    if not isinstance(tools, list):
        return "tools: write a list of {type, function}"
    if len(tools) > _MOST_TOOLS:
        return f"tools: {len(tools)} tools, at most {_MOST_TOOLS} can be given"
    problems = ((index, _why_no_tool(tool)) for index, tool in enumerate(tools))
    found = next((f"tools.{index}{problem}" for index, problem in problems if problem is not None), None)
    if found is None and len({tool["function"]["name"] for tool in tools}) < len(tools):
        return "tools: two have the same name: rename one"
    return found


def why_no_choice(choice: object, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what is wrong with `tool_choice`; None: nothing."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            return 'tool_choice: write {"type": "function", "function": {"name": ...}}'
        return None if name in map(_name, tools) else f"tool_choice: {name!r:.80} is not among tools: name one of these"
    if choice not in ("none", "auto", "required"):
        return "tool_choice: write none, auto, required, or an object with the name of a function"
    return "tool_choice: required without tools: send tools" if choice == "required" and not tools else None


def forced_call(choice: object, tools: Sequence[Mapping[str, Any]]) -> Format | None:
    """Return what an answer is held to that has to be a call; None where it need not be. Raises RequestError."""
    if choice != "required" and not isinstance(choice, Mapping):
        return None
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    functions = [tool["function"] for tool in tools if named in (None, _name(tool))]
    try:
        return of_calls([(one["name"], one.get("parameters") or _ANY_ARGUMENTS) for one in functions])
    except ConfigError as error:
        raise RequestError("tools", str(error)) from None


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _why_no_tool(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        return ': write it as {"type": "function", "function": {"name": ..., "parameters": ...}}'
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        return ".function.name: write 1 to 64 letters, digits, underscores, dots and dashes"
    if parameters not in (None, {}) and (not isinstance(parameters, Mapping) or parameters.get("type") != "object"):
        return ".function.parameters: write a schema of type object"
    return None
