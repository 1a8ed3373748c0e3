"""Which models run on the project's kernels: their blocks are powers of two."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.checkpoint import load_model_config
from common.config import DeviceProfile, find_config, load_profile_and_run
from common.errors import MissingCapability
from lopa_cuda.assemble import _ops, chooses_tiles

DREAM = load_model_config("configs/models/dream_7b")
CACHE: Any = SimpleNamespace(committed=torch.empty(0, dtype=torch.bfloat16))


def profile(kernels: str) -> DeviceProfile:
    paths = find_config("profiles", "h200_tp1_bp1"), find_config("runs", "demo")
    return load_profile_and_run(*paths, [f"kernels={kernels}"])[0]


@pytest.mark.parametrize(
    ("head_size", "is_fused"), [(8, False), (16, True), (96, False), (128, True), (256, True), (512, False)]
)
def test_auto_takes_the_kernels_where_heads_allow_it(head_size: int, is_fused: bool) -> None:
    config = replace(DREAM, head_size=head_size)
    assert chooses_tiles(profile("auto"), torch.bfloat16, config) is is_fused


def test_kernels_that_do_not_take_the_model_are_refused_in_a_sentence() -> None:
    with pytest.raises(
        MissingCapability, match=r"heads of 16, .* 256 channels \(this model's have 96\): set kernels to"
    ):
        _ops(profile("triton"), replace(DREAM, head_size=96), CACHE, SimpleNamespace())  # type: ignore[arg-type]
