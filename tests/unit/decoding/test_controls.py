"""What the study compares lookahead with decides as it says."""

from __future__ import annotations

from typing import Any

from test_core import HashedEngine

from common.config import DecodeConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests

PROMPTS = [tuple(range(10, 20 + n)) for n in range(3)]


def decoded(**settings: Any) -> list[Completion]:
    decode = DecodeConfig(block_size=8, max_new_tokens=32, skip_threshold=0.8, **settings)
    scheduler = Scheduler(decode, mask_token_id=5, eos_token_id=6, num_slots=len(PROMPTS))
    requests = (GenerationRequest(str(n), prompt) for n, prompt in enumerate(PROMPTS))
    found = [done for done in decode_requests(requests, scheduler, HashedEngine()) if isinstance(done, Completion)]
    assert len(found) == len(PROMPTS)
    return sorted(found, key=lambda done: done.id)


def test_an_anchor_that_always_wins_gives_the_tokens_of_no_lookahead() -> None:
    """The same rows as lookahead's, and nothing of them used."""
    plain, control = decoded(num_lookahead=0), decoded(num_lookahead=3, branch_score="anchor")
    for one, other in zip(plain, control, strict=True):
        assert one.canvas_token_ids == other.canvas_token_ids
        assert other.num_rows > one.num_rows == one.num_forwards == other.num_forwards


def test_a_lookahead_that_always_wins_wins_wherever_there_is_one() -> None:
    for done in decoded(num_lookahead=1, branch_score="lookahead", spawn_rule="random"):
        num_with_lookahead = done.num_rows - done.num_forwards
        assert done.num_lookahead_wins == num_with_lookahead > 0
