"""Train the demo checkpoint from scratch: data and tokenizer are generated, the model has Dream's names and layout.

    python scripts/train_demo.py --out models/demo          # one GPU, about 20 minutes
    python scripts/train_demo.py --out /tmp/demo --tiny     # CPU, seconds: the same path, no useful model

Order: tokenizer -> samples (worker processes) -> noise and attention horizons (on the device) -> Muon + AdamW -> files.
Prints a short sanity check at the end; results come from the evaluation script, not from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from demo_problems import (
    CANVAS_TOKENS,
    MAX_PROMPT_TOKENS,
    PROMPT_END,
    SPLIT_PATTERN,
    TokenizedSamples,
    held_out_code,
    held_out_math,
    held_out_new_templates,
    tokenize_samples,
    training_pairs,
    word_encoder,
)
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from common.metrics import score, standard_error

EOS, MASK = "<|endoftext|>", "<|mask|>"
SEQUENCE = MAX_PROMPT_TOKENS + CANVAS_TOKENS
BLOCK_SIZES = (8, 16, 32)
MAX_BLOCKS = CANVAS_TOKENS // min(BLOCK_SIZES)
BEHIND_CANVAS = 10_000  # block id of padding: beyond every horizon
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


@dataclass(frozen=True)
class Recipe:
    hidden: int = 256
    layers: int = 10
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 672
    vocabulary: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    samples: int = 6_000_000
    chunk: int = 20_000
    tokenizer_samples: int = 60_000
    batch: int = 384
    warmup_steps: int = 200
    constant_share: float = 0.4
    muon_lr: float = 0.006
    muon_decay: float = 0.1
    adam_lr: float = 1e-3
    clip: float = 0.5
    checked_problems: int = 200
    checked_thresholds: tuple[float, ...] = (0.9,)


TINY = Recipe(
    hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48, vocabulary=400, samples=600, chunk=200,
    tokenizer_samples=300, batch=8, warmup_steps=4, checked_problems=4, checked_thresholds=(0.0,),
)  # fmt: skip


# Data


def train_tokenizer(recipe: Recipe, seed: int) -> Tokenizer:
    """Byte-level BPE with Dream's pre-tokenization; the two special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pairs = islice(training_pairs(seed), recipe.tokenizer_samples)
    tokenizer.train_from_iterator((text for q, a in pairs for text in (q + PROMPT_END, a)), trainer)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken(MASK, special=True)])
    if tokenizer.get_vocab_size() != recipe.vocabulary:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens instead of {recipe.vocabulary}: too little text")
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids of EOS (also the padding) and mask."""
    vocabulary = tokenizer.get_vocab()
    return vocabulary[EOS], vocabulary[MASK]


_encode: Callable[[str], list[int]]


def _start_worker(tokenizer_json: str) -> None:
    global _encode
    tokenizer = Tokenizer.from_str(tokenizer_json)
    _encode = word_encoder(lambda word: tokenizer.encode(word, add_special_tokens=False).ids)


def _tokenize_chunk(job: tuple[int, int]) -> TokenizedSamples:
    return tokenize_samples(*job, _encode)


class Corpus(NamedTuple):
    tokens: torch.Tensor  # int16, samples end to end
    starts: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor


def corpus_of(chunks: list[TokenizedSamples], device: torch.device) -> Corpus:
    lengths = np.concatenate([c.lengths for c in chunks]).astype(np.int64)
    prompts = np.concatenate([c.prompt_lengths for c in chunks]).astype(np.int64)
    tokens = np.concatenate([c.tokens for c in chunks]).astype(np.int16)
    parts = (tokens, np.cumsum(lengths) - lengths, lengths, prompts)
    return Corpus(*(torch.from_numpy(part).to(device) for part in parts))


# Noise and attention horizons


class Batch(NamedTuple):
    """`visible[kv] <= horizon[q]` on block ids is the whole attention rule; the prompt is block 0."""

    inputs_BS: torch.Tensor
    targets_BS: torch.Tensor
    block_BS: torch.Tensor
    horizon_BS: torch.Tensor
    weight_BS: torch.Tensor


class Draws(NamedTuple):
    """Per-sample choices, [B, 1] each."""

    block_size: torch.Tensor
    num_blocks: torch.Tensor
    eos_block: torch.Tensor
    first_active: torch.Tensor
    last_active: torch.Tensor
    is_whole: torch.Tensor
    window_end: torch.Tensor


def block_ids(offset_BS: torch.Tensor, block_size: torch.Tensor) -> torch.Tensor:
    block = offset_BS.div(block_size, rounding_mode="floor") + 1
    block = torch.where(offset_BS < CANVAS_TOKENS, block, BEHIND_CANVAS)
    return block.clamp(min=0).masked_fill(offset_BS < 0, 0).int()


def chance(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.rand(like.shape, device=like.device) < probability


def below(limit: torch.Tensor) -> torch.Tensor:
    """Random integers in [0, limit)."""
    return (torch.rand(limit.shape, device=limit.device) * limit).long().minimum(limit - 1)


def draw_windows(answer_length: torch.Tensor) -> Draws:
    """60%: clean blocks, then 1 to 4 active ones, then masks. 40%: every block up to the EOS or the canvas's end."""
    one = torch.ones_like(answer_length)
    small, middle, large = BLOCK_SIZES
    size = torch.where(chance(one, 0.1), small, torch.where(chance(one, 0.5), middle, large))
    num_blocks = CANVAS_TOKENS // size
    eos_block = answer_length // size + 1
    is_whole = chance(one, 0.4)
    first = torch.where(is_whole, one, 1 + below(eos_block))
    last = torch.where(chance(one, 0.5), num_blocks, eos_block)
    last = torch.where(is_whole, last, (first + below(4 * one)).minimum(num_blocks))
    end = (last + below(2 * one)).minimum(num_blocks)
    end = torch.where(chance(one, 0.15) | (is_whole & chance(one, 0.5)), num_blocks, end)
    return Draws(size, num_blocks, eos_block, first, last, is_whole, end)


def mask_ratio(block_BS: torch.Tensor, d: Draws) -> torch.Tensor:
    """Ascending ratios over the active blocks, as when decoding runs ahead in several blocks at once."""
    count = d.last_active - d.first_active + 1
    # Stretched beyond 1: a block that was just opened is all masks.
    ratio = torch.rand(len(count), MAX_BLOCKS, device=count.device) * 1.15
    ratio = ratio.masked_fill(torch.arange(MAX_BLOCKS, device=count.device) >= count, 2.0).sort(dim=1).values
    is_uniform = d.is_whole & chance(count, 0.25)
    ratio = torch.where(is_uniform, torch.rand_like(ratio[:, :1]), ratio)
    ratio_BS = ratio.gather(1, (block_BS - d.first_active).clamp(0, MAX_BLOCKS - 1))
    ratio_BS = ratio_BS.masked_fill(block_BS < d.first_active, 0.0)
    return torch.where((block_BS > d.last_active) & ~is_uniform, 1.0, ratio_BS)


def causal_horizon(block_BS: torch.Tensor, is_shifted: torch.Tensor) -> torch.Tensor:
    """A block sees what is before it and itself. Shifted: a block's last row predicts the next block, so sees it."""
    following = F.pad(block_BS[:, 1:], (0, 1), value=BEHIND_CANVAS)
    is_last = (following > block_BS) & (following < BEHIND_CANVAS)
    return block_BS + (is_shifted & is_last).int()


def window_horizon(block_BS: torch.Tensor, d: Draws) -> torch.Tensor:
    """Full attention up to the window's end; in half of the samples the clean blocks see less, as if cached earlier."""
    end_BS = d.window_end.expand_as(block_BS).int()
    reach = torch.arange(MAX_BLOCKS + 1, device=block_BS.device) + torch.randint_like(block_BS[:, : MAX_BLOCKS + 1], 4)
    reach[:, 0] = torch.randint_like(reach[:, 0], 2)
    reach = reach.cummax(dim=1).values
    cached_BS = reach.gather(1, block_BS.clamp(max=MAX_BLOCKS).long()).int().minimum(end_BS)
    is_clean = block_BS < d.first_active
    following = F.pad(block_BS[:, 1:], (0, 1), value=BEHIND_CANVAS)
    is_shift_row = is_clean & (following == d.first_active) & chance(d.first_active, 0.5)
    use_cached = is_clean & chance(d.first_active, 0.5) & ~is_shift_row
    return torch.where(use_cached, cached_BS, end_BS)


def loss_weight(offset_BS: torch.Tensor, block_BS: torch.Tensor, answer_length: torch.Tensor, d: Draws) -> torch.Tensor:
    """EOS padding counts little; blocks far behind the EOS only where the whole canvas is in play."""
    weight = torch.where(offset_BS > answer_length, 0.1, 1.0)
    is_far = block_BS > d.eos_block + 2
    weight = torch.where(is_far, torch.where(d.is_whole, 0.02, 0.0), weight)
    limit = torch.where(d.is_whole, d.num_blocks, d.last_active + 1)
    return weight.masked_fill((offset_BS < 0) | (block_BS > limit), 0.0)


def add_noise(tokens_BS: torch.Tensor, prompt_length: torch.Tensor, answer_length: torch.Tensor, mask_id: int) -> Batch:
    """Lengths are [B, 1]; `tokens_BS` is prompt, answer and EOS up to the end."""
    d = draw_windows(answer_length)
    offset_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) - prompt_length
    block_BS = block_ids(offset_BS, d.block_size)
    in_canvas = (block_BS > 0) & (block_BS < BEHIND_CANVAS)
    is_masked = (torch.rand(tokens_BS.shape, device=tokens_BS.device) < mask_ratio(block_BS, d)) & in_canvas
    is_causal = chance(answer_length, 0.35)
    horizon_BS = torch.where(
        is_causal, causal_horizon(block_BS, chance(answer_length, 0.5)), window_horizon(block_BS, d)
    )
    weight_BS = loss_weight(offset_BS, block_BS, answer_length, d) * is_masked
    weight_BS = weight_BS.masked_fill(~is_causal & (block_BS > d.window_end), 0.0)
    # Padding rows must see something, or their softmax is not a number.
    horizon_BS = torch.where(block_BS == BEHIND_CANVAS, 0, horizon_BS)
    return Batch(tokens_BS.masked_fill(is_masked, mask_id), tokens_BS, block_BS, horizon_BS.int(), weight_BS)


def batches(corpus: Corpus, batch_size: int, eos_id: int, mask_id: int) -> Iterator[Batch]:
    position_S = torch.arange(SEQUENCE, device=corpus.tokens.device)
    while True:
        rows = torch.randint(len(corpus.starts), (batch_size, 1), device=corpus.tokens.device)
        index_BS = (corpus.starts[rows] + position_S).clamp(max=len(corpus.tokens) - 1)
        tokens_BS = corpus.tokens[index_BS].long().masked_fill(position_S >= corpus.lengths[rows], eos_id)
        prompt_length = corpus.prompt_lengths[rows]
        yield add_noise(tokens_BS, prompt_length, corpus.lengths[rows] - prompt_length, mask_id)


# Model: module names are the tensor names of a Dream checkpoint


class Visibility(NamedTuple):
    block_BS: torch.Tensor
    horizon_BS: torch.Tensor
    bias_B1SS: torch.Tensor | None  # None: flex attention applies the rule itself
    cos_SH: torch.Tensor
    sin_SH: torch.Tensor


def rotate(x_BNSH: torch.Tensor, see: Visibility) -> torch.Tensor:
    first, second = x_BNSH.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BNSH * see.cos_SH + rotated * see.sin_SH).to(x_BNSH.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = recipe.heads, recipe.kv_heads, recipe.hidden // recipe.heads
        kv_width = self.kv_heads * self.head_size
        self.q_proj = nn.Linear(recipe.hidden, recipe.hidden)
        self.k_proj = nn.Linear(recipe.hidden, kv_width)
        self.v_proj = nn.Linear(recipe.hidden, kv_width)
        self.o_proj = nn.Linear(recipe.hidden, recipe.hidden, bias=False)

    def forward(self, x: torch.Tensor, see: Visibility) -> torch.Tensor:
        rows, length, _ = x.shape
        q = rotate(self.q_proj(x).view(rows, length, self.heads, self.head_size).transpose(1, 2), see)
        k = rotate(self.k_proj(x).view(rows, length, self.kv_heads, self.head_size).transpose(1, 2), see)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_size).transpose(1, 2)
        if see.bias_B1SS is None:
            out = flex_attention(q, k, v, score_mod=hide_beyond(see), enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=see.bias_B1SS.to(q.dtype))
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def hide_beyond(see: Visibility) -> Callable[..., torch.Tensor]:
    block_BS, horizon_BS = see.block_BS, see.horizon_BS

    def score_mod(logit: torch.Tensor, b: Any, _head: Any, q: Any, kv: Any) -> torch.Tensor:
        return torch.where(block_BS[b, kv] <= horizon_BS[b, q], logit, -float("inf"))

    return score_mod


class MLP(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden, recipe.intermediate, bias=False)
        self.up_proj = nn.Linear(recipe.hidden, recipe.intermediate, bias=False)
        self.down_proj = nn.Linear(recipe.intermediate, recipe.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.self_attn = Attention(recipe)
        self.mlp = MLP(recipe)
        self.input_layernorm = RMSNorm(recipe.hidden, recipe.norm_eps)
        self.post_attention_layernorm = RMSNorm(recipe.hidden, recipe.norm_eps)

    def forward(self, x: torch.Tensor, see: Visibility) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), see)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocabulary, recipe.hidden)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(recipe.layers))
        self.norm = RMSNorm(recipe.hidden, recipe.norm_eps)


class Dream(nn.Module):
    """Row i of the logits predicts position i+1, as Dream's does."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Body(recipe)
        self.lm_head = nn.Linear(recipe.hidden, recipe.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.layers) if is_output else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def visibility(self, block_BS: torch.Tensor, horizon_BS: torch.Tensor, is_flex: bool) -> Visibility:
        head_size = self.recipe.hidden // self.recipe.heads
        exponent = torch.arange(0, head_size, 2, device=block_BS.device).float() / head_size
        position_S = torch.arange(block_BS.shape[1], device=block_BS.device).float()
        angle = torch.outer(position_S, self.recipe.rope_theta**-exponent).repeat(1, 2)
        bias = None
        if not is_flex:
            is_visible = block_BS[:, None, None, :] <= horizon_BS[:, None, :, None]
            bias = torch.zeros(is_visible.shape, device=block_BS.device).masked_fill(~is_visible, -float("inf"))
            bias = bias.to(torch.bfloat16 if block_BS.is_cuda else torch.float32)
        return Visibility(block_BS, horizon_BS, bias, angle.cos(), angle.sin())

    def forward(
        self, tokens_BS: torch.Tensor, block_BS: torch.Tensor, horizon_BS: torch.Tensor, is_flex: bool = False
    ) -> torch.Tensor:
        see = self.visibility(block_BS, horizon_BS, is_flex)
        x = self.model.embed_tokens(tokens_BS)
        for layer in self.model.layers:
            x = layer(x, see)
        return self.lm_head(self.model.norm(x))


def masked_loss(model: Dream, batch: Batch, is_flex: bool) -> torch.Tensor:
    logits = model(batch.inputs_BS, batch.block_BS, batch.horizon_BS, is_flex)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets_BS[:, 1:].flatten(), reduction="none")
    weight = batch.weight_BS[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum()


# Optimisation


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon over a stack of matrices: their singular values go to about 1."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon with decoupled decay. Parameters of one shape are stacked: few launches instead of one set per matrix."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, decay: float, momentum: float = 0.95) -> None:
        shapes = sorted({tuple(p.shape) for p in parameters})
        groups = [{"params": [p for p in parameters if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, momentum = group["params"], group["momentum"]
            gradient = torch.stack([p.grad for p in parameters])
            average = group.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - momentum)
            update = orthogonalize(gradient.lerp(average, momentum)).to(gradient.dtype)
            scale = math.sqrt(max(1.0, gradient.shape[-2] / gradient.shape[-1]))
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-group["lr"] * scale)


def make_optimizers(model: Dream, recipe: Recipe) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    is_hidden = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in is_hidden]
    is_cuda = rest[0].is_cuda
    adam = torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=is_cuda)
    optimizers: list[torch.optim.Optimizer] = [Muon(hidden, recipe.muon_lr, recipe.muon_decay), adam]
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate_factor(elapsed: float, step: int, recipe: Recipe) -> float:
    """Warm-up by steps, then by the elapsed share of the time: constant, then linear to zero."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    return warm * min(1.0, max(0.0, (1 - elapsed) / (1 - recipe.constant_share)))


def log(text: str, began: float) -> None:
    print(f"[{time.perf_counter() - began:7.1f} s] {text}", flush=True)


class Trial(NamedTuple):
    milliseconds: float
    loss: float
    norm: float


class Trainer:
    def __init__(self, recipe: Recipe, model: Dream, attention: str, began: float) -> None:
        self.recipe, self.model, self.began = recipe, model, began
        self.device = model.lm_head.weight.device
        self.parameters = list(model.parameters())
        self.optimizers = make_optimizers(model, recipe)
        self.loss = torch.compile(masked_loss, dynamic=False) if self.device.type == "cuda" else masked_loss
        self.is_flex = self._choose_flex() if attention == "auto" else attention == "flex"
        self.is_stopped = False

    def gradients(self, batch: Batch, is_flex: bool) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss(self.model, batch, is_flex)
        loss.backward()
        return loss

    def _time(self, batch: Batch, is_flex: bool) -> Trial:
        """One compiled forward and backward pass."""
        for _ in range(3):
            self.gradients(batch, is_flex)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            self.model.zero_grad()
            loss = self.gradients(batch, is_flex)
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - began) * 100
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, math.inf)
        self.model.zero_grad()
        return Trial(milliseconds, loss.item(), norm.item())

    def _choose_flex(self) -> bool:
        """The faster of two kernels for the same rule, if both agree. Runs while the samples are being generated."""
        if self.device.type != "cuda":
            return False
        tokens_BS = torch.randint(self.recipe.vocabulary - 2, (self.recipe.batch, SEQUENCE), device=self.device)
        prompt = torch.randint(20, MAX_PROMPT_TOKENS, (self.recipe.batch, 1), device=self.device)
        batch = add_noise(tokens_BS, prompt, torch.randint_like(prompt, 30, CANVAS_TOKENS), self.recipe.vocabulary - 1)
        sdpa = self._time(batch, False)
        log(f"sdpa: {sdpa}", self.began)
        try:
            flex = self._time(batch, True)
        except Exception as error:  # an optional kernel: the choice is logged and the other one is complete
            log(f"flex attention does not work here, using sdpa: {error!r:.300}", self.began)
            self.model.zero_grad()
            return False
        log(f"flex: {flex}", self.began)
        agrees = abs(flex.loss - sdpa.loss) < 0.01 and abs(flex.norm - sdpa.norm) < 0.03 * sdpa.norm
        return agrees and flex.milliseconds < sdpa.milliseconds

    def step(self, batch: Batch, factor: float) -> torch.Tensor:
        loss = self.gradients(batch, self.is_flex)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def _stop(self, *_: Any) -> None:
        self.is_stopped = True

    def run(self, data: Iterator[Batch], seconds: float, save: Callable[[], None]) -> None:
        """Train for `seconds` or until SIGTERM; save every four minutes and at the end."""
        signal.signal(signal.SIGTERM, self._stop)
        began = saved = reported = time.perf_counter()
        step = last_step = 0
        while not self.is_stopped and (elapsed := (time.perf_counter() - began) / seconds) < 1:
            loss = self.step(next(data), learning_rate_factor(elapsed, step, self.recipe))
            step += 1
            now = time.perf_counter()
            if now - reported > 10:
                rate = (step - last_step) * self.recipe.batch * SEQUENCE / (now - reported)
                log(f"step {step} loss {loss.item():.4f} {rate / 1e6:.2f} M positions/s {elapsed:.1%}", self.began)
                reported, last_step = now, step
            if now - saved > 240:
                save()
                saved = now
        save()
        log(f"trained {step} steps, last loss {loss.item():.4f}", self.began)


# Files


def save_weights(model: Dream, out: Path) -> None:
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    partial = out / "model.safetensors.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")


def save_settings(recipe: Recipe, tokenizer: Tokenizer, out: Path) -> None:
    eos_id, mask_id = special_ids(tokenizer)
    config = {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_act": "silu", "attention_dropout": 0.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": None,
        "vocab_size": recipe.vocabulary, "hidden_size": recipe.hidden, "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads, "max_position_embeddings": 512, "rope_theta": recipe.rope_theta,
        "rms_norm_eps": recipe.norm_eps, "mask_token_id": mask_id, "pad_token_id": eos_id, "eos_token_id": eos_id,
    }  # fmt: skip
    write_json(out / "config.json", config)
    ids = {"eos_token_id": eos_id, "pad_token_id": eos_id, "mask_token_id": mask_id}
    write_json(out / "generation_config.json", ids)
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokenizer.model.save(str(out))
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "errors": "replace", "split_special_tokens": False, "model_max_length": 512, "bos_token": None,
        "eos_token": EOS, "pad_token": EOS, "mask_token": MASK, "unk_token": None, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(eos_id): {"content": EOS, **special}, str(mask_id): {"content": MASK, **special}},
    })  # fmt: skip


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# Sanity check


@torch.no_grad()
def decode_blockwise(
    model: Dream, prompts: list[list[int]], threshold: float, eos_id: int, mask_id: int, block_size: int = 32
) -> list[list[int]]:
    """Greedy, one block at a time, nothing cached: fill every mask above the threshold, else the best one."""
    device = model.lm_head.weight.device
    length_B1 = torch.tensor([[len(p)] for p in prompts], device=device)
    offset_BS = torch.arange(SEQUENCE, device=device) - length_B1
    block_BS = block_ids(offset_BS, torch.full_like(length_B1, block_size))
    tokens_BS = torch.tensor([p + [mask_id] * (SEQUENCE - len(p)) for p in prompts], device=device)
    for block in range(1, CANVAS_TOKENS // block_size + 1):
        horizon_BS = torch.full_like(block_BS, block)
        while (open_BS := (tokens_BS == mask_id) & (block_BS == block)).any():
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(tokens_BS, block_BS, horizon_BS).float().roll(1, dims=1)
            logits[..., mask_id] = -float("inf")
            probability_BS, best_BS = logits.softmax(-1).max(-1)
            probability_BS = probability_BS.masked_fill(~open_BS, -1.0)
            is_best = F.one_hot(probability_BS.argmax(1), SEQUENCE).bool()
            fill_BS = open_BS & ((probability_BS > threshold) | is_best)
            tokens_BS = torch.where(fill_BS, best_BS, tokens_BS)
    answers = [row[len(p) : len(p) + CANVAS_TOKENS] for row, p in zip(tokens_BS.tolist(), prompts, strict=True)]
    return [answer[: answer.index(eos_id)] if eos_id in answer else answer for answer in answers]


def sanity_check(model: Dream, tokenizer: Tokenizer, recipe: Recipe, began: float) -> None:
    count = recipe.checked_problems
    problems = held_out_math(count) + held_out_code(count // 2) + held_out_new_templates(count)
    prompts = [tokenizer.encode(p["question"] + PROMPT_END).ids for p in problems]
    fits = [len(prompt) <= MAX_PROMPT_TOKENS for prompt in prompts]
    problems, prompts = list(compress(problems, fits)), list(compress(prompts, fits))
    for threshold in recipe.checked_thresholds:
        answers = decode_blockwise(model, prompts, threshold, *special_ids(tokenizer))
        texts = [tokenizer.decode(answer) for answer in answers]
        marks: dict[str, list[bool]] = {}
        for problem, text in zip(problems, texts, strict=True):
            marks.setdefault(problem["id"].split("-")[0], []).append(score(problem, text))
        shares = (f"{k} {sum(v)}/{len(v)} (se {standard_error(sum(v), len(v)):.3f})" for k, v in marks.items())
        log(f"sanity check, not a result: threshold {threshold}: " + ", ".join(shares), began)
    for i in (0, 1, -1):
        print(f"--- {problems[i]['question']}\n{texts[i]!r}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=17.0, help="training time; data and compilation come on top")
    parser.add_argument("--samples", type=int, help="training samples to generate instead of the recipe's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--attention", choices=("auto", "sdpa", "flex"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="a toy size for tests")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    recipe, began = TINY if args.tiny else Recipe(), time.perf_counter()
    if args.samples:
        recipe = dataclasses.replace(recipe, samples=args.samples)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(recipe, args.seed * 1_000_003)
    save_settings(recipe, tokenizer, args.out)
    log("tokenizer trained", began)
    jobs = [(args.seed * 1_000_003 + 1 + i, recipe.chunk) for i in range(math.ceil(recipe.samples / recipe.chunk))]
    # Fork before the device is touched; the kernels compile while the workers generate.
    with multiprocessing.get_context("fork").Pool(args.workers, _start_worker, (tokenizer.to_str(),)) as pool:
        pending = pool.map_async(_tokenize_chunk, jobs, chunksize=1)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = Dream(recipe).to(device)
        log(f"{sum(p.numel() for p in model.parameters())} parameters on {device}", began)
        trainer = Trainer(recipe, model, args.attention, began)
        corpus = corpus_of(pending.get(), device)
    log(f"{len(corpus.starts)} samples, {len(corpus.tokens)} tokens; flex: {trainer.is_flex}", began)
    data = batches(corpus, recipe.batch, *special_ids(tokenizer))
    trainer.run(data, args.minutes * 60, lambda: save_weights(model, args.out))
    sanity_check(model, tokenizer, recipe, began)


if __name__ == "__main__":
    main()
