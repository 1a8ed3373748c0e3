"""What a conversation is, whichever door it comes through.

A message is an object with a role. Its content is text, a list of text parts, or null; other keys, such as tool_calls,
tool_call_id, name and reasoning_content, are the template's to read, and null is the same as absent. What a template
cannot take is fitted to it where it is rendered (`common.checkpoint.chat_worker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError

MOST_VARIABLES = 64
MOST_MESSAGES = 4096  # of a conversation, and parts of a message
# What transformers' apply_chat_template has itself, and would not hand on to the template.
_OF_THE_CALL = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
_NOT_RENDERED = ("documents",)


def why_no_conversation(messages: object) -> str | None:
    """Say what is wrong with it, and where; None: nothing."""
    if not isinstance(messages, (list, tuple)) or not messages:
        return "messages: write a list of at least one {role, content}"
    if len(messages) > MOST_MESSAGES:
        return f"messages: {len(messages)} messages, at most {MOST_MESSAGES} can be given"
    problems = ((index, _why_no_message(message)) for index, message in enumerate(messages))
    return next((f"messages.{index}{problem}" for index, problem in problems if problem is not None), None)


def why_no_variables(variables: object) -> str | None:
    """Say what is wrong with what a template is to be given beside the messages; None: nothing."""
    if not isinstance(variables, Mapping):
        return 'chat_template_kwargs: write an object, such as {"enable_thinking": false}'
    if len(variables) > MOST_VARIABLES:
        return f"chat_template_kwargs: {len(variables)} variables, at most {MOST_VARIABLES} can be given"
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier():
            return f"chat_template_kwargs: {name!r:.100} is no name that a template can have; correct it"
        if name in _NOT_RENDERED:
            return f"chat_template_kwargs.{name}: conversations are rendered without {name}: describe them in a message"
        if name == "tools":
            return "chat_template_kwargs.tools: a chat has its tools beside its messages: send them there"
        if name in _OF_THE_CALL:
            return f"chat_template_kwargs.{name}: it is the same for every request, and not one's to set: remove it"
    return None


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as the template gets them. Raises ConfigError."""
    problem = why_no_conversation(messages)
    if problem is not None:
        raise ConfigError(problem)
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]


def _why_no_message(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return ": write it as an object with role and content"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return ".role: write it as text, such as user or assistant"
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, (list, tuple)):
        return ".content: write it as text, or as a list of text parts"
    if len(content) > MOST_MESSAGES:
        return f".content: {len(content)} parts, at most {MOST_MESSAGES} can be given"
    problems = ((index, _why_no_part(part)) for index, part in enumerate(content))
    return next((f".content.{index}{problem}" for index, problem in problems if problem is not None), None)


def _why_no_part(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return ': write it as {"type": "text", "text": ...}'
    if part.get("type") != "text":
        return f".type: {part.get('type')!r:.100}, and the model reads text only: send parts of type text"
    return None if isinstance(part.get("text"), str) else ".text: write it as text"
