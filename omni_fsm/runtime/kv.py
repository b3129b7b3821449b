"""KV transfers of one rank: marked by the scheduler, begun by the runner, moved by a manager, collected by the scheduler.

What is logically over and what is physically quiet are two things. A transfer that failed or was cancelled is reported at
once, and its blocks are held until its engine says that it touches them no more. Under the lock a half moves and its
effects change tables; the manager and the observers are called once the lock is free, one call at a time and in order, so an
abort never overtakes what it ends.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol, assert_never

from omni_fsm.protocol.errors import ConfigError, LocalProtocolError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.kv import KvTransferHalf, KvTransferMoved
from omni_fsm.protocol.names import KvTransferEffect, KvTransferState
from omni_fsm.runtime.ports import Clock, Failure, MonotonicClock, Observer, Transition
from omni_fsm.runtime.reports import Reports
from omni_fsm.runtime.timers import Timers
from omni_fsm.tables import kv_table

DEFAULT_DEADLINE_S = 600.0
DEFAULT_REMEMBERED_MAX = 65_536


class KvDirection(StrEnum):
    """What the engine does with the blocks of a rank's transfers."""

    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, slots=True)
class KvJob:
    """What an engine is given to move.

    Attributes:
        identity: The request and its generation.
        blocks: Ids of the blocks, in the order of the tokens.
        ranks: Remote ranks that have a piece of it.
        role: Its role, if it is a companion.
    """

    identity: Identity
    blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    role: str = ""


@dataclass(frozen=True, slots=True)
class KvReport:
    """What happened since the last drain, each once.

    Attributes:
        completed: Transfers that are delivered. Of a receiver: its blocks hold the data.
        failed: Transfers that failed, with the first cause. A companion's failure stands under its parent. What the owner
            cancelled itself is not here.
        released: Blocks that nobody holds any more, by the transfer that let go of them: free, or of a completed receiver the
            request's own again.
    """

    completed: tuple[Identity, ...] = ()
    failed: Mapping[Identity, Cause] = field(default_factory=dict)
    released: Mapping[Identity, tuple[int, ...]] = field(default_factory=dict)


class KvManager(Protocol):
    """The engine that moves blocks. No lock is held during a call; calls come one at a time.

    What ``send`` or ``recv`` raises fails the transfer; ``abort`` follows. What ``abort`` raises is reported to the
    observers, and the blocks stay held.
    """

    def send(self, job: KvJob, transfers: "KvTransfers") -> None:
        """Begin to read the blocks for every remote rank.

        Called by: whoever drains what is pending, once per transfer. Do not wait in it.

        Args:
            job: What to send. Its blocks are held until ``transfers`` was told the last ``ack``, ``complete`` or ``quiet``.
            transfers: Whom to tell, from any thread, also in this call.
        """

    def recv(self, job: KvJob, transfers: "KvTransfers") -> None:
        """Begin to write the blocks, as ``send`` reads them."""

    def abort(self, job: KvJob, transfers: "KvTransfers", cause: Cause) -> None:
        """Nobody needs this transfer: tell the other end, stop, and say ``transfers.quiet`` once nothing touches its blocks.

        It may come instead of ``send`` or ``recv``, when a transfer ends before it begins; never before them.
        """


class BlockHolds:
    """Who needs which block of one cache. A hold belongs to its holder: dropping it never drops another's.

    Thread-safe. One object may serve both directions of a rank, several engines, and look-ups of the host's own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, tuple[int, ...]] = {}
        self._count: dict[int, int] = {}

    def hold(self, holder: Hashable, blocks: Iterable[int]) -> None:
        """Hold blocks.

        Args:
            holder: Unique for this acquisition: who looks up twice holds twice.
            blocks: Ids, each once.

        Raises:
            ConfigError: The holder holds some already.
        """
        with self._lock:
            if holder in self._blocks:
                raise ConfigError("holder", holder, "one that holds nothing yet")
            self._blocks[holder] = held = tuple(blocks)
            for block in held:
                self._count[block] = self._count.get(block, 0) + 1

    def drop(self, holder: Hashable) -> tuple[int, ...]:
        """Let go. Returns the blocks that nobody holds now.

        Raises:
            ConfigError: The holder holds nothing.
        """
        with self._lock:
            if holder not in self._blocks:
                raise ConfigError("holder", holder, "one that holds blocks")
            free = []
            for block in self._blocks.pop(holder):
                self._count[block] -= 1
                if not self._count[block]:
                    del self._count[block]
                    free.append(block)
            return tuple(free)

    def __contains__(self, block: int) -> bool:
        with self._lock:
            return block in self._count

    def __len__(self) -> int:
        """How many blocks are held."""
        with self._lock:
            return len(self._count)


@dataclass(slots=True, eq=False)
class _Life:
    half: KvTransferHalf
    role: str = ""
    parent: Identity | None = None
    companions: Mapping[str, Identity] = field(default_factory=dict)
    holding: bool = False

    @property
    def cause(self) -> Cause:
        return self.half.cause or Cause(Outcome.OK)


class KvTransfers:
    """The KV transfers of one rank at one end of an edge. A rank that receives and sends has two, over one `BlockHolds`.

    All methods are thread-safe and none waits. Reports on a transfer that is over or unknown change nothing and are counted in
    ``late``.

    Args:
        edge: The edge that the blocks cross.
        direction: What happens to the blocks here.
        ranks: Remote ranks that have a piece of each transfer, from the plan
            (`omni_fsm.payload.heads.HeadPlan.target_ranks`, ``source_ranks``). Without any a transfer completes as it begins.
        manager: Moves the blocks. None: the runner does, with what ``drain_pending`` returns.
        holds: Who needs which block; made when missing.
        clock: Time.
        deadline_s: Seconds from the first that is known of a transfer to its outcome, after which it fails. Its blocks are
            held until the engine is quiet, however long that takes.
        remembered_max: How many transfers that are over are remembered, so that no life is transferred twice.
        observers: Told of every transition and failure.
    """

    def __init__(  # noqa: PLR0913 - the ports of a rank
        self,
        edge: Edge,
        direction: KvDirection,
        *,
        ranks: Collection[int] = (0,),
        manager: KvManager | None = None,
        holds: BlockHolds | None = None,
        clock: Clock | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        remembered_max: int = DEFAULT_REMEMBERED_MAX,
        observers: Iterable[Observer] = (),
    ) -> None:
        if not deadline_s > 0:
            raise ConfigError("deadline_s", deadline_s, "a number above 0")
        if type(remembered_max) is not int or remembered_max < 1:
            raise ConfigError("remembered_max", remembered_max, "an int of 1 or more")
        self.edge, self.direction, self.ranks = edge, KvDirection(direction), tuple(ranks)
        self.holds = BlockHolds() if holds is None else holds
        self.late = 0
        self._manager, self._deadline_s, self._remembered_max = manager, deadline_s, remembered_max
        self._clock = clock or MonotonicClock()
        self._observers = tuple(observers)
        self._reports = Reports(self._observers, self._clock)
        self._lock = threading.RLock()
        self._lives: dict[Identity, _Life] = {}
        self._over: dict[Identity, _Life] = {}
        self._timers = Timers()
        self._completed: list[Identity] = []
        self._failed: dict[Identity, Cause] = {}
        self._released: dict[Identity, tuple[int, ...]] = {}
        self._calls: deque[Callable[[], None]] = deque()  # what runs without the lock, in order
        self._calling = False

    # What the scheduler says

    def bind(self, parent: Identity, companions: Mapping[str, Identity]) -> None:
        """A request needs the transfers of others, such as those of classifier-free guidance.

        The parent completes after all of them; when one fails or is cancelled the parent fails, once, and the others are
        cancelled. Called by: the scheduler, before any of them is marked.

        Args:
            parent: The request that needs them.
            companions: Who they are, by role.

        Raises:
            ConfigError: A role is empty, an identity stands twice, or one of them is known already.
        """
        group = [parent, *companions.values()]
        if not companions or not all(isinstance(role, str) and role for role in companions):
            raise ConfigError("companions", list(companions), "one role at least, each a str that is not empty")
        if len(set(group)) != len(group):
            raise ConfigError(
                "companions", [str(one) for one in group], "identities that differ, also from the parent's"
            )
        with self._turn():
            for identity in group:
                if self._known(identity) is not None:
                    raise ConfigError("companions", str(identity), "identities that are neither bound nor marked yet")
            self._begin_life(parent, companions=dict(companions))
            for role, identity in companions.items():
                self._begin_life(identity, role=role, parent=parent)

    def mark(self, identity: Identity, blocks: Iterable[int]) -> bool:
        """Ask for the transfer of a request's blocks, and hold them. Once per life: what is marked again is not moved again.

        Called by: the scheduler. The blocks may hold anything until they are released; a receiver's are written to.

        Args:
            identity: The request.
            blocks: Ids of its blocks, in the order of the tokens; none is fine.

        Returns:
            Whether it is new. False: it was marked before, whatever became of it; these blocks are not held.

        Raises:
            ConfigError: A block is no int from 0 on, or stands twice.
        """
        listed = tuple(blocks)
        if not all(type(block) is int and block >= 0 for block in listed) or len(set(listed)) != len(listed):
            raise ConfigError("blocks", listed, "ints of 0 or more, each once")
        with self._turn():
            if identity in self._over:
                return False
            life = self._lives.get(identity) or self._begin_life(identity)
            return not self._moved(life, life.half.on_marked(listed)).ignored

    def cancel(self, identity: Identity, reason: str | Cause = "cancelled") -> None:
        """The owner of the request wants no transfer. Idempotent; in every state. Its companions are cancelled too.

        The manager tells the other end. A receiver that rejects a request marks it without blocks and cancels it, or fails it.
        """
        cause = self._cause(reason, Outcome.CANCELLED)
        self._happened(identity, lambda half: half.on_cancelled(cause))

    def drain_completed(self) -> KvReport:
        """Collect what happened, each once. Blocks of completed transfers are released by it. Called once per cycle."""
        with self._turn():
            for life in [one for one in self._lives.values() if one.half.state is KvTransferState.COMPLETED]:
                self._moved(life, life.half.on_drained())
            report = KvReport(tuple(self._completed), self._failed, self._released)
            self._completed, self._failed, self._released = [], {}, {}
            return report

    # What the runner says

    def drain_pending(self) -> tuple[KvJob, ...]:
        """Begin what is marked: from now on the engine may touch the blocks. Called once per cycle.

        Returns:
            What was begun, in the order of the marks; with a manager, it was given these.
        """
        jobs = []
        with self._turn():
            for life in [one for one in self._lives.values() if one.half.state is KvTransferState.MARKED]:
                moved = self._moved(life, life.half.on_begun(self.ranks, self._clock.now_ns()))
                if moved.after is KvTransferState.ACTIVE:
                    job = self._job(life)
                    jobs.append(job)
                    self._calls.append(partial(self._give, job))
        return tuple(jobs)

    # What the engine says

    def ack(self, identity: Identity, rank: int) -> None:
        """One remote rank's piece is delivered, and its engine touches the blocks no more. The last one completes.

        In a failed transfer it says the latter alone.
        """
        self._happened(identity, lambda half: half.on_acked((rank,), self._clock.now_ns()))

    def complete(self, identity: Identity) -> None:
        """All pieces are delivered and stored, and nothing touches the blocks any more: every ``ack`` at once."""
        self._happened(identity, lambda half: half.on_all_acked(self._clock.now_ns()))

    def fail(self, identity: Identity, reason: str | Cause) -> None:
        """The transfer failed: reported at once. The blocks are held until ``quiet``, unless it had not begun."""
        cause = self._cause(reason, Outcome.ERROR)
        self._happened(identity, lambda half: half.on_failed(cause))

    def quiet(self, identity: Identity) -> None:
        """Nothing touches the blocks of this transfer any more. One that has no outcome yet fails by it; one that is over is."""
        with self._lock:
            if identity in self._over:
                return
        cause = self._cause("the engine stopped before all of it was delivered", Outcome.ERROR)
        self._happened(identity, lambda half: half.on_quiet(cause))

    def tick_once(self) -> bool:
        """Fail one transfer whose deadline has passed; whether there was one. Called once per cycle, or by a timer."""
        with self._turn():
            due = self._timers.pop_due(self._clock.now_ns())
            life = self._lives.get(due) if isinstance(due, Identity) else None
            if life is not None:
                cause = self._cause(f"deadline: no outcome within {self._deadline_s} s", Outcome.ERROR)
                self._moved(life, life.half.on_deadline(cause))
            return life is not None

    # Questions; none changes anything

    @property
    def has_pending(self) -> bool:
        """Whether a transfer is not over, or something is to be collected."""
        with self._lock:
            return bool(self._lives or self._completed or self._failed or self._released)

    def state(self, identity: Identity) -> KvTransferState:
        """Where a transfer stands; idle when nothing is known of it."""
        with self._lock:
            life = self._known(identity)
            return KvTransferState.IDLE if life is None else life.half.state

    def cause(self, identity: Identity) -> Cause | None:
        """How it ended; None while it has no outcome, or when nothing is known of it."""
        with self._lock:
            life = self._known(identity)
            return None if life is None else life.half.cause

    def is_triggered(self, identity: Identity) -> bool:
        """Whether it was marked, whatever became of it."""
        return self.state(identity) is not KvTransferState.IDLE

    def blocks(self, identity: Identity) -> tuple[int, ...]:
        """The blocks that a transfer may touch, for an engine that looks them up late.

        Raises:
            LocalProtocolError: It holds none: it was not marked, or they were given back and may be another's.
        """
        with self._lock:
            life = self._known(identity)
            if life is None or not life.half.holds:
                raise LocalProtocolError(
                    machine="kv_transfer",
                    stream=f"{identity} {self.edge}",
                    event="blocks_read",
                    state=self.state(identity),
                    detail="it holds no blocks",
                )
            return life.half.blocks

    def bundle(self, parent: Identity) -> Mapping[str, KvJob] | None:
        """The companions of a request, by role, once the request and all of them are completed; None until then.

        Takes nothing away: it is the same however often it is asked, as long as they are remembered.
        """
        with self._lock:
            life = self._known(parent)
            if life is None or life.half.cause is None or life.half.cause.outcome is not Outcome.OK:
                return None
            known = {role: self._known(identity) for role, identity in life.companions.items()}
            return {role: self._job(companion) for role, companion in known.items() if companion is not None}

    def residue(self) -> dict[str, int]:
        """What it holds, by table: transfers by state, blocks, what is to be collected, what is remembered."""
        with self._lock:
            counts = dict.fromkeys((str(state) for state in KvTransferState if state not in kv_table().final), 0)
            for life in self._lives.values():
                counts[life.half.state] += 1
            untold = len(self._completed) + len(self._failed) + len(self._released)
            return {**counts, "held_blocks": len(self.holds), "to_collect": untold, "remembered": len(self._over)}

    # Under the lock

    def _known(self, identity: Identity) -> _Life | None:
        return self._lives.get(identity) or self._over.get(identity)

    def _job(self, life: _Life) -> KvJob:
        return KvJob(life.half.identity, life.half.blocks, self.ranks, life.role)

    def _cause(self, reason: str | Cause, outcome: Outcome) -> Cause:
        return reason if isinstance(reason, Cause) else Cause(outcome, reason, self._clock.now_ns())

    def _begin_life(
        self,
        identity: Identity,
        *,
        role: str = "",
        parent: Identity | None = None,
        companions: Mapping[str, Identity] | None = None,
    ) -> _Life:
        companions = companions or {}
        life = _Life(KvTransferHalf(kv_table(), self.edge, identity, companions), role, parent, companions)
        self._lives[identity] = life
        self._timers.set(identity, self._clock.now_ns() + int(self._deadline_s * 1e9))
        return life

    def _happened(self, identity: Identity, happening: Callable[[KvTransferHalf], KvTransferMoved]) -> None:
        """Something is said of a transfer; of one that is over or unknown it comes too late."""
        with self._turn():
            life = self._lives.get(identity)
            if life is None:
                self.late += 1
            else:
                self._moved(life, happening(life.half))

    def _moved(self, life: _Life, moved: KvTransferMoved) -> KvTransferMoved:
        """Do what a transition asks for."""
        self._tell_transition(life.half, moved)
        for effect in moved.effects:
            self._do(life, effect)
        if moved.before is not moved.after and life.half.cause is not None:
            self._timers.cancel(life.half.identity)  # it has its outcome
        if life.half.is_final and self._lives.pop(life.half.identity, None) is not None:
            self._over[life.half.identity] = life
            if len(self._over) > self._remembered_max:
                del self._over[next(iter(self._over))]
        return moved

    def _do(self, life: _Life, effect: KvTransferEffect) -> None:
        match effect:
            case KvTransferEffect.HOLD_BLOCKS:
                self.holds.hold((self, life.half.identity), life.half.blocks)
                life.holding = True
            case KvTransferEffect.FREE_BLOCKS:
                self._free(life)
            case KvTransferEffect.REPORT_COMPLETED:
                self._completed.append(life.half.identity)
            case KvTransferEffect.RECORD_FAILURE:
                self._record_failure(life)
            case KvTransferEffect.TELL_PARENT:
                self._tell_parent(life)
            case KvTransferEffect.CANCEL_COMPANIONS:
                self._cancel_companions(life)
            case KvTransferEffect.ABORT_ENGINE:
                self._abort(life)
            case _:
                assert_never(effect)

    def _free(self, life: _Life) -> None:
        if life.holding:
            life.holding = False
            self._released[life.half.identity] = self.holds.drop((self, life.half.identity))

    def _record_failure(self, life: _Life) -> None:
        if life.parent is not None:
            return  # the parent is told, and its failure is the one that is reported
        identity = life.half.identity
        self._failed[identity] = life.cause
        failure = Failure("failed", life.half.table.machine, self.edge, "", identity, life.cause)
        for observer in self._observers:
            self._calls.append(partial(self._reports.guarded, observer.on_failure, failure))

    def _cancel_companions(self, life: _Life) -> None:
        for companion in [self._lives.get(identity) for identity in life.companions.values()]:
            if companion is not None:
                self._moved(companion, companion.half.on_cancelled(life.cause))

    def _abort(self, life: _Life) -> None:
        if self._manager is not None:
            guarded, abort = self._reports.guarded, self._manager.abort
            self._calls.append(partial(guarded, abort, self._job(life), self, life.cause))

    def _tell_parent(self, life: _Life) -> None:
        """A companion has its outcome: what becomes of the parent."""
        parent = None if life.parent is None else self._lives.get(life.parent)
        if parent is None:
            return
        if life.cause.outcome is Outcome.OK:
            self._moved(parent, parent.half.on_acked((life.role,), life.cause.at_ns))
        else:
            self._moved(parent, parent.half.on_companion_failed(life.cause))

    def _tell_transition(self, half: KvTransferHalf, moved: KvTransferMoved) -> None:
        if self._observers:
            transition = Transition(
                machine=half.table.machine,
                edge=self.edge,
                internal_id="",
                identity=half.identity,
                seq=-1,
                event=moved.event,
                before=moved.before,
                after=moved.after,
                effects=moved.effects,
                ignored=moved.ignored,
                cause=half.cause,
                at_ns=self._clock.now_ns(),
            )
            for observer in self._observers:
                self._calls.append(partial(self._reports.guarded, observer.on_transition, transition))

    # Without the lock

    def _give(self, job: KvJob) -> None:
        if self._manager is None:
            return
        move = self._manager.send if self.direction is KvDirection.SEND else self._manager.recv
        try:
            move(job, self)
        except Exception as error:  # noqa: BLE001 - becomes an event: the transfer fails, in the manager's own words
            self.fail(job.identity, f"{self.direction} raised {type(error).__name__}: {error}")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A critical section, and after it what it put aside; another thread that is doing that already goes on with it."""
        try:
            with self._lock:
                yield
        finally:
            while (call := self._next_call()) is not None:
                try:
                    call()
                finally:
                    self._calling = False

    def _next_call(self) -> Callable[[], None] | None:
        with self._lock:
            if self._calling or not self._calls:
                return None
            self._calling = True
            return self._calls.popleft()
