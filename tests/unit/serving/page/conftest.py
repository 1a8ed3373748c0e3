"""A trace of a scripted model, and one browser for all tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from common.config import DecodeConfig
from common.decoding import ModelFacts
from common.serving import DenoiseEvents
from tests.unit.decoding.test_block_strategies import decoded_at_random
from tests.unit.decoding.test_scheduler import run

if TYPE_CHECKING:
    from tests.unit.serving.page.browser import Page

# Texts of the tokens, by id modulo their number: what a page must not take for markup, and what cannot be seen.
TEXTS = (" the", " cat", "</script>", "<b>x</b>", " ", "\n", "ü", " internationalisation", "&amp;", "7")


def text_of(ids: Sequence[int]) -> str:
    return "".join(TEXTS[token % len(TEXTS)] for token in ids)


@pytest.fixture(scope="session")
def trace() -> dict[str, Any]:
    """The trace of a scripted model: 48 positions in blocks of 8."""
    decode = DecodeConfig(num_lookahead=3, block_size=8, max_new_tokens=48, skip_threshold=0.8, stop_at_eos=False)
    _, (completion,), records = run(decode, seed=3)
    told = DenoiseEvents(completion.prompt_length, decode, text_of)
    events = [told.of(record) for record in records]
    events[-1]["finished"] = completion.finish_reason
    return {
        "model": "scripted",
        "profile": "test",
        "prompt": "What <i>is</i> it?",
        "settings": {"strategy": "d2f", "num_lookahead": 3, "block_size": 8, "sampling_strategy": "neg_entropy"},
        "answer": {"text": text_of(completion.token_ids), "length": len(completion.token_ids)},
        "num_lookahead_wins": completion.num_lookahead_wins,
        "seconds": [0.01 * (number + 1) for number in range(len(events))],
        "events": events,
    }


@pytest.fixture(scope="session")
def edited_trace(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace of a model whose blocks of 4 are counted from position 0: the prompt has 3 positions of the first."""
    settings = {"strategy": "block_diffusion", "block_size": 4, "max_new_tokens": 17, "skip_threshold": 0.6}
    edits = {"name": "block_diffusion", "edit_threshold": 0.5}
    decode = DecodeConfig.model_validate({**settings, "eos_token_id": -1, "strategy": edits})
    decoded = decoded_at_random(decode, ModelFacts(0), 1, [7])
    told = DenoiseEvents(7, decode, text_of)
    events = [told.of(record) for record in decoded.records]
    events[-1]["finished"] = decoded.completions["0"].finish_reason
    tokens = decoded.completions["0"].token_ids
    return {
        **trace,
        "settings": settings,
        "answer": {"text": text_of(tokens), "length": len(tokens)},
        "seconds": [0.01 * (number + 1) for number in range(len(events))],
        "events": events,
    }


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from tests.unit.serving.page.browser import browsing  # here: it skips where selenium is missing

    with browsing(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """Nothing goes wrong unseen in it."""
    yield browser
    browser.require_no_errors()
