"""Static shapes of the Ascend engine on the CPU: padded tokens, virtual rows and reads change no prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.decoding import ReleaseMemory, ResumeMemory, carry_out
from common.runtime import PagePool
from graphs.runner import Replay
from lopa_ascend.assemble import assemble
from lopa_ascend.engine import AscendEngine, Graphs
from lopa_ascend.kv import PageBook
from lopa_ascend.shapes import Shapes
from lopa_ascend.steps import FlatStep, filler, pad
from tests.engine.lopa_ascend.test_ascend_engine import PROMPTS, causal, decode_all, profile, run_of

pytestmark = pytest.mark.slow


class CallAgain:
    """A capture for the CPU: replaying is calling, on the same static buffers."""

    lengths: dict[str, list[int]]

    def __call__(self, work: Callable[[], None]) -> Replay:
        return work

    def allocated_bytes(self) -> int:
        return 0


def static_engine(num_requests: int, **settings: Any) -> AscendEngine:
    graphs = Graphs(Shapes.of((), (), 48), CallAgain())
    return assemble(profile(), run_of(causal(**settings), num_requests), graphs=graphs)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"shift_row": "fresh", "num_lookahead": 7, "block_size": 8}, id="fresh"),
        pytest.param({"temperature": 0.7, "top_p": 0.9}, id="sampled", marks=pytest.mark.slow),
    ],
)
def test_padded_passes_decode_the_same_tokens(settings: dict[str, Any]) -> None:
    decode = causal(**settings)
    engine = static_engine(3, **settings)
    assert decode_all(engine, decode, PROMPTS[:4]) == decode_all(
        assemble(profile(), run_of(decode, 3)), decode, PROMPTS[:4]
    )
    assert engine.layers.num_captured > 3
    assert engine.head.num_captured > 3


def test_a_step_beyond_the_largest_shape_runs_as_it_is() -> None:
    graphs = Graphs(Shapes.of((64, 128), (4, 8), 48), CallAgain())
    engine = assemble(profile(), run_of(causal(), 1), graphs=graphs)
    wanted = assemble(profile(), run_of(causal(), 1))
    assert decode_all(engine, causal(), PROMPTS[4:]) == decode_all(wanted, causal(), PROMPTS[4:])
    assert engine.layers.num_captured <= 4


def test_no_more_shapes_are_captured_than_allowed() -> None:
    decode = causal(shift_row="fresh")
    engine = assemble(profile(), run_of(decode, 3), graphs=Graphs(Shapes.of((), (), 6), CallAgain()))
    wanted = assemble(profile(), run_of(decode, 3))
    assert decode_all(engine, decode, PROMPTS[:4]) == decode_all(wanted, decode, PROMPTS[:4])
    assert (engine.layers.num_captured, engine.head.num_captured) == (4, 2)


def test_what_was_captured_is_captured_again_once_all_memory_is_there() -> None:
    engine, decode = static_engine(2), causal()
    before, num_captured = decode_all(engine, decode, PROMPTS[:2]), engine.layers.num_captured
    assert carry_out(engine, ReleaseMemory()) is carry_out(engine, ResumeMemory(("weights",))) is None
    assert engine.layers.num_captured == engine.head.num_captured == 0
    assert carry_out(engine, ResumeMemory(("kv_cache",))) is None
    assert 0 < engine.layers.num_captured <= num_captured
    assert decode_all(engine, decode, PROMPTS[:2]) == before


def check_padding(flat: FlatStep, num_tokens: int, num_rows: int) -> None:
    assert flat.num_tokens == flat.query_ends[-1] == num_tokens
    assert len(flat.query_ends) == len(flat.kv_lengths) == len(flat.table_VP) == num_rows
    assert (np.diff([0, *flat.query_ends]) > 0).all(), "no virtual row is empty"
    assert len(set(flat.entries_3T[2].tolist())) == num_tokens, "slots are unique"


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(17, 2), (300, 3), (200, 127), (1023, 1), (5, 5)])
def test_every_padded_row_has_a_token(num_tokens: int, num_rows: int) -> None:
    shapes, book = Shapes.of((), (), 48), PageBook(PagePool(30))
    shape = shapes.shape(num_tokens, num_rows)
    if shape is None:
        assert num_tokens + 4 > shapes.most_tokens
        return
    flat = filler(num_tokens, num_rows, 2, 99, book)
    check_padding(flat, num_tokens, num_rows)
    padded = pad(flat, *shape, book)
    check_padding(padded, *shape)
    assert padded.num_dummies - flat.num_dummies <= shapes.most_padding
    assert padded.kv_lengths[num_rows:] == [1] * (shape[1] - num_rows)
    assert not padded.table_VP[num_rows:].any()


def test_shapes_waste_little() -> None:
    shapes = Shapes.of((), (), 48)
    assert len(shapes.tokens) < 24 and len(shapes.heads) < shapes.most_heads
    for num_tokens in range(16, 900):
        shape = shapes.shape(num_tokens, 3)
        assert shape is not None and 1 + shape[0] / 235 <= 1.2 * (1 + num_tokens / 235)


def test_a_profile_fixes_the_shapes() -> None:
    shapes = Shapes.of((256, 64), (16,), 48)
    assert shapes.tokens == (64, 256) and shapes.rows == (16,)
    assert shapes.shape(60, 5) == (256, 16)
    assert shapes.shape(60, 16) is None


@pytest.mark.parametrize("num_lookahead", [0, 7])
def test_most_steps_find_their_shape_captured_before_the_first_request(num_lookahead: int) -> None:
    """The rest are prompts' first passes and steps of several requests."""
    settings = {"shift_row": "fresh", "num_lookahead": num_lookahead}
    engine = static_engine(1, **settings)
    ahead, found = set(engine.layers._entries), []
    run_layers = engine.layers.entry
    engine.layers.entry = lambda key, **how: found.append(key in ahead) or run_layers(key, **how)  # type: ignore
    decode_all(engine, causal(**settings), PROMPTS[:3])
    share = sum(found) / len(found)
    print(f"k={num_lookahead}: {len(ahead)} shapes ahead serve {share:.0%} of {len(found)} steps")
    assert share > 0.5
