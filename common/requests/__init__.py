"""Make what the engine is asked for of a text, messages or token ids and what their sender wishes, for every caller."""

from common.requests.maker import RequestMaker
from common.requests.prompts import LONG, Offered, PromptMaker
from common.requests.reading import read_json
from common.requests.refusal import RequestError, first_error, path_of, refusal
from common.requests.tools import forced_call, why_no_choice, why_no_tools
from common.requests.wishes import FIRST_ERROR, AnswerFields, CanvasFields, MaxTokens, PaceFields, Seed, TokenId, Wishes

__all__ = [
    "FIRST_ERROR",
    "LONG",
    "AnswerFields",
    "CanvasFields",
    "MaxTokens",
    "Offered",
    "PaceFields",
    "PromptMaker",
    "RequestError",
    "RequestMaker",
    "Seed",
    "TokenId",
    "Wishes",
    "first_error",
    "forced_call",
    "path_of",
    "read_json",
    "refusal",
    "why_no_choice",
    "why_no_tools",
]
