"""The main loop: `EngineCore.step` runs one forward pass for all requests; requests come and go between steps.

One step: finish the pass under way (winners, commit, fill, spawn), let in who waits, start the next pass. What the
finished pass brought is handed over while the device computes the next. Every rank of a replica runs this on the same
plans and the same predictions; who comes and goes is rank 0's to say (`Relay`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import cast

from common.decoding.admission import why_impossible
from common.decoding.engine import Engine, GivesLogprobs, carry_out, prefixes_of, start_forward
from common.decoding.model_check import ModelCheck
from common.decoding.orders import Order
from common.decoding.plan import Predictions, StepPlan
from common.decoding.relay import Command, Hold, digest_of
from common.decoding.request import Completion, GenerationRequest, Rejection, RequestOutput, RequestQueue
from common.decoding.scheduling.scheduler import Scheduler
from common.errors import EngineError, first_line

_IDLE_S = 0.001  # of a step that finds nothing to do
_LEAST_JUDGED = 4  # waiting requests of a step that are looked at ahead; as many as ended last, if those were more


class EngineCore:
    """Decodes the requests of one replica step by step.

    source: where waiting requests come from beside `add_request`; it is read when there is room for them, and may give
    None for "nothing now". On several ranks, rank 0's counts.
    A request that fails while it is decoded ends alone, with a Rejection (`error`).
    """

    def __init__(self, scheduler: Scheduler, engine: Engine, source: RequestQueue | None = None) -> None:
        self.scheduler = scheduler
        self.engine = engine
        scheduler.share(prefixes_of(engine), engine.capacity)
        self._queue = RequestQueue() if source is None else source
        self._relay = engine.mesh.relay
        self._is_leader = self._relay is None or engine.mesh.is_leader
        self._aborted: list[str] = []  # open requests
        self._check = ModelCheck(scheduler, engine.mesh.rank)
        self._under_way: tuple[StepPlan, Callable[[], Predictions]] | None = None
        self._failure: Exception | None = None
        self._num_given: dict[str, int] = {}
        self._most_of: dict[str, int] = {}  # tokens of open answers that are cut
        self._is_over = False
        self._is_closed = False
        self._num_steps = 0
        self._num_ended = 0  # in the last step
        self._finished_at: float | None = None  # the last pass, if another was started at once
        self._seconds: float | None = None  # of the last pass
        self._held: Hold = ""
        self._orders: deque[tuple[Order, Callable[[str | None], None]]] = deque()

    def add_request(self, request: GenerationRequest) -> None:
        """Queue the request; later steps return its tokens and its end. Called on rank 0.

        Raises ValueError if a request of this id waits or is being decoded, EngineError after `close`.
        """
        self._require_open()
        self._queue.add(request)

    def abort(self, request_id: str) -> None:
        """End the open request of this id at the next step, with the tokens it has by then. Called on rank 0; an
        unknown id is ignored."""
        if request_id in self._queue.open_ids:
            self._aborted.append(request_id)

    def hold(self, held: Hold) -> None:
        """Let no request in from the next step on (`requests`), or start no pass either (`passes`), or go on (an empty
        text). Called on rank 0."""
        self._held = held

    def order(self, order: Order, then: Callable[[str | None], None]) -> None:
        """Have every rank carry out an order at the next step, in which nothing is decoded. Called on rank 0.

        then: called with why it cannot be, in one sentence; None once it has been. KV of earlier requests is forgotten.
        """
        self._orders.append((order, then))

    def why_impossible(self, request: GenerationRequest) -> str | None:
        """Return why this engine could not decode the request even if it were empty; None if it could."""
        return why_impossible(request, self.scheduler, self.engine.capacity)

    @property
    def num_waiting(self) -> int:
        """Number of requests that have been added and have no slot yet."""
        return len(self._queue)

    @property
    def has_pass(self) -> bool:
        """Whether a pass is under way."""
        return self._under_way is not None

    @property
    def is_decoding(self) -> bool:
        """Whether a pass is under way, or a request is amid its answer."""
        return self.has_pass or bool(self.scheduler.active)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: requests wait or are being decoded, or results have not been told."""
        if not self._is_leader:
            return not self._is_over
        if self._under_way is not None or self._failure is not None or self._orders or self._aborted:
            return True
        if self._held == "passes":
            return False
        return bool(self.scheduler.active) or not (self._held or self._queue.is_over)

    def step(self) -> list[RequestOutput]:
        """Finish the pass under way and start the next. Returns what the finished one brought to each request.

        Raises EngineError where the device, a peer or the model fails; results of the pass before are returned first.
        """
        self._require_open()
        if self._failure is not None:
            raise self._failure
        self._queue.prefetch(max(1, self._num_ended))  # while the device computes
        command = self._agree()
        if command.seconds is not None:
            self.scheduler.took(command.seconds)
        has_finished = self._under_way is not None
        outputs = [self._ended(result) for result in (*self._finish_pass(), *self._abort(command.aborted))]
        self._num_ended = len(outputs)
        if command.order is not None:
            self._carry_out(command.order)
        if not command.held:
            outputs += [self._ended(rejection) for rejection in self._admit()]
        failure = None if command.held == "passes" else self._start_pass()
        if self._under_way is None:
            self._finished_at = None
        # While the device computes:
        if self._under_way is not None:
            self.scheduler.look_ahead()
        if has_finished:
            outputs += self._progress()
        for request in islice(self._queue, max(_LEAST_JUDGED, self._num_ended)):
            self._queue.reason(request, self.why_impossible)
        if failure is not None:
            if not outputs:
                raise failure
            self._failure = failure
        if self._under_way is None and not outputs and self._is_leader and self.has_work:
            time.sleep(_IDLE_S)
        return outputs

    def end(self) -> None:
        """Tell the other ranks that nothing more will come. Rank 0 calls it when has_work is False."""
        if self._relay is not None and self._is_leader:
            self._relay.exchange(Command(is_over=True), self._num_steps)

    def close(self) -> None:
        """Take no step any more: the engine may serve another decoding from here on."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("this decoding is over: begin another one by decoding()")

    def _agree(self) -> Command:
        """Exchange which requests come and go in this step; rank 0 decides."""
        aborted, self._aborted = tuple(self._aborted), []
        order = self._orders[0][0] if self._orders else None
        if self._relay is None:
            return Command(aborted=aborted, held=self._held, order=order, seconds=self._seconds)
        plan = self._under_way[0] if self._under_way else None
        digest = digest_of(plan)
        command = Command()
        if self._is_leader:
            added = self._queue.release(self.scheduler.num_slots)
            command = Command(added, aborted, digest, held=self._held, order=order, seconds=self._seconds)
        command = self._relay.exchange(command, self._num_steps)
        if command.is_over:
            self._is_over = True
        elif command.digest != digest:
            raise EngineError(
                f"rank {self.engine.mesh.rank}, step {self._num_steps}: this rank and the first of its replica have "
                "planned different passes; start all ranks with the same version, settings and input"
            )
        if not self._is_leader:
            self._queue.receive(command.added)
        return command

    def _carry_out(self, order: Order) -> None:
        assert not self.scheduler.active, "whoever orders waits until nothing is decoded"
        problem = carry_out(self.engine, order)
        if self._orders:
            self._orders.popleft()[1](problem)

    def _finish_pass(self) -> list[Completion | Rejection]:
        self._seconds = None
        if self._under_way is None:
            return []
        (plan, receive), self._under_way = self._under_way, None
        scheduler = self.scheduler
        predictions = receive()
        began, self._finished_at = self._finished_at, scheduler.clock()
        if began is not None:
            self._seconds = self._finished_at - began
        winners = scheduler.select_winners(self._check.contained(predictions, plan, self._num_steps))
        self.engine.commit(plan, winners)
        self._num_steps += 1
        # Only requests that ask have it called.
        tell = partial(cast(GivesLogprobs, self.engine).logprobs, plan) if self.engine.capacity.gives_logprobs else None
        return self._check.settled(scheduler.advance(winners, tell))

    def _progress(self) -> list[RequestOutput]:
        """Return tokens that can no longer change and have not been returned, of requests that go on."""
        outputs = []
        for request_id, token_ids in self.scheduler.newly_final():
            num_given, most = self._num_given.get(request_id, 0), self._most_of.get(request_id)
            if most is not None and num_given + len(token_ids) >= most:
                token_ids = token_ids[: most - num_given]
                self.abort(request_id)  # it has all that it may have
            if token_ids:
                num_told = self._num_given[request_id] = num_given + len(token_ids)
                logprobs = self.scheduler.logprobs(request_id, num_given, num_told)
                outputs.append(RequestOutput(request_id, token_ids, logprobs=logprobs))
        return outputs

    def _ended(self, result: Completion | Rejection) -> RequestOutput:
        num_given, most = self._num_given.pop(result.id, 0), self._most_of.pop(result.id, None)
        if most is not None and isinstance(result, Completion) and (num_given == most or len(result.token_ids) > most):
            result = result.cut(most)
        self._queue.open_ids.discard(result.id)
        logprobs = result.logprobs[num_given:] if isinstance(result, Completion) else ()
        return RequestOutput(result.id, result.token_ids[num_given:], result, logprobs)

    def _abort(self, request_ids: tuple[str, ...]) -> list[Completion | Rejection]:
        ended = []
        for request_id in request_ids:
            waiting = self._queue.remove(request_id)
            # On every rank, also those that have not heard of it: a look for it settles who lies where in a pass.
            result = self.scheduler.drop(request_id)
            if waiting is not None:
                result = Completion.of_nothing(waiting, "abort")
            if result is not None:
                ended.append(result)
        return ended

    def _admit(self) -> list[Rejection]:
        """Fill the free slots while the engine has room; reject what it could not decode if it were empty."""
        rejected: list[Rejection] = []
        scheduler, queue = self.scheduler, self._queue
        if not scheduler.has_free_slot:
            return rejected
        num_sure = self._num_sure()
        while scheduler.has_free_slot and (request := self._next()) is not None:
            reason = queue.reason(request, self.why_impossible)
            if reason is None:
                if not scheduler.can_begin(request):
                    break
                if num_sure <= 0 and not self._can_hold(request):
                    break
                reason = self._begin(request)
            if reason is not None:
                rejected.append(Rejection(request.id, reason))
            queue.take()
            num_sure -= 1
        return rejected

    def _begin(self, request: GenerationRequest) -> str | None:
        """Give the request a slot. Returns what is wrong with it, or None."""
        try:
            self.scheduler.admit(request)
        except ValueError as error:
            return str(error)
        except Exception as error:  # one request never ends another
            return f"it cannot be begun ({type(error).__name__}: {first_line(error)}); correct it"
        if request.max_tokens is not None:
            self._most_of[request.id] = request.max_tokens
        return None

    def _next(self) -> GenerationRequest | None:
        """Return the request to admit next; None if nobody waits."""
        if self._relay is None:  # else it has been told in this step's command
            self._queue.release(1)
        return self._queue.first()

    def _num_sure(self) -> int:
        """Return for how many of the first waiting requests the engine has room, asked once for all of them; 0 if not
        for all."""
        first = islice(self._queue, self.scheduler.num_free_slots)
        coming = [request for request in first if self._queue.reason(request, self.why_impossible) is None]
        return len(coming) if len(coming) > 1 and self._can_hold(*coming) else 0

    def _can_hold(self, *requests: GenerationRequest) -> bool:
        """Return whether the engine has room for these beside those being decoded."""
        scheduler = self.scheduler
        return self.engine.capacity.can_hold([*scheduler.rooms(), *map(scheduler.room_of, requests)])

    def _start_pass(self) -> Exception | None:
        """Start the next pass. Returns the error that prevented it, which is raised once earlier results are
        returned."""
        try:
            if self.scheduler.active:
                plan = self.scheduler.plan_step()
                self._under_way = plan, start_forward(self.engine, plan)
        except Exception as error:
            return error
        return None
