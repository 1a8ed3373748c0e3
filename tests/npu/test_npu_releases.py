"""What the engine calls is in the wheels of the supported releases that this torch cannot load: only their files are
read here, `run_sim.py --torch RELEASE` loads them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sim.runtime import RELEASES, releases_here

from common.checkpoint import MoEConfig
from lopa_ascend.ops import AttentionForm, Ops, VirtualRows, reference_ops

pytestmark = [pytest.mark.sim, pytest.mark.slow]  # downloads a wheel of 40 MB
WHEELS = Path(__file__).parents[2] / "build" / "wheels"
# Files of the wheel, and the names in them that the engine uses although they are not documented.
PRIVATE = {
    "torch_npu/npu/graphs.py": (
        "auto_dispatch_capture",
        "graph_dispatch_mode",
        "graph_dispatch_records",
        "update_stream",
    ),
    "torch_npu/dynamo/npugraph_ex/_acl_concrete_graph/graph_pass.py": ("def register_inplaceable_npu_op",),
    "torch_npu/dynamo/torchair/ops/_npu_fused_infer_attention_score_v2.py": ("_ge_converter",),
    "torch_npu/dynamo/torchair/inference/__init__.py": ("cache_compile",),
}


OTHERS = [release for releases in RELEASES.values() for release in releases if release not in releases_here()]


@pytest.fixture(scope="module", params=OTHERS)
def wheel(request: pytest.FixtureRequest) -> Iterator[zipfile.ZipFile]:
    """Downloaded on first use."""
    pattern = f"torch_npu-{request.param}-*.whl"
    if not list(WHEELS.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WHEELS)]
        done = subprocess.run([*command, f"torch-npu=={request.param}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no wheel of torch-npu {request.param}: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(WHEELS.glob(pattern))) as opened:
        yield opened


_NUM_RESULTS = {
    "npu_add_rms_norm": 3,
    "npu_add_rms_norm_dynamic_quant": 5,
    "npu_grouped_matmul": 1,
    "npu_moe_gating_top_k": 3,
    "npu_moe_gating_top_k_softmax": 3,
    "npu_moe_init_routing_v2": 4,
}


def keywords_of_calls() -> dict[str, set[str]]:
    """Every operator that the facade calls, with the keywords that it passes."""
    calls: dict[str, set[str]] = {}
    right, x = reference_ops()._kernels, torch.zeros(2, 3 * 128)

    def noting(name: str) -> Any:
        def call(*_: Any, **keywords: Any) -> Any:
            calls.setdefault(name, set()).update(keywords)
            return _NUM_RESULTS.get(name, 2) * [x]

        return call

    kernels = SimpleNamespace(**{name: noting(name) for name in vars(right)})
    rows = VirtualRows(torch.zeros(1, 1), [2], [2])
    page = torch.zeros(1, 128, 1, 128)
    for ops in (Ops(kernels, AttentionForm(1, 3)), Ops(kernels, AttentionForm(2, 4), writes_kv_by_atb=True)):
        ops.rms_norm(x, x, 1e-6)
        ops.add_rms_norm(x, x, x, 1e-6)
        ops.add_rms_norm_dynamic_quant(x, x, x, 1e-6)
        ops.dynamic_quant(x)
        ops.static_quant(x, x, x)
        ops.quant_matmul(x, x, x)
        ops.quant_matmul_int32(x, x, x)
        ops.dequant_swiglu_quant(x, x, x)
        ops.quant_matmul_swiglu_quant(x, x, x, x)
        ops.swiglu(x)
        ops.split_and_rotate(x, page, page, 1)
        ops.write_kv(x, x, page, page, x)
        ops.paged_attention(page[0], page, page, rows, 1.0)
        ops.to_nz(x)
        ops.prefetch(x, x, 1)
        for scoring in ("sigmoid", "softmax"):
            ops.route(x, x, MoEConfig(4, 2, 8, 0, 1, 1, scoring, True, 1.0, 0, False))
        ops.dispatch(x, x, 4, x)
        ops.grouped_matmul(x, x, x)
        ops.grouped_matmul_int32(x, x, x)
        ops.grouped_quant_matmul(x, x, x, x, x, torch.bfloat16)
        ops.combine(x, x, x)
    assert calls.keys() == vars(right).keys()
    return calls


def schemas(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Declarations in the wheel's libraries by operator."""
    found: dict[str, list[str]] = {}
    for name in wheel.namelist():
        if name.endswith(".so") and "/lib/" in name:
            for text in re.findall(rb"(_?npu_[a-z0-9_]+)(\([^\0]{10,4000}?\) -> [^\0]{2,200})\0", wheel.read(name)):
                found.setdefault(text[0].decode(), []).append(text[1].decode())
    return found


def test_every_call_is_declared_with_its_keywords(wheel: zipfile.ZipFile) -> None:
    declared = schemas(wheel)
    for operator, keywords in keywords_of_calls().items():
        assert operator in declared, operator
        names = [set(re.findall(r"(\w+)(?==|,|\))", text)) for text in declared[operator]]
        assert any(keywords <= known for known in names), (operator, keywords, declared[operator])


def test_the_private_names_are_there(wheel: zipfile.ZipFile) -> None:
    for path, names in PRIVATE.items():
        text = wheel.read(path).decode()
        assert [name for name in names if name not in text] == [], path
