"""The router of a mixture of experts, and which tokens each expert gets.

`router_logits` multiplies as in float32, the depth cut into parts that `route` adds. `route` follows
common.model.moe.choose_experts, one program a token; with a capacity the program looks at the logits of all tokens of
its block first. `deal` sorts the (token, choice) pairs by expert and cuts them into tiles without asking the host: the
program of an expert counts the pairs of the experts before it, which is where its own begin, and writes its own there.
Shapes follow from T alone, so all are captured.

Shapes: D model width, E experts, G groups, C chosen experts of a token, P pairs, L tiles, Z parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.checkpoint import MoEConfig
from common.model import Routing
from lopa_cuda.kernels.launch import overlap, prefetch_rows, release_successor, start_after_predecessor

NOBODY = tl.constexpr(2**30)  # no expert's id
DEAL_BLOCK = 1024
ROWS = 8  # tokens of a block that are looked at at once


class RouterTile(NamedTuple):
    """What a program of the router's product multiplies at a time, and parts of the depth."""

    tokens: int
    experts: int
    channels: int
    parts: int
    stages: int


FEW_TOKENS = 64  # up to here the wait for memory bounds the router's product, then its sums do
FEW, MANY = RouterTile(32, 16, 128, 8, 4), RouterTile(64, 32, 64, 4, 4)


class Deal(NamedTuple):
    """order_P: indices of pairs, those of this rank's first expert first. A tile is at most `tile` pairs of one expert:
    the expert's number on this rank, and the places in order_P where the tile begins and its expert's pairs end; some
    tiles are empty. All int32."""

    order_P: Tensor
    expert_L: Tensor
    first_L: Tensor
    end_L: Tensor
    tile: int


@triton.jit
def _router_kernel(
    x_ptr, router_ptr, out_ptr, num_tokens, num_experts, part_stride,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_expert, part = tl.program_id(0) * BLOCK_E, tl.program_id(2)
    num_blocks: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    first, end = part * num_blocks // PARTS * BLOCK_K, (part + 1) * num_blocks // PARTS * BLOCK_K
    release_successor(PDL)
    if PDL:
        num_bytes = 4 * (tl.minimum(end, DEPTH) - first)
        prefetch_rows(router_ptr, first_expert, num_experts, 4 * first, 4 * DEPTH, num_bytes, BLOCK_E, THREADS)
    token, expert = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), first_expert + tl.arange(0, BLOCK_E)
    channel = tl.arange(0, BLOCK_K)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < num_experts)[:, None]
    x_at = x_ptr + token.to(tl.int64)[:, None] * DEPTH + channel[None, :]
    router_at = router_ptr + expert[:, None] * DEPTH + channel[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    start_after_predecessor(PDL)
    for at in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        is_channel = (at + channel < DEPTH)[None, :]
        x = tl.load(x_at + at, mask=is_token & is_channel, other=0.0).to(tl.float32)
        router = tl.load(router_at + at, mask=is_expert & is_channel, other=0.0)
        acc = tl.dot(x, tl.trans(router), acc, input_precision="tf32x3")  # bf16 x is exact in tf32
    out_at = out_ptr + part * part_stride + token[:, None] * num_experts + expert[None, :]
    tl.store(out_at, acc, mask=is_token & tl.trans(is_expert))


@triton.jit
def _load_logits(logits_ptr, at, mask, part_stride, PARTS: tl.constexpr):
    """Add the parts of these logits; zeros outside of the mask."""
    logits = tl.load(logits_ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(logits_ptr + part * part_stride + at, mask=mask, other=0.0)
    return logits


@triton.jit
def _first_of_best(value, index):
    """The largest value and the lowest index that has it, over one dimension."""
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, index, NOBODY), axis=0)


@triton.jit
def _best_groups(choice, group, num_groups, TOP_GROUPS: tl.constexpr, LENGTH: tl.constexpr):
    """[G, 1] true for the groups whose two largest values have the largest sums."""
    column = tl.arange(0, LENGTH)[None, :]
    best = tl.max(choice, axis=1)
    place = tl.min(tl.where(choice == best[:, None], column, NOBODY), axis=1)
    second = tl.max(tl.where(column == place[:, None], float("-inf"), choice), axis=1)
    score = tl.where(group < num_groups, best + second, float("-inf"))
    is_kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, chosen = _first_of_best(score, group)
        is_kept = is_kept | (group == chosen)
        score = tl.where(group == chosen, float("-inf"), score)
    return is_kept[:, None]


@triton.jit
def _admitted(
    logits_ptr, bias, token, num_tokens, num_experts, part_stride, PARTS: tl.constexpr,
    CAPACITY: tl.constexpr, ROUTING_BLOCK: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """[LENGTH] true for the CAPACITY experts with the largest scores in the token's block, of equal ones the lower ids.
    bias: [1, LENGTH]."""
    column = tl.arange(0, LENGTH)
    first = token // ROUTING_BLOCK * ROUTING_BLOCK
    end = tl.minimum(first + ROUTING_BLOCK, num_tokens)
    score = tl.full([LENGTH], float("-inf"), tl.float32)
    for start in range(0, ROUTING_BLOCK, ROWS):
        row = first + start + tl.arange(0, ROWS)
        is_here = (row < end)[:, None] & (column < num_experts)[None, :]
        at = row[:, None] * num_experts + column[None, :]
        choice = 1.0 / (1.0 + tl.exp(-_load_logits(logits_ptr, at, is_here, part_stride, PARTS))) + bias
        score = tl.maximum(score, tl.max(tl.where(is_here, choice, float("-inf")), axis=0))
    # The smallest score that is admitted, bit by bit, as an integer in the order of floats.
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    least = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= CAPACITY, 0, -2147483648).to(tl.int32)
    for bit in tl.static_range(31):
        tried = least + (1 << (30 - bit))
        least = tl.where(tl.sum((key >= tried).to(tl.int32), axis=0) >= CAPACITY, tried, least)
    num_tied = CAPACITY - tl.sum((key > least).to(tl.int32), axis=0)
    is_tied = key == least
    return (key > least) | (is_tied & (tl.cumsum(is_tied.to(tl.int32), axis=0) <= num_tied))


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, expert_ptr, weight_ptr, num_tokens, num_groups, group_size, part_stride, scaling,
    PARTS: tl.constexpr, CAPACITY: tl.constexpr, ROUTING_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr, IS_GROUPED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, IS_NORMALISED: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    release_successor(PDL)
    group, column = tl.arange(0, GROUPS), tl.arange(0, LENGTH)[None, :]
    expert = group[:, None] * group_size + column
    mask = (group[:, None] < num_groups) & (column < group_size)
    start_after_predecessor(PDL)
    at = token * num_groups * group_size + expert
    logits = tl.where(mask, _load_logits(logits_ptr, at, mask, part_stride, PARTS), float("-inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    bias = tl.zeros([GROUPS, LENGTH], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=mask, other=0.0)
    choice = tl.where(mask, scores + bias, float("-inf"))
    if CAPACITY:
        is_admitted = _admitted(
            logits_ptr, bias, token, num_tokens, group_size, part_stride, PARTS, CAPACITY, ROUTING_BLOCK, ROWS, LENGTH
        )
        choice = tl.where(is_admitted[None, :], choice, float("-inf"))
    if IS_GROUPED:
        choice = tl.where(_best_groups(choice, group, num_groups, TOP_GROUPS, LENGTH), choice, float("-inf"))
    slot = tl.arange(0, CHOSEN_BLOCK)
    chosen_expert, chosen_score = tl.full([CHOSEN_BLOCK], NOBODY, tl.int32), tl.zeros([CHOSEN_BLOCK], tl.float32)
    for number in tl.static_range(CHOSEN):
        best = tl.max(tl.max(choice, axis=1), axis=0)
        found = tl.min(tl.min(tl.where(choice == best, expert, NOBODY), axis=1), axis=0)
        is_found = expert == found
        score = tl.sum(tl.sum(tl.where(is_found, scores, 0.0), axis=1), axis=0)
        chosen_expert = tl.where(slot == number, found, chosen_expert)
        chosen_score = tl.where(slot == number, score, chosen_score)
        choice = tl.where(is_found, float("-inf"), choice)
    if IS_NORMALISED:
        chosen_score = chosen_score / (tl.sum(chosen_score, axis=0) + 1e-20)
    tl.store(expert_ptr + token * CHOSEN + slot, chosen_expert, mask=slot < CHOSEN)
    tl.store(weight_ptr + token * CHOSEN + slot, chosen_score * scaling, mask=slot < CHOSEN)


@triton.jit
def _deal_kernel(
    chosen_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, num_pairs, num_tiles, first_expert,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    release_successor(PDL)
    start_after_predecessor(PDL)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        expert = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=NOBODY) - first_expert
        before += ((expert >= 0) & (expert < own)).to(tl.int32)
        mine += (expert == own).to(tl.int32)
    place = tl.sum(before, axis=0)
    end = place + tl.sum(mine, axis=0)
    # Whole tiles of the pairs before, and one an expert for the rest of its pairs: enough without the others' counts.
    next_tile = end // TILE + own + 1
    if own == tl.num_programs(0) - 1:
        next_tile = num_tiles
    first = place
    for tile in range(place // TILE + own, next_tile):
        tl.store(expert_ptr + tile, own)
        tl.store(first_ptr + tile, first)
        tl.store(end_ptr + tile, end)
        first += TILE
    start = 0
    while place < end:
        pair = start + lane
        expert = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=NOBODY) - first_expert
        is_mine = (expert == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_mine, axis=0) - 1, pair, mask=is_mine > 0)
        place += tl.sum(is_mine, axis=0)
        start += BLOCK


def router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """Parts [Z, T, E] of the logits, float32, from bf16 activations and a float32 router."""
    (num_tokens, depth), num_experts = x_TD.shape, len(router_ED)
    assert x_TD.dtype == torch.bfloat16 and router_ED.dtype == torch.float32
    assert x_TD.is_contiguous() and router_ED.is_contiguous()
    tile = FEW if num_tokens <= FEW_TOKENS else MANY
    logits_ZTE = torch.empty((tile.parts, num_tokens, num_experts), dtype=torch.float32, device=x_TD.device)
    _router_kernel[triton.cdiv(num_experts, tile.experts), triton.cdiv(num_tokens, tile.tokens), tile.parts](
        x_TD, router_ED, logits_ZTE, num_tokens=num_tokens, num_experts=num_experts,
        part_stride=num_tokens * num_experts, DEPTH=depth, PARTS=tile.parts, BLOCK_T=tile.tokens,
        BLOCK_E=tile.experts, BLOCK_K=tile.channels, STAGES=tile.stages, THREADS=128, num_warps=4, **overlap(),
    )  # fmt: skip
    return logits_ZTE


def route(logits_ZTE: Tensor, expert_bias_E: Tensor | None, config: MoEConfig) -> Routing:
    """expert_TC int32 and weight_TC float32 from the parts of float32 logits; experts with equal scores in the order of
    their ids."""
    num_parts, num_tokens, num_experts = logits_ZTE.shape
    chosen = config.experts_per_token
    assert logits_ZTE.dtype == torch.float32 and logits_ZTE.is_contiguous()
    is_by_block = config.capacity > 0
    assert not is_by_block or (config.num_groups == 1 and config.scoring == "sigmoid"), "blocks are of no groups"
    expert_TC = torch.empty((num_tokens, chosen), dtype=torch.int32, device=logits_ZTE.device)
    weight_TC = torch.empty((num_tokens, chosen), dtype=torch.float32, device=logits_ZTE.device)
    group_size = config.num_experts // config.num_groups
    _route_kernel[(num_tokens,)](
        logits_ZTE, expert_bias_E, expert_TC, weight_TC, num_tokens=num_tokens,
        part_stride=num_tokens * num_experts, PARTS=num_parts, CAPACITY=config.capacity,
        ROUTING_BLOCK=config.block_size, ROWS=ROWS,
        num_groups=config.num_groups, group_size=group_size, scaling=config.scaling,
        CHOSEN=chosen, CHOSEN_BLOCK=triton.next_power_of_2(chosen), TOP_GROUPS=config.top_groups,
        IS_GROUPED=config.top_groups < config.num_groups, IS_SIGMOID=config.scoring == "sigmoid",
        IS_NORMALISED=config.normalise, GROUPS=triton.next_power_of_2(config.num_groups),
        LENGTH=triton.next_power_of_2(group_size), num_warps=4 if is_by_block else 1, **overlap(),
    )  # fmt: skip
    return Routing(expert_TC, weight_TC)


def deal(expert_TC: Tensor, first_expert: int, num_experts: int, tile: int) -> Deal:
    """The pairs of the experts [first_expert, first_expert + num_experts) in tiles of at most `tile`; the end of
    order_P is undefined where others have some."""
    num_pairs = expert_TC.numel()
    num_tiles = num_experts + num_pairs // tile
    lengths = (num_pairs, num_tiles, num_tiles, num_tiles)
    dealt = Deal(*(torch.empty(length, dtype=torch.int32, device=expert_TC.device) for length in lengths), tile)
    _deal_kernel[(num_experts,)](
        expert_TC, *dealt[:4], num_pairs=num_pairs, num_tiles=num_tiles, first_expert=first_expert, TILE=tile,
        BLOCK=DEAL_BLOCK, num_warps=4, **overlap(),
    )  # fmt: skip
    return dealt
