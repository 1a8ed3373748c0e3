"""What variables of CANN and torch-npu do to a run: refused, or told when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import DeviceProfile, RunConfig, load_profile
from common.errors import ConfigError
from lopa_ascend.limits import check
from lopa_ascend.selftest.in_graphs import algorithm_of_sums
from lopa_ascend.variables import REFUSED, told_sums

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
RUN = RunConfig.model_validate({"model": "m", "decode": {"window_attention": "block_causal"}})
AIV = {"HCCL_OP_EXPANSION_MODE": "AIV"}


def profile(mode: str, **settings: Any) -> DeviceProfile:
    device = "cpu" if settings.get("device") == "cpu" else "npu"
    return DeviceProfile.model_validate(
        {"name": "p", "engine": "lopa_ascend", "device": device, "graph": {"mode": mode}, **settings}
    )


@pytest.mark.parametrize("mode", ["npugraph", "npugraph_ex"])
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_what_captured_graphs_cannot_work_with_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, refused: Any, mode: str
) -> None:
    monkeypatch.setenv(refused.name, refused.value)
    with pytest.raises(ConfigError) as found:
        check(profile(mode), RUN)
    assert str(found.value).startswith(f"{refused.name}={refused.value} ")
    assert str(found.value).endswith(f": set graph.mode to eager to look for a fault, or unset {refused.name}")
    for other in (profile("eager"), profile("torchair"), profile("eager", device="cpu")):
        check(other, RUN)
    monkeypatch.setenv(refused.name, "0")
    check(profile(mode), RUN)


def test_a_shipped_profile_sets_nothing_that_is_refused() -> None:
    shipped = [load_profile(path) for path in PROFILES.glob("ascend_*.yaml")]
    assert len(shipped) > 1
    assert not [(one.name, bad) for one in shipped for bad in REFUSED if one.environment.get(bad.name) == bad.value]


def test_shipped_profiles_sum_on_vector_cores_in_any_order() -> None:
    told = {
        one.name: told_sums(one.mesh.tensor_parallel_size, 3584, 2, one.environment)
        for one in map(load_profile, PROFILES.glob("ascend_*.yaml"))
        if one.device == "npu"
    }
    sentence = "all-reduces of steps of up to {} tokens run on vector cores, larger ones several times as long"
    assert told == {"ascend_910c_tp4_bp4": sentence.format(585), "ascend_910c_tp2_bp8": sentence.format(292)}


def test_the_cost_of_one_order_is_told() -> None:
    told = told_sums(4, 3584, 2, {**AIV, "HCCL_DETERMINISTIC": "true"})
    assert told.startswith("all-reduces of steps of up to 73 tokens run on vector cores, larger ones several times as")
    assert told.endswith(": HCCL_DETERMINISTIC is true, with false it were up to 585 tokens")
    assert told_sums(4, 3584, 2, {}).endswith("HCCL_OP_EXPANSION_MODE is unset")


def test_the_algorithm_is_what_hccl_s_log_says_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", str(tmp_path))
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert algorithm_of_sums() is None
    line = "[INFO] HCCL(7,python):2026-11-25 [all_reduce_operator.cc:1][7][SelectAlgfor91093] {} algName [{}].\n"
    for place, text in (
        ("run/plog/plog-7_1.log", line.format("allreduce SelectAlgfor91093", "AllReduceMeshAivFor91093Executor")),
        ("run/plog/plog-7_2.log", line.format("AllReduce SelectAlgfor91093 is", "AllReduceMeshAivExecutor")),
        ("run/plog/plog-7_3.log", line.format("AllGather SelectAlgfor91093 is", "AllGatherMesh")),
        ("run/plog/plog-77_1.log", line.format("allreduce SelectAlgfor91093", "OfAnother")),
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert algorithm_of_sums() == "AllReduceMeshAivExecutor"
