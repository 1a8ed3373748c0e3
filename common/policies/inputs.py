"""The arguments of policies. Shapes: B branches of a request, the anchor last; W positions of their windows; M masks
that a step may fill, of one block; C masks that may be tried, of all active blocks.

Probabilities and confidences are float32; a confidence is that of `sampling_strategy`. `settings` is the request's
DecodeConfig. Policies that draw random numbers take them from `rng`, which every rank of a replica draws alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Score = npt.NDArray[np.float64]


class Token(NamedTuple):
    """What `token_confidences` get: the distribution of each position's next token, a float32 tensor each, of equal
    length.

    probability: of the predicted token, which is the best one unless it was drawn. best, second: the two highest
    probabilities. negative_entropy: sum p log p, in nats.
    """

    probability: Any
    best: Any
    second: Any
    negative_entropy: Any


class Draws(NamedTuple):
    """Keys of random numbers: a request's, at a step, for one use (`stream`)."""

    noise_key: int
    step: int
    stream: int

    def generator(self) -> np.random.Generator:
        return np.random.default_rng((self.noise_key % 2**63, self.step, self.stream))


class Tried(Protocol):
    """A branch: the anchor, or the anchor and some more tokens. fills: (position, token) of each, positions absolute;
    of the anchor none. creation_confidence: of the prediction that made the branch; 1 for the anchor."""

    @property
    def fills(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def creation_confidence(self) -> float: ...


class Scoring(NamedTuple):
    """What `branch_scores` get: what the branches of a step predict. `score` returns C(B), float64 [B]; the highest
    wins, of equal ones the first, so that the anchor loses ties.

    values_3BW: token id, probability, confidence; anything where a position is not masked. start: of the windows.
    """

    values_3BW: Float
    is_masked_BW: Bool
    branches: Sequence[Tried]
    start: int
    settings: Any
    draws: Draws

    @property
    def probability_BW(self) -> Float:
        found: Float = self.values_3BW[1]
        return found

    @property
    def confidence_BW(self) -> Float:
        found: Float = self.values_3BW[2]
        return found

    @property
    def likely_B(self) -> Score:
        """[B]: the probability of each branch's own tokens as the anchor of the same pass judges them anew, knowing of
        the fills that came after the branch was spawned; 0 where another token is the best by now, 1 for the anchor."""
        likely_B: Score = np.ones(len(self.branches))
        for branch, tried in enumerate(self.branches):
            for position, token in tried.fills:
                token_now, probability = self.values_3BW[:2, -1, position - self.start].tolist()
                likely_B[branch] *= probability if token_now == token else 0.0
        return likely_B

    @property
    def is_agreed_B(self) -> Bool:
        """[B]: whether each of a branch's own tokens is what the branch without it and its later ones predicts. The
        branch before one with several tokens has all but the last."""
        is_agreed_B: Bool = np.ones(len(self.branches), dtype=np.bool_)
        for branch, tried in enumerate(self.branches):
            if tried.fills:
                position, token = tried.fills[-1]
                is_first = len(tried.fills) == 1
                before = -1 if is_first else branch - 1
                is_predicted = self.values_3BW[0, before, position - self.start] == token
                is_agreed_B[branch] = is_predicted and (is_first or is_agreed_B[branch - 1])
        return is_agreed_B


class Spawning(NamedTuple):
    """What `spawn_rules` get: masks of the next anchor that lookaheads may fill. `rank` returns a number each, [C]; the
    highest are tried, of equal ones the earliest.

    values_3W: token id, probability, confidence, as the winner predicts them. column_C: where the masks are in it,
    ascending. start: the position of its first column.
    """

    values_3W: Float
    column_C: Int
    start: int
    settings: Any
    draws: Draws

    @property
    def probability_C(self) -> Float:
        found: Float = self.values_3W[1][self.column_C]
        return found

    @property
    def confidence_C(self) -> Float:
        found: Float = self.values_3W[2][self.column_C]
        return found


class Filling(NamedTuple):
    """What `fill_rules` get: a block's masks. `choose` returns those to fill, bool [M], at least one of them. In a
    block that need not fill any, those that are not above `skip_threshold` stay masks.

    values_3BM: token id, probability, confidence of every branch; the winner's are filled in. quota: how many
    its `steps` ask for; 1 of rules without.
    """

    values_3BM: Float
    winner: int
    quota: int
    settings: Any

    @property
    def probability_M(self) -> Float:
        found: Float = self.values_3BM[1, self.winner]
        return found

    @property
    def confidence_M(self) -> Float:
        found: Float = self.values_3BM[2, self.winner]
        return found


class Stepped(NamedTuple):
    """What `lookahead_rules` get: what a step did. `count` returns how many lookaheads the next one tries,
    `num_lookahead` at the most.

    num_filled: tokens above the threshold, the lookahead's not among them. num_masked: masks left in active blocks.
    variance: of the scores of the step's lookaheads; infinite where there were less than two.
    """

    num_filled: int
    num_masked: int
    settings: Any
    variance: float = np.inf
