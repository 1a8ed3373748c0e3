"""The decoder stages in fused kernels (lopa_cuda.kernels): what runs on a GPU in bf16, int8 or fp8.

A linear hands its split-K parts to the next stage (a norm, the rotary stage), which adds them while it reads. With
tensor parallelism the norm also exchanges the ranks' addends and adds them. In a pass that is cut over branch ranks the
rotary stage writes keys and values on all of them. A stage in front of a quantized linear writes its output quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from common.checkpoint import ModelConfig
from common.config import NUM_CANDIDATES
from common.decoding import Sampling
from common.model import Activation, Gather, MoE, QKNorm, RMSNorm, SamplingRows, cut_edge, merge_sampled
from common.runtime import Collectives
from lopa_cuda import kernels
from lopa_cuda.ops.plain import rotary_of
from lopa_cuda.parallel.exchange import build_exchange
from lopa_cuda.parallel.peer_staging import PeerStaging
from lopa_cuda.steps import DeviceStep, PagedKVCache, Tiling
from quant.linear import QuantizedLinear
from quant.w8a8 import QuantizedActivation

ResultT = TypeVar("ResultT")


class FusedOps:
    """lopa_cuda.ops.plain.TorchOps on kernels that read every length from the device."""

    # Attention's (kernels.window_attention); None: by the number of tokens.
    num_splits: int | None = None
    is_long: bool | None = None

    noted_experts: list[Tensor] | None = None

    def __init__(self, config: ModelConfig, cache: PagedKVCache, collectives: Collectives) -> None:
        tp_size = collectives.mesh.tp_size
        self.head_size = config.head_size
        self.num_heads, self.num_kv_heads = config.num_heads // tp_size, config.kv_heads_of_rank(tp_size)
        self.tiling = Tiling(self.num_heads // self.num_kv_heads, kernels.BLOCK_QUERIES)
        self.cache = cache
        self.rotary = rotary_of(config, cache)
        self._collectives = collectives
        self._exchange = build_exchange(collectives.mesh.tp_group, cache.committed.device, config.hidden_size)
        self._aside = _SecondStream(cache.committed.device)
        self._o_projs: list[nn.Module] = []

    def adopt(self, model: nn.Module) -> None:
        self._o_projs = [layer.get_submodule("o_proj") for layer in model.get_submodule("layers").children()]
        for module in model.modules():
            if isinstance(module, QuantizedLinear) and module.bias is not None:
                module.bias = module.bias.to(torch.bfloat16)  # else every pass would do that

    def plan(self, step: DeviceStep) -> DeviceStep:
        if (peers := self._peers_of(step)) is not None:
            peers.begin()
        return step

    def _peers_of(self, step: DeviceStep) -> PeerStaging | None:
        """Where this pass's keys and values are written for other ranks; None where there are none or they gather
        them."""
        is_captured = self.cache.staging is self.cache.captured_staging
        return self.cache.peers if is_captured and step.staged.is_cut else None

    def norm(
        self, x_TD: Any, residual_TD: Tensor | None, norm: RMSNorm, consumer: nn.Module | None
    ) -> tuple[Activation, Tensor]:
        return kernels.add_rms_norm(x_TD, residual_TD, norm.weight, norm.eps, quantize=quantize_for(consumer))

    def linear(self, x: Activation, linear: nn.Module) -> Any:
        """[T, E], or its split-K parts."""
        return kernels.linear_partials(_input(x, linear), *_operands(linear))

    def mlp(self, x: Activation, gate_up: nn.Module, down: nn.Module) -> Any:
        weight, _, scale = _operands(gate_up)
        activated = kernels.gate_up_swiglu(_input(x, gate_up), weight, scale, quantize=quantize_for(down))
        return self.linear(activated, down)

    def moe(self, x_TD: Tensor, moe: MoE) -> Tensor:
        take_aside = self._aside.start(lambda: self._beside_routing(x_TD, moe))
        routing = kernels.route(kernels.router_logits(x_TD, moe.router), moe.expert_bias, moe.config)
        if self.noted_experts is not None:
            self.noted_experts.append(routing.expert_TC)
        dealt = kernels.deal_pairs(routing, moe)
        x, shared_TD = take_aside()
        return kernels.mix_experts(x, routing, dealt, moe, shared_TD)

    @staticmethod
    def _beside_routing(x_TD: Tensor, moe: MoE) -> tuple[Activation, Tensor | None]:
        """What does not depend on the routing: the experts' input, and the shared experts' result."""
        x = kernels.expert_input(x_TD, moe)
        if moe.shared_gate_up_proj is None or moe.shared_down_proj is None:
            return x, None
        inner_TX = kernels.gate_up_swiglu(x_TD, moe.shared_gate_up_proj.weight)
        return x, kernels.linear(inner_TX, moe.shared_down_proj.weight)

    def all_reduce(self, x_TD: Any) -> Any:
        """The sum, or this rank's addend for the norm to sum."""
        if self._collectives.mesh.tp_group is None:
            return x_TD
        shared = None if self._exchange is None else self._exchange.next(x_TD)
        if shared is not None:
            return shared
        return self._collectives.tp_sum(kernels.sum_partials(x_TD))

    def attend(self, qkv_TE: Any, layer: int, step: DeviceStep, qk_norm: QKNorm | None) -> Activation:
        window, peers = self.cache.staging[layer], self._peers_of(step)
        own_window = step.staged.own(window)
        q_TNH = kernels.rope_prewrite(
            qkv_TE, step.position_T, self.rotary, own_window, num_heads=self.num_heads, qk_norm=qk_norm,
            mirrors=None if peers is None else peers.mirrors(own_window),
        )  # fmt: skip
        if peers is None:
            step.staged.gather(window)
        else:
            peers.meet(layer)
        consumer = self._o_projs[layer]
        return kernels.window_attention(
            q_TNH, self.cache.committed[layer], window, table_SP=self.cache.table_SP,
            tiles_N8=step.tiles_N8, horizon_T=step.horizon_T, num_splits=self.num_splits,
            is_long=self.is_long, quantize=quantize_for(consumer),
        )  # fmt: skip

    copy_rows = staticmethod(kernels.copy_rows)

    def logits(self, hidden: Activation, head: nn.Module) -> Tensor:
        return kernels.linear(hidden, *_operands(head))

    statistics = staticmethod(kernels.head_statistics)
    merge = staticmethod(kernels.merge_statistics)
    class_statistics = staticmethod(kernels.class_statistics)

    def sampled(
        self, logits_MV: Tensor, vocab_start: int, sampling: Sampling, rows: SamplingRows, gather: Gather
    ) -> Tensor:
        return sampled_of(logits_MV, vocab_start, sampling, rows, gather)


class InvariantOps(FusedOps):
    """The same in bf16 with sums whose order depends on no other row of the pass (`batch_invariant`)."""

    num_splits, is_long = 4, False

    def linear(self, x: Activation, linear: nn.Module) -> Any:
        return kernels.invariant_linear(x, *_operands(linear)[:2])

    def mlp(self, x: Activation, gate_up: nn.Module, down: nn.Module) -> Any:
        return self.linear(kernels.swiglu(self.linear(x, gate_up)), down)

    def logits(self, hidden: Activation, head: nn.Module) -> Tensor:
        return kernels.invariant_linear(hidden, *_operands(head)[:2])


class _SecondStream:
    """Runs work beside the stream in use, also in a capture; on CPU when its result is taken. That is to be before the
    next work starts, and before anything it reads is freed: allocations do not know of the other stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """Return what waits for the result on the stream then in use."""
        stream = self._stream
        if stream is None:
            return work
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made = work()

        def take() -> ResultT:
            torch.cuda.current_stream().wait_stream(stream)
            return made

        return take


def sampled_of(logits_MV: Tensor, vocab_start: int, sampling: Sampling, rows: SamplingRows, gather: Gather) -> Tensor:
    """[M, 3], as common.model.sampled_statistics; the logits are used up."""
    own, edge_M1 = (logits_MV, vocab_start, sampling.mask_token_id, rows), None
    if sampling.is_cut:
        mass_M1 = kernels.sampled_statistics(*own, None, tempers_confidence=True)[:, 3:4]
        best_MC = _best(logits_MV, sampling.mask_token_id - vocab_start) / rows.temperature_N[:, None]
        edge_M1 = cut_edge(best_MC, mass_M1, rows, gather)
    statistics_M7 = kernels.sampled_statistics(*own, edge_M1, tempers_confidence=sampling.tempers_confidence)
    return merge_sampled(gather(statistics_M7), sampling.strategy)


def _best(logits_MV: Tensor, mask_column: int) -> Tensor:
    """[M, C] float32: the best candidates' logits in descending order, the mask's left out."""
    if 0 <= mask_column < logits_MV.shape[1]:
        logits_MV[:, mask_column].fill_(-torch.inf)
    return logits_MV.topk(min(NUM_CANDIDATES, logits_MV.shape[1]), dim=-1).values.float()


def quantize_for(consumer: nn.Module | None) -> kernels.Quantize | None:
    """The format that a linear reads its input in; None where it quantizes by itself (static), or not at all."""
    if not isinstance(consumer, QuantizedLinear) or consumer.is_static:
        return None
    return "fp8" if consumer.weight.is_floating_point() else "int8"


def _input(x: Activation, linear: nn.Module) -> Activation:
    if isinstance(linear, QuantizedLinear) and linear.is_static:
        return QuantizedActivation(kernels.quantize_static(x, linear.input_scale, linear.input_offset), None)
    return x


def _operands(linear: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """weight, bias and the scale of each output channel, as lopa_cuda.kernels.linear takes them."""
    if not isinstance(linear, QuantizedLinear):
        return linear.weight, linear.bias, None
    if linear.is_static:
        return linear.weight, linear.quant_bias, linear.deq_scale
    return linear.weight, linear.bias, linear.weight_scale
