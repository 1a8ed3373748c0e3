"""The sanity check's decoding: plain, complete, cut at the end of the text."""

from __future__ import annotations

import pytest
import torch
from demo_problems import CANVAS_TOKENS
from demo_training.check import decode_blockwise
from demo_training.model import Dream
from demo_training.recipe import TINY

EOS_ID, MASK_ID = 7, 9


@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_an_answer_never_holds_a_mask_or_an_end(threshold: float) -> None:
    torch.manual_seed(0)
    answers = decode_blockwise(Dream(TINY), [[1, 2, 3], [4, 5]], threshold, EOS_ID, MASK_ID)
    assert len(answers) == 2
    for answer in answers:
        assert not {EOS_ID, MASK_ID} & set(answer) and len(answer) <= CANVAS_TOKENS


def test_an_answer_ends_in_front_of_the_first_end() -> None:
    model = Dream(TINY)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert decode_blockwise(model, [[1, 2, 3]], 0.0, eos_id=0, mask_id=MASK_ID) == [[]]
        assert decode_blockwise(model, [[1, 2, 3]], 0.0, EOS_ID, MASK_ID) == [[0] * CANVAS_TOKENS]
