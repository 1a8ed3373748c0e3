"""From a request's branches to its part of a step: the blocks that each opens, and what is computed."""

from __future__ import annotations

from reference_plain.layout import shift_columns
from reference_plain.spans import CausalBlocks, spans_of
from reference_plain.state import PlainRequest, RequestStep


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on."""
    blocks, strategy = decoding.blocks, decoding.strategy
    opens_block = _opens_block(decoding)
    window = strategy.window(blocks, decoding.is_refreshed)
    opened_end = new_end = blocks[-1].end  # a window may reach behind it
    start = window.start
    ends = widths = (window.end - start,) * len(opens_block)
    if any(opens_block):
        own_end, new_end = window.end, strategy.new_block(blocks).end
        window = window.until(max(own_end, new_end))
        ends = widths = tuple([(window.end if opens else own_end) - start for opens in opens_block])
    if opened_end < window.end:
        ends = tuple([(new_end if opens else opened_end) - start for opens in opens_block])
    column_of, rules = shift_columns(start, window.end, decoding), decoding.rules
    shifts = tuple([block_start - start for block_start in column_of])
    causal = None
    if rules.decode.window_attention == "block_causal":
        causal = CausalBlocks(start - (strategy.origin or 0), rules.decode.block_size)
    spans = spans_of(widths, ends, rules.shift, shifts, causal)
    end_row = first_row + len(widths)
    return RequestStep(decoding, first_row, end_row, window, opens_block, widths, spans, column_of)


def _opens_block(decoding: PlainRequest) -> list[bool]:
    """Whether each branch appends a block, by its own filled share of the last one, its lookahead token included."""
    blocks, branches, opens_block = decoding.blocks, decoding.branches, decoding.strategy.opens_block
    last = blocks[-1]
    if decoding.has_eos or not opens_block(blocks, last.share_with(1)):
        return [False] * len(branches)
    without, end_token_ids = opens_block(blocks, last.filled_share), decoding.rules.end_token_ids
    lookaheads = zip(branches.positions, branches.tokens, strict=True)
    opens = [(without or position >= last.start) and token not in end_token_ids for position, token in lookaheads]
    return [*opens, without]
