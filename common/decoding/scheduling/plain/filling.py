"""From a step's winner to the next anchor and its lookaheads: adopt the branch, fill what is sure, spawn what to
try."""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Int
from common.decoding.scheduling.confidence import random_numbers, spawn_order
from common.decoding.scheduling.plain.blocks import Block
from common.decoding.scheduling.plain.state import Aligned, Branch, PlainRequest, RequestStep

_NO_RANDOMNESS = np.random.default_rng(0)
_NOTHING = np.empty(0, dtype=np.int64)


def adopt(decoding: PlainRequest, branch: Branch) -> None:
    """The winner becomes the anchor: the block it opened, its activations and its token."""
    if branch.opens_block:
        decoding.blocks.append(decoding.strategy.new_block(decoding.blocks))
    for index in branch.activated:
        decoding.blocks[index].is_fully_activated = True
    if branch.position is not None:
        decoding.blocks[decoding.block_index_at(branch.position)].num_masked -= 1
        decoding.token_S[branch.position] = branch.token
        decoding.is_masked_S[branch.position] = False
        decoding.has_eos = decoding.has_eos or branch.token == decoding.rules.eos_token_id


def fill(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> tuple[Int, Int]:
    """Fill every mask above tau_conf; a fully activated block without one fills its most confident mask. The
    positions filled, and their tokens."""
    decoding = step.decoding
    if not fillable:
        return _NOTHING, _NOTHING
    start, offset = fillable[0].start, fillable[0].start - step.window.start
    is_masked_C = decoding.is_masked_S[start : fillable[-1].end]
    columns = slice(offset, offset + len(is_masked_C))
    is_chosen_C = aligned.probability_BW[winner, columns] > decoding.rules.decode.skip_threshold
    is_chosen_C &= is_masked_C
    for block in fillable:
        if block.num_masked:
            is_chosen_N = is_chosen_C[block.start - start : block.end - start]
            num_chosen = int(np.count_nonzero(is_chosen_N))
            if not num_chosen and block.is_fully_activated:
                masked_N = is_masked_C[block.start - start : block.end - start].nonzero()[0]
                confidence_N = aligned.confidence_BW[winner, masked_N + (block.start - step.window.start)]
                is_chosen_N[masked_N[confidence_N.argmax()]] = True
                num_chosen = 1
                decoding.num_forced_fills += 1
            block.num_masked -= num_chosen
    chosen_N = is_chosen_C.nonzero()[0]
    position_N, token_N = chosen_N + start, aligned.tokens(winner, chosen_N + offset)
    decoding.token_S[position_N] = token_N
    is_masked_C[chosen_N] = False
    decoding.has_eos = decoding.has_eos or decoding.rules.eos_token_id in token_N.tolist()
    return position_N, token_N


def spawn(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> list[Branch]:
    """Up to k lookaheads, each the anchor plus one more of its remaining masks; then the anchor."""
    decoding, start, decode = step.decoding, step.window.start, step.decoding.rules.decode
    masked = [block for block in fillable if block.num_masked]
    if decode.spawn_blocks == "first":
        masked = masked[:1]
    if not masked or decode.num_lookahead == 0:
        return [Branch()]
    offset = masked[0].start - start
    # What lies between the first and the last of these blocks is full.
    candidate_C = decoding.is_masked_S[masked[0].start : masked[-1].end].nonzero()[0] + offset
    confidence_C = aligned.confidence_BW[winner].take(candidate_C)
    rng = random_of(decoding, stream=1)
    order_K = spawn_order(decode.spawn_rule, confidence_C, decode.num_lookahead, rng)
    chosen_K = candidate_C[order_K]
    columns = (
        (chosen_K + start).tolist(),
        aligned.tokens(winner, chosen_K).tolist(),
        confidence_C[order_K].tolist(),
    )
    return [Branch(*column) for column in zip(*columns, strict=True)] + [Branch()]


def random_of(decoding: PlainRequest, stream: int) -> np.random.Generator:
    kind = decoding.rules.kind
    if "random" not in (kind.branch_score, kind.spawn_rule):
        return _NO_RANDOMNESS
    return random_numbers(decoding.noise_key, decoding.num_forwards, stream)
