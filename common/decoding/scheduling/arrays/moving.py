"""A request between two steps, from the arrays to `plain` and back."""

from __future__ import annotations

from dataclasses import fields

from common.decoding.scheduling.arrays.batch import RequestBatch
from common.decoding.scheduling.plain import BlockStatus, Branches, PlainRequest, begun
from common.decoding.scheduling.state import Admission, DecodingRequest

_REMEMBERED = [field.name for field in fields(DecodingRequest) if field.name not in Admission.__dataclass_fields__]


def admission_of(decoding: DecodingRequest) -> Admission:
    return Admission(**{field.name: getattr(decoding, field.name) for field in fields(Admission)})


def to_plain(batch: RequestBatch, place: int, mask_token_id: int) -> PlainRequest:
    """The request at this place of the batch, which keeps it."""
    decoding, first_open = batch.requests[place], int(batch.first_open_N[place])
    plain = begun(admission_of(decoding), mask_token_id)
    _copy_remembered(decoding, plain)
    length, blocks = len(plain.token_S), plain.blocks
    plain.token_S[:], plain.is_masked_S[:] = decoding.token_S[:length], decoding.is_masked_S[:length]
    while len(blocks) < batch.num_blocks_N[place]:
        blocks.append(plain.strategy.new_block(blocks))
    counts, limit = batch.num_masked_NM[place].tolist(), int(batch.activation_limit_N[place])
    for block, num_masked, num_before in zip(blocks, counts, [0, *counts], strict=False):
        block.num_masked, block.is_fully_activated = num_masked, num_before <= limit
    is_kept_late = batch.kind.strategy == "d2f"
    for block in blocks[:first_open]:
        is_waiting = is_kept_late and block.end > batch.start_N[place]
        block.status = BlockStatus.TO_CACHE if is_waiting else BlockStatus.IN_CACHE
    spawned = slice(0, int(batch.num_branches_N[place]) - 1)
    positions, tokens = batch.branch_2NB[:, place, spawned].tolist()
    plain.branches = Branches(positions, tokens, batch.confidence_NB[place, spawned].tolist())
    plain.carry_31 = batch.carry_3N[:, place : place + 1].copy()
    plain.is_refreshed, plain.has_eos = bool(batch.is_refreshed_N[place]), bool(batch.has_eos_N[place])
    plain.num_forwards, plain.num_lookahead_wins = int(batch.num_forwards_N[place]), int(batch.num_wins_N[place])
    plain.num_given = int(batch.num_given_N[place])
    return plain


def put(plain: PlainRequest, batch: RequestBatch, place: int) -> None:
    """Have the batch's request at this place, which has been admitted anew, go on as this one."""
    decoding, blocks = batch.requests[place], plain.blocks
    _copy_remembered(plain, decoding)
    length, num_blocks = len(plain.token_S), len(blocks)
    decoding.token_S[:length], decoding.is_masked_S[:length] = plain.token_S, plain.is_masked_S
    counts = [block.num_masked for block in blocks]
    batch.num_masked_NM[place, :num_blocks] = counts
    batch.start_N[place] = plain.strategy.window(blocks, plain.is_refreshed).start
    batch.num_blocks_N[place], batch.num_masked_N[place] = num_blocks, sum(counts)
    batch.first_open_N[place] = next((index for index, count in enumerate(counts) if count), num_blocks)
    branches = plain.branches
    spawned = slice(0, len(branches.positions))
    batch.branch_2NB[:, place, spawned] = branches.positions, branches.tokens
    batch.confidence_NB[place, spawned] = branches.confidences
    batch.num_branches_N[place] = len(branches)  # behind the lookaheads stands the anchor, as of any that begins
    batch.carry_3N[:, place] = plain.carry_31[:, 0]
    batch.is_refreshed_N[place] = plain.is_refreshed
    batch.num_forwards_N[place], batch.num_wins_N[place] = plain.num_forwards, plain.num_lookahead_wins
    batch.num_given_N[place] = plain.num_given
    if plain.has_eos:
        batch.end(place)


def _copy_remembered(source: DecodingRequest, target: DecodingRequest) -> None:
    for name in _REMEMBERED:
        setattr(target, name, getattr(source, name))
