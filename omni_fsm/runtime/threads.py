"""The threads of a stage: each repeats one step of the runtime and sleeps when there is nothing to do."""

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import FrameType

from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.names import ConnectorEvent
from omni_fsm.runtime.feedback import Feedback
from omni_fsm.runtime.lifecycle import Lifecycle
from omni_fsm.runtime.stage import StageRuntime

_JOIN_S = 1.0
"""How long a shutdown waits for the threads: one that hangs in a hook or a producer ends with the process."""


class _Workers:
    """Daemon threads that repeat one step, as many as there are steps to take at once, up to a limit.

    Not an executor of the standard library: these are joined at exit, so that one producer that hangs would keep the process.
    """

    def __init__(self, name: str, limit: int, step: Callable[[], None]) -> None:
        self._name, self._limit, self._step = name, limit, step
        self._lock = threading.Lock()
        self._steps: SimpleQueue[None] = SimpleQueue()
        self._idle = 0  # workers that wait, less the steps that wait for one
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def wake(self) -> None:
        """There is one more step to take."""
        try:
            with self._lock:
                self._idle -= 1
                if self._idle < 0 and len(self._threads) < self._limit and not self._stopping:
                    self._add()
        finally:
            self._steps.put(None)

    def _add(self) -> None:
        """One more worker. Where no thread can be had, those that there are take the step.

        Raises:
            RuntimeError: There is none at all.
        """
        thread = threading.Thread(target=self._loop, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            return
        self._idle += 1
        self._threads.append(thread)

    def _loop(self) -> None:
        while True:
            self._steps.get()
            if self._stopping:
                return
            self._step()
            with self._lock:
                self._idle += 1

    def stop(self) -> list[threading.Thread]:
        """Let every worker end after its step; returns them, to be joined."""
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
        for _ in threads:
            self._steps.put(None)
        return threads


class StageThreads(Lifecycle):
    """Runs a `StageRuntime`: one I/O thread per edge, one outbox thread, one timer thread, workers for producers.

    Nothing polls: I/O threads block in the connector, the others on a queue of steps (it costs less than a semaphore)
    or on a condition. All are daemons.

    Args:
        runtime: The stage. Its steps are called by these threads alone from ``start`` on.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._frames: SimpleQueue[None] = SimpleQueue()
        self._timer = threading.Condition()
        self._timer_set = False
        self._due_ns: int | None = None
        self._stopping = False
        self._threads: list[threading.Thread] = []
        name = f"{runtime.config.stage}-producer"
        self._workers = _Workers(name, runtime.config.workers, partial(self._guarded, runtime.produce_once))
        super().__init__(runtime)

    def start(self) -> None:
        """See `Lifecycle`."""
        self._happened(ConnectorEvent.STARTED)

    def collect_feedback(self, timeout_s: float = 0.0) -> Feedback:
        """See `Lifecycle`."""
        return self.runtime.collect_feedback(timeout_s)

    def _start_threads(self) -> None:
        loops: list[tuple[str, Callable[[], None]]] = [("outbox", self._put_loop), ("timer", self._timer_loop)]
        for name, connector, step in (
            ("source", self.runtime.source, self.runtime.source_once),
            ("sink", self.runtime.sink, self.runtime.sink_once),
        ):
            if connector is not None:
                loops.append((name, partial(self._io_loop, connector, step)))
        for name, loop in loops:
            thread = threading.Thread(target=loop, name=f"{self.runtime.config.stage}-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)  # a shutdown meanwhile joins those that run

    def _flush(self, grace_s: float) -> bool:
        return self.runtime.wait_idle(grace_s)

    def _halt(self) -> None:
        self._stopping = True
        self._frames.put(None)
        self.tick()
        for connector in self.runtime.ends:
            connector.wake()

    def _join(self) -> None:
        until_s = time.monotonic() + _JOIN_S
        for thread in (*self._threads, *self._workers.stop()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    # Wake-ups

    def produce(self) -> None:
        """See `Wakeups`."""
        self._workers.wake()

    def put(self) -> None:
        """See `Wakeups`."""
        self._frames.put(None)

    def tick(self) -> None:
        """See `Wakeups`."""
        with self._timer:
            self._timer_set = True
            self._timer.notify()

    # Loops

    def _guarded(self, step: Callable[[], object]) -> None:
        """One step. One that raises is a bug, which must not leave every request of the stage waiting."""
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - the stage dies loudly, see there
            self._happened(ConnectorEvent.STEP_RAISED, error)

    def _put_loop(self) -> None:
        while True:
            self._frames.get()
            if self._stopping:
                return
            self._guarded(self.runtime.put_once)

    def _timer_loop(self) -> None:
        while not self._stopping:
            self._guarded(self._tick)
            with self._timer:
                due_ns = self._due_ns
                wait_s = None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
                self._timer.wait_for(lambda: self._timer_set or self._stopping, wait_s)
                self._timer_set = False

    def _tick(self) -> None:
        self._due_ns = self.runtime.tick_once()

    def _io_loop(self, connector: Connector, step: Callable[[], bool]) -> None:
        while not self._stopping:
            self._guarded(partial(self._take_all, connector, step))

    def _take_all(self, connector: Connector, step: Callable[[], bool]) -> None:
        """Block until the edge has something, then take all of it."""
        connector.wait(None)
        while not self._stopping and step():
            pass


def on_sigterm(lifecycle: Lifecycle, then: Callable[[], None]) -> None:
    """Shut a stage down on SIGTERM: ``end(cancelled, shutdown)`` to every stage after it, a stop to those before it.

    Called by: the main thread of a stage's process. A second SIGTERM while the first is obeyed changes nothing.

    Args:
        lifecycle: Of the stage.
        then: Called when all is flushed or the grace is over, on a thread of its own.
    """

    def shut_down() -> None:
        try:
            lifecycle.shutdown()
        finally:
            then()

    def handle(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)
        threading.Thread(target=shut_down, name="sigterm").start()

    signal.signal(signal.SIGTERM, handle)
