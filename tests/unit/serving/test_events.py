"""What a page draws from the events is what was decoded."""

from __future__ import annotations

import json

import pytest

from common.config import DecodeConfig
from common.serving import DenoiseEvents
from tests.unit.decoding.test_scheduler import run


@pytest.mark.parametrize("strategy", ["d2f", "fast_dllm", "vanilla"])
@pytest.mark.parametrize("seed", range(3))
def test_the_events_of_a_request_draw_its_canvas(strategy: str, seed: int) -> None:
    decode = DecodeConfig(strategy=strategy, num_lookahead=3, block_size=4, max_new_tokens=16, skip_threshold=0.6)
    _, (completion,), records = run(decode, seed)
    told = DenoiseEvents(completion.prompt_length, lambda ids: f"<{ids[0]}>")
    events = [told.of(record) for record in records]
    drawn = {position: token for event in events for position, token, _, _ in event["filled"]}
    masked = records and set(range(len(completion.canvas_token_ids))) - {p - completion.prompt_length for p in drawn}
    canvas = {place + completion.prompt_length: token for place, token in enumerate(completion.canvas_token_ids)}
    assert drawn == {place: token for place, token in canvas.items() if place - completion.prompt_length not in masked}
    assert [event["pass"] for event in events] == list(range(1, completion.num_forwards + 1))
    assert events[-1]["canvas_length"] == len(completion.canvas_token_ids)
    assert sum(len(event["filled"]) for event in events) == completion.num_canvas_tokens
    finals = [event["final_length"] for event in events]
    assert finals == sorted(finals) and finals[-1] >= len(completion.token_ids)
    assert sum(event["winner"] < len(event["branch_scores"]) - 1 for event in events) == completion.num_lookahead_wins
    json.dumps(events, allow_nan=False)  # what a browser can read
