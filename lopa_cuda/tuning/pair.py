"""A linear with the stage that takes its sum, as the engine strings them together: what a tile costs a step.

A tile that hands over split-K parts is paid for by whoever adds them, and launches overlap. So a linear is never timed
alone. Importing this needs Triton, running it a CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.errors import TritonError

from common.checkpoint import ModelConfig
from common.model import rotary_table
from lopa_cuda import kernels
from lopa_cuda.kernels.launch import Partials
from lopa_cuda.tiles import ModelLinear, Tile, only_tiles
from lopa_cuda.tuning.compiling import is_refusal
from lopa_cuda.tuning.stopwatch import as_quantize, graph_us, make_input, random, rotation
from quant.w8a8 import QuantizedActivation

_POSITIONS, _THETA, _EPS = 4096, 1e6, 1e-6
_LEAST_LAUNCHES = 8
_REPLAYS = 15
# Greatest distance of two bf16 results of one product: rounding is well below, a tile that is wrong far above.
_MOST_DIFFERENCE = 2e-2


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of the stages that follow the linears, on one rank."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int) -> LayerSizes:
        return cls(
            config.hidden_size, config.num_heads // tp_size, config.kv_heads_of_rank(tp_size), config.head_size,
            config.rotary_size,
        )  # fmt: skip


class LinearPair:
    """One linear of a model and its weights in turn; times any tile of it."""

    def __init__(self, linear: ModelLinear, sizes: LayerSizes) -> None:
        self.name, self.shape = linear
        self._sizes = sizes
        self.weights = rotation(self.shape.num_out, self.shape.num_in, self.shape.kind)
        self._norm_weight = random(sizes.hidden_size)
        self._rotary = rotary_table(_POSITIONS, sizes.rotary_size, _THETA, self._norm_weight.device)

    def us(self, num_tokens: int, config: Tile | None, replays: int = _REPLAYS) -> float:
        """Microseconds with the kernel's tile, or the library's where `config` is None.

        Raises what `is_refusal` knows for a tile that this device or compiler does not take.
        """
        x, stage = make_input(num_tokens, self.shape.num_in, self.shape.kind), _NextStage(self, num_tokens)

        def run(i: int) -> None:
            stage.take(self._product(x, i % len(self.weights)))

        with only_tiles({} if config is None else {self.shape: ((num_tokens, config),)}):
            return graph_us(run, max(_LEAST_LAUNCHES, len(self.weights)), replays)

    def try_us(self, num_tokens: int, config: Tile | None, replays: int = _REPLAYS) -> float | None:
        """Return `us`, or None for what takes more than the device has or its compiler can do."""
        try:
            return self.us(num_tokens, config, replays)
        except (TritonError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            return None

    def is_right(self, num_tokens: int, config: Tile) -> bool:
        """Whether the kernel with this tile computes what the library does."""
        x = make_input(num_tokens, self.shape.num_in, self.shape.kind)
        with only_tiles({}):
            expected = self._values(self._product(x, 0, is_quantized=False))
        with only_tiles({self.shape: ((num_tokens, config),)}):
            found = self._values(self._product(x, 0, is_quantized=False))
        return bool((found - expected).norm() <= _MOST_DIFFERENCE * expected.norm())  # False for what is not finite

    def _product(
        self, x: Tensor | QuantizedActivation, index: int, is_quantized: bool = True
    ) -> Tensor | Partials | QuantizedActivation:
        weight = self.weights[index]
        if self.shape.fusion == "none":
            return kernels.linear_partials(x, weight.values, None, weight.scale)
        quantize = as_quantize(self.shape.kind) if is_quantized else None
        return kernels.gate_up_swiglu(x, weight.values, weight.scale, quantize=quantize)

    @staticmethod
    def _values(y: Tensor | Partials | QuantizedActivation) -> Tensor:
        assert not isinstance(y, QuantizedActivation), "compared before it is quantized"
        return kernels.sum_partials(y).float()


class _NextStage:
    """The stage that follows a linear, over `num_tokens` tokens."""

    def __init__(self, pair: LinearPair, num_tokens: int) -> None:
        sizes = pair._sizes
        self._name, self._sizes, self._rotary, self._norm_weight = pair.name, sizes, pair._rotary, pair._norm_weight
        self._is_gated = pair.shape.fusion == "swiglu"
        self._position = torch.arange(num_tokens, device=pair._rotary.device, dtype=torch.int32) % _POSITIONS
        self._window = random(2, num_tokens, sizes.num_kv_heads, sizes.head_size)
        self._residual = random(num_tokens, sizes.hidden_size)

    def take(self, y: Tensor | Partials | QuantizedActivation) -> None:
        if self._is_gated:
            if isinstance(y, Tensor):  # whatever comes next, so that the launches alternate as in a layer
                self._norm(self._residual)
            return
        assert not isinstance(y, QuantizedActivation), "only what is gated comes out quantized"
        if self._name == "qkv":
            kernels.rope_prewrite(y, self._position, self._rotary, self._window, num_heads=self._sizes.num_heads)
        elif self._name == "shared_down":  # added to what the routed experts give
            kernels.sum_partials(y)
        elif self._name != "head":
            self._norm(y)

    def _norm(self, y: Tensor | Partials) -> None:
        kernels.add_rms_norm(y, self._residual, self._norm_weight, _EPS)
