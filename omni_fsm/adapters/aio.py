"""A stage whose requests are coroutines: one async generator each, from frames to payloads.

For hosts that live in an event loop, such as those on the public API of an engine. The generator says what a request does; the
stage runs it, gives it its frames, sends what it yields, cancels it when the request is over, and passes on what it raises.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from omni_fsm.adapters.runner import AcceptAll, StageRunnerAdapter
from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Feedback, Observer, Producer, StageConfig, Taken, TakenKind, passthrough

_log = logging.getLogger("omni_fsm.aio")


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """What a generator yields instead of a payload that is the last of its segment."""

    payload: Any = None


class StageRequest:
    """One life of a request, as its generator sees it. Used in the stage's event loop alone.

    Attributes:
        internal_id: The stage's name of it.
        identity: External id and generation.
        cause: Why it ended early; None while it goes on.
    """

    def __init__(self, adapter: StageRunnerAdapter, internal_id: str, identity: Identity) -> None:
        self.internal_id, self.identity = internal_id, identity
        self.cause: Cause | None = None
        self.more, self.room = asyncio.Event(), asyncio.Event()
        self._adapter = adapter
        self._input_over = False

    async def frames(self) -> AsyncIterator[Taken]:
        """The frames of its input, in order, each once; the last is the end, whose payload may be None.

        Waits for each. When the request ends early its generator is cancelled, here or wherever it waits.
        """
        while not self._input_over and self.cause is None:
            self.more.clear()
            taken = self._adapter.take(self.internal_id)
            if taken.kind in (TakenKind.NOT_YET, TakenKind.FAILED):  # the feedback tells of a failure, too
                await self.more.wait()
                continue
            self._input_over = taken.kind is not TakenKind.CHUNK
            if taken.kind is not TakenKind.GONE:
                yield taken

    async def submit(self, payload: Any) -> bool:
        """Offer a payload to the next stage; waits while there is no room. Returns whether it was accepted.

        Called by: the stage, with what the generator yields.

        Raises:
            ConfigError: The stage has no output.
        """
        if self._adapter.runtime.sink is None:
            accepted = "a generator that yields nothing: the stage has no output"
            raise ConfigError("work", type(payload).__name__, accepted)
        is_end = isinstance(payload, SegmentEnd)
        output = payload.payload if is_end else payload
        while True:
            self.room.clear()
            admission = self._adapter.submit_chunk(self.internal_id, output, segment_end=is_end)
            if admission.accepted:
                await asyncio.sleep(0)  # a generator that waits for nothing lets others live
                return True
            if not admission.no_room:
                return False
            await self.room.wait()


Work = Callable[[Any], AsyncIterator[Any]]
"""What a stage does with a request: an async generator that takes its `StageRequest`'s ``frames()`` and yields payloads.

Called by: the stage, once a life; run in its event loop. When it returns, the output is complete: the end goes out, and what is
left of the input is not wanted. What it raises ends the request with its own words. It is cancelled when the request ends early.
"""


class AsyncStage:
    """A stage in an event loop.

    Args:
        config: The stage's settings.
        work: What it does with each request.
        source: Receiving end of the input edge. Owned from here on.
        sink: Sending end of the output edge, or None: then ``work`` yields nothing. Owned from here on.
        producer: Turns what ``work`` yields into payloads.
        observers: In addition to the logs.

    Raises:
        ConfigError: There is no input.
    """

    def __init__(  # noqa: PLR0913 - the ports of a stage
        self,
        config: StageConfig,
        work: Work,
        *,
        source: Connector,
        sink: Connector | None = None,
        producer: Producer = passthrough,
        observers: Iterable[Observer] = (),
    ) -> None:
        if source is None:
            raise ConfigError("source", source, "the receiving end of an edge: requests come by it")
        self._work = work
        self._accepts = AcceptAll(config.stage)
        self._tasks: dict[str, tuple[StageRequest, asyncio.Task[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._woken.set()  # nobody knows yet what happened before the first cycle
        self.adapter = StageRunnerAdapter(
            config, source=source, sink=sink, producer=producer, host=self, observers=observers
        )

    # The host's hooks

    def stream_offered(self, identity: Identity) -> Any:
        """See `StageHost`: every request is accepted."""
        return self._accepts.stream_offered(identity)

    def feedback_ready(self) -> None:
        """See `StageHost`."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to wake
                self._loop.call_soon_threadsafe(self._woken.set)

    # Serving

    async def serve(self) -> None:
        """Serve requests until this is cancelled; then every request is, and the stage is shut down.

        Returns when somebody else shuts the stage down.

        Raises:
            OmniFsmError: The stage has died of a bug; its words are the cause of every request.
        """
        self.adapter.start()
        try:
            while self.adapter.runtime.closing is None or self._tasks:
                await self.cycle()
        finally:
            await self.aclose()
        closing = self.adapter.runtime.closing
        if closing is not None and closing.outcome is Outcome.ERROR:
            raise OmniFsmError(closing.reason)

    def cancel(self, internal_id: str, reason: str = "cancelled") -> None:
        """Cancel a request here: its generator is cancelled, and every other stage hears it.

        Called by: the event loop. Unknown ids change nothing.
        """
        if (live := self._tasks.get(internal_id)) is not None:
            self.adapter.cancel(internal_id, reason)
            self._stop(*live, Cause(Outcome.CANCELLED, reason, time.monotonic_ns()))

    async def cycle(self, timeout_s: float | None = None) -> None:
        """Act on what has happened, once; waits for something to happen.

        Called by: `serve`, or whoever turns the stage step by step.

        Args:
            timeout_s: How long to wait at most; None: until something happens.
        """
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        self._woken.clear()
        self._hear(self.adapter.collect_feedback())

    async def aclose(self) -> None:
        """Cancel every request, and shut the stage down. Idempotent; a generator that does not end is left after the grace."""
        for internal_id in list(self._tasks):
            if self._tasks[internal_id][0].cause is None:
                self.cancel(internal_id, "shutdown")
        try:
            if running := [task for _, task in self._tasks.values()]:
                await asyncio.wait(running, timeout=self.adapter.runtime.config.shutdown_grace_s)
        finally:
            await asyncio.shield(asyncio.to_thread(self.adapter.shutdown))
            self.adapter.collect_feedback()  # nobody is left to act on it

    @property
    def num_requests(self) -> int:
        """How many generators run."""
        return len(self._tasks)

    def _request(self, internal_id: str, identity: Identity) -> StageRequest:
        """What the work of a life is given."""
        return StageRequest(self.adapter, internal_id, identity)

    def _hear(self, told: Feedback) -> None:
        for internal_id, identity in told.registered.items():
            request = self._request(internal_id, identity)
            task = asyncio.create_task(self._run(request), name=internal_id)
            task.add_done_callback(partial(self._over, internal_id))
            self._tasks[internal_id] = (request, task)
        for internal_id, cause in told.failed.items():
            if (live := self._tasks.get(internal_id)) is None:
                self.adapter.release(internal_id)
                continue
            self._stop(*live, cause)
        for internal_id in told.ready.keys() & self._tasks.keys():
            self._tasks[internal_id][0].more.set()
        for internal_id in told.resumed.keys() & self._tasks.keys():
            self._tasks[internal_id][0].room.set()
        if (closing := self.adapter.runtime.closing) is not None:
            for live in self._tasks.values():
                self._stop(*live, closing)  # a host is told nothing of the requests that it ends itself

    @staticmethod
    def _stop(request: StageRequest, task: "asyncio.Task[None]", cause: Cause) -> None:
        """Cancel a generator, once: what it does then to clean up is its own."""
        if request.cause is None:
            request.cause = cause
            task.cancel()

    async def _run(self, request: StageRequest) -> None:
        """One life, from its first frame to its end."""
        try:
            async with contextlib.aclosing(self._checked(self._work(request))) as payloads:
                async for payload in payloads:
                    if not await request.submit(payload):
                        return  # it is over: the feedback says why
            if self.adapter.runtime.sink is not None:
                self.adapter.end(request.internal_id)
        except asyncio.CancelledError:
            if request.cause is not None:
                raise
            self.adapter.fail(
                request.internal_id, "CancelledError: inside the work"
            )  # nobody has cancelled the request
        except BaseException as error:  # becomes an event: the request fails, all others are served on
            _log.debug("%s: the work of %s raised", self.adapter.runtime.config.stage, request.identity, exc_info=error)
            self.adapter.fail(request.internal_id, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise

    def _over(self, internal_id: str, _: "asyncio.Task[None]") -> None:
        """A generator has come to its end, in whatever way; one that was cancelled before it began, too."""
        del self._tasks[internal_id]
        self.adapter.release(internal_id)
        self._woken.set()  # `serve` may have waited for the last one

    @staticmethod
    def _checked(work: Any) -> Any:
        if not hasattr(work, "aclose"):
            raise ConfigError("work", work, "a function that gives an async generator for each request")
        return work
