"""Run a step of all requests of a replica: Python around the compiled loops over their tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.decoding.changes import with_changes
from common.decoding.engine import Room
from common.decoding.plan import CommitSpan, Float, Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import HOLE, Completion, FinishReason, TokenLogprob
from common.decoding.scheduling import by_request
from common.decoding.scheduling.advancing import IS_DONE, IS_OUT_OF_STEPS, advance
from common.decoding.scheduling.drafts import hold
from common.decoding.scheduling.ending import find_end
from common.decoding.scheduling.held import Pass, Threads, Workspaces
from common.decoding.scheduling.logprobs import Book, Tell, note
from common.decoding.scheduling.planning import begin_request, ends_of_answer, final_counts, num_prompt_tokens, plan
from common.decoding.scheduling.rules import Rules
from common.decoding.scheduling.scoring import best_rows, select
from common.decoding.scheduling.state import DecodingRequest, Observer
from common.decoding.scheduling.strategies.survival import cut_canvases
from common.decoding.scheduling.tables import NOWHERE, ORIGIN, Sizes, TableStore, positions_of
from common.policies import Draws
from common.policies.spawn_rules import NESTED

_SPENT: dict[int, FinishReason | None] = {IS_DONE: "length", IS_OUT_OF_STEPS: "max_steps"}


class Requests:
    """The requests being decoded and their tables. observer: sees StepRecords; None costs nothing."""

    def __init__(self, num_slots: int, mask_token_id: int) -> None:
        self.observer: Observer | None = None
        self._mask_token_id = mask_token_id
        self._store = TableStore(num_slots)
        self._decoding: dict[int, DecodingRequest] = {}  # by slot, in the order of a step
        self._order_N, self._places_N = np.zeros(0, np.int64), np.zeros(0, np.int64)  # slots of a step; 0, 1, ...
        self._room = 0, 0  # rows and entries that a step is given places for
        self._num_rows = 0  # of the step planned last
        self._num_sampled = self._num_drawing = self._num_with_plug_ins = self._num_held = self._num_verified = 0
        self._rows_8R = np.zeros((8, 0), np.int64)
        self._values_3T = np.zeros((3, 0), np.float32)
        self._score_R = np.zeros(0)
        self._new: list[DecodingRequest] = []  # before their first step
        self._views: dict[int, by_request.StepView] = {}  # by place in the step
        self._books: dict[str, Book] = {}  # by id, of requests that ask for log probabilities
        self._threads = Threads()

    @property
    def active(self) -> list[DecodingRequest]:
        """Requests being decoded, in the order of a step's rows."""
        return [*self._decoding.values()]

    def add(self, decoding: DecodingRequest) -> None:
        """Add a request; it is part of the next step. If this raises, nothing has been added."""
        rules, length = decoding.rules, decoding.prompt_length
        decode, slot = rules.decode, decoding.slot
        num_positions = Room(length, decode).num_positions
        num_chunks = 0 if rules.chunk is None else length // rules.chunk
        least = min(each.block_size for each in (rules, *rules.ways))
        num_blocks = num_chunks + 3 + (num_positions - length + least - 1) // least
        num_steps = rules.most_steps + num_chunks
        num_shifts = num_blocks if decode.shift_row == "fresh" else 1
        ends = sorted(rules.end_token_ids)
        sizes = Sizes(num_positions, num_blocks, max(decode.num_lookahead, 1), max(len(ends), 1), num_shifts)
        if rules.edit_ids is not None:
            sizes = sizes._replace(num_columns=rules.block_size)
        if rules.record[0]["spawn_rule"] == NESTED:
            sizes = sizes._replace(num_fills=sizes.num_lookaheads)
        self._store.admit(slot, sizes, num_steps, rules.num_remembered)
        tables = self._store.loops
        tables.settings[slot] = rules.record[0]
        tables.ends_E[slot, : len(ends)] = ends
        state = tables.states[slot]
        is_from_zero = decode.strategy.is_from_zero
        state["mask_token"] = self._mask_token_id
        if rules.edit_ids is not None:
            state["delete_token"], state["split_token"] = rules.edit_ids
        for name, value in {
            "slot": slot, "noise_key": decoding.noise_key, "prompt_length": length, "num_positions": num_positions,
            "shift": rules.shift, "origin": 0 if is_from_zero else length, "canvas_end": _canvas_end(rules, length),
            "room_blocks": num_blocks, "chunk": rules.chunk or 0, "canvas_block": rules.block_size,
            "most_steps": rules.max_steps + num_chunks, "num_ends": len(ends), "keeps_carry": not is_from_zero,
            "num_skipped": decoding.num_reused // rules.chunk if rules.chunk else 0,
            "has_stops": rules.find_stop is not None, "carry_token": -1.0,
        }.items():  # fmt: skip
            state[name] = value
        token_P, is_masked_P = positions_of(tables, slot)
        token_P[:length], token_P[length:] = decoding.request.prompt, self._mask_token_id
        is_masked_P[:length], is_masked_P[length:] = False, True
        if decoding.request.canvas is not None:
            own_C = np.array(decoding.request.canvas)
            token_P[length:], is_masked_P[length:] = ends[0], False
            token_P[length : length + len(own_C)] = np.where(own_C == HOLE, self._mask_token_id, own_C)
            is_masked_P[length : length + len(own_C)] = own_C == HOLE
        first = int(state["first_position"])
        tables.origin_P[first : first + num_positions] = np.zeros((), ORIGIN)
        begin_request(tables, slot, decoding.num_reused)
        request = decoding.request
        if request.num_logprobs is not None:
            self._books[request.id] = Book(slot, request.num_logprobs, {})
        self._decoding[slot] = decoding
        self._new.append(decoding)
        self._count(decoding, 1)

    def drop(self, request_id: str, now: float) -> tuple[DecodingRequest, Completion] | None:
        """End a request between two steps with what it has; returns None if it is not being decoded."""
        for decoding in self._decoding.values():
            if decoding.request.id == request_id:
                completion = self._completion(decoding, now, None, "abort")
                assert completion is not None, "it ends in any case"
                self._remove(decoding)
                return decoding, completion
        return None

    @property
    def slot_N(self) -> Int:
        """Slots of the coming step, in its order."""
        return self._order_N

    def take_way(self, slot: int, way: int) -> None:
        """Decode the request by one of its rules' ways from the coming step on."""
        self._store.loops.settings[slot] = self._decoding[slot].rules.ways[way].record[0]

    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens of the coming step, of prompts that are cut and have begun."""
        return int(num_prompt_tokens(self._order_N, self._store.loops))

    def plan_step(self, sampling: Sampling) -> StepPlan:
        """Open blocks in every branch, then lay all branches of all requests out as rows."""
        step = self._written_step(sampling)
        if self._num_drawing:
            self._draw()
        if self._num_held:
            held = {place: one.held.automaton for place, one in enumerate(self.active) if one.held is not None}
            step = step._replace(automaton_of=held)
        if not sampling.is_special:
            return step
        states = self._store.loops.states[self._order_N]
        return with_changes(step, states["prompt_length"][step.request_R], states["canvas_block"][step.request_R])

    def _written_step(self, sampling: Sampling) -> StepPlan:
        order_N = self._order_N
        if sampling.num_best:
            sampling = self._with_enough(sampling)
        num_rows, num_entries = self._room
        entries_3T, is_read_T = np.empty((3, num_entries), np.int32), np.empty(num_entries, np.bool_)
        rows_8R, request_R = np.empty((8, num_rows), np.int64), np.empty(num_rows, np.int64)
        commits_N5 = np.empty((len(order_N), 5), np.int64)
        num_rows, num_entries, num_commits, is_local = plan(
            order_N, self._store.parts, entries_3T, is_read_T, rows_8R, request_R, commits_N5
        )
        if num_commits == NOWHERE:
            self._room = num_rows + num_rows // 2, num_entries + num_entries // 2
            return self._written_step(sampling)
        if 4 * num_entries < self._room[1]:
            self._room = num_rows, num_entries
        self._num_rows, self._rows_8R = num_rows, rows_8R
        request_R = request_R[:num_rows]
        commits = tuple([CommitSpan(*span) for span in commits_N5[:num_commits].tolist()]) if num_commits else ()
        sampling_3R = self._sampling_of(request_R)
        return StepPlan(
            entries_3T[:, :num_entries], is_read_T[:num_entries], rows_8R[:, :num_rows], request_R, commits,
            sampling.of_rows(sampling_3R), is_local, sampling_3R,
        )  # fmt: skip

    def _with_enough(self, sampling: Sampling) -> Sampling:
        """Ask for more of the most probable tokens where a block repeats: those that were tried are left out."""
        states = self._store.loops.states[self._order_N]
        if not states["repeats"].any():
            return sampling
        blocks, last_N = self._store.loops.block_B, states["first_block"] + states["num_blocks"] - 1
        num_tried = int(blocks["num_steps"][last_N[states["repeats"]]].max())
        return sampling._replace(num_best=max(sampling.num_best, -(-(num_tried + 4) // 16) * 16))

    def look_ahead(self) -> None:
        """Do what needs no prediction of the step planned last."""
        if self._num_held:
            store = self._store
            for decoding in self._decoding.values():
                if decoding.held is not None and decoding.request.id not in decoding.failures:
                    decoding.asked(decoding.held.look_ahead, store.loops, store.parts, decoding.slot)

    def select_winners(self, predictions: Predictions) -> Int:
        """Return the winning row of each request in the step planned last."""
        order_N = self._order_N
        self._values_3T, self._score_R = predictions.values_3T, np.empty(self._num_rows)
        winner_N = np.empty(len(order_N), np.int64)
        held = self._held(predictions) if self._num_held else {}
        ready = [
            (decoding, own, int(own.state["first_row"]) if own.state["num_rows"] == 1 else None)
            for own, decoding in held.values()
        ]
        self._threads.run(_keep_to_format, ready)
        select(order_N, self._store.parts, self._values_3T, self._rows_8R, self._score_R, winner_N)
        if self._num_verified:
            hold(order_N, self._store.parts, self._values_3T, self._rows_8R, self._score_R, winner_N)
        self._views = {}
        if self._num_with_plug_ins or self.observer is not None:
            self._views = self._look(predictions)
            scoring = [view for view in self._views.values() if view.decoding.rules.has_own_score]
            for view in scoring:
                by_request.score(view, self._score_R)
            if scoring:
                best_rows(order_N, self._store.loops, self._score_R, winner_N)
        won = [
            (decoding, own, int(winner_N[place]))
            for place, (own, decoding) in held.items()
            if own.state["num_rows"] > 1
        ]
        self._threads.run(_keep_to_format, won)
        if held and self._views:
            self._views = self._look(predictions)
        return winner_N

    def scores(self) -> Score:
        """Return C(B) of the rows of the step planned last, once winners are selected."""
        return self._score_R

    def advance(self, winner_N: Int, now: float, tell: Tell | None = None) -> list[tuple[DecodingRequest, Completion]]:
        """Bring all requests to their next step. Returns those that have ended. tell: of requests that ask for log
        probabilities."""
        order_N, views = self._order_N, self._views
        ended_N, places_N = np.empty(len(order_N), np.int64), self._places_N
        if views:
            places_N = np.array([place for place in places_N.tolist() if place not in views], dtype=np.int64)
        cut = [each for each in self._new if each.rules.survival_margin is not None and each.held is None]
        if cut and tell is not None:
            cut_canvases(cut, self._store.loops, self._rows_8R, tell)
        num_ended = advance(places_N, order_N, self._store.parts, self._values_3T, self._rows_8R, winner_N, ended_N)
        for place, view in views.items():
            ended_N[place] = self._advance_by_hand(view, int(winner_N[place]))
            num_ended += 1
        if self._books:
            assert tell is not None, "requests that ask are admitted where the engine tells"
            note([*self._books.values()], self._store.loops, tell)
        for decoding in self._new:
            decoding.first_step_s = now - decoding.admitted_at
        self._new.clear()
        complete = self._complete() if self._num_held else ()
        if not num_ended and not complete:
            return []
        decodings, finished = self.active, []
        for place in sorted({*ended_N.nonzero()[0].tolist(), *complete}):
            if place in complete:
                completion = self._completion(decodings[place], now, None, "eos")
            else:
                completion = self._completion(decodings[place], now, _SPENT.get(int(ended_N[place])))
            if completion is not None:
                finished.append((decodings[place], completion))
        for decoding, _ in finished:
            self._remove(decoding)
        return finished

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return, by id of requests that go on, tokens that can no longer change and were not told of before."""
        tables, count_N, found = self._store.loops, np.zeros(len(self._order_N), np.int64), []
        final_counts(self._order_N, tables, count_N)
        place_X = count_N.nonzero()[0]
        slot_X, count_X, states = self._order_N[place_X], count_N[place_X], tables.states
        begin_X = states["first_position"][slot_X] + states["prompt_length"][slot_X] + states["num_given"][slot_X]
        states["num_given"][slot_X] += count_X
        for slot, begin, count in zip(slot_X.tolist(), begin_X.tolist(), count_X.tolist(), strict=True):
            found.append((self._decoding[slot].request.id, tuple(tables.token_P[begin : begin + count].tolist())))
        return found

    def logprobs(self, request_id: str, begin: int, end: int) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of tokens [begin, end) of an answer; () where none are asked for."""
        book = self._books.get(request_id)
        if book is None:
            return ()
        tables = self._store.loops
        prompt_length = int(tables.states[book.slot]["prompt_length"])
        return book.of(tables, prompt_length + begin, prompt_length + end)

    def _advance_by_hand(self, view: by_request.StepView, winner: int) -> int:
        first = int(self._store.loops.states[view.decoding.slot]["first_row"])
        scores = self._score_R[first : first + len(view.scoring.branches)].tolist()
        ended, record = by_request.advance(view, winner)
        if self.observer is not None and self.observer.wants(view.decoding):
            self.observer.see(replace(record, branch_scores=scores))
        return ended

    def _look(self, predictions: Predictions) -> dict[int, by_request.StepView]:
        """Return views of the requests that are decoded by hand in this step, by their place."""
        return {
            place: by_request.view_of(decoding, self._store.loops, predictions, self._rows_8R)
            for place, decoding in enumerate(self._decoding.values())
            if decoding.rules.has_plug_ins or (self.observer is not None and self.observer.wants(decoding))
        }

    def _held(self, predictions: Predictions) -> dict[int, tuple[Pass, DecodingRequest]]:
        """Return the requests whose answers are held to a format, with their part of the pass, by their place."""
        found, given = {}, predictions.classes or {}
        for place, decoding in enumerate(self._decoding.values()):
            if decoding.held is None or decoding.request.id in decoding.failures:
                continue
            classes = given.get(decoding.held.automaton.key)
            if classes is None:
                decoding.failures[decoding.request.id] = "this engine computes nothing of formats: leave the format out"
            else:
                store, values_3T = self._store, predictions.values_3T
                found[place] = (
                    Pass(
                        store.loops, store.parts, decoding.slot, values_3T, self._rows_8R, decoding.held.biased(classes)
                    ),
                    decoding,
                )
        return found

    def _complete(self) -> list[int]:
        """Return the places of answers that are held to a format and stand."""
        return [
            place
            for place, decoding in enumerate(self._decoding.values())
            if decoding.held is not None and decoding.held.is_complete(self._store.loops, decoding.slot)
        ]

    def _sampling_of(self, request_R: Int) -> Float | None:
        """Return StepPlan.sampling_3R."""
        if not self._num_sampled:
            return None
        of_request_N3 = np.array([decoding.rules.sampling for decoding in self._decoding.values()], dtype=np.float32)
        sampling_3R: Float = of_request_N3.T[:, request_R]
        return sampling_3R

    def _draw(self) -> None:
        """Write the step's random numbers, for rules that use them."""
        tables = self._store.loops
        for slot, decoding in self._decoding.items():
            if decoding.rules.draws:
                state = tables.states[slot]
                draws = Draws(decoding.noise_key, int(state["num_forwards"] + state["num_skipped"]), 0)
                num_rows, first = int(state["num_rows"]), int(state["first_position"])
                tables.score_draw_K[slot, :num_rows] = draws.generator().random(num_rows)
                num_open = int(state["num_positions"] - state["prompt_length"])
                tables.draw_P[first : first + num_open] = draws._replace(stream=1).generator().random(num_open)

    def _completion(
        self, decoding: DecodingRequest, now: float, spent: FinishReason | None, reason: FinishReason | None = None
    ) -> Completion | None:
        """Return the request's completion, or None while it goes on. reason: why it ends in any case."""
        tables, slot = self._store.loops, decoding.slot
        state, (end, final) = tables.states[slot], ends_of_answer(tables, slot)
        token_P, is_masked_P = positions_of(tables, slot)
        end = end if decoding.held is None else min(end, decoding.held.end)
        token_C, is_masked_C = token_P[decoding.prompt_length : end], is_masked_P[decoding.prompt_length : end]
        num_final = None if final == NOWHERE or reason is not None else max(0, final - decoding.prompt_length)
        num_kept, reason = find_end(decoding, token_C, is_masked_C, num_final, spent, reason)
        if reason is None:
            return None
        first = int(state["first_position"]) + decoding.prompt_length
        step_map = tables.origin_P[first : first + num_kept]["step"].tolist()
        first = int(state["first_step"])
        steps = tables.step_B[first : first + int(state["num_forwards"])]
        return Completion(
            id=decoding.request.id,
            prompt_length=decoding.prompt_length,
            token_ids=tuple(token_C[:num_kept].tolist()),
            canvas_token_ids=tuple(token_C.tolist()),
            num_canvas_tokens=int((~is_masked_C).sum()),
            num_forwards=int(state["num_forwards"]),
            num_lookahead_wins=int(state["num_wins"]),
            finish_reason=reason,
            first_step_s=decoding.first_step_s,
            total_s=now - decoding.admitted_at,
            tokens_per_step=tuple(steps["tokens"].tolist()),
            winner_per_step=tuple(steps["winner"].tolist()),
            window_per_step=tuple(steps["window"].tolist()),
            num_forced_fills=int(state["num_forced"]),
            num_rows=int(steps["rows"].sum()),
            step_map=tuple(step_map),
            logprobs=self.logprobs(decoding.request.id, 0, num_kept),
            num_cached_tokens=decoding.num_reused,
            option_logprobs=(decoding.held.option_logprobs or ()) if decoding.held is not None else (),
        )

    def _remove(self, decoding: DecodingRequest) -> None:
        del self._decoding[decoding.slot]
        if decoding in self._new:
            self._new.remove(decoding)
        self._store.drop(decoding.slot)
        self._books.pop(decoding.request.id, None)
        self._count(decoding, -1)

    def _count(self, decoding: DecodingRequest, change: int) -> None:
        """Update the step's order and counts after a request was added (1) or removed (-1)."""
        rules = decoding.rules
        self._order_N = np.array([*self._decoding], dtype=np.int64)
        self._places_N = np.arange(len(self._order_N))
        self._num_sampled += change * rules.is_sampled
        self._num_drawing += change * rules.draws
        self._num_with_plug_ins += change * rules.has_plug_ins
        self._num_held += change * (decoding.held is not None)
        self._num_verified += change * rules.verifies_drafts


def _canvas_end(rules: Rules, prompt_length: int) -> int:
    if rules.decode.strategy.is_from_zero:
        return Room(prompt_length, rules.decode).num_positions
    return prompt_length + rules.max_blocks * rules.block_size


def _keep_to_format(of_pass: tuple[DecodingRequest, Pass, int | None], spaces: Workspaces) -> None:
    """Have the request's format write what the rows predict or, once there is one, the winning row; a request without a
    way on ends with the step."""
    decoding, own, winner = of_pass
    held, name = decoding.held, decoding.request.id
    assert held is not None, "the caller has looked"
    if name in decoding.failures:
        return
    if winner is None:
        is_kept = decoding.asked(held.score_ready, own)
    else:
        is_kept = decoding.asked(held.solve, own, winner, spaces)
    if is_kept is False:
        decoding.failures[name] = "decoding this request failed (nothing that its format allows is left)"
