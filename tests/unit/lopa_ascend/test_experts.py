"""A mixture of experts over the operators' twins is the plain mixture, on one rank and split over several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.checkpoint import MoEConfig
from common.config import DeviceProfile
from common.errors import ConfigError, MissingCapability
from common.model import MoE, mixture
from common.processes import Mesh
from common.runtime import Collectives
from lopa_ascend.limits import check_experts
from lopa_ascend.ops import reference_ops
from lopa_ascend.stages import AscendStages, lay_out_experts
from quant.experts import swap_experts
from tests.unit.model.test_moe import LING, QWEN, random_moe, tokens


def stages(*, hardware_types: bool) -> AscendStages:
    return AscendStages(reference_ops(hardware_types=hardware_types), Collectives(Mesh()), 1, 1.0)


def laid_out(moe: MoE) -> MoE:
    lay_out_experts(moe)
    return moe


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("config", [LING, QWEN, replace(QWEN, normalise=False)], ids=["ling", "qwen", "shares"])
def test_the_ranks_shares_make_up_the_plain_mixture(config: MoEConfig, tp_size: int) -> None:
    """Other ranks' rows go to a rank's own experts with weight 0: nothing of them is left in the sum."""
    x_TD, moe = tokens(40), random_moe(config)
    ops = stages(hardware_types=False)
    shares = [ops.moe(x_TD, laid_out(random_moe(config, rank, tp_size))) for rank in range(tp_size)]
    torch.testing.assert_close(torch.stack(shares).sum(dim=0), mixture(x_TD, moe), rtol=1e-4, atol=1e-4)


def test_in_bfloat16_it_differs_by_rounding_alone() -> None:
    x_TD, moe = tokens(40).bfloat16(), random_moe(LING)
    for name, value in moe.named_parameters():
        if name not in ("router", "expert_bias"):
            value.data = value.data.bfloat16()
    wanted = mixture(x_TD, moe).float()
    found = stages(hardware_types=True).moe(x_TD, laid_out(moe))
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).abs().max()) <= 2**-7 * float(wanted.abs().max())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_in_8_bits_the_ranks_shares_are_the_mixture_to_a_few_percent(tp_size: int) -> None:
    x_TD, ops = tokens(40), stages(hardware_types=False)
    ranks = [random_moe(LING, rank, tp_size) for rank in range(tp_size)]
    for moe in ranks:
        swap_experts(moe, "w8a8_dynamic")
        lay_out_experts(moe)
        assert moe.experts_gate_up.dtype == moe.experts_down.dtype == torch.int8
    mixed = torch.stack([ops.moe(x_TD, moe) for moe in ranks]).sum(dim=0)
    wanted = mixture(x_TD, random_moe(LING))
    error = float((mixed - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    assert 1e-4 < error < 0.03, error


PROFILE = DeviceProfile.model_validate(
    {"name": "p", "engine": "lopa_ascend", "device": "npu", "dtype": "bfloat16", "graph": {"mode": "npugraph"}}
)


@pytest.mark.parametrize(
    ("of_model", "of_profile", "problem"),
    [
        ({"normalise": False}, {}, "norm_topk_prob False"),
        ({"scoring": "softmax"}, {}, "no softmax with .* 4 groups and expert bias True"),
        ({"num_experts": 8}, {}, "groups of 2 experts"),
        ({}, {"mesh": {"tensor_parallel_size": 16}}, "lower tensor_parallel_size"),
        ({}, {"graph": {"mode": "torchair"}}, "set graph.mode to npugraph"),
        ({"intermediate_size": 48}, {"quantization": "w8a8"}, "multiples of 64 in groups: remove quantization"),
    ],
)
def test_what_the_operators_do_not_take_is_said_at_load(
    of_model: dict[str, object], of_profile: dict[str, object], problem: str
) -> None:
    profile = DeviceProfile.model_validate({**PROFILE.model_dump(), **of_profile})
    with pytest.raises((ConfigError, MissingCapability), match=problem):
        check_experts(profile, replace(LING, **of_model))  # type: ignore[arg-type]
    check_experts(PROFILE, LING)
