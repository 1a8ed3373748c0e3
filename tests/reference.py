"""A plain decoder written from the papers alone: no branches, no scheduler, no batching, no cache reuse tricks.

It keeps an explicit list of keys and values a layer and recomputes everything else; slow, short, and the thing that k
= 0 must agree with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.model import rotary_table, rotate
from common.model.ops import rms_norm


@dataclass
class PlainModel:
    """Forward of chosen positions over cached keys, with an explicit visibility rule."""

    config: ModelConfig
    weights: dict[str, Tensor]
    keys: list[dict[int, Tensor]] = field(default_factory=list)  # layer -> position -> [2, K, H]

    def __post_init__(self) -> None:
        self.keys = [{} for _ in range(self.config.num_layers)]
        self.table = rotary_table(4096, self.config.head_size, self.config.rope_theta, torch.device("cpu"))

    def forward(
        self, ids: list[int], start: int, horizon: list[int], cached: set[int], commit: set[int],
        extra: list[tuple[int, int, int]] | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [W, V] of positions [start, start + W); query i sees `cached` and window positions below horizon[i].

        extra: queries (token, position, horizon) after the window that provide no keys; their logits come last.
        """
        c, w = self.config, self.weights
        extra = extra or []
        self.num_keys = len(ids)
        positions = [*range(start, start + len(ids)), *(position for _, position, _ in extra)]
        horizon = [*horizon, *(sight for _, _, sight in extra)]
        x = w["embed_tokens.weight"][torch.tensor([*ids, *(token for token, _, _ in extra)])]
        for layer in range(c.num_layers):
            x = x + self._attend(x, layer, positions, horizon, cached, commit)
            h = rms_norm(x, w[f"layers.{layer}.post_attention_norm.weight"], c.rms_norm_eps)
            gate, up = (h @ w[f"layers.{layer}.gate_up_proj.weight"].T).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ w[f"layers.{layer}.down_proj.weight"].T
        logits = rms_norm(x, w["norm.weight"], c.rms_norm_eps) @ w["lm_head.weight"].T
        logits[:, c.mask_token_id] = -torch.inf
        return logits

    def _attend(
        self, x: Tensor, layer: int, positions: list[int], horizon: list[int], cached: set[int], commit: set[int]
    ) -> Tensor:
        c, w = self.config, self.weights
        h = rms_norm(x, w[f"layers.{layer}.input_norm.weight"], c.rms_norm_eps)
        qkv = h @ w[f"layers.{layer}.qkv_proj.weight"].T + w[f"layers.{layer}.qkv_proj.bias"]
        qkv = qkv.view(len(positions), -1, c.head_size)
        turned = rotate(qkv[:, : c.num_heads + c.num_kv_heads], self.table[torch.tensor(positions)])
        keyed = enumerate(positions[: self.num_keys])
        own = {p: torch.stack((turned[i, c.num_heads :], qkv[i, -c.num_kv_heads :])) for i, p in keyed}
        everything = {**{p: self.keys[layer][p] for p in cached if p not in own}, **own}
        order = sorted(everything)
        keys = torch.stack([everything[p] for p in order])
        groups = c.num_heads // c.num_kv_heads
        k, v = (keys[:, part].repeat_interleave(groups, dim=1) for part in (0, 1))
        scores = torch.einsum("qnh,knh->nqk", turned[:, : c.num_heads], k) / c.head_size**0.5
        sees = torch.tensor(
            [[(p in cached and p not in own) or p < horizon[i] for p in order] for i in range(len(positions))]
        )
        attended = torch.einsum("nqk,knh->qnh", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)
        for p in commit:
            self.keys[layer][p] = own[p]
        return attended.reshape(len(positions), -1) @ w[f"layers.{layer}.o_proj.weight"].T


def confidences(logits: Tensor, strategy: str) -> Tensor:
    p = logits.float().softmax(-1)
    if strategy == "default":
        return p.amax(-1)
    if strategy == "margin":
        best = p.topk(2).values
        return best[..., 0] - best[..., 1]
    return (p * (p + 1e-10).log()).sum(-1)


def plain_d2f(model: PlainModel, prompt: list[int], decode: DecodeConfig, eos: int) -> tuple[list[int], int]:
    """D2F with one branch (docs/architecture.md): (canvas, forward steps)."""
    size, mask = decode.block_size, model.config.mask_token_id
    tokens, bounds, status, activated = list(prompt), [(0, len(prompt))], ["to_cache"], [True]
    committed, steps, carry = 0, 0, None
    while True:
        share = [1 - tokens[a:b].count(mask) / (b - a) for a, b in bounds]
        room = len(bounds) <= decode.max_new_tokens // size
        if share[-1] >= decode.block_add_threshold and room and eos not in tokens[len(prompt) :]:
            bounds.append((len(tokens), len(tokens) + size))
            tokens += [mask] * size
            status.append("active")
            activated.append(len(bounds) == 2)
            share.append(0.0)
        for i in range(1, len(bounds)):
            activated[i] = activated[i] or share[i - 1] >= decode.decoded_token_threshold
        if mask not in tokens and "active" not in status:
            return tokens[len(prompt) :], steps
        end = max([b for (_, b), s in zip(bounds, status, strict=True) if s == "to_cache"], default=committed)
        horizon = _horizons(bounds, committed, len(tokens), decode.window_attention)
        extra = _shift_queries(tokens, bounds, committed, decode) if decode.shift_row == "fresh" else []
        logits = model.forward(
            tokens[committed:], committed, horizon, set(range(committed)), set(range(committed, end)), extra
        )
        steps += 1
        window = len(tokens) - committed
        shifted = torch.cat((logits[:1] if carry is None else carry[None], logits[: window - 1]))
        for place, (_, position, _) in enumerate(extra):
            shifted[position + 1 - committed] = logits[window + place]
        if end > committed:
            carry = logits[end - 1 - committed]
        _fill(tokens, bounds, status, activated, shifted, committed, decode, mask)
        committed = end
        status = ["in_cache" if s == "to_cache" else s for s in status]
        for i, (a, b) in enumerate(bounds):
            if status[i] == "active":
                if mask in tokens[a:b]:
                    break
                status[i] = "to_cache"


def _fill(
    tokens: list[int], bounds: list[tuple[int, int]], status: list[str], activated: list[bool], shifted: Tensor,
    committed: int, decode: DecodeConfig, mask: int,
) -> None:  # fmt: skip
    probability, confidence = shifted.softmax(-1).amax(-1), confidences(shifted, decode.sampling_strategy)
    for (a, b), state, is_activated in zip(bounds, status, activated, strict=True):
        masked = [p for p in range(a, b) if tokens[p] == mask]
        if state != "active" or not masked:
            continue
        chosen = [p for p in masked if probability[p - committed] > decode.skip_threshold]
        if not chosen and is_activated:
            chosen = [max(masked, key=lambda p: float(confidence[p - committed]))]
        for p in chosen:
            tokens[p] = int(shifted[p - committed].argmax())


def _shift_queries(
    tokens: list[int], bounds: list[tuple[int, int]], start: int, decode: DecodeConfig
) -> list[tuple[int, int, int]]:
    """The position before the window (full attention), or before each of its blocks (block-causal), seeing that
    block."""
    if decode.window_attention == "full":
        return [(tokens[start - 1], start - 1, len(tokens))] if start else []
    return [(tokens[a - 1], a - 1, b) for a, b in bounds[1:] if a >= start]


def _horizons(bounds: list[tuple[int, int]], start: int, end: int, attention: str) -> list[int]:
    if attention == "full":
        return [end] * (end - start)
    return [next(b for a, b in bounds if a <= p < b) for p in range(start, end)]


def plain_multi_block(
    model: PlainModel, prompt: list[int], decode: DecodeConfig, cache_delay: int, threshold: float
) -> tuple[list[int], int]:
    """d3LLM with one branch and no end token: (canvas, forward steps). A block that was found full in pass n is kept
    in pass n + cache_delay; the prompt was found full in pass 0."""
    size, mask, total = decode.block_size, model.config.mask_token_id, len(prompt) + decode.max_new_tokens
    tokens, bounds = prompt + [mask] * decode.max_new_tokens, [(0, len(prompt)), (len(prompt), len(prompt) + size)]
    activated, full_since, cached, steps, carry = [True, True], {0: 0}, 0, 0, None
    while mask in tokens:
        steps += 1
        share = [1 - tokens[a:b].count(mask) / (b - a) for a, b in bounds]
        activated = [was or share[max(i - 1, 0)] >= decode.decoded_token_threshold for i, was in enumerate(activated)]
        if bounds[-1][1] < total and share[-1] >= decode.block_add_threshold:
            bounds.append((bounds[-1][1], bounds[-1][1] + size))
            activated.append(share[-1] >= decode.decoded_token_threshold)
        start, kept, waits = cached, cached, False
        for a, b in bounds:
            if mask in tokens[a:b]:
                break
            if b > cached:
                is_ready = steps - full_since.setdefault(a, steps) >= cache_delay
                kept, waits = (b, waits) if is_ready else (kept, True)
        if waits and kept == cached:
            start = 0
        commit = set(range(start, kept))
        logits = model.forward(tokens[start:], start, [total] * (total - start), set(range(start)), commit)
        shifted = torch.cat((logits[:1] if carry is None else carry[None], logits[:-1]))
        if commit:
            cached, carry = kept, logits[kept - 1 - start]
        _fill_by_entropy(tokens, bounds, activated, shifted, start, threshold, mask)
    return tokens[len(prompt) :], steps


def _fill_by_entropy(
    tokens: list[int], bounds: list[tuple[int, int]], activated: list[bool], shifted: Tensor, start: int,
    threshold: float, mask: int,
) -> None:  # fmt: skip
    entropy, masked = -confidences(shifted, "neg_entropy"), [p for p in range(bounds[-1][1]) if tokens[p] == mask]
    chosen = {p for p in masked if entropy[p - start] < threshold}
    due = [
        block
        for (a, b), is_due in zip(bounds, activated, strict=True)
        if is_due and (block := {p for p in masked if a <= p < b})
    ]
    if due and not due[0] & chosen:
        chosen.add(min(due[0], key=lambda p: float(entropy[p - start])))
    for p in chosen:
        tokens[p] = int(shifted[p - start].argmax())


def plain_fast_dllm(model: PlainModel, prompt: list[int], decode: DecodeConfig) -> tuple[list[int], int]:
    """Fast-dLLM: one full forward at a block's start, then windows over the cache before (or around) the block."""
    mask, steps, total = model.config.mask_token_id, 0, len(prompt) + decode.max_new_tokens
    tokens = prompt + [mask] * decode.max_new_tokens
    for a in range(len(prompt), total, decode.block_size):
        b = a + decode.block_size
        is_dual, carry = decode.strategy.cached == "dual", None
        while mask in tokens[a:b]:
            if carry is None:
                kept = set(range(total if is_dual else a))
                logits = model.forward(tokens, 0, [total] * total, set(), kept)
                carry, shifted, start = logits[a - 1], logits[a - 1 : b - 1], a
            else:
                start, end = a, b if is_dual else total
                cached = set(range(a)) | (set(range(b, total)) if is_dual else set())
                logits = model.forward(tokens[start:end], start, [end] * (end - start), cached, set())
                shifted = torch.cat((carry[None], logits[: b - a - 1]))
            steps += 1
            _fill(tokens, [(a, b)], ["active"], [True], shifted, start, decode, mask)
    return tokens[len(prompt) :], steps


def plain_vanilla(model: PlainModel, prompt: list[int], decode: DecodeConfig) -> tuple[list[int], int]:
    mask, steps, total = model.config.mask_token_id, 0, len(prompt) + decode.max_new_tokens
    tokens = prompt + [mask] * decode.max_new_tokens
    while mask in tokens:
        logits = model.forward(tokens, 0, [total] * total, set(), set())
        steps += 1
        shifted = torch.cat((logits[:1], logits[:-1]))
        _fill(tokens, [(len(prompt), total)], ["active"], [True], shifted, 0, decode, mask)
    return tokens[len(prompt) :], steps
