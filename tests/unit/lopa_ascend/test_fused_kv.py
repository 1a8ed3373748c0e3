"""Split, rotation and KV write in one Triton kernel: on a CPU, in Triton's interpreter, beside its twin."""

from __future__ import annotations

import os

import pytest
import torch
from started import interpreted_by_triton
from torch import Tensor

from lopa_ascend.ops import fused_kv, reference_ops

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PAGE = 128
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in test_in_the_interpreter's process")
if IS_INTERPRETED:
    from lopa_ascend.kernels import rotate_and_write


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    interpreted_by_triton(__file__)


@interpreted
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (2, 2), (14, 2)])
def test_it_computes_what_its_twin_does(num_heads: int, num_kv_heads: int) -> None:
    """Dream-7B's heads on a rank of TP4 and of TP2. Values have the same bits, and so has what lies between the slots;
    what is rotated is off by a step of bfloat16 at most, since the interpreter cuts bits off instead of rounding."""
    draw, num_tokens, size = torch.Generator().manual_seed(num_heads), 21, 128
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size, generator=draw).bfloat16()
    angle = torch.rand(num_tokens, 1, size // 2, generator=draw).mul(6).repeat(1, 1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    slot = torch.randperm(3 * PAGE, generator=draw)[:num_tokens].int()
    caches = [torch.randn(3, PAGE, num_kv_heads, size, generator=draw).bfloat16() for _ in "kv"]
    found: list[Tensor] = [cache.clone() for cache in caches]
    query = rotate_and_write(qkv.clone(), cos, sin, *found, slot, num_heads)
    wanted = reference_ops().rotate_and_write(qkv.clone(), cos, sin, num_heads, *caches, slot)
    torch.testing.assert_close(query, wanted, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(found[0], caches[0], rtol=2.0**-7, atol=1e-6)
    assert torch.equal(found[1], caches[1])
    kept = torch.ones(3 * PAGE, dtype=torch.bool)
    kept[slot.long()] = False
    assert torch.equal(found[0].flatten(0, 1)[kept], caches[0].flatten(0, 1)[kept])


def test_more_tokens_than_a_launch_has_programs_take_the_operators_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 65,536 tokens, made short here; on a CPU the kernel itself is not to be had."""
    monkeypatch.setattr(fused_kv, "MOST_TOKENS", 4)
    ops = reference_ops().with_fused_kv_write()

    def query(num_tokens: int) -> Tensor:
        qkv, angle = torch.ones(num_tokens, 3 * PAGE).bfloat16(), torch.zeros(num_tokens, 1, PAGE).bfloat16()
        caches = [torch.zeros(1, PAGE, 1, PAGE).bfloat16() for _ in "kv"]
        return ops.rotate_and_write(qkv, angle + 1, angle, 1, *caches, torch.arange(num_tokens).int())

    assert query(5).shape == (5, 1, PAGE)
    with pytest.raises(NotImplementedError, match=r"lopa::rotate_and_write"):
        query(4)
