"""A step of one request in Python: where a policy of another package decides something, or an observer looks on.

The same compiled functions as in `advancing.advance`, in the same order, with the policies' answers and the record in
between: about 0.4 ms a request and step, where the loops alone take 0.02 to 0.07 (docs/policies.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.decoding.plan import Float, Int, Predictions, Score
from common.decoding.scheduling import advancing
from common.decoding.scheduling.scoring import align
from common.decoding.scheduling.state import Branch, Candidate, DecodingRequest, Revision, StepRecord
from common.decoding.scheduling.strategies.revising import revise
from common.decoding.scheduling.tables import NOWHERE, Tables, positions_of
from common.policies import Draws, Filling, Scoring, Spawning, Stepped, policy
from common.policies.rule import PLUG_IN


class StepView(NamedTuple):
    """A request's part of the step. values_3BW, is_masked_BW: what each branch predicts at every position of its
    window, and where it has masks, as the pass saw it."""

    decoding: DecodingRequest
    tables: Tables
    values_3T: Float
    fields_8R: Int
    scoring: Scoring

    @property
    def start(self) -> int:
        return self.scoring.start


def view_of(decoding: DecodingRequest, tables: Tables, predictions: Predictions, fields_8R: Int) -> StepView:
    """Return the request's view, before the step changes anything."""
    slot, state = decoding.slot, tables.states[decoding.slot]
    shape = int(state["num_rows"]), int(state["widest_end"] - state["window_start"])
    values_3BW, is_masked_BW = np.zeros((3, *shape), np.float32), np.zeros(shape, np.bool_)
    align(slot, tables, predictions.values_3T, fields_8R, values_3BW, is_masked_BW)
    draws = Draws(decoding.noise_key, int(state["num_forwards"] + state["num_skipped"]), 0)
    branches, start = branches_of(decoding, tables), int(state["window_start"])
    scoring = Scoring(values_3BW, is_masked_BW, branches, start, decoding.rules.decode, draws)
    return StepView(decoding, tables, predictions.values_3T, fields_8R, scoring)


def branches_of(decoding: DecodingRequest, tables: Tables) -> list[Branch]:
    """Return the branches of the coming step, the anchor last."""
    found, slot = [], decoding.slot
    for branch in range(int(tables.states[slot]["num_lookaheads"])):
        own = tables.branches_K[slot, branch]
        fills = tuple((int(fill["position"]), int(fill["token"])) for fill in tables.fills_KF[slot, branch])
        origin = decoding.rules.decode.spawn_rule
        found.append(Branch(fills[: int(own["num_fills"])], float(own["confidence"]), origin))
    return [*found, Branch()]


def score(view: StepView, score_R: Score) -> None:
    """Write C(B) of the request's rows by a policy of another package."""
    decode, first_row = view.scoring.settings, int(view.tables.states[view.decoding.slot]["first_row"])
    found_B = view.decoding.asked(policy("branch_scores", decode.branch_score), view.scoring)
    score_B: Score = np.zeros(len(view.scoring.branches)) if found_B is None else found_B
    weight = float(view.tables.settings[view.decoding.slot]["score_created"])
    if weight:
        created_B = np.array([branch.creation_confidence for branch in view.scoring.branches])
        score_B = weight * created_B + (1 - weight) * score_B
    score_R[first_row : first_row + len(score_B)] = score_B


def advance(view: StepView, winner: int) -> tuple[int, StepRecord]:
    """Bring the request to its next step. winner: its row. Returns what `advancing.end_of` says, and the record."""
    slot, tables = view.decoding.slot, view.tables
    state, num_keys = tables.states[slot], advancing.align_winner(tables, slot, view.values_3T, view.fields_8R, winner)
    branch, num_rows = winner - int(state["first_row"]), int(state["num_rows"])
    window_lengths = view.fields_8R[2, winner - branch : winner - branch + num_rows].tolist()
    commit_length, is_tentative = int(state["commit_length"]), bool(state["is_tentative"])
    num_adopted = advancing.adopt(tables, slot, winner)
    num_spans = advancing.find_spans(tables, slot)
    change = (_revise if view.decoding.rules.edit_ids is not None else _fill)(view, branch, winner, num_spans)
    filled, candidates, edited, num_filled = change.filled, change.candidates, change.edited, change.num_filled
    num_seeded = advancing.move_on(tables, slot, num_keys, num_filled + len(edited) > 0)
    if num_seeded:
        start = int(state["next_start"])
        filled[start] = int(positions_of(tables, slot)[0][start])
    num_spans = advancing.spans_to_try(tables, slot, num_spans)
    num_open = advancing.gather_open(tables, slot, num_spans)
    most = _num_to_try(view, num_spans, num_filled)
    _rank(view, branch, num_open)
    advancing.spawn(tables, slot, num_open, most, view.values_3T)
    advancing.finish(tables, slot, winner, num_adopted + num_filled + num_seeded, num_keys)
    record = StepRecord(
        request_id=view.decoding.request.id,
        start=view.start,
        commit_length=commit_length,
        window_lengths=window_lengths,
        branch_scores=[],
        winner_is_anchor=branch == num_rows - 1,
        filled=filled,
        filled_confidence=[candidates[position].confidence for position in filled],
        lookahead=branches_of(view.decoding, tables)[:-1],
        candidates=candidates,
        num_sure=_num_sure(view),
        edited=edited,
        is_tentative=is_tentative,
        revision=change.revision,
    )
    return int(advancing.end_of(tables, slot)), record


class _Change(NamedTuple):
    """What a step did to the anchor; names are StepRecord's. num_filled: masks that have become text."""

    filled: dict[int, int]
    candidates: dict[int, Candidate]
    edited: dict[int, int]
    num_filled: int
    revision: Revision | None = None


def _fill(view: StepView, branch: int, winner: int, num_spans: int) -> _Change:
    slot, tables = view.decoding.slot, view.tables
    num_edits = advancing.find_edits(tables, slot, num_spans)
    edited = {int(edit["position"]): int(edit["token"]) for edit in tables.edits[:num_edits]}
    candidates = _candidates(view, branch, num_spans)
    filled: dict[int, int] = {}
    may_wait = False
    for place in range(num_spans):
        num_masks = advancing.gather(tables, slot, place)
        if num_masks:
            position_M = tables.position_M[:num_masks].copy()
            _choose(view, place, position_M, winner)
            advancing.write_chosen(tables, slot, place, num_masks, may_wait)
            may_wait = may_wait or advancing.fills_alone(tables, slot, place)
            token_P, is_masked_P = positions_of(tables, slot)
            filled |= {at: int(token_P[at]) for at in position_M.tolist() if not is_masked_P[at]}
    advancing.write_edits(tables, slot, num_edits)
    return _Change(filled, candidates, edited, len(filled))


def _revise(view: StepView, branch: int, winner: int, num_spans: int) -> _Change:
    if not num_spans:
        return _Change({}, {}, {}, 0)
    slot, tables = view.decoding.slot, view.tables
    state, start = tables.states[slot], int(tables.spans[0]["start"])
    end, begin = int(tables.spans[0]["end"]), max(start, view.decoding.prompt_length)
    num_filled = revise(tables, slot, view.values_3T, view.fields_8R, winner)
    drafts = {begin + column: draft for column, draft in enumerate(tables.drafts[: end - begin])}
    token_P, is_masked_P = positions_of(tables, slot)
    is_first_P = tables.is_first_P[int(state["first_position"]) :]
    written = {at: int(draft["written"]) for at, draft in drafts.items() if draft["writes"]}
    delete, split = int(state["delete_token"]), int(state["split_token"])
    revision = Revision(
        quota=None if state["quota"] == NOWHERE else int(state["quota"]),
        is_final=bool(state["is_final"]),
        num_post=int(state["num_post"]),
        runners_up=tuple(at for at, draft in drafts.items() if draft["is_runner_up"]),
        replaced={at: token for at, token in written.items() if token != drafts[at]["token"]},
        escaped=tuple(at for at, draft in drafts.items() if draft["has_escaped"]),
        deleted=tuple(at for at, token in written.items() if token == delete),
        inserted=tuple(at for at, token in written.items() if token == split),
        after=tuple(token_P[start:end].tolist()),
        masks=tuple(at for at in drafts if is_masked_P[at]),
        first=tuple(at for at in drafts if is_first_P[at]),
    )
    return _Change(
        filled={at: token for at, token in written.items() if drafts[at]["is_masked"]},
        candidates={at: _drafted(draft) for at, draft in drafts.items()},
        edited={at: token for at, token in written.items() if not drafts[at]["is_masked"]},
        num_filled=int(num_filled),
        revision=revision,
    )


def _drafted(draft: Any) -> Candidate:
    probability = float(draft["confidence"])
    current = None if draft["is_masked"] else int(draft["input"])
    return Candidate(int(draft["token"]), probability, probability, current)


def _choose(view: StepView, place: int, position_M: Int, winner: int) -> None:
    """Mark the masks to fill, by the rule that ships or by the plug-in."""
    tables, slot, count = view.tables, view.decoding.slot, len(position_M)
    settings, state = tables.settings[slot], tables.states[slot]
    if settings["fill_rule"] != PLUG_IN:
        advancing.choose_masks(tables, slot, place, count, view.values_3T, view.fields_8R)
        return
    decode, span = view.scoring.settings, tables.spans[place]
    quota = advancing.quota(int(state["canvas_block"]), int(settings["fill_steps"]), int(span["num_steps"]))
    values_3BM = view.scoring.values_3BW.take(position_M - view.start, axis=2)
    filling = Filling(values_3BM, winner - int(state["first_row"]), quota, decode)
    is_chosen_M = view.decoding.asked(policy("fill_rules", decode.fill_rule), filling)
    tables.is_chosen_M[:count] = True if is_chosen_M is None else is_chosen_M


def _num_to_try(view: StepView, num_spans: int, num_filled: int) -> int:
    tables, slot, decode = view.tables, view.decoding.slot, view.scoring.settings
    if tables.settings[slot]["lookahead_rule"] != PLUG_IN:
        return int(advancing.num_to_try(tables, slot, num_spans, num_filled))
    num_masked = sum(int(span["num_masked"]) for span in tables.spans[:num_spans])
    if not num_masked or not decode.num_lookahead:
        return 0
    stepped = Stepped(num_filled, num_masked, decode, float(tables.states[slot]["score_variance"]))
    return view.decoding.asked(policy("lookahead_rules", decode.lookahead_rule), stepped) or 0


def _rank(view: StepView, branch: int, num_open: int) -> None:
    tables, slot, decode = view.tables, view.decoding.slot, view.scoring.settings
    if tables.settings[slot]["spawn_rule"] != PLUG_IN or not num_open:
        advancing.rank_open(tables, slot, num_open, view.values_3T)
        return
    column_C = tables.position_M[:num_open] - view.start
    draws = view.scoring.draws._replace(stream=1)
    spawning = Spawning(view.scoring.values_3BW[:, branch], column_C, view.start, decode, draws)
    rank_M = view.decoding.asked(policy("spawn_rules", decode.spawn_rule), spawning)
    tables.rank_M[:num_open] = 0 if rank_M is None else rank_M


def _candidates(view: StepView, branch: int, num_spans: int) -> dict[int, Candidate]:
    """Return what the winner predicts at each mask that the step may fill and, where it may edit, at each filled
    position."""
    tables, slot, found = view.tables, view.decoding.slot, {}
    state, (token_P, is_masked_P) = tables.states[slot], positions_of(tables, slot)
    for span in tables.spans[:num_spans]:
        for position in range(max(int(span["start"]), int(state["prompt_length"])), int(span["end"])):
            is_masked = bool(is_masked_P[position])
            if is_masked or tables.settings[slot]["edits"]:
                token, probability, confidence = view.scoring.values_3BW[:, branch, position - view.start].tolist()
                current = None if is_masked else int(token_P[position])
                found[position] = Candidate(int(token), probability, confidence, current)
    if state["predicts_next"]:
        row = int(state["first_row"]) + branch
        last = int(view.fields_8R[0, row] + view.fields_8R[2, row]) - 1
        token, probability, confidence = view.values_3T[:, last].tolist()
        found[int(state["window_end"])] = Candidate(int(token), probability, confidence)
    return found


def _num_sure(view: StepView) -> list[int]:
    """Return how many masks of each branch passed `skip_threshold` in the pass."""
    is_sure_BW = view.scoring.probability_BW > view.scoring.settings.skip_threshold
    found: list[int] = (is_sure_BW & view.scoring.is_masked_BW).sum(axis=1).tolist()
    return found
