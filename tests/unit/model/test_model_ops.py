"""The plain operators round in half precision where the fused kernels do, and building a decoder leaves its process."""

from __future__ import annotations

import torch
from started import python
from torch import Tensor

from common.checkpoint import load_model_config
from common.model import attention, rotary_table, swiglu
from lopa_cuda.ops.plain import rotary_of
from lopa_cuda.steps import CacheSizes, PagedKVCache
from tests.conftest import GOLDEN

SCALE = 64**-0.5
HALF_STEP = 2.0**-8  # of bfloat16, relative


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def rounded_formula(query: Tensor, key: Tensor, value: Tensor, is_visible: Tensor) -> Tensor:
    score = torch.einsum("bnwh,bnxh->bnwx", query.double(), key.repeat_interleave(2, 1).double()) * SCALE
    score = score.masked_fill(~is_visible, -torch.inf)
    weight = (score - score.amax(-1, keepdim=True)).exp()
    summed = torch.einsum("bnwx,bnxh->bnwh", weight.bfloat16().double(), value.repeat_interleave(2, 1).double())
    return summed / weight.sum(-1, keepdim=True)


def test_attention_rounds_its_weights_and_its_result() -> None:
    query, key, value = random(2, 4, 16, 64), random(2, 2, 80, 64), random(2, 2, 81, 64)[:, :, 1:]
    is_visible = torch.rand(2, 1, 16, 80) < 0.7
    expected = rounded_formula(query, key, value, is_visible)
    torch.testing.assert_close(
        attention(query, key, value, is_visible, SCALE).double(), expected, rtol=HALF_STEP, atol=1e-9
    )


def test_where_keys_stand_changes_no_bit_of_attention() -> None:
    """A cache of fixed slots and one of pages keep the same keys in other places."""
    query, key, value = random(1, 4, 16, 64), random(1, 2, 80, 64), random(1, 2, 81, 64)[:, :, 1:]
    place = torch.randperm(200)[:80]
    spread_key, spread_value, is_key = random(1, 2, 200, 64), random(1, 2, 201, 64)[:, :, 1:], torch.zeros(200).bool()
    spread_key[:, :, place], spread_value[:, :, place], is_key[place] = key, value, True
    spread = attention(query, spread_key, spread_value, is_key, SCALE)
    assert torch.equal(attention(query, key, value, None, SCALE), spread)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    query, key = random(1, 2, 3, 64), random(1, 2, 5, 64)
    attended = attention(query, key, key, torch.tensor([[True], [False], [True]]).expand(3, 5), SCALE)
    assert bool((attended[:, :, 1] == 0).all()) and bool(attended.isfinite().all())


def test_swiglu_rounds_once() -> None:
    gate_up = random(20, 128)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(gate_up).double(), expected, rtol=HALF_STEP * 1.001, atol=0)


def test_the_rotary_table_holds_what_the_models_dtype_can() -> None:
    config = load_model_config(GOLDEN / "model_a")
    exact = rotary_table(64, config.head_size, config.rope_theta, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        cache = PagedKVCache(CacheSizes(1, 1, 64, 1, config.head_size, dtype), 1, torch.device("cpu"))
        assert torch.equal(rotary_of(config, cache), exact.to(dtype).float())


BUILD = """
import sys

from common.config import DeviceProfile, MeshConfig, RunConfig
from common.platforms import build_engine

profile = DeviceProfile(name="start", engine="lopa_cuda", device="cpu", dtype="float32", mesh=MeshConfig())
build_engine(profile, RunConfig(model="models/demo")).close()
print(*sys.modules)
"""


def test_an_engine_starts_without_the_compiler_of_torch() -> None:
    """`torch._dynamo` and what it imports take two seconds; a random number drawn on the meta device imports it."""
    done = python("-c", BUILD, check=True)
    imported = done.stdout.split()
    assert "torch" in imported
    assert not {"torch._dynamo", "torch._inductor", "sympy", "transformers"} & {*imported}
