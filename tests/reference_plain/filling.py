"""From a step's winner to the next anchor and its lookaheads: adopt the branch, fill what is sure, spawn what to
try."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from common.config import DecodeConfig
from common.decoding.plan import Bool, Float, Int
from reference_plain.blocks import ACTIVE, Block
from reference_plain.policies import policy
from reference_plain.policies.inputs import Draws, Filling, Spawning, Stepped
from reference_plain.state import Aligned, Branches, PlainRequest, RequestStep

_NOTHING = np.empty(0, dtype=np.int64)


class Filled(NamedTuple):
    """What a step has written beside the winner's lookahead token.

    place_N: counted from `start`. edited: position -> new token.
    """

    start: int
    place_N: Int
    token_N: Int
    edited: dict[int, int]


def adopt(step: RequestStep, winner: int) -> None:
    """The winner becomes the anchor: the block it opened, its token, and the blocks that its filled shares activate."""
    decoding, branches = step.decoding, step.decoding.branches
    blocks, rules = decoding.blocks, decoding.rules
    if step.opens_block[winner]:
        blocks.append(decoding.strategy.new_block(blocks))
    if winner < len(branches.positions):  # behind the lookaheads comes the anchor
        position, token = branches.positions[winner], branches.tokens[winner]
        decoding.block_at(position).num_masked -= 1
        decoding.token_S[position] = token
        decoding.is_masked_S[position] = False
        decoding.has_eos = decoding.has_eos or token in rules.end_token_ids
    threshold = rules.decode.decoded_token_threshold
    for block, before in pairwise(reversed(blocks)):
        if block.status is not ACTIVE:
            break
        if not block.is_fully_activated:
            block.is_fully_activated = before.filled_share >= threshold


def fill(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> Filled:
    """Fill masks by the fill rule, and edit tokens; a block that is not fully activated need not fill any."""
    decoding = step.decoding
    if not fillable:
        return Filled(0, _NOTHING, _NOTHING, {})
    decode, end_token_ids = decoding.rules.decode, decoding.rules.end_token_ids
    edited = {} if decode.edit_threshold is None else _edits(step, aligned, winner, fillable[0])
    own = slice(fillable[0].start, fillable[-1].end)
    values_3W = aligned.of_branch(winner, own.start - step.window.start)
    if decode.fill_rule == "threshold":
        place_N = _above_threshold(decoding, values_3W, fillable)
    else:
        place_N = _by_rule(step, aligned, winner, fillable)
    token_N = values_3W[0][place_N].astype(np.int64)
    decoding.token_S[own][place_N] = token_N
    decoding.is_masked_S[own][place_N] = False
    if edited:
        for position, token in edited.items():
            decoding.token_S[position] = token
        canvas = slice(decoding.prompt_length, decoding.blocks[-1].end)
        tokens = decoding.token_S[canvas][~decoding.is_masked_S[canvas]].tolist()
        decoding.has_eos = not end_token_ids.isdisjoint(tokens)
    else:
        decoding.has_eos = decoding.has_eos or not end_token_ids.isdisjoint(token_N.tolist())
    return Filled(own.start, place_N, token_N, edited)


def seed_next_block(step: RequestStep, aligned: Aligned, winner: int) -> tuple[int, int]:
    """Open the next block and fill its first position with what the window's last entry predicts."""
    decoding = step.decoding
    assert aligned.next_3B is not None, "the plan has it read"
    block, token = decoding.strategy.new_block(decoding.blocks), int(aligned.next_3B[0, winner])
    decoding.blocks.append(block)
    block.num_masked -= 1
    decoding.token_S[block.start], decoding.is_masked_S[block.start] = token, False
    decoding.has_eos = decoding.has_eos or token in decoding.rules.end_token_ids
    return block.start, token


def quota(decode: DecodeConfig, block_size: int, step: int) -> int:
    """How many positions the given step of a block fills, if `denoising_steps` of them fill all of it; 1 at least."""
    num_steps = min(decode.denoising_steps or block_size, block_size)
    return block_size // num_steps + (step < block_size % num_steps)


def _above_threshold(decoding: PlainRequest, values_3W: Float, fillable: list[Block]) -> Int:
    """Where to fill, counted from the first of the blocks: every mask above tau_conf; a fully activated block without
    one fills its most confident."""
    masked_C = decoding.is_masked_S[fillable[0].start : fillable[-1].end].nonzero()[0]  # block after block
    is_chosen_C = values_3W[1][masked_C] > decoding.rules.decode.skip_threshold
    is_sure, first = is_chosen_C.tobytes(), 0  # bytes are counted in less time than numpy takes to be called
    for block in fillable:
        if block.num_masked:
            behind = first + block.num_masked
            num_chosen = is_sure.count(1, first, behind)
            if not num_chosen and block.is_fully_activated:
                is_chosen_C[first + values_3W[2][masked_C[first:behind]].argmax()] = True
                num_chosen = 1
                decoding.num_forced_fills += 1
            block.num_masked -= num_chosen
            first = behind
    place_N: Int = masked_C[is_chosen_C]
    return place_N


def _by_rule(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> Int:
    """Where to fill by `fill_rule`, counted from the first of the blocks."""
    decoding, start = step.decoding, fillable[0].start
    offset = start - step.window.start
    decode, size, chosen = decoding.rules.decode, decoding.rules.kind.block_size, []
    may_wait = False  # of several blocks `multi_block` has the first fully activated one alone fill something
    choose = policy("fill_rules", decode.fill_rule)
    for block in fillable:
        masked_M = decoding.is_masked_S[block.start : block.end].nonzero()[0] + (block.start - start)
        if masked_M.size:
            count = quota(decode, size, block.num_steps)
            filling = Filling(aligned.values_3BW.take(masked_M + offset, axis=2), winner, count, decode)
            is_chosen_M, is_sure_M = decoding.asked(choose, filling), _is_sure(filling)
            if is_chosen_M is None:
                is_chosen_M = np.ones(len(masked_M), dtype=np.bool_)
            if may_wait or not block.is_fully_activated:
                is_chosen_M &= is_sure_M
            may_wait = may_wait or (block.is_fully_activated and decode.strategy == "multi_block")
            block.num_masked -= int(is_chosen_M.sum())
            decoding.num_forced_fills += int((is_chosen_M & ~is_sure_M).sum())
            chosen.append(masked_M[is_chosen_M])
    return np.concatenate(chosen) if chosen else _NOTHING


def _is_sure(filling: Filling) -> Bool:
    """What passes the rule's threshold, so that it may be filled in a block that need not fill any."""
    decode = filling.settings
    is_below_M: Bool = -filling.confidence_M < decode.entropy_threshold
    is_above_M: Bool = filling.probability_M > decode.skip_threshold
    return is_below_M if decode.fill_rule == "entropy" else is_above_M


def _edits(step: RequestStep, aligned: Aligned, winner: int, block: Block) -> dict[int, int]:
    """Filled positions of the block to be replaced (LLaDA2.1): another token than the own one is the most probable,
    with more than `edit_threshold`. Counts the step, if the block has no mask."""
    decoding, decode = step.decoding, step.decoding.rules.decode
    assert decode.edit_threshold is not None
    block.num_edit_steps += not block.num_masked
    if block.num_edit_steps > decode.max_post_edit_steps:
        return {}
    first = max(block.start, decoding.prompt_length)
    position_N = (~decoding.is_masked_S[first : block.end]).nonzero()[0] + first
    values_3N = aligned.of_branch(winner).take(position_N - step.window.start, axis=1)
    token_N, probability_N = values_3N[0].astype(np.int64), values_3N[1]
    is_edited_N = (token_N != decoding.token_S[position_N]) & (probability_N > decode.edit_threshold)
    return dict(zip(position_N[is_edited_N].tolist(), token_N[is_edited_N].tolist(), strict=True))


def spawn(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block], num_filled: int) -> Branches:
    """Up to k lookaheads, each the anchor plus one more of its remaining masks; then the anchor.

    num_filled: by the fill rule in this step.
    """
    decoding, decode = step.decoding, step.decoding.rules.decode
    masked = [block for block in fillable if block.num_masked]
    if decode.spawn_blocks == "first":
        masked = masked[:1]
    if not masked or decode.num_lookahead == 0:
        return Branches()
    most = decode.num_lookahead
    if decode.lookahead_rule != "all":
        stepped = Stepped(num_filled, sum(block.num_masked for block in masked), decode)
        most = min(most, decoding.asked(policy("lookahead_rules", decode.lookahead_rule), stepped) or 0)
    start = masked[0].start
    # What lies between the first and the last of these blocks is full.
    candidate_C = decoding.is_masked_S[start : masked[-1].end].nonzero()[0]
    values_3W = aligned.of_branch(winner, start - step.window.start)
    entropy_to_the_left_C = np.concatenate(([0], -values_3W[2][candidate_C].astype(np.float64).cumsum()))[:-1]
    candidate_C = candidate_C[entropy_to_the_left_C <= decode.spawn_entropy]
    spawning = Spawning(values_3W, candidate_C, start, decode, draws_of(decoding, stream=1))
    rank_C = decoding.asked(policy("spawn_rules", decode.spawn_rule), spawning)
    if rank_C is None:
        return Branches()
    chosen_K = candidate_C[(-rank_C).argsort(kind="stable")[:most]]
    positions = [start + column for column in chosen_K.tolist()]
    return Branches(positions, [*map(int, values_3W[0][chosen_K].tolist())], values_3W[2][chosen_K].tolist())


def draws_of(decoding: PlainRequest, stream: int) -> Draws:
    return Draws(decoding.noise_key, decoding.num_forwards, stream)
