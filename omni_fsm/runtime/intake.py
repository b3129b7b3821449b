"""How a life begins in a stage."""

from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf
from omni_fsm.runtime.core import StageCore, Turn
from omni_fsm.runtime.feedback import ACCEPTED, Admission
from omni_fsm.runtime.inbox import Inbox
from omni_fsm.runtime.requests import Request
from omni_fsm.tables import receiver_table, sender_table


class Intake:
    """Registers requests: by the host itself, or because it accepted an offer."""

    def __init__(self, core: StageCore, inbox: Inbox) -> None:
        self._core = core
        self._inbox = inbox

    def register(self, internal_id: str, identity: Identity, *, offered: bool) -> Admission:
        """See `omni_fsm.runtime.StageRuntime.register`; an offered one is told to the host as registered."""
        core = self._core
        with core.turn() as turn:
            self._check_free(internal_id, identity)
            refusal = self._refusal(identity)
            if refusal:
                return Admission(accepted=False, reason=refusal)
            turned_away = core.tables.turned_away.get(identity)
            request = Request(internal_id, identity)
            if core.source is not None:
                request.receiver = ReceiverHalf(receiver_table(), core.source.edge, identity)
            if core.sink is not None:
                request.sender = SenderHalf(sender_table(), core.sink.edge, identity, core.config.retries)
            core.tables.add(request)
            if offered:
                core.feedback.registered[internal_id] = identity
                core.woken(turn)
            self._begin(turn, request)
            if turned_away is not None and request.receiver is not None:
                core.receiver_moved(turn, request, request.receiver.on_unclaimed(turned_away))
            return ACCEPTED

    def _refusal(self, identity: Identity) -> str:
        """Why a life cannot begin here now; empty when it can."""
        tables, limit = self._core.tables, self._core.config.requests_max
        ended = tables.tombstones.get(identity)
        if ended is not None:
            return f"{identity} has ended here: {ended}"
        if len(tables.by_internal) >= limit:
            return f"{limit} requests are registered, no more are taken"
        return self._core.closing.reason if self._core.closing is not None else ""

    def _check_free(self, internal_id: str, identity: Identity) -> None:
        tables = self._core.tables
        if not isinstance(internal_id, str) or not internal_id:
            raise ConfigError("internal_id", internal_id, "a str that is not empty")
        if not isinstance(identity, Identity):
            raise ConfigError("identity", identity, "an Identity")
        if internal_id in tables.by_internal:
            raise ConfigError("internal_id", internal_id, "an id that is not in use in this stage")
        if identity in tables.by_identity:
            held = tables.by_identity[identity].internal_id
            raise ConfigError("identity", str(identity), f"a life that is not registered (it is, as {held!r})")

    def _begin(self, turn: Turn, request: Request) -> None:
        """Start both halves: the clock of the receiver with what came before it, the sender behind its predecessor."""
        core = self._core
        identity = request.identity
        if request.sender is not None:
            owner = core.tables.owner(request)
            if owner is request:
                core.open_life(turn, request)
            else:
                core.release_for_successor(turn, owner)
        waiting = core.tables.unclaimed.pop(identity, None)
        core.timers.cancel(("unclaimed", identity))
        if request.receiver is not None and core.input_wait_s:
            core.set_timer(turn, ("deadline", identity), core.input_wait_s)
        for held in waiting.frames if waiting else ():
            self._inbox.feed(turn, request, held)
        if waiting and waiting.orphaned and request.receiver is not None:
            lost = Cause(Outcome.ERROR, "peer_lost", core.clock.now_ns())
            core.receiver_moved(turn, request, request.receiver.on_peer_lost(lost))
        for edge in core.lost:
            core.await_peer(turn, edge, request)
