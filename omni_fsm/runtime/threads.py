"""The threads of a stage: each repeats one step of the runtime and sleeps when there is nothing to do."""

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.errors import OmniFsmError
from omni_fsm.runtime.stage import StageRuntime

_JOIN_S = 1.0
"""How long a shutdown waits for a thread: one that hangs in a hook or a producer ends with the process."""


class _Workers:
    """Daemon threads that repeat one step, as many as there are steps to take at once, up to a limit.

    Not an executor of the standard library: these are joined at exit, so that one producer that hangs would keep the process.
    """

    def __init__(self, name: str, limit: int, step: Callable[[], None]) -> None:
        self._name, self._limit, self._step = name, limit, step
        self._lock = threading.Lock()
        self._steps = threading.Semaphore(0)
        self._idle = 0  # workers that wait, less the steps that wait for one
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def wake(self) -> None:
        """There is one more step to take."""
        with self._lock:
            self._idle -= 1
            if self._idle < 0 and len(self._threads) < self._limit and not self._stopping:
                self._idle += 1
                number = len(self._threads)
                thread = threading.Thread(target=self._loop, name=f"{self._name}-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._steps.release()

    def _loop(self) -> None:
        while True:
            self._steps.acquire()
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
            self._steps.release()
        return threads


class StageThreads:
    """Runs a `StageRuntime`: one I/O thread per edge, one outbox thread, one timer thread, workers for producers.

    Nothing polls: I/O threads block in the connector, the others on a semaphore or a condition. All are daemons.

    Args:
        runtime: The stage. Its steps are called by these threads alone from ``start`` on.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self.runtime = runtime
        self._frames = threading.Semaphore(0)
        self._timer = threading.Condition()
        self._timer_set = False
        self._due_ns: int | None = None
        self._stopping = False
        self._lifecycle = threading.Lock()
        self._over = False
        self._threads: list[threading.Thread] = []
        name = f"{runtime.config.stage}-producer"
        self._workers = _Workers(name, runtime.config.workers, partial(self._guarded, runtime.produce_once))
        runtime.drive(self)

    def start(self) -> None:
        """Start the threads. Once: again is harmless.

        Raises:
            OmniFsmError: The stage was shut down; make a new one.
        """
        with self._lifecycle:
            if self._over:
                raise OmniFsmError(f"stage {self.runtime.config.stage} was shut down and cannot start again")
            if self._threads:
                return
            loops: list[tuple[str, Callable[[], None]]] = [("outbox", self._put_loop), ("timer", self._timer_loop)]
            for name, connector, step in (
                ("source", self.runtime.source, self.runtime.source_once),
                ("sink", self.runtime.sink, self.runtime.sink_once),
            ):
                if connector is not None:
                    loops.append((name, partial(self._io_loop, connector, step)))
            for name, loop in loops:
                thread = threading.Thread(target=loop, name=f"{self.runtime.config.stage}-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def shutdown(self, grace_s: float | None = None) -> bool:
        """End every request, give the ends time to go out, stop the threads, close the connectors. Idempotent.

        Args:
            grace_s: Seconds to wait; None: the config's ``shutdown_grace_s``.

        Returns:
            Whether every end went out in time.
        """
        with self._lifecycle:
            if self._over:
                return self.runtime.wait_idle(0.0)
            self._over = True
            self.runtime.begin_shutdown()
            grace_s = self.runtime.config.shutdown_grace_s if grace_s is None else grace_s
            flushed = self.runtime.wait_idle(grace_s)
            if not flushed:
                self.runtime.abandon(grace_s)
            self._halt()
            for thread in (*self._threads, *self._workers.stop()):
                thread.join(_JOIN_S)
            for connector in self._connectors():
                connector.close()
            return flushed

    def _halt(self) -> None:
        """Make every loop end."""
        self._stopping = True
        self._frames.release()
        self.tick()
        for connector in self._connectors():
            connector.wake()

    def _connectors(self) -> list[Connector]:
        return [end for end in (self.runtime.source, self.runtime.sink) if end is not None]

    # Wake-ups

    def produce(self) -> None:
        """See `Wakeups`."""
        self._workers.wake()

    def put(self) -> None:
        """See `Wakeups`."""
        self._frames.release()

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
            self.runtime.crash(error)
            self._halt()

    def _put_loop(self) -> None:
        while True:
            self._frames.acquire()
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


def on_sigterm(threads: StageThreads, then: Callable[[], None]) -> None:
    """Shut a stage down on SIGTERM: ``end(cancelled, shutdown)`` to every stage after it, a stop to those before it.

    Called by: the main thread of a stage's process. A second SIGTERM while the first is obeyed changes nothing.

    Args:
        threads: The stage.
        then: Called when all is flushed or the grace is over, on a thread of its own.
    """

    def shut_down() -> None:
        threads.shutdown()
        then()

    def handle(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)
        threading.Thread(target=shut_down, name="sigterm").start()

    signal.signal(signal.SIGTERM, handle)
