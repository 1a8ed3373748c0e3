"""The simulated NPU computes what a device would, and refuses what a device could not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import MissingCapability
from common.platforms import platform_of_device
from lopa_ascend.ops import OpRuleError, npu_ops

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("npu")]


def test_a_node_of_sixteen_devices() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 16
    torch.npu.set_device(3)
    assert torch.zeros(1, device="npu").device == torch.device("npu:3")
    torch.npu.set_device(0)


def test_aten_operators_on_npu_tensors() -> None:
    x = torch.arange(12.0).view(3, 4)
    y = x.npu()
    y[1:].mul_(2)
    wanted = x.clone()
    wanted[1:] *= 2
    assert torch.equal(y.cpu(), wanted)
    assert torch.equal((y.t() @ y).softmax(-1).cpu(), (wanted.t() @ wanted).softmax(-1))
    assert torch.cat([y, y])[2:4, torch.tensor([0, 2], device="npu")].tolist() == [[16.0, 20.0], [0.0, 2.0]]
    buffer = torch.zeros(4, device="npu")
    buffer[1:].copy_(torch.ones(3), non_blocking=True)
    assert buffer.to("cpu", torch.int32).tolist() == [0, 1, 1, 1]


def test_tensors_of_host_and_device_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="a cpu tensor"):
        torch.ones(3, device="npu") + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"npu:0.*npu:1"):
        torch.ones(3, device="npu:0") + torch.ones(3, device="npu:1")


def test_what_is_not_simulated_is_said(torch_npu: Any) -> None:
    with pytest.raises(NotImplementedError, match="npu_silu has no twin"):
        torch_npu.npu_silu(torch.ones(3, device="npu"))
    with pytest.raises(NotImplementedError, match="does not model"):
        torch_npu.npu_quant_matmul(*_factors(), offset=torch.ones(8, device="npu"))
    with pytest.raises(NotImplementedError, match="random numbers"):
        torch.rand(3, device="npu")


def test_a_broken_rule_raises_where_the_meta_kernel_is_silent(torch_npu: Any) -> None:
    x, weight, scale = _factors()
    torch.ops.npu.npu_quant_matmul(*(t.to("meta") for t in (x, weight, scale.half())), output_dtype=15)
    with pytest.raises(OpRuleError, match="scale is float32 or bfloat16"):
        torch_npu.npu_quant_matmul(x, weight, scale.half(), output_dtype=torch.bfloat16)


def test_a_weight_in_nz_is_read_by_the_product_only(torch_npu: Any) -> None:
    x, weight, scale = _factors()
    plain = torch_npu.npu_quant_matmul(x, weight, scale, output_dtype=torch.bfloat16)
    cast = torch_npu.npu_format_cast(weight, 29)
    assert torch_npu.get_npu_format(cast) == 29
    assert torch.equal(torch_npu.npu_quant_matmul(x, cast, scale, output_dtype=torch.bfloat16).cpu(), plain.cpu())
    for misuse in (lambda: cast[:, :4], lambda: cast.view(-1), lambda: cast.copy_(weight), lambda: cast + 1):
        with pytest.raises(OpRuleError, match="cast last"):
            misuse()


def test_the_npu_lane_allows_nz_formats(torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default, where torch_npu quietly creates the plain format instead."""
    options: dict[str, str] = {}
    monkeypatch.setattr(torch_npu._C, "_npu_setOption", options.update)
    npu_ops()
    assert options == {"ALLOW_INTERNAL_FORMAT": "enable"}


def test_the_stream_of_calls_is_recorded(npu: Any, torch_npu: Any) -> None:
    x, weight, scale = _factors()
    torch_npu.npu_quant_matmul(x, weight, scale, output_dtype=torch.bfloat16)
    last = npu.stream[-1]
    assert last.op == "npu::npu_quant_matmul"
    assert last.arguments[:3] == ("int8[4, 16]", "int8[16, 8]", "float32[8]")
    assert npu.counts["npu::npu_quant_matmul"] == 1


def _factors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8) for shape in ((4, 16), (16, 8)))
    return x.npu(), weight.npu(), torch.ones(8).npu()


def test_torch_npus_profiler_takes_its_settings_and_is_told_where_cann_has_none(tmp_path: Path) -> None:
    """The real torch_npu's; what it needs of CANN is not simulated."""
    no_table = pytest.raises(MissingCapability, match=r"has left no table of kernels there: it needs CANN's msprof")
    with no_table, platform_of_device("npu").profiled(tmp_path):
        torch.ones(2, device="npu").add(1)
    (left,) = tmp_path.glob("*_ascend_pt")
    settings = (left / "profiler_info.json").read_text()
    assert '"Level1"' in settings
