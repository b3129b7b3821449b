"""The tables of a stage: one record per request, and who owns which external id."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from omni_fsm.protocol.frames import Cause, Frame
from omni_fsm.protocol.identity import FrameKey, Identity
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf, SendTask
from omni_fsm.state import StateView


@dataclass(slots=True, eq=False)
class Request:
    """One life of a request in this stage: its two halves, and what its outbox waits for.

    Attributes:
        internal_id: The host's name of it.
        identity: External id and generation.
        receiver: The half on the input edge; None in a stage without one.
        sender: The half on the output edge; None in a stage without one.
        view: Its producer state; None until it owns the external id.
        scheduled: Whether it is in the queue of tasks for producers.
        put_queued: Whether its frame in flight is in a queue of the outbox.
        hold: The head of the queue while it waits for credit, room or the time of its retry.
        hold_is_busy: Whether it waits for credit or room.
        busy_key: The frame that has found the connector busy; None when none has.
        busy_since_ns: Since when.
        wakes: How often credit or room came back: tells a put that was busy whether that happened meanwhile.
        backlog: Bytes that it counts for in the stage's backlog.
        producing: Whether its producer runs now: a successor does not open before that has returned.
        host_knows: Whether the host was told why it ends, or has ended it itself.
        reported: Whether the observers were told.
        exception: What its producer raised, for the report.
    """

    internal_id: str
    identity: Identity
    receiver: ReceiverHalf | None = None
    sender: SenderHalf | None = None
    view: StateView | None = None
    scheduled: bool = False
    put_queued: bool = False
    hold: SendTask | None = None
    hold_is_busy: bool = False
    busy_key: FrameKey | None = None
    busy_since_ns: int = 0
    wakes: int = 0
    backlog: int = 0
    producing: bool = False
    host_knows: bool = False
    reported: bool = False
    exception: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether both halves are final."""
        return all(half is None or half.is_final for half in (self.receiver, self.sender))


@dataclass(frozen=True, slots=True)
class HeldFrame:
    """A frame of a request that nobody has registered. ``invalid`` says why its body cannot be accepted."""

    frame: Frame
    payload: Any = None
    nbytes: int = 0
    invalid: Cause | None = None


@dataclass(slots=True)
class Unclaimed:
    """Frames of one identity that wait for its registration; ``orphaned`` once their sender's process is gone."""

    frames: list[HeldFrame] = field(default_factory=list)
    orphaned: bool = False


class Tombstones:
    """How identities ended here, bounded in number and time: the oldest make room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._graves: OrderedDict[Identity, tuple[Cause, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def get(self, identity: Identity) -> Cause | None:
        """How it ended; None when that is not remembered."""
        grave = self._graves.get(identity)
        return grave[0] if grave is not None else None

    def bury(self, identity: Identity, cause: Cause, expires_ns: int) -> None:
        """Remember it until then."""
        self._graves[identity] = (cause, expires_ns)
        self._graves.move_to_end(identity)
        while len(self._graves) > self._limit:
            self._graves.popitem(last=False)

    def expire(self, now_ns: int) -> int | None:
        """Drop those whose time is over; returns when the next one's is."""
        while self._graves:
            identity, (_, expires_ns) = next(iter(self._graves.items()))
            if expires_ns > now_ns:
                return expires_ns
            del self._graves[identity]
        return None


class Tables:
    """Requests by both names, lives by external id, unclaimed frames and tombstones. Used under the runtime's lock.

    Identities that were turned away unclaimed have tombstones of their own: a flood of them must not push out the others.
    """

    def __init__(self, tombstones_max: int) -> None:
        self.by_internal: dict[str, Request] = {}
        self.by_identity: dict[Identity, Request] = {}
        self.lives: dict[str, deque[Request]] = {}
        self.unclaimed: dict[Identity, Unclaimed] = {}
        self.tombstones = Tombstones(tombstones_max)
        self.turned_away = Tombstones(tombstones_max)

    def add(self, request: Request) -> None:
        """Enter a request; a sender queues behind the earlier lives of its external id."""
        self.by_internal[request.internal_id] = request
        self.by_identity[request.identity] = request
        if request.sender is not None:
            self.lives.setdefault(request.identity.external_id, deque()).append(request)

    def forget(self, request: Request) -> None:
        """Drop a request whose halves are over."""
        self.by_internal.pop(request.internal_id, None)
        self.by_identity.pop(request.identity, None)

    def end_life(self, request: Request) -> Request | None:
        """Take a life out of its queue; returns the one that owns the external id now, if that is news."""
        lives = self.lives[request.identity.external_id]
        was_owner = lives[0] is request
        lives.remove(request)
        if not lives:
            del self.lives[request.identity.external_id]
            return None
        return lives[0] if was_owner else None

    def has_successor(self, request: Request) -> bool:
        """Whether a later life waits for this one, which owns the external id."""
        lives = self.lives.get(request.identity.external_id)
        return lives is not None and lives[0] is request and len(lives) > 1

    def owner(self, request: Request) -> Request:
        """The life that owns the request's external id."""
        return self.lives[request.identity.external_id][0]

    def receiver_of(self, identity: Identity) -> Request | None:
        """The request whose receiver still takes frames of this identity."""
        request = self.by_identity.get(identity)
        return request if request and request.receiver and not request.receiver.is_final else None

    def snapshot(self) -> list[Request]:
        """The requests now, safe to walk while they come and go."""
        return list(self.by_internal.values())
