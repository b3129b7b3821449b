"""The threads of a stage: each repeats one step of the runtime and sleeps when there is nothing to do."""

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType

from omni_fsm.connectors.port import Connector
from omni_fsm.runtime.stage import StageRuntime


class StageThreads:
    """Runs a `StageRuntime`: one I/O thread per edge, one outbox thread, one timer thread, workers for producers.

    Nothing polls: I/O threads block in the connector, the others on a semaphore or a condition.

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
        self._stopped = threading.Lock()
        self._workers = ThreadPoolExecutor(
            runtime.config.workers, thread_name_prefix=f"{runtime.config.stage}-producer"
        )
        self._threads: list[threading.Thread] = []
        runtime.drive(self)

    def start(self) -> None:
        """Start the threads."""
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
        with self._stopped:
            if self._stopping:
                return self.runtime.wait_idle(0.0)
            self.runtime.begin_shutdown()
            flushed = self.runtime.wait_idle(self.runtime.config.shutdown_grace_s if grace_s is None else grace_s)
            self._stop()
            return flushed

    def _stop(self) -> None:
        self._stopping = True
        self._frames.release()
        self.tick()
        connectors = [end for end in (self.runtime.source, self.runtime.sink) if end is not None]
        for connector in connectors:
            connector.wake()
        for thread in self._threads:
            thread.join()
        self._workers.shutdown(wait=False, cancel_futures=True)
        for connector in connectors:
            connector.close()

    # Wake-ups

    def produce(self) -> None:
        """See `Wakeups`."""
        if not self._stopping:
            self._workers.submit(self._guarded, self.runtime.produce_once)

    def put(self) -> None:
        """See `Wakeups`."""
        self._frames.release()

    def tick(self) -> None:
        """See `Wakeups`."""
        with self._timer:
            self._timer_set = True
            self._timer.notify()

    # Loops

    def _guarded(self, step: Callable[[], bool]) -> bool:
        """One step. One that raises is a bug, which must not leave every request of the stage waiting."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - becomes an event of every request
            self.runtime.crash(error)
            return False

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

    def _tick(self) -> bool:
        self._due_ns = self.runtime.tick_once()
        return True

    def _io_loop(self, connector: Connector, step: Callable[[], bool]) -> None:
        """Block until the edge has something, then take all of it."""
        while not self._stopping:
            connector.wait(None)
            while not self._stopping and self._guarded(step):
                pass


def on_sigterm(threads: StageThreads, then: Callable[[], None]) -> None:
    """Shut a stage down on SIGTERM: ``end(cancelled, shutdown)`` to every stage after it, a stop to those before it.

    Called by: the main thread of a stage's process.

    Args:
        threads: The stage.
        then: Called when all is flushed or the grace is over, on a thread of its own.
    """

    def shut_down() -> None:
        threads.shutdown()
        then()

    def handle(_signum: int, _frame: FrameType | None) -> None:
        threading.Thread(target=shut_down, name="sigterm").start()

    signal.signal(signal.SIGTERM, handle)
