"""What may be called in several ways is called in one that is right here: the write of KV, and attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sim.ranks import run_ranks
from test_npu_selftest import SMALL, profile, with_wrong

from common.errors import ConfigError, MissingCapability
from common.processes import Mesh
from lopa_ascend.ops import AttentionForm, Ops, fused_kv, npu_ops, reference_ops
from lopa_ascend.selftest import Sizes, attention_form, choose, examine, fuse, settle
from lopa_ascend.selftest.choose import forms_of
from lopa_ascend.selftest.grades import Grade

V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
CPU = torch.device("cpu")
SECONDS = {(1, 3): 4.0, (2, 3): 3.0, (1, 4): 2.0, (2, 4): 1.0}


def settled(ops: Ops, sizes: Sizes = SMALL, device: torch.device = CPU, **settings: Any) -> Ops:
    return settle(ops, sizes, device, Mesh(), profile(**settings))


def average(result: Any) -> Any:
    return result[0].mean(0, keepdim=True).expand_as(result[0]), result[1]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form takes the seconds of the table."""

    def seconds(work: Callable[[], Any], device: torch.device) -> float:
        assert work().isfinite().all()
        return SECONDS[tried.pop(0)]

    tried: list[AttentionForm] = []
    with_attention = Ops.with_attention

    def noted(ops: Ops, form: AttentionForm) -> Ops:
        tried[:] = [form]
        return with_attention(ops, form)

    monkeypatch.setattr(choose, "median_seconds", seconds)
    monkeypatch.setattr(Ops, "with_attention", noted)


@pytest.mark.usefixtures("times")
def test_the_fastest_form_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert settled(reference_ops(), npu={"attention": "auto"}).attention == (2, 4)
    assert "v1 over 3-D pages right (equal, 4000.000 ms)" in caplog.text
    assert "taken is v2 over 4-D pages" in caplog.text
    two_heads = Sizes(width=256, num_heads=2, num_kv_heads=2, inner=128)
    assert settled(reference_ops(), two_heads, npu={"attention": "auto"}).attention == (2, 3)


@pytest.mark.usefixtures("times")
def test_no_form_that_is_wrong_or_absent_is_taken() -> None:
    assert settled(with_wrong(V2, average), npu={"attention": "auto"}).attention == (1, 4)
    without = reference_ops()
    del without._kernels.npu_fused_infer_attention_score_v2
    assert settled(without, npu={"attention": "auto"}).attention == (1, 4)
    both = with_wrong(V2, average)
    setattr(both._kernels, V1, lambda *_, **__: (torch.full((48, 2, 128), torch.nan).bfloat16(), None))
    with pytest.raises(MissingCapability, match="rank 0: attention is wrong in every form here: v1 over 3-D pages"):
        settled(both, npu={"attention": "auto"})


def test_the_profile_says_which_form() -> None:
    assert attention_form(profile(), 1) == attention_form(profile(npu={"attention": "auto"}), 1) == (1, 3)
    assert attention_form(profile(npu={"attention": "v2", "kv_view": "4d"}), 1) == (2, 4)
    with pytest.raises(ConfigError, match="kv_view 4d needs one KV head a process, and each has 2"):
        attention_form(profile(npu={"kv_view": "4d"}), 2)


def test_every_form_is_tried_and_only_the_called_one_stops() -> None:
    found = list(examine(with_wrong(V2, average), SMALL, CPU, Mesh(), "eager", ("FLOAT",)))
    told = {one.name: one for one in found if one.name.startswith("attention ")}
    assert [name.removeprefix("attention ") for name in told] == [str(form) for form in forms_of(SMALL)]
    assert {name: one.is_useless for name, one in told.items()} == {name: " v2 " in name for name in told}
    assert not any(one.stops for one in found)
    assert " ms" in told["attention v1 over 4-D pages"].detail


def _older_release() -> Ops:
    """Return an older release's operators, without cache_mode."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unknown keyword argument 'cache_mode'")

    ops = reference_ops()
    ops._kernels.npu_scatter_pa_kv_cache = fails
    return ops


def test_kv_is_written_by_the_older_operator_where_the_newer_one_fails() -> None:
    assert settled(_older_release()).writes_kv_by_atb
    assert not settled(reference_ops()).writes_kv_by_atb
    assert not settled(_older_release(), npu={"selftest": "off"}).writes_kv_by_atb
    neither = _older_release()
    del neither._kernels._npu_reshape_and_cache
    assert not settled(neither).writes_kv_by_atb  # and the self-test names write_kv


def test_an_older_operator_without_nnal_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """torch-npu loads ATB when it is first called, and raises OSError without it."""

    def without_nnal(*_: Any, **__: Any) -> None:
        raise OSError(None, "Please check that the nnal package is installed.")

    ops = _older_release()
    ops._kernels._npu_reshape_and_cache = without_nnal
    assert not settled(ops).writes_kv_by_atb
    assert "'cache_mode') nor by _npu_reshape_and_cache ([Errno None] Please check that the nnal package" in caplog.text
    wrong = {found.name for found in examine(ops, SMALL, CPU, Mesh(), "eager", ("FLOAT",)) if found.stops}
    assert wrong == {"write_kv"}


def test_a_call_that_does_not_bind_or_is_absent_is_wrong() -> None:
    """A release may lack an operator, or refuse an option in Python: neither ends the other checks."""

    def refuses(*_: Any, **__: Any) -> None:
        raise TypeError("npu_swiglu() got an unexpected keyword argument 'dim'")

    ops = reference_ops()
    ops._kernels.npu_swiglu = refuses
    del ops._kernels.npu_rms_norm
    wrong = {found.name for found in examine(ops, SMALL, CPU, Mesh(), "eager", ("FLOAT",)) if found.stops}
    assert wrong == {"swiglu", "rms_norm"}


@pytest.mark.parametrize("mode", ["npugraph_ex", "torchair"])
def test_the_older_operator_is_not_compiled(mode: str) -> None:
    with pytest.raises(MissingCapability, match=f"graph.mode {mode} cannot keep in place: set graph.mode to npugraph"):
        settled(_older_release(), graph={"mode": mode})
    assert settled(_older_release(), graph={"mode": "eager"}).writes_kv_by_atb


class Stopwatch:
    """Seconds of the fused form and of the forms apart, in turns; notes how often each was captured."""

    def __init__(self, fused: float, apart: float) -> None:
        self._seconds = [fused, apart]

    def __call__(self, work: Callable[[], Any], device: torch.device) -> float:
        work()
        self._seconds.append(self._seconds.pop(0))
        return self._seconds[-1]


@pytest.mark.parametrize(("fused", "is_taken"), [(1.0, True), (2.0, False), (3.0, False)])
@pytest.mark.parametrize("has_triton", [True, False])
def test_an_operator_that_stands_for_several_is_taken_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fused: float, is_taken: bool, has_triton: bool
) -> None:
    monkeypatch.setattr(fuse, "median_seconds", Stopwatch(fused, 2.0))
    monkeypatch.setattr(fuse, "find_spec", lambda name: object() if has_triton else None)
    monkeypatch.setattr(fused_kv, "rotate_and_write", _kernel_s_twin)
    with caplog.at_level(logging.INFO):
        ops = settled(reference_ops(), quantization="w8a8")
    assert (ops.fuses_gate_up, ops.fuses_kv_write) == (is_taken, is_taken and has_triton)
    word = "taken" if is_taken else "left"
    assert f"gate and up in one operator: right (equal), {fused * 100:.3f} ms instead of 200.000 at 48" in caplog.text
    assert caplog.text.count(f" tokens, {word}") == 1 + has_triton


def _kernel_s_twin(qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, slot: Any, num_heads: int) -> Any:
    return reference_ops().rotate_and_write(qkv.clone(), cos, sin, num_heads, keys, values, slot)


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        (SMALL, {"quantization": "w8a8", "graph": {"mode": "npugraph_ex"}}),
        (SMALL, {"quantization": "w8a8", "npu": {"selftest": "off"}}),
        (SMALL, {}),
        (Sizes(width=256, num_heads=2, num_kv_heads=1, inner=5121), {"quantization": "w8a8"}),
    ],
    ids=["compiled", "no self-test", "bf16", "too wide"],
)
def test_gate_and_up_stay_apart_where_one_operator_cannot_be(
    monkeypatch: pytest.MonkeyPatch, sizes: Sizes, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(fuse, "median_seconds", Stopwatch(1.0, 2.0))
    assert not settled(reference_ops(), sizes, **settings).fuses_gate_up


def test_one_operator_that_is_wrong_or_absent_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fuse, "median_seconds", Stopwatch(1.0, 2.0))
    name = "npu_grouped_matmul_swiglu_quant_v2"
    absent = reference_ops()
    delattr(absent._kernels, name)
    with caplog.at_level(logging.INFO):
        for ops in (with_wrong(name, lambda result: (result[0].flip(1), result[1])), absent):
            assert not settled(ops, quantization="w8a8").fuses_gate_up
    assert caplog.text.count("gate and up in one operator: not taken, wrong on some rank (here: ") == 2


@pytest.mark.sim
def test_both_forms_of_gate_and_up_are_timed_in_a_graph(npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "median_seconds", Stopwatch(1.0, 2.0))
    ops = settled(npu_ops(), SMALL, torch.device("npu", 0), quantization="w8a8", graph={"mode": "npugraph"})
    assert ops.fuses_gate_up
    # Once beside its twin, then ten times before the capture and ten times in its replay.
    assert npu.counts["npu::npu_grouped_matmul_swiglu_quant_v2"] == 21
    assert npu.counts["npu::npu_dequant_swiglu_quant"] == 20


@pytest.mark.sim
def test_torch_npu_binds_every_form_and_both_writes(npu: Any) -> None:
    device = torch.device("npu", 0)
    assert settled(npu_ops(), SMALL, device, npu={"attention": "auto"}).attention in forms_of(SMALL)
    assert {f"npu::{V1}", f"npu::{V2}"} <= npu.counts.keys()
    npu.counts.clear()
    assert choose._kv_written(npu_ops().with_kv_writes_by_atb(), SMALL, device).grade is Grade.SAME
    assert npu.counts["atb::_npu_reshape_and_cache"] == 1


@pytest.mark.sim
@pytest.mark.usefixtures("torch_npu")
def test_all_ranks_take_the_form_that_is_right_everywhere() -> None:
    """Each of two ranks has another fastest form, and another version is wrong on the second."""
    assert run_ranks("npu_ranks:settled_form", world_size=2) == [[1, 4], [1, 4]]
