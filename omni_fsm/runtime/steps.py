"""A stage without threads, on ends that belong to somebody else: the caller does the work."""

import time
from collections.abc import Callable

from omni_fsm.protocol.names import ConnectorEvent, ConnectorState
from omni_fsm.runtime.feedback import Feedback
from omni_fsm.runtime.lifecycle import Lifecycle
from omni_fsm.runtime.stage import StageRuntime

_WAIT_S = 0.01
"""How long it waits at one edge before it looks at the other."""


class StageSteps(Lifecycle):
    """Runs a `StageRuntime` whenever its caller says so, for hosts that may not have threads beside them.

    The ends are borrowed, from a manager of connectors, say: a shutdown leaves them open, and their owner closes them. One bug
    is enough to close them too: when a step raises, the peers must learn it.

    Called by: one thread at a time. Between two calls of ``run`` or ``collect_feedback`` nothing is sent, nothing arrives and no
    deadline passes. What a producer raises ends its request, a Ctrl-C that meets it there too.

    Args:
        runtime: The stage. Nobody else calls its steps.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._tasks = self._frames = 0
        super().__init__(runtime)
        self._happened(ConnectorEvent.LENT)

    def start(self) -> None:
        """See `Lifecycle`; no thread is started, it can run as soon as it is made."""
        self._happened(ConnectorEvent.LENT)

    @property
    def _drives(self) -> bool:
        """Whether the ends are this stage's to drive: not once they were given back."""
        return self.state in (ConnectorState.BORROWED, ConnectorState.RETURNING)

    def collect_feedback(self, timeout_s: float = 0.0) -> Feedback:
        """See `Lifecycle`; does all that can be done before it looks, and works on while it waits."""
        until_s = time.monotonic() + timeout_s
        self.run()
        while not (told := self.runtime.collect_feedback()) and (left_s := until_s - time.monotonic()) > 0:
            if not self._drives:
                return self.runtime.collect_feedback(left_s)
            self.run(min(left_s, _WAIT_S))
        return told

    def run(self, wait_s: float = 0.0) -> bool:
        """Do all that can be done now: take what has come, run producers, put frames, let due timers go off.

        Args:
            wait_s: If there was nothing, wait so long for the input edge (the output edge, where there is none), once.

        Returns:
            Whether there was anything to do; nothing after a shutdown.

        Raises:
            Exception: What a step raised that it never should. Every request has failed, and both ends are closed.
        """
        worked = self._drives and self._run()
        if not worked and wait_s > 0 and self._drives:
            due_ns = self.runtime.tick_once()
            if due_ns is not None:
                wait_s = min(wait_s, max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
            self.runtime.ends[0].wait(wait_s)
            worked = self._run()
        return worked

    def _run(self) -> bool:
        try:
            worked = False
            while self._run_once():
                worked = True
        except Exception as error:
            self._happened(ConnectorEvent.STEP_RAISED, error)
            raise
        return worked

    def _run_once(self) -> bool:
        """Each kind of step, as often as there is work for it. Returns whether there was any."""
        runtime = self.runtime
        worked = False
        for end, step in ((runtime.source, runtime.source_once), (runtime.sink, runtime.sink_once)):
            if end is not None:
                end.wait(0.0)
                worked |= self._repeated(step)
        while self._tasks:
            self._tasks -= 1
            worked |= runtime.produce_once()
        while self._frames:
            self._frames -= 1
            worked |= runtime.put_once()
        runtime.tick_once()
        return worked or bool(self._tasks or self._frames)

    @staticmethod
    def _repeated(step: Callable[[], bool]) -> bool:
        worked = False
        while step():
            worked = True
        return worked

    def _flush(self, grace_s: float) -> bool:
        until_s = time.monotonic() + grace_s
        while not self.runtime.wait_idle(0.0):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self.run(min(left_s, _WAIT_S))
        return True

    def _start_threads(self) -> None:
        """There are none."""

    def _halt(self) -> None:
        """There are none."""

    def _join(self) -> None:
        """There are none."""

    def produce(self) -> None:
        """See `Wakeups`."""
        self._tasks += 1

    def put(self) -> None:
        """See `Wakeups`."""
        self._frames += 1

    def tick(self) -> None:
        """See `Wakeups`: every run looks at the timers."""
