"""The wide kernel on a GPU: every kind and layout against double precision, and every tile that ships."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.config import tiles_folder
from lopa_cuda.tiles import Kind, LinearShape, WideConfig, impossible, read_tiles
from quant import fp8, w8a8
from quant.w8a8 import QuantizedActivation

pytestmark = pytest.mark.cuda
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="the kernels need Triton")
    from lopa_cuda import kernels
    from lopa_cuda.kernels.linear import launch_linear
    from lopa_cuda.wgmma import launch_wide_linear, why_unavailable

    if why_unavailable():
        pytest.skip(f"no wide kernel here: {why_unavailable()}", allow_module_level=True)

KINDS: tuple[Kind, ...] = ("bf16", "int8", "fp8")
CONFIGS = (
    WideConfig(144), WideConfig(64, 2), WideConfig(96, 3), WideConfig(64, 2, 2), WideConfig(96, 1, 2),
    WideConfig(96, tokens=128), WideConfig(96, 3, tokens=64), WideConfig(64, 2, 2, tokens=64),
    WideConfig(32, 1, 2, tokens=64),
)  # fmt: skip
BF16_TOLERANCE = 5e-3


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).mul(scale).to(torch.bfloat16)


def operands(
    kind: Kind, num_tokens: int, num_out: int, num_in: int
) -> tuple[Tensor | QuantizedActivation, Tensor, Tensor | None]:
    x, weight = random(num_tokens, num_in), random(num_out, num_in, scale=0.02, seed=1)
    if kind == "bf16":
        return x, weight, None
    plain = w8a8 if kind == "int8" else fp8
    quantized = plain.quantize_weight(weight)
    return plain.quantize_per_token(x), quantized.values, quantized.scale


def expected(x: Tensor | QuantizedActivation, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the product in double precision, where 8-bit values are whole and their sums exact."""
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    y = values.double() @ weight.double().T
    if scale is not None:
        y = y * scale.double()[None]
    if x_scale is not None:
        y = y * x_scale.double()[:, None]
    return y if bias is None else y + bias.double()


def run(
    x: Tensor | QuantizedActivation, weight: Tensor, scale: Tensor | None, bias: Tensor | None, config: WideConfig,
    is_gated: bool = False,
) -> Tensor:  # fmt: skip
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    columns = weight.shape[0] // (2 if is_gated else 1)
    out = torch.full((len(values), columns), torch.nan, device="cuda", dtype=torch.bfloat16)
    launch_wide_linear(values, x_scale, weight, bias, scale, config, out, is_gated=is_gated)
    return out


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 128, 160, 192, 193, 256, 300, 700])
def test_a_linear_of_ragged_shape(kind: Kind, config: WideConfig, num_tokens: int) -> None:
    """Neither its columns nor its depth are whole tiles."""
    num_out, num_in = 1160, 1040
    if impossible(LinearShape(kind, num_out, num_in, "none"), config, num_tokens):
        pytest.skip("such a tile cannot run")
    x, weight, scale = operands(kind, num_tokens, num_out, num_in)
    bias = random(num_out, seed=2)
    y = run(x, weight, scale, bias, config)
    assert difference(y, expected(x, weight, scale, bias)) < BF16_TOLERANCE
    assert torch.equal(y, run(x, weight, scale, bias, config)), "the order of the sums is fixed"
    assert difference(run(x, weight, scale, None, config), expected(x, weight, scale, None)) < BF16_TOLERANCE


@pytest.mark.parametrize("config", [WideConfig(56, 2), WideConfig(64), WideConfig(96, 3)], ids=str)
def test_float8_sums_of_great_depth_leave_the_matrix_unit(config: WideConfig) -> None:
    """The unit would lose several per cent where all products have one sign. The depth is no multiple of
    that after which sums move."""
    num_in = 18992
    x, weight, scale = operands("fp8", 160, 1160, num_in)
    assert difference(run(x, weight, scale, None, config), expected(x, weight, scale, None)) < BF16_TOLERANCE
    x = fp8.quantize_per_token(random(160, num_in).abs())
    positive = fp8.quantize_weight(random(1160, num_in, scale=0.02, seed=1).abs())
    weight, scale = positive.values, positive.scale
    assert difference(run(x, weight, scale, None, config), expected(x, weight, scale, None)) < 0.015


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_tokens", [65, 128, 192, 256, 300, 700])
def test_gate_and_up_with_swiglu(kind: Kind, config: WideConfig, num_tokens: int) -> None:
    num_out, num_in = 2 * 1096, 1024
    if impossible(LinearShape(kind, num_out, num_in, "swiglu"), config, num_tokens):
        pytest.skip("such a tile cannot run")
    x, weight, scale = operands(kind, num_tokens, num_out, num_in)
    gate, up = expected(x, weight, scale, None).chunk(2, dim=-1)
    found = run(x, weight, scale, None, config, is_gated=True)
    assert difference(found, functional.silu(gate) * up) < 2 * BF16_TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("share", [1, 2])
def test_a_program_takes_several_tiles_of_some_tokens(kind: Kind, is_gated: bool, share: int) -> None:
    """More tiles than a device has multiprocessors; the last ones of tokens and of columns are not whole."""
    num_tokens, num_out, num_in = 700, 2 * 1192, 1024
    x, weight, scale = operands(kind, num_tokens, num_out, num_in)
    wanted = expected(x, weight, scale, None)
    if is_gated:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = functional.silu(gate) * up
    found = run(x, weight, scale, None, WideConfig(32, 1, share, tokens=64), is_gated)
    assert difference(found, wanted) < 2 * BF16_TOLERANCE


@pytest.mark.parametrize("num_tokens", [160, 700])
@pytest.mark.parametrize(
    "config", [WideConfig(96), WideConfig(64, 2), WideConfig(96, tokens=64), WideConfig(96, 1, 2, 128)], ids=str
)
def test_a_static_linear_adds_whole_numbers_before_the_scale(config: WideConfig, num_tokens: int) -> None:
    if impossible(LinearShape("int8", 512, 1024, "none"), config, num_tokens):
        pytest.skip("such a tile cannot run")
    x, weight = random(num_tokens, 1024), w8a8.quantize_weight(random(512, 1024, seed=1))
    values = w8a8.quantize_static(x, torch.tensor([0.02], device="cuda"), torch.tensor([3.0], device="cuda"))
    bias = torch.randint(-(2**20), 2**20, (512,), device="cuda", dtype=torch.int32)
    wanted = w8a8.linear(values, weight.values, weight.scale, None, bias, torch.bfloat16)
    found = launch_linear(values, None, weight.values, bias, weight.scale, config)
    assert isinstance(found, Tensor) and torch.equal(found, wanted)


@pytest.mark.parametrize("path", sorted(tiles_folder().glob("*.json")), ids=lambda path: path.stem)
def test_every_wide_tile_that_ships(path) -> None:  # type: ignore[no-untyped-def]
    checked = 0
    for shape, entry in read_tiles(path).entries.items():
        for most_tokens, tile in entry.tiles:
            if isinstance(tile, WideConfig):
                x, weight, scale = operands(shape.kind, most_tokens, shape.num_out, shape.num_in)
                is_gated = shape.fusion == "swiglu"
                wanted = expected(x, weight, scale, None)
                if is_gated:
                    gate, up = wanted.chunk(2, dim=-1)
                    wanted = functional.silu(gate) * up
                found = run(x, weight, scale, None, tile, is_gated=is_gated)
                assert difference(found, wanted) < 2 * BF16_TOLERANCE, (shape, most_tokens, tile)
                checked += 1
    assert checked > 0


def test_captured_among_other_kernels_it_computes_the_same() -> None:
    """What runs in front is overlapped: a norm's output must be whole before it is read."""
    weight, norm = random(1024, 1024, scale=0.02, seed=1), random(1024, seed=3)
    x, residual = random(192, 1024), random(192, 1024, seed=4)
    config = WideConfig(64, 2)

    def layer() -> tuple[Tensor, Tensor]:
        y, summed = kernels.add_rms_norm(x, residual, norm, 1e-6)
        assert isinstance(y, Tensor)
        found = launch_linear(y, None, weight, None, None, config)
        assert isinstance(found, Tensor)
        return kernels.add_rms_norm(found, summed, norm, 1e-6)

    eager = layer()[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()[0]
    for _ in range(20):
        captured.zero_()  # type: ignore[union-attr]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, eager)  # type: ignore[arg-type]
