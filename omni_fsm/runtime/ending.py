"""How a whole stage ends: in order, out of time, or by a fault of its own."""

from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.runtime.core import StageCore
from omni_fsm.runtime.inbox import Inbox


class Ending:
    """Ends every request of a stage."""

    def __init__(self, core: StageCore, inbox: Inbox) -> None:
        self._core = core
        self._inbox = inbox

    def begin_shutdown(self, cause: Cause | None = None) -> None:
        """See `StageRuntime.begin_shutdown`."""
        core = self._core
        with core.turn() as turn:
            cause = core.closing or cause or Cause(Outcome.CANCELLED, "shutdown", core.clock.now_ns())
            core.closing = cause
            for identity in list(core.tables.unclaimed):
                self._inbox.drop_unclaimed(turn, identity, cause)
            core.woken(turn)  # it is told nothing of each, so that it looks
            for request in core.tables.snapshot():
                request.host_knows = True
                if request.receiver is not None:
                    core.receiver_moved(turn, request, request.receiver.on_cancelled(cause))
                if request.sender is not None:
                    core.sender_moved(turn, request, request.sender.on_closed(cause))

    def crash(self, error: BaseException) -> None:
        """A step raised what it never should: the stage cannot be trusted any more and dies loudly.

        Every request fails with the error, and new ones are refused. The driver then closes both edges: the peers learn it like
        a death.

        Called by: the driver whose step it was.
        """
        core = self._core
        cause = Cause(
            Outcome.ERROR, f"stage {self._core.config.stage}: {type(error).__name__}: {error}", core.clock.now_ns()
        )
        with core.turn() as turn:
            core.closing = cause
            core.reports.crash(cause, error)
            for request in core.tables.snapshot():
                half = request.sender or request.receiver
                if half is not None:
                    core.tell_host(turn, request, half, cause)
                if request.receiver is not None:
                    core.receiver_moved(turn, request, request.receiver.on_cancelled(cause))
                if request.sender is not None:
                    core.sender_moved(turn, request, request.sender.on_peer_lost(cause))

    def abandon(self, grace_s: float) -> None:
        """The grace of a shutdown is over: report each request whose end did not go out."""
        core = self._core
        reason = f"shutdown: its end was not out within {grace_s:g} s"
        cause = Cause(Outcome.ERROR, reason, core.clock.now_ns())
        with core.turn():
            for request in core.tables.snapshot():
                if request.sender is not None and not request.sender.is_final:
                    core.reports.failure("marker_lost", request, request.sender, cause)
