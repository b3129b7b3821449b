"""What a stage tells its observers, and what becomes of a hook that raises."""

import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.half import Moved
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf
from omni_fsm.runtime.ports import Clock, Failure, Observer, Transition
from omni_fsm.runtime.requests import Request


class Reports:
    """Puts aside what happens, under the runtime's lock, and gives it to the observers in that order, without it."""

    def __init__(self, observers: tuple[Observer, ...], clock: Clock) -> None:
        self._observers = observers
        self._wants = [(observer, getattr(observer, "wants_transitions", _always)) for observer in observers]
        self._clock = clock
        self._untold: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._telling = threading.Lock()

    def transition(self, request: Request, half: SenderHalf | ReceiverHalf, moved: Moved[Any, Any, Any]) -> None:
        """A half moved, or ignored an event."""
        takers = [observer for observer, wants in self._wants if wants()]
        if not takers:
            return
        transition = Transition(
            machine=half.table.machine,
            edge=half.edge,
            internal_id=request.internal_id,
            identity=request.identity,
            seq=half.next_seq,
            event=moved.event,
            before=moved.before,
            after=moved.after,
            effects=moved.effects,
            ignored=moved.ignored,
            cause=half.cause,
            at_ns=self._clock.now_ns(),
        )
        self._untold.extend((observer.on_transition, transition) for observer in takers)

    def failure(self, what: str, request: Request, half: SenderHalf | ReceiverHalf, cause: Cause) -> None:
        """A request failed, or its end was lost."""
        raised, request.exception = request.exception, None  # it holds the producer's frames
        self._put_aside(
            Failure(
                what=what,
                machine=half.table.machine,
                edge=half.edge,
                internal_id=request.internal_id,
                identity=request.identity,
                cause=cause,
                seq=half.next_seq,
                exception=raised,
            )
        )

    def edge_failure(self, connector: Connector | None, cause: Cause) -> None:
        """An edge failed as a whole."""
        self._put_aside(Failure("edge", "connector", connector.edge if connector else None, "", None, cause))

    def crash(self, cause: Cause, error: BaseException) -> None:
        """The stage failed as a whole."""
        self._put_aside(Failure("crashed", "stage", None, "", None, cause, exception=error))

    def _put_aside(self, failure: Failure) -> None:
        self._untold.extend((observer.on_failure, failure) for observer in self._observers)

    def tell(self) -> None:
        """Give the observers what happened, in the order in which it happened, whichever threads it happened on."""
        while self._untold and self._telling.acquire(blocking=False):
            try:
                while self._untold:
                    call, event = self._untold.popleft()
                    self.guarded(call, event)
            finally:
                self._telling.release()

    def guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a connector call, hook or observer; what it raises is reported, and the stage goes on."""
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reported: a hook must not take the I/O thread with it
            name = getattr(call, "__qualname__", repr(call))
            cause = Cause(Outcome.ERROR, f"{name} raised {type(error).__name__}: {error}", self._clock.now_ns())
            failure = Failure("hook_raised", "stage", None, "", None, cause, exception=error)
            others = [observer for observer in self._observers if getattr(call, "__self__", None) is not observer]
            for observer in others:
                _tell_last(observer, failure)
            if not others:
                traceback.print_exc()  # nobody else is left to tell


def _always() -> bool:
    return True


def _tell_last(observer: Observer, failure: Failure) -> None:
    """Report a raise to an observer that was not its cause. One that raises too is printed: nobody is left to tell."""
    try:
        observer.on_failure(failure)
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
