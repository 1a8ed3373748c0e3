"""From a line of the input to what is asked of the engine: a prompt as token ids, and settings of the line's own."""

from common.batch.requests.cautions import cautions
from common.batch.requests.own_settings import Own, OwnSettings, why_unused
from common.batch.requests.prompts import LengthLimit, TokenizerLike, prompt_or_reason

__all__ = ["LengthLimit", "Own", "OwnSettings", "TokenizerLike", "cautions", "prompt_or_reason", "why_unused"]
