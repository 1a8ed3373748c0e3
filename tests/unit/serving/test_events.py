"""What a page draws from the events is what was decoded, and each is one line on the wire."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from common.config import DecodeConfig, FastDllmV2
from common.decoding import ModelFacts
from common.serving import DenoiseEvents
from common.serving.http.responses.sse import event
from common.serving.messages import Ended
from tests.unit.decoding.test_block_strategies import EDIT_IDS, EOS, decoded_at_random
from tests.unit.decoding.test_scheduler import run


def test_the_end_of_a_request_says_what_its_completion_does() -> None:
    _, (completion,), _ = run(DecodeConfig(num_lookahead=3, block_size=4, max_new_tokens=16), 0)
    completion = replace(completion, num_cached_tokens=3, option_logprobs=(-1.0, -2.0))
    ended = Ended.of(completion)
    shared = {field.name for field in fields(completion)} & set(Ended._fields)
    assert {"num_cached_tokens", "option_logprobs", "step_map", "logprobs", "tokens_per_step"} < shared
    assert {name: getattr(ended, name) for name in shared} == {name: getattr(completion, name) for name in shared}
    assert (ended.num_tokens, ended.prefill_s) == (len(completion.token_ids), completion.first_step_s)


@pytest.mark.parametrize("strategy", ["d2f", "fast_dllm", "vanilla"])
@pytest.mark.parametrize("seed", range(3))
def test_the_events_of_a_request_draw_its_canvas(strategy: str, seed: int) -> None:
    decode = DecodeConfig(strategy=strategy, num_lookahead=3, block_size=4, max_new_tokens=16, skip_threshold=0.6)
    _, (completion,), records = run(decode, seed)
    told = DenoiseEvents(completion.prompt_length, decode, lambda ids: f"<{ids[0]}>")
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


@pytest.mark.parametrize("strategy", ["block_diffusion", "fast_dllm_v2"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_from_position_0_are_drawn_with_their_edits(strategy: str, seed: int) -> None:
    is_edited = strategy == "block_diffusion"
    own = {"name": strategy, **({"edit_threshold": 0.5} if is_edited else {})}
    decode = DecodeConfig.model_validate(
        {"strategy": own, "block_size": 4, "max_new_tokens": 14, "skip_threshold": 0.6, "eos_token_id": -1}
    )
    decoded = decoded_at_random(decode, ModelFacts(0 if is_edited else 1), seed, [8])
    told = DenoiseEvents(8, decode, lambda ids: f"<{ids[0]}>")
    drawn: dict[int, int] = {}
    num_predicted = 0
    for record in decoded.records:
        event = told.of(record)
        drawn |= {position: token for position, token, _, _ in event["filled"]}
        drawn |= {position: token for position, token, _, _ in event["edited"]}
        assert (event["block_start"], event["block_size"]) == (8, 4)
        num_predicted += len(event["predicted"])
        for position, token, text, probability in event["predicted"]:
            assert position not in drawn and text == f"<{token}>" and 0 <= probability <= 1
            assert (token, probability) == record.candidates[position][:2]
        edits = [one.confidence for place, one in record.candidates.items() if place in record.edited]
        assert [confidence for *_, confidence in event["edited"]] == edits
        assert event["commit_length"] == (0 if record.is_tentative else record.commit_length)
        assert 8 + event["canvas_length"] > max(drawn, default=0) and event["final_length"] <= event["canvas_length"]
    assert tuple(drawn[8 + place] for place in range(14)) == decoded.completions["0"].canvas_token_ids
    assert is_edited == any(record.edited for record in decoded.records)
    assert num_predicted > 0


@pytest.mark.parametrize("num_lookahead", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_revised_are_drawn_with_what_moved(seed: int, num_lookahead: int) -> None:
    own = {"name": "levenshtein", "edit_threshold": 0.6, "max_post_edit_steps": 3}
    decode = DecodeConfig.model_validate(
        {"strategy": own, "block_size": 4, "max_new_tokens": 14, "skip_threshold": 0.6, "num_lookahead": num_lookahead}
    )
    decoded = decoded_at_random(decode, ModelFacts(0, edit_ids=EDIT_IDS), seed, [6])
    told, drawn, seen = DenoiseEvents(6, decode, lambda ids: f"<{ids[0]}>"), dict[int, int](), set[str]()
    for record in decoded.records:
        event = told.of(record)
        made = record.revision
        assert made is not None and not set(drawn) & {position for position, *_ in event["filled"]}
        assert {position for position, *_ in event["edited"]} | set(event["masked"]) <= set(drawn)
        for position, token, _, _ in (*event["filled"], *event["edited"]):
            drawn[position] = token
        for position in event["masked"]:
            del drawn[position]
        end = record.start + record.window_lengths[-1]
        after = dict(zip(range(end - 4, end), made.after, strict=True))
        assert {at: token for at, token in after.items() if at >= 6 and at not in made.masks} == {
            at: token for at, token in drawn.items() if at >= end - 4
        }
        assert (event["deleted"], event["inserted"]) == (list(made.deleted), list(made.inserted))
        seen |= {what for what in ("masked", "deleted", "inserted", "edited") if event[what]}
        json.dumps(event, allow_nan=False)
    assert (
        tuple(drawn[6 + at] for at in range(14)) == decoded.completions["0"].canvas_token_ids or EOS in drawn.values()
    )
    assert event["final_length"] == len(drawn)
    assert "masked" in seen and seen & {"deleted", "inserted"}


@pytest.mark.parametrize(
    ("strategy", "expected"), [("d2f", (10, 4)), ("vanilla", (10, 16)), ("block_diffusion", (8, 4))]
)
def test_events_say_where_blocks_begin(strategy: str, expected: tuple[int, int]) -> None:
    decode = DecodeConfig.model_validate({"strategy": strategy, "block_size": 4, "max_new_tokens": 16})
    record = decoded_at_random(decode, ModelFacts(0), 0, [10]).records[0]
    event = DenoiseEvents(10, decode, str).of(record)
    assert (event["block_start"], event["block_size"]) == expected


def test_what_sub_blocks_write_over_later_is_not_told_as_final() -> None:
    strategy = FastDllmV2(cache="dual", sub_block_size=2)
    decode = DecodeConfig(strategy=strategy, block_size=4, max_new_tokens=16, eos_token_id=-1)
    records = decoded_at_random(decode, ModelFacts(1), 0, [8]).records
    told = DenoiseEvents(8, decode, str)
    assert any(record.is_tentative for record in records)
    assert sum(told.of(record)["commit_length"] for record in records) == 8 + 12, "the last block's is not needed"


def test_what_is_given_is_told_once_and_counts_as_final() -> None:
    decode = DecodeConfig(strategy="vanilla", num_lookahead=0, block_size=4, max_new_tokens=8, skip_threshold=0.6)
    _, (completion,), records = run(decode, 0)
    begin = completion.prompt_length
    told = DenoiseEvents(begin, decode, lambda ids: f"<{ids[0]}>", {begin: 5, begin + 3: 6})
    first, *others = [told.of(record) for record in records]
    assert first["given"] == [[begin, 5, "<5>"], [begin + 3, 6, "<6>"]] and first["final_length"] >= 1
    assert not any("given" in event for event in others)


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x1c", "\x85", "\u2028", "\u2029"])
def test_an_event_is_one_line_to_any_reader(end: str) -> None:
    line, empty = event({"text": f"é{end}😀"}).splitlines()
    assert not empty and json.loads(line.removeprefix("data: ")) == {"text": f"é{end}😀"}
