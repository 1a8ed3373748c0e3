"""The engine decodes as the published code of these families does, pass by pass; `fused` gives the same tokens in fewer
passes, and parity notices what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint import load_model_config
from common.config import BlockDiffusion, DecodeConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection, Scheduler, decode_requests
from common.evaluation.families.settings import settings_of
from common.evaluation.families.trace import FamilyTrace, read_family_trace
from common.evaluation.parity import cpu_profile, family_difference, replay_files
from common.platforms import build_engine
from common.runtime import facts_of

HERE = Path(__file__).parent
TRACES = sorted(HERE.glob("*/*.json"))
names = [f"{path.parent.name}-{path.stem}" for path in TRACES]


@pytest.mark.parametrize("path", TRACES, ids=names)
def test_every_pass_of_the_trace_is_reproduced(path: Path) -> None:
    assert family_difference(read_family_trace(path), path, cpu_profile()) is None


def decoded(path: Path, trace: FamilyTrace, decode: DecodeConfig) -> Completion:
    model = path.parent / trace.model
    config = load_model_config(model)
    engine = build_engine(cpu_profile(), RunConfig(model=str(model), decode=decode))
    try:
        scheduler = Scheduler(
            decode, mask_token_id=config.mask_of(decode.mask_token_id), eos_token_id=None, facts=facts_of(config)
        )
        request = GenerationRequest("0", tuple(trace.prompt))
        (completion,) = decode_requests(iter([request]), scheduler, engine)
    finally:
        engine.close()
    assert not isinstance(completion, Rejection)
    return completion


def commits_apart(decode: DecodeConfig) -> bool:
    return isinstance(decode.strategy, BlockDiffusion) and decode.strategy.commit == "separate"


SEPARATE = [path for path in TRACES if commits_apart(settings_of(read_family_trace(path)))]


@pytest.mark.parametrize("path", SEPARATE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_fused_commits_give_the_same_tokens_in_fewer_passes(path: Path) -> None:
    trace = read_family_trace(path)
    published = settings_of(trace)
    fused = published.changed({"strategy": {"commit": "fused", "cache": "prefix", "end_at": "token"}})
    separate, saving = decoded(path, trace, published), decoded(path, trace, fused)
    assert saving.token_ids == separate.token_ids
    if published.strategy.cached == "prefix":
        assert saving.num_forwards < separate.num_forwards
    else:
        assert saving.num_forwards <= separate.num_forwards


DECODE = json.loads((HERE / "llada" / "10_dual_threshold_june2025.json").read_text())["decode"]


def spoil(tree: dict[str, Any], what: str) -> None:
    step = next(step for step in tree["steps"] if step.get("filled") and step["candidates"])
    position = next(iter(step["candidates"]))
    if what == "window":
        step["window"][1] += 1
    elif what == "candidate":
        step["candidates"][position][0] += 1
    elif what == "probability":
        step["candidates"][position][1] += 0.002
    elif what == "fill":
        step["filled"] = {}
    elif what == "kv":
        next(step for step in tree["steps"] if step["kind"] == "commit")["kv_written"][1] += 1
    elif what == "steps":
        tree["num_forward_steps"] += 1
    elif what == "missing":
        del tree["steps"][-1]
    elif what == "token":
        tree["generated"][3] += 1
    elif what == "edit":
        next(step for step in tree["steps"] if step.get("edited"))["edited"] = {}
    elif what in ("deleted", "split", "escape", "original", "after"):
        next(step for step in tree["steps"] if step.get(what))[what].pop()
    elif what == "final":
        next(step for step in tree["steps"] if step.get("final"))["final"] = False
    elif what == "answer":
        tree["answer"][-1] += 1


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("sdar/08_dynamic_quota2", what) for what in ("window", "candidate", "probability", "fill")),
        *(("sdar/08_dynamic_quota2", what) for what in ("kv", "steps", "missing", "token")),
        ("llada2/06_hf21_editing_budget2", "edit"),
        *(("llada2_2/11_sglang_indel_loop", what) for what in ("candidate", "probability", "fill", "edit", "steps")),
        *(("llada2_2/11_sglang_indel_loop", what) for what in ("escape", "original", "after", "final", "answer")),
        *(("llada2_2/08_levenshtein_routing16", what) for what in ("deleted", "window")),
        ("llada2_2/01_sglang_indel", "split"),
    ],
)  # fmt: skip
def test_a_trace_that_differs_is_noticed(name: str, what: str) -> None:
    path = HERE / f"{name}.json"
    tree = json.loads(path.read_text())
    spoil(tree, what)
    assert family_difference(FamilyTrace.model_validate(tree), path, cpu_profile()) is not None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"decode": {"mask_id": 511}}, "none of mask_id is known"),
        ({"decode": {**DECODE, "steps": "a"}}, "make no settings"),
        ({"decode": {**DECODE, "block_length": 0}}, "make no settings"),
        ({"prompt": []}, "prompt"),
        ({"steps": [{"kind": "denoise"}]}, "window"),
        ({"source": {"function": "magic"}}, "decode.magic"),
    ],
)
def test_a_trace_that_makes_no_sense_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = HERE / "llada" / "10_dual_threshold_june2025.json"
    tree = json.loads(path.read_text())
    (tmp_path / "trace.json").write_text(json.dumps({**tree, "model": str(path.parent / tree["model"]), **changes}))
    assert replay_files([tmp_path / "trace.json"]) == 2
    assert problem in caplog.text and "Traceback" not in caplog.text
