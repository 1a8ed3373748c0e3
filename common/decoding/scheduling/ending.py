"""Where an answer ends, and why."""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Bool, Int
from common.decoding.request import FinishReason
from common.decoding.scheduling.state import DecodingRequest


def find_end(
    decoding: DecodingRequest,
    token_C: Int,
    is_masked_C: Bool,
    num_final: int | None,
    spent: FinishReason | None,
    reason: FinishReason | None = None,
) -> tuple[int, FinishReason | None]:
    """Return how many of the opened positions are the answer, and why the request ends; None: it goes on.

    num_final: positions in front of which an end counts already; None: any. spent: why it ends, if there is nothing
    left to do for it. reason: why it ends in any case.
    """
    num_filled = int(is_masked_C.argmax()) if is_masked_C.any() else len(token_C)
    if num_final is not None and spent is None and reason is None:
        num_filled = min(num_filled, num_final)
    rules, prefix = decoding.rules, token_C[:num_filled]
    ends = list(rules.end_token_ids)
    end_at = (prefix == ends[0] if len(ends) == 1 else np.isin(prefix, ends)).nonzero()[0]
    num_kept = int(end_at[0]) + 1 if end_at.size else len(prefix)
    has_stop_token = bool(end_at.size) and int(prefix[end_at[0]]) in rules.decode.stop_token_ids
    if rules.find_stop is not None:
        if decoding.stop_search is None:
            decoding.stop_search = decoding.asked(rules.find_stop)
        search, is_over = decoding.stop_search, bool(end_at.size) or spent is not None or reason is not None
        if search is not None:
            more_ids = prefix[search.num_seen : num_kept - has_stop_token].tolist()
            stop_at = decoding.asked(search.find, more_ids, is_over)
            if stop_at is not None:
                return stop_at, "stop"
    if end_at.size and (rules.decode.stop_at_eos or spent == "length"):
        return num_kept, "stop" if has_stop_token else "eos"
    return num_kept, spent or reason
