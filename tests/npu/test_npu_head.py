"""The head on simulated devices: how many kernels it is, how many bytes they move, and that sampled ones are replayed,
with the tokens of any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from head_ranks import CUTS, NUM_READS
from sim.ranks import run_ranks
from test_npu_engine import DREAM_7B_TP4, causal, decode_all, engine_on

from common.config import DeviceProfile, RunConfig
from common.decoding import Sampling
from lopa_ascend.assemble import assemble
from lopa_ascend.engine import AscendEngine
from tests.soaking import soaking

pytestmark = pytest.mark.sim
VOCAB, WIDTH, READS = 38016, 3584, 128  # a rank of TP4
# Kernels of a captured head, its product and the copy of its result included; passes over the float32 logits.
KERNELS = {"default": 19, "margin": 26, "neg_entropy": 25}
PASSES = {"default": 8.1, "margin": 9.1, "neg_entropy": 12.1}


class Cost(NamedTuple):
    """passes: bytes beside the head's weight, as reads or writes of all its float32 logits."""

    kernels: int
    passes: float


@pytest.fixture
def engine(npu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AscendEngine:
    monkeypatch.setattr("lopa_ascend.assemble.warm_up", lambda *_: None)
    config = {**DREAM_7B_TP4, "num_hidden_layers": 1, "vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps(config))
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": "lopa_ascend", "device": "npu", "max_model_len": 256,
            "graph": {"mode": "npugraph"}, "npu": {"selftest": "off"},
        }
    )  # fmt: skip
    return assemble(profile, RunConfig(model=str(tmp_path), load_format="dummy", decode=causal()))


def cost_of(npu: Any, engine: AscendEngine, sampling: Sampling) -> Cost:
    """Return the cost of a replay."""
    with torch.no_grad():
        key = engine.reads_key(READS, sampling)
        assert key.is_captured and key.num_reads == READS
        head = engine.head.entry(key)
        npu.counts.clear()
        npu.traffic.clear()
        head.run()
    moved = sum(call.total for call in npu.traffic) - VOCAB * WIDTH * 2
    return Cost(npu.counts.total(), moved / (READS * VOCAB * 4))


@pytest.mark.parametrize("strategy", ["default", "margin", "neg_entropy"])
def test_a_head_keeps_its_budget(npu: Any, engine: AscendEngine, strategy: Any) -> None:
    """A sampled one has at most twice the kernels of a greedy one."""
    greedy = cost_of(npu, engine, Sampling(strategy, 1000))
    sampled = cost_of(npu, engine, Sampling(strategy, 1000, is_sampled=True))
    cut = cost_of(npu, engine, Sampling(strategy, 1000, is_sampled=True, is_cut=True))
    for name, cost in (("greedy", greedy), ("sampled", sampled), ("top_p", cut)):
        print(f"{strategy}, {name}: {cost.kernels} kernels, {cost.passes:.2f} passes over the logits")
    assert greedy.kernels <= KERNELS[strategy] and greedy.passes <= PASSES[strategy]
    assert sampled.kernels <= 2 * greedy.kernels
    assert cut.kernels <= sampled.kernels + 34


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "top_k": 20}], ids=["all", "cut"])
def test_sampled_steps_are_replayed_and_give_the_tokens_of_the_ref_lane(settings: dict[str, Any]) -> None:
    decode = causal(temperature=0.7, **settings)
    engine = engine_on("npu", decode, None, "npugraph")
    kinds, reads_key = [], engine.reads_key

    def noted(*given: Any) -> Any:
        kinds.append(reads_key(*given))
        return kinds[-1]

    engine.reads_key = noted  # type: ignore[method-assign]
    found = decode_all(engine, decode)
    assert len(kinds) == engine.num_steps
    assert all(key.is_captured and key.sampling.is_sampled and key.sampling.is_cut == bool(settings) for key in kinds)
    assert found == decode_all(engine_on("cpu", decode, None), decode)
    assert found != decode_all(engine_on("cpu", causal(), None), causal())


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=soaking)])
def test_sampled_tokens_do_not_depend_on_the_mesh(world_size: int) -> None:
    """tp 1, 2, 4 and bp 1, 2 (both at their most on eight devices), from the same hidden states."""
    by_rank = run_ranks("head_ranks:sampled_tokens", world_size, timeout_s=60.0 * world_size)
    wanted = by_rank[0]["1 1"]
    assert len(by_rank[0]) == {4: 5, 8: 6}[world_size]
    assert all(tokens == wanted for found in by_rank for tokens in found.values())
    assert [len(tokens) for tokens in wanted] == [NUM_READS] * len(CUTS)
    assert len({tuple(tokens) for tokens in wanted}) == len(CUTS) and len(set(wanted[0])) > NUM_READS // 2
