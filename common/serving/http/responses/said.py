"""What a message says, in the words of OpenAI's and vLLM's APIs."""

from __future__ import annotations

import uuid
from typing import Any

from common.text import Said


def spoken(said: Said, first_index: int | None = None) -> dict[str, Any]:
    """Return a message's own fields, or a delta's: then with each call's index, from the first."""
    found: dict[str, Any] = {}
    if said.reasoning:
        found |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
    if said.calls:
        found["tool_calls"] = [
            {
                **({} if first_index is None else {"index": first_index + place}),
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(said.calls)
        ]
    if first_index is None:
        return {"content": said.content if said.content or not said.calls else None, **found}
    return {"content": said.content, **found} if said.content or not found else found
