"""weight_prefetch_mb: the next weight comes into L2 on a second stream while an all-reduce is under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.processes import Mesh
from common.runtime import Collectives
from lopa_ascend.ops import OpRuleError, npu_ops, reference_ops, twins
from lopa_ascend.stages import AscendStages
from tests.distributed.ascend_launch import decoded, write_model

MESH, SETTINGS = (1, 1, 2), ["k=3 fresh"]
# Shapes of the next linear's weight on a rank of TP2 of ascend_launch.write_model, with heads of 128.
GATE_UP, QKV, HEAD = [96, 64], [1024, 64], [160, 64]


class Prefetched:
    """Ops that only note what is prefetched."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, int]] = []

    def prefetch_aside(self, weight: torch.Tensor, after: torch.Tensor, num_bytes: int) -> None:
        self.calls.append((weight, num_bytes))

    def join_prefetch(self, x: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(("tp_size", "cap", "wanted"), [(2, 100, 100), (2, 4096, 512), (2, 0, None), (1, 100, None)])
def test_no_more_is_prefetched_than_said_and_than_there_is(tp_size: int, cap: int, wanted: int | None) -> None:
    ops = Prefetched()
    stages = AscendStages(ops, Collectives(Mesh(tp_size=tp_size)), 1, 1.0, cap)  # type: ignore[arg-type]
    before, after = nn.Linear(8, 8), nn.Linear(8, 16)
    before.read_next = (after,)  # type: ignore[assignment]
    stages.all_reduce(stages.linear(torch.zeros(3, 8), before))
    assert ops.calls == ([] if wanted is None else [(after.weight, wanted)])


def test_the_ref_lane_checks_a_prefetch() -> None:
    with pytest.raises(OpRuleError, match="max_size is positive"):
        reference_ops().prefetch_aside(torch.zeros(4, 4), torch.zeros(1), 0)


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_it_runs_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    def noted(weight: torch.Tensor, dependency: torch.Tensor, max_size: int) -> None:
        streams.append(torch.npu.current_stream())

    monkeypatch.setattr(twins, "npu_prefetch", noted)
    weight, x = torch.zeros(8, 8).npu(), torch.zeros(4).npu()
    main = torch.npu.current_stream()
    ops = npu_ops()
    ops.prefetch_aside(weight, x, 64)
    ops.join_prefetch(x)
    assert len(streams) == 1 and streams[0] != main
    assert torch.npu.current_stream() == main


@pytest.fixture(scope="module")
def of_the_ref_lane(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model, and what two ranks decode with it."""
    folder = tmp_path_factory.mktemp("ref")
    model = write_model(folder)
    return model, decoded(model, folder / "ref", MESH, SETTINGS, dtype="bfloat16")


@pytest.mark.sim
@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("mode", ["npugraph_ex", pytest.param("torchair", marks=pytest.mark.slow)])
def test_every_all_reduce_has_the_next_weight_under_it(
    tmp_path: Path, of_the_ref_lane: tuple[Path, Any], mode: str
) -> None:
    """TP2, captured or as a GE graph, collectives inside: the ref lane's tokens, and before each all-reduce of a step
    the weight after it."""
    model, wanted = of_the_ref_lane
    graph, npu = {"mode": mode, "token_buckets": [176]}, {"row_buckets": [16], "weight_prefetch_mb": 1}
    options = {"device": "npu", "dtype": "bfloat16", "graph": graph, "npu": npu}
    assert decoded(model, tmp_path / mode, MESH, SETTINGS, **options) == wanted
    calls = json.loads((tmp_path / mode / "rank00.json").read_text())["calls"]
    step = calls[-8:]  # two layers
    assert ["prefetch" in op for op, *_ in step] == [True, False] * 4
    shapes = [GATE_UP, QKV, GATE_UP, HEAD]
    if mode == "torchair":  # whose weights lie the other way round
        shapes = [shape[::-1] for shape in shapes]
    found = [(arguments[0], arguments[2]) for op, *arguments in step if "prefetch" in op]
    assert found == [(f"bfloat16{shape}", str(shape[0] * shape[1] * 2)) for shape in shapes]
