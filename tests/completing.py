"""Prompts decoded together on an engine, as their model's folder says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.checkpoint import load_model_config
from common.config import DecodeConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.runtime import facts_of


def completions_of(
    engine: Any, model: Path, decode: DecodeConfig, prompts: Iterable[Any], **of_scheduler: Any
) -> dict[str, Completion]:
    """Return all completions by id, in the order of the prompts. prompts: token ids, which get their number for an id,
    or whole requests."""
    config, requests = load_model_config(model), []
    for number, prompt in enumerate(prompts):
        is_whole = isinstance(prompt, GenerationRequest)
        requests.append(prompt if is_whole else GenerationRequest(str(number), tuple(prompt)))
    scheduler = Scheduler(
        decode, mask_token_id=config.mask_of(decode.mask_token_id), eos_token_id=config.eos_token_id,
        num_slots=engine.capacity.num_slots, facts=facts_of(config), **of_scheduler,
    )  # fmt: skip
    found = {one.id: one for one in decode_requests(iter(requests), scheduler, engine)}
    assert all(isinstance(one, Completion) for one in found.values()), found
    return {request.id: found[request.id] for request in requests}  # type: ignore[misc]
