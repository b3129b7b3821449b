"""The life of a stage's connectors, whoever drives them: what specs/connector.toml says, and its effects."""

import contextlib
import threading
from abc import ABC, abstractmethod

from omni_fsm.protocol.names import ConnectorEffect, ConnectorEvent, ConnectorState
from omni_fsm.protocol.table import step
from omni_fsm.runtime.feedback import Feedback
from omni_fsm.runtime.stage import StageRuntime
from omni_fsm.tables import connector_table


class Lifecycle(ABC):
    """Drives a `StageRuntime` from the making of its connectors to their end. Thread-safe.

    Args:
        runtime: The stage. Nobody else calls its steps.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self.runtime = runtime
        self._table = connector_table()
        self._state = self._table.initial
        self._moving = threading.Lock()
        self._closed = threading.Event()
        self._grace_s = 0.0
        self._flushed = True
        self._closer = 0  # the thread that shuts down
        runtime.drive(self)

    @property
    def state(self) -> ConnectorState:
        """Where the life of the connectors is."""
        return self._state

    def shutdown(self, grace_s: float | None = None) -> bool:
        """End every request, give the ends time to go out, stop what drives them. Idempotent; waits for another shutdown.

        Args:
            grace_s: Seconds to wait; None: the config's ``shutdown_grace_s``.

        Returns:
            Whether every end went out in time. False at once where a hook calls it in the middle of that very shutdown.
        """
        grace_s = self.runtime.config.shutdown_grace_s if grace_s is None else grace_s
        if self._happened(ConnectorEvent.SHUTDOWN_BEGUN):
            self._drain(min(grace_s, threading.TIMEOUT_MAX))
        elif self._closer == threading.get_ident() and not self._closed.is_set():
            return False
        self._closed.wait()
        return self._flushed

    def _drain(self, grace_s: float) -> None:
        """Give the ends time; whatever happens meanwhile, a Ctrl-C too, the stage is closed afterwards."""
        if self._closed.is_set():  # it never ran, or a step had raised
            return
        self._grace_s = grace_s
        flushed = False
        try:
            flushed = self._flush(grace_s)
        finally:
            self._flushed = self._flushed and flushed
            self._happened(ConnectorEvent.FLUSHED if flushed else ConnectorEvent.GRACE_OVER)

    # What the two kinds of driver do

    @abstractmethod
    def start(self) -> None:
        """Begin to drive the stage. Once: again is harmless.

        Raises:
            LocalProtocolError: The stage was shut down; make a new one.
        """

    @abstractmethod
    def collect_feedback(self, timeout_s: float = 0.0) -> Feedback:
        """What happened since the last call; see `StageRuntime.collect_feedback`."""

    @abstractmethod
    def produce(self) -> None:
        """See `Wakeups`."""

    @abstractmethod
    def put(self) -> None:
        """See `Wakeups`."""

    @abstractmethod
    def tick(self) -> None:
        """See `Wakeups`."""

    @abstractmethod
    def _flush(self, grace_s: float) -> bool:
        """Go on until no request is left, for ``grace_s`` seconds at most. Returns whether none is."""

    @abstractmethod
    def _start_threads(self) -> None:
        """Start what drives the stage."""

    @abstractmethod
    def _halt(self) -> None:
        """Let every thread end after its step."""

    @abstractmethod
    def _join(self) -> None:
        """Wait for the threads a while."""

    # Moving

    def _happened(self, event: ConnectorEvent, error: BaseException | None = None) -> bool:
        """Move, and do what the row says. Returns whether there was anything to do.

        Raises:
            LocalProtocolError: It cannot happen now.
        """
        with self._moving:
            cell = step(self._table, self._state, event, self.runtime.config.stage)
            self._state = cell.next
            if event is ConnectorEvent.SHUTDOWN_BEGUN and not cell.ignored:
                self._closer = threading.get_ident()
        with contextlib.ExitStack() as left:
            if cell.next in self._table.final:
                left.callback(self._closed.set)
            # The stack unwinds from its end; an effect that raises does not keep the others from being done.
            for effect in reversed(cell.effects):
                left.callback(self._do, effect, error)
        return not cell.ignored

    def _do(self, effect: ConnectorEffect, error: BaseException | None) -> None:
        match effect:
            case ConnectorEffect.START_THREADS:
                self._start_threads()
            case ConnectorEffect.END_REQUESTS:
                self.runtime.begin_shutdown()
            case ConnectorEffect.REPORT_UNSENT:
                self._flushed = self._flushed and self.runtime.wait_idle(0.0)
                self.runtime.abandon(self._grace_s)
            case ConnectorEffect.STOP_THREADS:
                self._halt()
                self._join()
            case ConnectorEffect.CLOSE_ENDS:
                with contextlib.ExitStack() as ends:
                    for end in self.runtime.ends:
                        ends.callback(end.close)
            case ConnectorEffect.FAIL_REQUESTS:
                self._flushed = False
                if error is not None:
                    self.runtime.crash(error)
                self._halt()
