"""What a chat's tools may be, without a server."""

from __future__ import annotations

import pytest

from common.requests.tools import forced_call, why_no_tools


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters_takes_any_object(parameters: dict[str, object]) -> None:
    tools = [{"type": "function", "function": {"name": "stop", **parameters}}]
    assert why_no_tools(tools) is None
    plain = [{"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}]
    assert forced_call("required", tools) == forced_call("required", plain)
