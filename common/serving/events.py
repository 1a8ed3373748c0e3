"""What a page or a tool sees of a request as it is decoded: one JSON event a forward pass, the `denoise` stream of
POST /generate.

    {"pass": 3,                      passes of the request so far, from 1
     "prompt_length": 17,            positions in front of the canvas
     "block_start": 16,              the canvas's first block begins here; in front of the canvas where blocks are
                                     counted from position 0 and the prompt's remainder lies in it
     "block_size": 16,               positions of a block
     "start": 16,                    the window's first position; all positions are absolute, the prompt's first is 0
     "window_lengths": [32, 32],     positions that each branch computed, in the order of the branches
     "branch_scores": [-0.2, -0.3],  of the branches; the best wins, a tie goes to the earlier
                                     one; null: a branch without masks, which is better than any score
     "winner": 1,                    index among the branches; the last branch is the anchor
     "given": [[30, 11, "."]],       in the first event of a canvas that holds texts: position, token id, text
     "filled": [[18, 734, " cat", -0.01]],     position, token id, text, confidence: masks that became tokens
     "edited": [[17, 52, " dog", -0.02]],      the same of tokens that were replaced (`edit_threshold`)
     "masked": [20],                 positions that are masks again, of a block that is revised (`levenshtein`); there
                                     tokens that have moved are `filled` or `edited` where they stand now
     "deleted": [18], "inserted": [17],   where tokens of it were deleted, or masks inserted before them, as they stood
     "predicted": [[19, 5, " a", 0.31]],  position, token id, text, probability: what the pass predicted at masks that
                                     stay masks; of a request that is held to a format, among what may stand there
     "num_won": 0,                   the first so many of `filled` are the winning lookahead's own tokens
     "lookahead": [[[[21, 11, ","]], -0.40]],  of each branch that the next pass tries: its own tokens (position, token
                                     id, text), and the confidence that made it
     "commit_length": 16,            positions from start on whose keys and values became final
     "canvas_length": 32,            opened positions after the prompt
     "final_length": 4,              positions between the prompt and the first mask
     "finished": null}               the finish reason in the last event, else null

Confidences are those of the setting
`sampling_strategy`. Positions that no event has filled are masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isfinite
from types import MappingProxyType
from typing import Any

from common.config import DecodeConfig
from common.decoding import Branch, Revision, Room, StepRecord

Fill = tuple[int, int, float]  # position, token, confidence

_ALWAYS_SHOWN = (
    "strategy", "num_lookahead", "block_size", "max_new_tokens", "block_add_threshold", "decoded_token_threshold",
    "skip_threshold", "sampling_strategy",
)  # fmt: skip


def shown_settings(decode: DecodeConfig) -> dict[str, Any]:
    """Return the settings that a reader of the passes needs: a few always, others where they are not the default."""
    changed = decode.model_dump(mode="json", exclude_defaults=True)
    strategy = {"strategy": decode.strategy.name, **decode.strategy.unusual()}
    return {name: getattr(decode, name) for name in _ALWAYS_SHOWN} | changed | strategy


class DenoiseEvents:
    """The events of one request, made from its step records in their order.

    decode: its settings. text_of: the text of some token ids. given: `GenerationRequest.given`.
    """

    def __init__(
        self, prompt_length: int, decode: DecodeConfig, text_of: Callable[[Sequence[int]], str],
        given: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._prompt_length = prompt_length
        self._block_start = Room(prompt_length, decode).block_start
        self._block_size = decode.max_new_tokens if decode.strategy.name == "vanilla" else decode.block_size
        self._text_of = cache(lambda token: text_of([token]))
        self._num_passes = 0
        self._end = prompt_length  # of the opened canvas
        self._given = given
        self._is_filled = {*given}
        self._final_length = 0
        self._tried: list[Branch] = []
        self._drawn: dict[int, int] = {}  # of a block that is revised

    def _revised(self, record: StepRecord, made: Revision, won: list[Fill]) -> tuple[list[Fill], list[Fill], list[int]]:
        """Return what was filled, what was edited and what is masked again, of the block as it was drawn before."""
        end = record.start + record.window_lengths[-1]
        tokens = dict(zip(range(end - len(made.after), end), made.after, strict=True))
        now = {at: token for at, token in tokens.items() if at >= self._prompt_length and at not in made.masks}
        before = {at: token for at, token in self._drawn.items() if at in tokens}
        masked = sorted(before.keys() - now.keys())
        scores = {at: one.confidence for at, one in record.candidates.items()}
        new = [(at, token, scores[at]) for at, token in now.items() if at not in before]
        own = [fill for fill in won if now.get(fill[0]) == fill[1]]
        taken = {at for at, _, _ in own}
        edited = [(at, token, scores[at]) for at, token in now.items() if before.get(at, token) != token]
        self._drawn = now
        self._is_filled -= set(tokens)
        begin = max(min(tokens) - self._prompt_length, 0)
        self._final_length = min(self._final_length, begin)
        self._is_filled |= now.keys()
        return own + [fill for fill in new if fill[0] not in taken], edited, masked

    def _told_given(self) -> dict[str, Any]:
        if self._num_passes > 1 or not self._given:
            return {}
        return {"given": [[at, token, self._text_of(token)] for at, token in self._given.items()]}

    def of(self, record: StepRecord) -> dict[str, Any]:
        """Return the event of the pass that follows those given before; `finished` is null."""
        winner = _winner(record)
        won = Branch() if record.winner_is_anchor else self._tried[winner]
        filled = [(*fill, won.creation_confidence) for fill in won.fills]
        pairs = zip(record.filled.items(), record.filled_confidence, strict=True)
        filled += [(position, token, confidence) for (position, token), confidence in pairs]
        edited = [
            (position, token, record.candidates[position].confidence) for position, token in record.edited.items()
        ]
        num_won, masked = len(won.fills), list[int]()
        if record.revision is not None:
            filled, edited, masked = self._revised(record, record.revision, filled[:num_won])
            num_won = sum(fill in won.fills for fill in ((position, token) for position, token, _ in filled[:num_won]))
        written = {position for position, _, _ in filled}
        predicted = [
            [position, one.token, self._text_of(one.token), one.probability]
            for position, one in record.candidates.items()
            if one.current is None and position not in written and record.revision is None
        ]
        self._tried = record.lookahead
        self._num_passes += 1
        # A token may begin the block after the window.
        ends = record.start + max(record.window_lengths), *(position + 1 for position, _, _ in filled)
        self._end = max(self._end, *ends)
        self._is_filled.update(position for position, _, _ in filled)
        while self._prompt_length + self._final_length in self._is_filled:
            self._is_filled.remove(self._prompt_length + self._final_length)
            self._final_length += 1
        return {
            "pass": self._num_passes,
            "prompt_length": self._prompt_length,
            "block_start": self._block_start,
            "block_size": self._block_size,
            "start": record.start,
            "window_lengths": record.window_lengths,
            "branch_scores": [score if isfinite(score) else None for score in record.branch_scores],
            "winner": winner,
            **self._told_given(),
            "filled": [[position, token, self._text_of(token), score] for position, token, score in filled],
            "edited": [[position, token, self._text_of(token), score] for position, token, score in edited],
            **_moved(record, masked),
            "predicted": predicted,
            "num_won": num_won,
            "lookahead": [
                [[[*fill, self._text_of(fill[1])] for fill in made.fills], made.creation_confidence]
                for made in record.lookahead
            ],
            "commit_length": 0 if record.is_tentative else record.commit_length,
            "canvas_length": self._end - self._prompt_length,
            "final_length": self._final_length,
            "finished": None,
        }


def _moved(record: StepRecord, masked: list[int]) -> dict[str, Any]:
    made = record.revision
    if made is None:
        return {}
    return {"masked": masked, "deleted": list(made.deleted), "inserted": list(made.inserted)}


def _winner(record: StepRecord) -> int:
    """The scheduler's arg max, in which the first of equal scores wins; an anchor that won is the last branch."""
    last = len(record.branch_scores) - 1
    return last if record.winner_is_anchor else record.branch_scores.index(max(record.branch_scores))
