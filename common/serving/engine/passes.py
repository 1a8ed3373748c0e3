"""What passes did, counted where an engine is called: some microseconds a pass, and no request is looked at twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.decoding import Engine, Int, Predictions, Room, StepPlan, WrappedEngine, start_forward
from common.serving.messages import TOKEN_BUCKETS, WINDOW_BUCKETS, Counts

_REBUILD = ("fast_dllm", "multi_block")  # strategies that compute what is cached anew
_TOKEN_BOUNDS, _WINDOW_BOUNDS = np.array(TOKEN_BUCKETS), np.array(WINDOW_BUCKETS)


class CountedEngine(WrappedEngine):
    """The wrapped engine's passes, counted while the device computes the next.

    rooms: of the requests of a step, in their order.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rooms: Callable[[], list[Room]] = list
        self.counts = Counts(
            num_slots=engine.capacity.num_slots,
            tokens_histogram=[0] * (len(TOKEN_BUCKETS) + 1),
            windows_histogram=[0] * (len(WINDOW_BUCKETS) + 1),
        )
        self._windows = np.zeros(len(WINDOW_BUCKETS) + 1, dtype=np.int64)
        self._receive: Callable[[], Predictions] | None = None
        self._won: tuple[StepPlan, Int, list[Room]] | None = None
        self._graphs_before = self._graph_counts()

    def forward(self, plan: StepPlan) -> Predictions:
        self.launch(plan)
        return self.receive()

    def launch(self, plan: StepPlan) -> None:
        self._receive = start_forward(self.engine, plan)
        self._count_winners()
        counts = self.counts
        phase = "prefill" if not plan.step_R.all() else "commit" if plan.commits else "denoise"
        counts.forwards[phase] = counts.forwards.get(phase, 0) + 1
        counts.num_rows += plan.num_rows - plan.num_guiding_rows
        counts.tokens_sum += plan.num_tokens
        counts.tokens_histogram[int(_TOKEN_BOUNDS.searchsorted(plan.num_tokens))] += 1
        window_R = plan.num_keys_R[plan.scored]
        counts.windows_sum += int(window_R.sum())
        self._windows += np.bincount(_WINDOW_BOUNDS.searchsorted(window_R), minlength=len(self._windows))

    def receive(self) -> Predictions:
        receive, self._receive = self._receive, None
        assert receive is not None, "receive follows launch"
        return receive()

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        self.engine.commit(plan, winner_row_of_request)
        self._won = plan, winner_row_of_request, self.rooms() if plan.commits else []

    def now(self, num_running: int, num_waiting: int) -> Counts:
        """Return the counts as they are."""
        self._count_winners()
        counts = self.counts
        counts.num_running_now, counts.num_waiting_now = num_running, num_waiting
        counts.weight_version = self.weight_version
        counts.windows_histogram = self._windows.tolist()
        pages = self.engine.describe().get("kv_pages")
        counts.kv_usage = pages["in_use"] / pages["total"] if pages else num_running / counts.num_slots
        if not num_running:
            counts.kv_usage = 0.0  # an engine lets go of what has ended when it sees the next plan
        hits, misses = self._graph_counts()
        counts.graph_hits, counts.graph_misses = hits - self._graphs_before[0], misses - self._graphs_before[1]
        return counts

    def _graph_counts(self) -> tuple[int, int]:
        """Return hits and misses of an engine that has graphs, those of its start among them."""
        found: tuple[int, int] = getattr(self.engine, "graph_counts", (0, 0))
        return found

    def _count_winners(self) -> None:
        """Count who won the pass that was committed last. Rows of one request are adjacent, the anchor last."""
        if self._won is None:
            return
        (plan, winner_row_of_request, rooms), self._won = self._won, None
        self._count_commits(plan, rooms)
        winners, request_R = winner_row_of_request.tolist(), plan.request_R[plan.scored]
        ends = request_R.searchsorted(np.arange(len(winners)), side="right").tolist()
        wins, first = self.counts.wins, 0
        for winner, end in zip(winners, ends, strict=True):
            branch = "anchor" if winner == end - 1 else str(winner - first + 1)
            wins[branch] = wins.get(branch, 0) + 1
            first = end

    def _count_commits(self, plan: StepPlan, rooms: list[Room]) -> None:
        """Count what becomes final. What is written over later is not: caches that are rebuilt, and what sub-blocks
        leave."""
        for span in plan.commits:
            room = rooms[span.request]
            if span.is_final and room.decode.strategy.name not in _REBUILD:
                self.counts.num_committed += span.length
                self.counts.num_blocks += room.num_blocks(span.end) - room.num_blocks(span.start)
