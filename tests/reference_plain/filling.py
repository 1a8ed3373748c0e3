"""Make a step's winner the next anchor, with lookaheads: adopt the branch, fill what is sure, spawn what to
try."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from common.decoding.plan import Int
from common.decoding.scheduling.state import Branch
from common.policies import Draws, Filling, Spawning, Stepped
from reference_plain.blocks import ACTIVE, Block
from reference_plain.policies import policy
from reference_plain.state import ANCHOR, Aligned, PlainRequest, RequestStep


def adopt(step: RequestStep, winner: int) -> None:
    """The winner becomes the anchor: the block it opened, its token, and the blocks that its filled shares activate."""
    decoding, blocks = step.decoding, step.decoding.blocks
    if step.opens_block[winner]:
        blocks.append(decoding.strategy.new_block(blocks))
    for position, token in decoding.branches[winner].fills:
        decoding.block_at(position).num_masked -= 1
        _write(decoding, [position], [token])
    threshold = decoding.rules.decode.decoded_token_threshold
    for block, before in pairwise(reversed(blocks)):
        if block.status is not ACTIVE:
            break
        if not block.is_fully_activated:
            block.is_fully_activated = before.filled_share >= threshold


def _write(decoding: PlainRequest, positions: Any, tokens: Any) -> None:
    decoding.token_S[positions] = tokens
    decoding.is_masked_S[positions] = False
    decoding.has_eos = decoding.has_eos or not decoding.rules.end_token_ids.isdisjoint(tokens)


def fill(
    step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]
) -> tuple[dict[int, int], dict[int, int]]:
    """Fill masks by the fill rule, and edit tokens; a block that is not fully activated need not fill any. Returns the
    tokens of filled positions, and of edited ones."""
    if not fillable:
        return {}, {}
    decoding, decode = step.decoding, step.decoding.rules.decode
    edited = {} if decode.edit_threshold is None else _edits(step, aligned, winner, fillable[0])
    positions = _chosen(step, aligned, winner, fillable)
    tokens = aligned.values_3BW[0, winner, positions - step.window.start].astype(np.int64).tolist()
    _write(decoding, positions, tokens)
    if edited:
        decoding.token_S[[*edited]] = [*edited.values()]
        canvas = slice(decoding.prompt_length, decoding.blocks[-1].end)
        left = decoding.token_S[canvas][~decoding.is_masked_S[canvas]].tolist()
        decoding.has_eos = not decoding.rules.end_token_ids.isdisjoint(left)
    return dict(zip(positions.tolist(), tokens, strict=True)), edited


def seed_next_block(step: RequestStep, aligned: Aligned, winner: int) -> dict[int, int]:
    """Open the next block and fill its first position with what the window's last entry predicts."""
    decoding = step.decoding
    assert aligned.next_3B is not None, "the plan has it read"
    block, token = decoding.strategy.new_block(decoding.blocks), int(aligned.next_3B[0, winner])
    decoding.blocks.append(block)
    block.num_masked -= 1
    _write(decoding, [block.start], [token])
    return {block.start: token}


def quota(decode: Any, block_size: int, step: int) -> int:
    """How many positions the given step of a block fills, if `denoising_steps` of them fill all of it; 1 at least."""
    num_steps = min(decode.denoising_steps or block_size, block_size)
    return block_size // num_steps + (step < block_size % num_steps)


def _chosen(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> Int:
    """Positions to fill by `fill_rule`."""
    decoding, decode = step.decoding, step.decoding.rules.decode
    chosen = [np.empty(0, dtype=np.int64)]
    may_wait = False  # of several blocks `multi_block` has the first fully activated one alone fill something
    choose = policy("fill_rules", decode.fill_rule)
    for block in fillable:
        masked_M = decoding.is_masked_S[block.start : block.end].nonzero()[0] + block.start
        if masked_M.size:
            count = quota(decode, decoding.rules.block_size, block.num_steps)
            filling = Filling(aligned.values_3BW.take(masked_M - step.window.start, axis=2), winner, count, decode)
            is_chosen_M, is_sure_M = choose(filling), filling.probability_M > decode.skip_threshold
            if decode.fill_rule == "entropy":
                is_sure_M = -filling.confidence_M < decode.entropy_threshold
            if may_wait or not block.is_fully_activated:
                is_chosen_M &= is_sure_M
            may_wait = may_wait or (block.is_fully_activated and decode.strategy == "multi_block")
            block.num_masked -= int(is_chosen_M.sum())
            decoding.num_forced_fills += int((is_chosen_M & ~is_sure_M).sum())
            chosen.append(masked_M[is_chosen_M])
    return np.concatenate(chosen)


def _edits(step: RequestStep, aligned: Aligned, winner: int, block: Block) -> dict[int, int]:
    """Filled positions of the block to be replaced (LLaDA2.1): another token than the own one is the most probable,
    with more than `edit_threshold`. Counts the step, if the block has no mask."""
    decoding, decode = step.decoding, step.decoding.rules.decode
    block.num_edit_steps += not block.num_masked
    if block.num_edit_steps > decode.max_post_edit_steps:
        return {}
    first = max(block.start, decoding.prompt_length)
    position_N = (~decoding.is_masked_S[first : block.end]).nonzero()[0] + first
    token_N, probability_N, _ = aligned.values_3BW[:, winner].take(position_N - step.window.start, axis=1)
    is_edited_N = (token_N != decoding.token_S[position_N]) & (probability_N > decode.edit_threshold)
    return dict(zip(position_N[is_edited_N].tolist(), token_N[is_edited_N].astype(np.int64).tolist(), strict=True))


def spawn(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block], num_filled: int) -> list[Branch]:
    """Up to k lookaheads, each the anchor plus one more of its remaining masks; then the anchor.

    num_filled: by the fill rule in this step.
    """
    decoding, decode = step.decoding, step.decoding.rules.decode
    masked = [block for block in fillable if block.num_masked]
    if decode.spawn_blocks == "first":
        masked = masked[:1]
    if not masked or decode.num_lookahead == 0:
        return [ANCHOR]
    stepped = Stepped(num_filled, sum(block.num_masked for block in masked), decode)
    most = min(decode.num_lookahead, policy("lookahead_rules", decode.lookahead_rule)(stepped))
    start = masked[0].start
    # What lies between the first and the last of these blocks is full.
    candidate_C = decoding.is_masked_S[start : masked[-1].end].nonzero()[0]
    values_3W = aligned.values_3BW[:, winner, start - step.window.start :]
    entropy_to_the_left_C = np.concatenate(([0], -values_3W[2][candidate_C].astype(np.float64).cumsum()))[:-1]
    candidate_C = candidate_C[entropy_to_the_left_C <= decode.spawn_entropy]
    spawning = Spawning(values_3W, candidate_C, start, decode, draws_of(decoding, stream=1))
    rank_C = policy("spawn_rules", decode.spawn_rule)(spawning)
    chosen_K = candidate_C[(-rank_C).argsort(kind="stable")[:most]]
    tried = zip((start + chosen_K).tolist(), *values_3W[::2, chosen_K].tolist(), strict=True)
    return [*(Branch(((position, int(token)),), confidence) for position, token, confidence in tried), ANCHOR]


def draws_of(decoding: PlainRequest, stream: int) -> Draws:
    return Draws(decoding.noise_key, decoding.num_forwards, stream)
