"""From a line of the input to what is asked of the engine."""

from common.batch.requests.cautions import cautions
from common.batch.requests.lines import LineRequests, prompt_of, prompt_or_reason, why_unused

__all__ = ["LineRequests", "cautions", "prompt_of", "prompt_or_reason", "why_unused"]
