"""The main loop as an object: requests come and go between the steps, and a step is one forward pass for all of them.

One step: finish the pass under way (winners, commit, fill, spawn), let in who waits, start the next pass. What the
finished pass brought is handed over while the device computes the next. Every rank of a replica runs this on the same
plans and the same predictions; who comes and goes is rank 0's to say (`Relay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from common.decoding.admission import finite, why_impossible
from common.decoding.engine import Engine, start_forward
from common.decoding.plan import Predictions, StepPlan
from common.decoding.relay import Command, digest_of
from common.decoding.request import Completion, GenerationRequest, Rejection, RequestOutput, RequestQueue
from common.decoding.scheduling import Scheduler
from common.errors import EngineError

_IDLE_S = 0.001  # of a step that finds nothing to do
_LEAST_JUDGED = 4  # waiting requests of a step that are looked at ahead; as many as ended last, if those were more


class EngineCore:
    """One replica's requests, decoded step by step.

    source: where waiting requests come from beside `add_request`; it is read when there is room for them, and may give
    None for "nothing now". On several ranks, rank 0's counts.
    """

    def __init__(self, scheduler: Scheduler, engine: Engine, source: RequestQueue | None = None) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self._source = source or RequestQueue()
        self._relay = engine.mesh.relay
        self._is_leader = self._relay is None or engine.mesh.is_leader
        # With others to tell, what rank 0 has told of; else whatever comes.
        self._waiting = self._source if self._relay is None else RequestQueue()
        self._aborted: list[str] = []
        self._under_way: tuple[StepPlan, Callable[[], Predictions]] | None = None
        self._failure: Exception | None = None
        self._num_given: dict[str, int] = {}
        self._judged: dict[int, str | None] = {}  # waiting requests, by identity: why they are impossible
        self._is_over = False
        self._num_steps = 0
        self._num_ended = 0  # in the last step

    def add_request(self, request: GenerationRequest) -> None:
        """Let the request wait for room; the next steps tell how it fares. On rank 0.

        Raises ValueError if a request of this id waits or is being decoded.
        """
        if request.id in self._ids():
            raise ValueError(f"request {request.id} is being decoded already: give each request an id of its own")
        self._source.add(request)

    def abort(self, request_id: str) -> None:
        """End a request at the next step, with what it has by then. One that has ended is none of this step's concern:
        nothing happens. On rank 0."""
        self._aborted.append(request_id)

    def why_impossible(self, request: GenerationRequest) -> str | None:
        """Why this engine could not decode the request even if it were empty; None: it could, once there is room."""
        return why_impossible(request, self.scheduler, self.engine.capacity)

    @property
    def num_waiting(self) -> int:
        """Requests that have been added and have no room yet."""
        return len(self._waiting.read) + (0 if self._source is self._waiting else len(self._source.read))

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: requests wait or are being decoded, or results have not been told."""
        if not self._is_leader:
            return not self._is_over
        is_decoding = bool(self.scheduler.active) or self._under_way is not None or self._failure is not None
        return is_decoding or not (self._source.is_over and self._waiting.is_over)

    def step(self) -> list[RequestOutput]:
        """Finish a pass and start the next; what the finished one brought to each request.

        Raises EngineError where the device or a peer fails; results of the pass before are told first.
        """
        if self._failure is not None:
            raise self._failure
        self._source.prefetch(max(1, self._num_ended))  # while the device computes
        command = self._agree()
        has_finished = self._under_way is not None
        outputs = [self._ended(completion) for completion in (*self._finish_pass(), *self._abort(command.aborted))]
        self._num_ended = len(outputs)
        outputs += self._admit()
        failure = self._start_pass()
        # While the device computes:
        if has_finished:
            outputs += self._progress()
        for request in islice(self._waiting.read, max(_LEAST_JUDGED, self._num_ended)):
            self._judge(request)
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

    def _ids(self) -> list[str]:
        waiting = (*self._waiting.read, *self._source.read)
        return [request.id for request in (*(decoding.request for decoding in self.scheduler.active), *waiting)]

    def _agree(self) -> Command:
        """What comes and goes in this step, as rank 0 says."""
        aborted, self._aborted = tuple(self._aborted), []
        if self._relay is None:
            return Command(aborted=aborted)
        plan = self._under_way[0] if self._under_way else None
        digest = digest_of(plan)
        if self._is_leader:
            num_wanted = self.scheduler.num_slots - len(self._waiting.read)
            command = Command(self._source.take_up_to(num_wanted), aborted, digest)
        else:
            command = Command()
        command = self._relay.exchange(command, self._num_steps)
        if command.is_over:
            self._is_over = True
        elif command.digest != digest:
            raise EngineError(
                f"rank {self.engine.mesh.rank}, step {self._num_steps}: this rank and the first of its replica have "
                "planned different passes; start all ranks with the same version, settings and input"
            )
        for request in command.added:
            self._waiting.add(request)
        return command

    def _finish_pass(self) -> list[Completion]:
        if self._under_way is None:
            return []
        (plan, receive), self._under_way = self._under_way, None
        scheduler = self.scheduler
        winners = scheduler.select_winners(finite(receive(), plan, scheduler.active, self.engine.mesh.rank))
        self.engine.commit(plan, winners)
        self._num_steps += 1
        return scheduler.advance(winners)

    def _progress(self) -> list[RequestOutput]:
        """Of requests that go on: tokens that can no longer change and have not been told."""
        outputs = [RequestOutput(*final) for final in self.scheduler.newly_final()]
        for output in outputs:
            self._num_given[output.id] = self._num_given.get(output.id, 0) + len(output.token_ids)
        return outputs

    def _ended(self, completion: Completion) -> RequestOutput:
        num_given = self._num_given.pop(completion.id, 0)
        return RequestOutput(completion.id, completion.token_ids[num_given:], completion)

    def _abort(self, request_ids: tuple[str, ...]) -> list[Completion]:
        ended = []
        for request_id in request_ids:
            waiting = self._waiting.remove(request_id)
            self._judged.pop(id(waiting), None)
            completion = self.scheduler.drop(request_id)
            if waiting is not None:
                completion = Completion.of_nothing(waiting, "abort")
            if completion is not None:
                ended.append(completion)
        return ended

    def _admit(self) -> list[RequestOutput]:
        """Fill the free slots while the engine has room; reject what it could not decode if it were empty."""
        rejected: list[RequestOutput] = []
        scheduler = self.scheduler
        if not scheduler.has_free_slot:
            return rejected
        num_sure = self._num_sure()
        while scheduler.has_free_slot and (request := self._waiting.first()) is not None:
            reason = self._judge(request)
            if reason is None:
                if not scheduler.can_begin(request):
                    break
                if num_sure <= 0 and not self._can_hold(request):
                    break
                scheduler.admit(request)
            else:
                rejected.append(RequestOutput(request.id, (), Rejection(request.id, reason)))
            del self._judged[id(self._waiting.take())]
            num_sure -= 1
        return rejected

    def _num_sure(self) -> int:
        """For how many of the first waiting requests the engine has room, asked once for all of them; 0 where it has
        not room for all."""
        coming = list(islice(self._waiting.read, self.scheduler.num_free_slots))
        return len(coming) if len(coming) > 1 and self._can_hold(*coming) else 0

    def _can_hold(self, *requests: GenerationRequest) -> bool:
        """Whether the engine has room for these beside those being decoded."""
        scheduler = self.scheduler
        return self.engine.capacity.can_hold([*scheduler.rooms(), *map(scheduler.room_of, requests)])

    def _judge(self, request: GenerationRequest) -> str | None:
        """Why the waiting request is impossible, asked once."""
        if id(request) not in self._judged:
            self._judged[id(request)] = self.why_impossible(request)
        return self._judged[id(request)]

    def _start_pass(self) -> Exception | None:
        """What kept it from starting is raised once the results before it have been told."""
        try:
            if self.scheduler.active:
                plan = self.scheduler.plan_step()
                self._under_way = plan, start_forward(self.engine, plan)
                self.scheduler.prepare()
        except Exception as error:
            return error
        return None
