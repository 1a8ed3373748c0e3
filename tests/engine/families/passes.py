"""The first deciding pass of a published trace, as one uncached pass of an engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from common.checkpoint import ModelConfig
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import RowField, Sampling, StepPlan
from common.platforms import build_engine
from tests.conftest import GOLDEN

FAMILIES = GOLDEN.parent / "golden_families"
TRACES = [
    "llada/01_plain_static", "llada/03_nocache_threshold", "sdar/01_dynamic_block4", "sdar/02_dynamic_block8",
    "llada2/01_hf20_threshold", "llada2/08_sglang_low_confidence_short", "fastdllm_v2/01_block32_sub8",
    "fastdllm_v2/03_short_prompt_blockcache", "llada2_2/01_sglang_indel", "llada2_2/06_levenshtein",
]  # fmt: skip
EVERYTHING_MAY_BE_PREDICTED = -1  # the published confidences are those of the whole vocabulary, the mask included


def read(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((FAMILIES / f"{name}.json").read_text())
    return {**trace, "folder": FAMILIES / name.split("/")[0] / trace["model"]}


def engine_of(profile: DeviceProfile, trace: dict[str, Any], **settings: Any) -> Any:
    decode = DecodeConfig(mask_token_id=trace["decode"]["mask_id"], num_lookahead=0, **settings)
    return build_engine(profile, RunConfig(model=str(trace["folder"]), decode=decode, max_num_requests=1))


def first_pass(trace: dict[str, Any], config: ModelConfig) -> StepPlan:
    """Everything up to the end of the first window that is decided from, in one row."""
    settings, end = trace["decode"], first_step(trace)["window"][1]
    tokens = (trace["prompt"] + [settings["mask_id"]] * end)[:end]
    position = np.arange(end)
    horizon = np.full(end, end)
    if config.block_origin == "zero":
        size = settings.get("block_length") or settings["block_size"]
        horizon = (position // size + 1) * size
    row_fields_8R = np.zeros((len(RowField), 1), dtype=np.int64)
    row_fields_8R[[RowField.NUM_ENTRIES, RowField.NUM_KEYS]] = end
    return StepPlan(
        entries_3T=np.stack((tokens, position, horizon)),
        is_read_T=np.ones(end, dtype=np.bool_),
        row_fields_8R=row_fields_8R,
        request_R=np.zeros(1, dtype=np.int64),
        commits=(),
        sampling=Sampling("default", EVERYTHING_MAY_BE_PREDICTED),
        commits_locally=config.block_origin == "zero",
    )


def first_step(trace: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = next(step for step in trace["steps"] if step["kind"] != "prefill")
    return step
