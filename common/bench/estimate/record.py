"""One step as a list of operations: the shared model run on meta tensors, with operators that note what they move.

No weight is allocated. What is outside the model (upload, embedding, head, statistics, gather, commit) is noted around
it, as the engines do it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.bench.estimate.experts import mixture_kernels
from common.bench.estimate.operations import Collective, HostWork, Kernel, Operation
from common.bench.estimate.setup import Setup
from common.model import NUM_STATISTICS, Decoder, MoE, QKNorm, RMSNorm

_PART_OF = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "lm_head": "head"}
_TORCH_DTYPE = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
_QUERIES_A_TILE = 64
_NUM_PREDICTED = 3  # token, probability, confidence


def record_step(setup: Setup) -> list[Operation]:
    """Everything one rank does in a step, in order."""
    with torch.device("meta"):
        ops = RecordingOps(setup)
        model = Decoder(setup.model, ops, tp_size=setup.tp).to(_TORCH_DTYPE[setup.dtype])
    ops.adopt(model)
    token_T = torch.empty(setup.num_tokens, dtype=torch.int32, device="meta")
    if not setup.hides_host:
        ops.stream.append(HostWork())
    ops.note("host", "upload", read=16 * setup.num_tokens, written=16 * setup.num_tokens)
    ops.note_lookup(model.embed_tokens.weight, token_T)
    attended_TD, residual_TD = model.until_last_attention(token_T, None)
    if setup.launches.finishes_reads_only:
        attended_TD, residual_TD = (_select_reads(ops, x_TD) for x_TD in (attended_TD, residual_TD))
    hidden_TD = model.finish(attended_TD, residual_TD, model.lm_head if setup.quantizes_head else None)
    hidden_MD = hidden_TD if setup.launches.finishes_reads_only else _select_reads(ops, hidden_TD)
    _note_head(ops, model, hidden_MD)
    _note_commit(ops)
    return ops.stream


class RecordingOps:
    """common.model.ops.Ops that computes nothing: results are meta tensors of the right shape."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.stream: list[Operation] = []
        self._part_of: dict[nn.Module, str] = {}

    def adopt(self, model: Decoder) -> None:
        """Give the layers' linears the dtype that they run in."""
        for name, module in model.named_modules():
            leaf = name.rpartition(".")[2]
            if leaf in _PART_OF:
                self._part_of[module] = _PART_OF[leaf]
            if leaf in _PART_OF and self.setup.quantizes(_PART_OF[leaf]):
                weight = torch.empty_like(module.weight, dtype=_TORCH_DTYPE[self.setup.linear_dtype])
                module.weight = nn.Parameter(weight, requires_grad=False)

    def norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, norm: RMSNorm, consumer: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        is_quantized, fuses = consumer is not None and self.setup.is_quantized, self.setup.launches.fuses_norm_quant
        num_inputs = 1 if residual_TD is None else 2
        out = x_TD.numel() if is_quantized and fuses else _bytes(x_TD)
        self.note("norms", "add_norm", read=num_inputs * _bytes(x_TD), written=out + _bytes(x_TD))
        if is_quantized and not fuses:
            self._note_quantize("norms", x_TD)
        return x_TD, x_TD

    def linear(self, x_TK: Tensor, linear: nn.Module) -> Tensor:
        part = self._part_of[linear]
        sizes = self._qkv_sizes() if part == "qkv" and not self.setup.launches.merges_qkv else (len(_weight(linear)),)
        for size in sizes:
            self._note_linear(part, x_TK, _weight(linear)[:size], self._out_bytes(part, x_TK, size))
        return x_TK.new_empty(x_TK.shape[0], len(_weight(linear)))

    def attend(self, qkv_TE: Tensor, layer: int, step: Any, qk_norm: QKNorm | None) -> Tensor:
        setup, model = self.setup, self.setup.model
        num_heads, num_kv_heads = model.num_heads // setup.tp, model.kv_heads_of_rank(setup.tp)
        for number in range(setup.launches.rotary_kernels):
            self.note("attention", f"rotary_{number}", read=_bytes(qkv_TE), written=_bytes(qkv_TE))
        position_bytes = 2 * num_kv_heads * model.head_size * qkv_TE.element_size()
        for _ in range(setup.launches.kv_write_kernels):
            window_bytes = setup.num_tokens * position_bytes
            self.note("attention", "write_kv", read=window_bytes, written=window_bytes)
        out = qkv_TE.new_empty(setup.num_tokens, num_heads * model.head_size)
        # Rows of a request share its prefix: it comes from memory once, then from L2.
        num_cached = min(setup.num_requests, setup.rows) * setup.prefix
        num_tiles = setup.rows * num_heads * -(-setup.window // _QUERIES_A_TILE)
        self.stream.append(
            Kernel(
                "attention", "attend", "attention",
                read=_bytes(out) + (num_cached + setup.num_tokens) * position_bytes, written=_bytes(out),
                flops=4 * setup.num_tokens * setup.keys_seen * num_heads * model.head_size,
                num_pieces=None if setup.launches.splits_keys else num_tiles,
            )
        )  # fmt: skip
        if setup.launches.splits_keys:
            self.note("attention", "merge", read=4 * _bytes(out), written=_bytes(out))
        if setup.is_quantized and not setup.launches.fuses_attention_quant:
            self._note_quantize("o", out)
        return out

    def mlp(self, x_TD: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
        both_TI = self.linear(x_TD, gate_up)
        activated_TI = both_TI.new_empty(both_TI.shape[0], both_TI.shape[1] // 2)
        num_columns = both_TI.shape[1]
        if not self.setup.fuses_swiglu(num_columns):
            out = activated_TI.numel() if self.setup.is_quantized else _bytes(activated_TI)
            read = both_TI.numel() * self._out_bytes("gate_up", x_TD, num_columns)
            self.note("gate_up", "swiglu", read=read, written=out)
        return self.linear(activated_TI, down)

    def moe(self, x_TD: Tensor, moe: MoE) -> Tensor:
        setup = self.setup
        self.stream += mixture_kernels(moe, len(x_TD), setup.tp, setup.dtype, setup.linear_dtype)
        return x_TD

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        if self.setup.tp > 1:
            setup, pieces = self.setup, self.setup.all_reduce_pieces
            size, most = _bytes(x_TD) / pieces, setup.most_aiv_bytes
            is_on_ai_cpu = most is not None and size > most
            self.stream.append(
                Collective("all-reduce", "all_reduce", size, setup.tp, setup.tp, pieces, is_on_ai_cpu=is_on_ai_cpu)
            )
        return x_TD

    def note(self, part: str, name: str, *, read: float, written: float, times: float = 1.0) -> None:
        """A kernel that only moves."""
        self.stream.append(Kernel(part, name, "other", read, written, times=times))

    def note_lookup(self, table_VD: Tensor, token_T: Tensor) -> None:
        num_bytes = len(token_T) * table_VD.shape[1] * table_VD.element_size()
        self.note("embed", "lookup", read=num_bytes, written=num_bytes)

    def _note_quantize(self, part: str, x: Tensor) -> None:
        self.note(part, "quantize", read=_bytes(x), written=x.numel())

    def _out_bytes(self, part: str, x: Tensor, num_columns: int) -> float:
        """Return the bytes a value of a linear's result; gate_up with its activation leaves half of the values."""
        launches, is_quantized = self.setup.launches, self.setup.is_quantized
        if part != "gate_up":
            return x.element_size()
        if self.setup.fuses_swiglu(num_columns):
            return 0.5 if is_quantized else x.element_size() / 2
        return launches.gate_up_bytes if is_quantized else x.element_size()

    def _note_linear(self, part: str, x_TK: Tensor, weight_NK: Tensor, out_bytes: float) -> None:
        num_tokens, (num_out, num_in) = x_TK.shape[0], weight_NK.shape
        is_quantized = self.setup.quantizes(part)
        in_bytes = num_tokens * num_in * weight_NK.element_size()
        weight_bytes = _bytes(weight_NK) + (4 * num_out if is_quantized else 0)
        dtype = self.setup.linear_dtype if is_quantized else self.setup.dtype
        self.stream.append(
            Kernel(
                part, "linear", "linear", in_bytes + weight_bytes, num_tokens * num_out * out_bytes,
                flops=2.0 * num_tokens * num_out * num_in, dtype=dtype, weight_bytes=weight_bytes,
            )
        )  # fmt: skip

    def _qkv_sizes(self) -> tuple[int, int, int]:
        model = self.setup.model
        query, key = model.num_heads // self.setup.tp, model.kv_heads_of_rank(self.setup.tp)
        return query * model.head_size, key * model.head_size, key * model.head_size


def _select_reads(ops: RecordingOps, x_TD: Tensor) -> Tensor:
    x_MD = x_TD.new_empty(ops.setup.num_reads, x_TD.shape[1])
    ops.note("head", "select", read=_bytes(x_MD), written=_bytes(x_MD))
    return x_MD


def _note_head(ops: RecordingOps, model: Decoder, hidden_MD: Tensor) -> None:
    setup = ops.setup
    logits_MV = ops.linear(hidden_MD, model.lm_head)
    num_kernels, num_bytes = setup.launches.statistics_kernels, setup.launches.statistics_bytes * logits_MV.numel()
    for number in range(num_kernels):
        ops.note("head", f"statistics_{number}", read=num_bytes / num_kernels, written=0)
    if setup.tp > 1:
        size = 4 * NUM_STATISTICS * setup.num_reads
        ops.stream.append(Collective("gather", "all_gather", size, setup.tp, setup.tp))
    if setup.bp > 1:
        size = 4 * _NUM_PREDICTED * setup.num_reads
        ops.stream.append(Collective("gather", "all_gather", size, setup.bp, setup.bp * setup.tp))
    size = 4 * _NUM_PREDICTED * setup.num_reads * setup.bp
    ops.note("host", "read_back", read=size, written=size)


def _note_commit(ops: RecordingOps) -> None:
    """The winner's KV of a block, every so many steps; under block-causal attention nothing is sent."""
    setup, model = ops.setup, ops.setup.model
    times = setup.num_requests * setup.tokens_per_step / setup.block_size
    num_values = 2 * setup.block_size * model.kv_heads_of_rank(setup.tp) * model.head_size
    size = model.num_layers * num_values * _TORCH_DTYPE[setup.dtype].itemsize
    if setup.launches.commit_copies:
        ops.note("commit", "copy", read=size, written=size, times=times)
    if setup.bp > 1 and not setup.is_block_causal:
        ops.stream.append(Collective("commit", "broadcast", size, setup.bp, setup.bp * setup.tp, times))


def _weight(linear: nn.Module) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return linear.weight


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
