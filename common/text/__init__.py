"""What tokens read as, and what a conversation is: the same for batch runs, the server, lm-eval and Python."""

from common.text.answers import AnswerText, answer_of, answer_text, before_stop, stop_finder
from common.text.growing import BROKEN, Writing, writing_of
from common.text.messages import MOST_MESSAGES, conversation, why_no_conversation, why_no_variables
from common.text.said import BEGIN_CALL, BEGIN_REASONING, END_REASONING, PLAIN, MessageReader, Reading, Said, ToolCall

__all__ = [
    "BEGIN_CALL",
    "BEGIN_REASONING",
    "BROKEN",
    "END_REASONING",
    "MOST_MESSAGES",
    "PLAIN",
    "AnswerText",
    "MessageReader",
    "Reading",
    "Said",
    "ToolCall",
    "Writing",
    "answer_of",
    "answer_text",
    "before_stop",
    "conversation",
    "stop_finder",
    "why_no_conversation",
    "why_no_variables",
    "writing_of",
]
