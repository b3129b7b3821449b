"""A layer over vLLM's schedulers: requests that wait for the stage before are parked, outside of all that vLLM schedules.

Installed by ``scheduler_cls="omni_fsm.adapters.vllm.scheduler.StageScheduler"``; with async scheduling ``StageAsyncScheduler``.
Everything here runs on the engine's own thread, between its steps, but for `EngineWaker`. Nothing but `shutdown` waits.

`omni_fsm.adapters.SchedulerCoordinator` parks requests that go on with each chunk, in the scheduler's queues. Here a request is
parked before it is one: of what has no prompt yet, vLLM could count neither tokens nor blocks.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from omni_fsm.adapters.vllm.prompt import prompt_of, request_with
from omni_fsm.adapters.vllm.stage import EngineCoreStage, RequestEntry, entry_of, settings_of
from omni_fsm.adapters.vllm.states import Steps, check_worker, states_of
from omni_fsm.adapters.vllm.wake import EngineWaker
from omni_fsm.payload import ChunkAccumulator
from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.runtime import TakenKind

_log = logging.getLogger("omni_fsm.vllm")

_STATUS = {
    Outcome.OK: RequestStatus.FINISHED_STOPPED,
    Outcome.DONE: RequestStatus.FINISHED_STOPPED,
    Outcome.CANCELLED: RequestStatus.FINISHED_ABORTED,
    Outcome.ERROR: RequestStatus.FINISHED_ERROR,
}


@dataclass(slots=True, eq=False)
class _Life:
    """One life of a request in this engine.

    Attributes:
        request: vLLM's request.
        gathered: What has come of its prompt, while it is parked; None once vLLM has it.
        steps: What its last steps gave, and was not submitted yet.
        sent: How many tokens' states were taken from its steps: those of the positions from 0 on.
    """

    request: Request
    gathered: ChunkAccumulator | None
    steps: Steps = field(default_factory=Steps)
    sent: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    """A request that ended early, of which its client was not told yet."""

    request: Request
    reason: str


class StageSchedulerLayer(SchedulerInterface):  # type: ignore[misc] # vLLM is not typed here
    """What `StageScheduler` and `StageAsyncScheduler` add to the scheduler below.

    A request whose ``extra_args["omni_fsm"]`` says that it waits is registered with the stage and kept here until the end of
    its input: it is in no queue of vLLM's, has no slot and no block, and lets the engine sleep. Then vLLM gets it, with its
    input as its prompt. One that does not wait begins the pipeline. Of both the stage is told what their steps give, and how
    they end.

    Attributes:
        stage: The engine's stage; runs from here on until `shutdown`.

    Raises:
        ConfigError: See `settings_of`, `EngineCoreStage`, and, in an engine with an output edge, `check_worker`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lives: dict[str, _Life] = {}
        self._ended: list[_Ended] = []
        settings = settings_of(self.vllm_config)
        if settings.sends:
            check_worker(self.vllm_config.parallel_config.worker_cls)
        self.stage = EngineCoreStage(settings, EngineWaker())
        self.stage.adapter.start()

    # What the engine calls

    def add_request(self, request: Request) -> None:
        """See vLLM's scheduler. A request that cannot be served ends with finish reason error; the engine goes on."""
        try:
            entry = entry_of(request.sampling_params)
            if entry is not None:
                self._begin(request, entry)
                return
        except OmniFsmError as error:
            _log.error("%s: request %s was refused: %s", self._name, request.request_id, error)
            request.status = RequestStatus.FINISHED_ERROR
            self._ended.append(_Ended(request, str(error)))
            return
        super().add_request(request)

    def has_requests(self) -> bool:
        """See vLLM's scheduler. A sleeping engine that was woken asks this first: what woke it is dealt with here."""
        self._hear()
        return bool(self._ended) or super().has_requests()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's scheduler. What the stage has told is dealt with first."""
        self._hear()
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """See vLLM's scheduler. The step's states go to the stage before vLLM decides whether the request is finished."""
        if self.stage.sends:
            self._send(scheduler_output, model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            life = self._lives.get(request_id)
            if life is not None and life.request.is_finished():
                self._leave(life)
        self._tell_clients(outputs)
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """See vLLM's scheduler; parked requests as well. An abort is a cancel in every stage."""
        asked = (request_ids,) if isinstance(request_ids, str) else request_ids
        names = dict.fromkeys((*self.requests, *self._lives) if asked is None else asked)
        finished: list[Request] = super().finish_requests(names, finished_status)
        for life in [self._lives[name] for name in names if name in self._lives]:
            if life.gathered is not None:
                life.request.status = finished_status
                finished.append(life.request)
            if life.request.is_finished():
                self._leave(life)
        return finished

    def shutdown(self) -> None:
        """See vLLM's scheduler. An engine in order has aborted all requests by now; those that are left, it has failed."""
        for request_id in self._lives:
            self.stage.adapter.fail(request_id, "the engine ended before the request")
        self.stage.adapter.shutdown()
        super().shutdown()

    # How a request begins

    @property
    def _name(self) -> str:
        return self.stage.adapter.runtime.config.stage

    def _begin(self, request: Request, entry: RequestEntry) -> None:
        """Register a life; park it, or let vLLM have it.

        Raises:
            OmniFsmError: It cannot begin here.
        """
        if entry.waits is not self.stage.receives:
            raise ConfigError("extra_args.omni_fsm.waits", entry.waits, f"{self.stage.receives} in stage {self._name}")
        if request.resumable or request.mm_features:
            raise ConfigError("prompt", request.request_id, "one prompt of tokens or embeddings, given at once")
        if self.stage.sends and request.sampling_params.stop:  # the client aborts what ends so: here it is no end
            raise ConfigError("stop", request.sampling_params.stop, "stop_token_ids in a stage that sends")
        admission = self.stage.adapter.register(request.request_id, entry.identity)
        if not admission.accepted:
            raise OmniFsmError(f"{entry.identity} cannot begin: {admission.reason}")
        life = self._lives[request.request_id] = _Life(request, ChunkAccumulator() if entry.waits else None)
        if life.gathered is None:
            self._admit(life)

    def _admit(self, life: _Life) -> None:
        """From here on it is an ordinary request of vLLM's. States of a cached prefix would be missing: none is read."""
        life.gathered = None
        if self.stage.sends:
            life.request.skip_reading_prefix_cache = True
        super().add_request(life.request)

    # What the stage tells

    def _hear(self) -> None:
        if not self.stage.news.is_set():
            return
        self.stage.news.clear()  # before the feedback is collected: what comes in between is news again
        told = self.stage.adapter.collect_feedback()
        for request_id, cause in told.failed.items():
            life = self._lives.get(request_id)
            if life is None:
                self.stage.adapter.release(request_id)
            else:
                self._end_early(life, cause)
        for request_id in told.ready:
            life = self._lives.get(request_id)
            if life is not None and life.gathered is not None:
                self._take(life, life.gathered)

    def _end_early(self, life: _Life, cause: Cause) -> None:
        """Another stage, a deadline or a lost peer ended it. For a client that waits for a prompt that is an error, always."""
        status = RequestStatus.FINISHED_ERROR if life.gathered is not None else _STATUS[cause.outcome]
        self._end(life, status, str(cause))

    def _take(self, life: _Life, gathered: ChunkAccumulator) -> None:
        """Take what is there of a parked request's input. With its end, vLLM gets the request."""
        request_id = life.request.request_id
        try:
            while (taken := self.stage.adapter.take(request_id)).kind in (TakenKind.CHUNK, TakenKind.END):
                gathered.add(taken.payload)
                if taken.kind is TakenKind.END:
                    prompt = prompt_of(gathered.take(), self.vllm_config.model_config)
                    life.request = request_with(life.request, prompt)
                    self._admit(life)
                    return
        except Exception as error:  # noqa: BLE001 - becomes an event: whatever a peer sends, all others are served on
            self._fail(life, f"{type(error).__name__}: {error}")

    # What the stage is told

    def _send(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Submit the step's states and tokens, for each request that vLLM still has."""
        states, cached = states_of(model_runner_output), scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request_id, rows in states.items():
            life = self._lives.get(request_id)
            if life is None or life.request.is_finished() or _is_void(life.request):
                continue
            sampled = model_runner_output.sampled_token_ids
            tokens = sampled[model_runner_output.req_id_to_index[request_id]] if sampled else []
            if starts[request_id] > life.sent:
                self._fail(life, f"the states of tokens {life.sent} to {starts[request_id]} were not computed here")
                continue
            fresh = rows[life.sent - starts[request_id] :]  # what is computed again after a preemption was sent before
            if tokens or len(fresh):
                is_first = life.sent == 0
                life.sent += len(fresh)
                life.steps.add(tokens, fresh)
                if is_first or len(life.steps) >= self.stage.steps_together:
                    # A refusal needs no answer: the stage tells why the request is over, in its feedback.
                    self.stage.adapter.submit_chunk(request_id, life.steps.take())

    def _leave(self, life: _Life) -> None:
        """The request is finished in vLLM: the one place where the end of its output is said."""
        request_id, status = life.request.request_id, life.request.status
        del self._lives[request_id]
        if status is RequestStatus.FINISHED_ABORTED:
            self.stage.adapter.cancel(request_id, f"aborted in stage {self._name}")
        elif status is RequestStatus.FINISHED_ERROR:
            self.stage.adapter.fail(request_id, "the engine ended it with an error")
        elif self.stage.sends:
            self.stage.adapter.end(request_id, life.steps.take())
            return  # released by the stage itself, once the end is out
        self.stage.adapter.release(request_id)

    def _fail(self, life: _Life, reason: str) -> None:
        """It fails here: every stage is told, and its client."""
        _log.error("%s: request %s failed: %s", self._name, life.request.request_id, reason)
        self.stage.adapter.fail(life.request.request_id, reason)
        self._end(life, RequestStatus.FINISHED_ERROR, reason)

    def _end(self, life: _Life, status: RequestStatus, reason: str) -> None:
        """End a request that nobody in this engine has ended, wherever it is. Its client is told with the next step."""
        request_id = life.request.request_id
        del self._lives[request_id]
        if life.gathered is None:
            super().finish_requests(request_id, status)
        else:
            life.request.status = status
        self._ended.append(_Ended(life.request, reason))
        self.stage.adapter.release(request_id)

    def _tell_clients(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add what ended early to what vLLM's clients get: the finish reason, and ours as the stop reason."""
        for ended in self._ended:
            of_client = outputs.setdefault(ended.request.client_index, EngineCoreOutputs())
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=ended.request.request_id,
                    new_token_ids=[],
                    finish_reason=ended.request.get_finished_reason(),
                    stop_reason=ended.reason,
                    events=ended.request.take_events(),
                    trace_headers=ended.request.trace_headers,
                )
            )
        self._ended.clear()


class StageScheduler(StageSchedulerLayer, Scheduler):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's scheduler as a stage's. See `StageSchedulerLayer`."""


class StageAsyncScheduler(StageSchedulerLayer, AsyncScheduler):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's scheduler that runs a step ahead, as a stage's. See `StageSchedulerLayer`."""


def _is_void(request: Request) -> bool:
    """Whether vLLM drops this step's tokens, to sample them anew: then the states after them are no one's."""
    return bool(request.num_stale_output_tokens and request.drop_stale_output)
