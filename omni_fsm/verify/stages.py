"""States of one real stage, and what each happening makes of them: run once, remembered, used by every world that meets it.

A stage is frozen between two steps. A local state is known by its value (what decides how the stage goes on, and nothing
else), so a world of several stages is a few numbers, and the real code runs once for each local state and happening.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from omni_fsm.connectors.port import CreditReturned, PeerLost, RoomReturned, Stopped
from omni_fsm.protocol.frames import Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import ReceiverState, SenderState
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf, SendTask
from omni_fsm.runtime import StageConfig, StageRuntime
from omni_fsm.runtime.requests import Request
from omni_fsm.verify.ends import (
    CellName,
    Letter,
    Notice,
    Role,
    Sent,
    StoppedClock,
    StopSent,
    Watcher,
    WorldEnd,
    WorldHost,
    external_name,
    nothing,
)
from omni_fsm.verify.snapshot import freeze, thaw

Happening = tuple[Any, ...]
"""What happens to a stage: its kind, and what it needs. `Stages.run` lists the kinds."""


@dataclass(eq=False)
class Stage:
    """A real runtime with its world around it: what is frozen."""

    runtime: StageRuntime
    source: WorldEnd | None
    sink: WorldEnd | None
    host: WorldHost
    watcher: Watcher


@dataclass(frozen=True, slots=True)
class Local:
    """A local state.

    Attributes:
        frozen: The stage.
        fair: What happens next by itself.
        live: Requests that are not over, by internal id.
        told: How requests ended, as the host knows it.
        offered: Lives that wait for a registration.
        refused: Lives that were turned away because nobody registered them.
        waits: Requests whose receiver waits.
        unmarked: Requests whose marker is known to be lost.
        lost: Edges whose peer is known to be lost.
        held: What is left, in words; empty when nothing is.
    """

    frozen: bytes
    fair: tuple[Happening, ...]
    live: tuple[str, ...]
    told: tuple[tuple[str, str], ...]
    offered: tuple[str, ...]
    refused: tuple[str, ...]
    waits: tuple[str, ...]
    unmarked: frozenset[str]
    lost: frozenset[str]
    held: str


@dataclass(frozen=True, slots=True)
class Step:
    """What a happening leads to: the local state after it, what was sent, and what must never be."""

    after: int
    out: tuple[Letter, ...]
    problem: str


def build(role: Role) -> Stage:
    """A fresh stage."""
    source = WorldEnd(Edge(role.source, role.name), sends=False) if role.source else None
    sink = WorldEnd(Edge(role.name, role.sink), sends=True) if role.sink else None
    host = WorldHost(role)
    watcher = Watcher(role.name, host)
    config = StageConfig(
        stage=role.name, front=role.front, window_frames=role.window_frames, retries=role.retries, input_wait_s=600.0
    )
    runtime = StageRuntime(
        config,
        source=source,
        sink=sink,
        host=host,
        producer=watcher,
        clock=StoppedClock(),
        observers=(watcher,),
    )
    return Stage(runtime, source, sink, host, watcher)


class Stages:
    """The local states of one stage that were met, and the steps between them.

    Args:
        role: What the stage is.
        cells: Filled with the cells that were used.
    """

    def __init__(self, role: Role, cells: set[CellName]) -> None:
        self.role = role
        self.cells = cells
        self.locals: list[Local] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Happening], Step] = {}
        self.start = self._number(build(role))

    def step(self, number: int, happening: Happening) -> Step:
        """What ``happening`` makes of a local state."""
        step = self._steps.get((number, happening))
        if step is None:
            step = self._steps[number, happening] = self._run(number, happening)
        return step

    def _run(self, number: int, happening: Happening) -> Step:
        stage: Stage = thaw(self.locals[number].frozen)
        problem = ""
        try:
            run(stage, happening)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is what was looked for
            problem = f"{type(error).__name__}: {error}"
        self.cells |= stage.watcher.cells
        stage.watcher.cells.clear()
        problem = (
            problem
            or stage.watcher.problem
            or stage.host.problem
            or stray_state(stage)
            or unrecorded(stage)
            or unbound(stage)
        )
        out: list[Letter] = []
        for end in (stage.source, stage.sink):
            if end is not None:
                out += end.out
                end.out.clear()
        return Step(number if problem else self._number(stage), tuple(out), problem)

    def _number(self, stage: Stage) -> int:
        key = value_of(stage)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.locals)
            self.locals.append(describe(stage, freeze(stage)))
        return number


# What happens


def run(stage: Stage, happening: Happening) -> None:  # noqa: C901, PLR0912 - one line a kind
    """Let one thing happen to a stage.

    Kinds: ``open`` a life, ``end`` it, ``register`` an offered one, ``leave`` one early, ``produce``, ``raise`` (a producer),
    ``put``, ``get`` a frame, ``hear`` a letter, ``lost`` (an edge's peer), ``room``, ``timer``, ``cycle``, ``take``, ``release``,
    ``shutdown``.
    """
    runtime, host = stage.runtime, stage.host
    match happening:
        case ("open", identity):
            host.open(runtime, identity)
        case ("end", name):
            host.end(runtime, name)
        case ("register", name):
            runtime.register(name, host.offered.pop(name))
        case ("leave", how, name, reason):
            host.leave(runtime, how, name, reason)
        case ("produce", meanwhile):
            _produce(stage, meanwhile, raises=False)
        case ("raise", meanwhile):
            _produce(stage, meanwhile, raises=True)
        case ("put", planned, meanwhile):
            _put(stage, planned, meanwhile)
        case ("get", sent, load, meanwhile):
            _get(stage, sent, load, meanwhile)
        case ("hear", notice):
            _hear(stage, notice)
        case ("lost", edge):
            _lose(stage, edge)
        case ("room",):
            _end(stage.sink).room_owed = False
            _end(stage.sink).said.append(RoomReturned())
            runtime.sink_once()
        case ("timer", key):
            _go_off(runtime, key)
        case ("cycle",):
            host.cycle(runtime)
        case ("take", name):
            host.take(runtime, name)
        case ("shutdown", names):
            host.shut_down(runtime, names)
        case ("release", name):
            host.release(runtime, name)
        case _:
            raise AssertionError(happening)


def _end(end: WorldEnd | None) -> WorldEnd:
    if end is None:
        raise AssertionError("there is no such edge")
    return end


def _meanwhile(stage: Stage, happening: Happening | None) -> Callable[[], None]:
    return partial(run, stage, happening) if happening is not None else nothing


def _produce(stage: Stage, meanwhile: Happening | None, *, raises: bool) -> None:
    watcher = stage.watcher
    watcher.raises, watcher.meanwhile = raises, _meanwhile(stage, meanwhile)
    watcher.is_over = partial(_is_over, stage.runtime)
    stage.runtime.produce_once()
    watcher.raises, watcher.meanwhile, watcher.is_over = False, nothing, bool


def _is_over(runtime: StageRuntime, identity: Identity) -> bool:
    request = runtime._core.tables.by_identity.get(identity)
    return request is None or request.sender is None or request.sender.is_final


def _put(stage: Stage, planned: str, meanwhile: Happening | None) -> None:
    sink = _end(stage.sink)
    sink.planned, sink.meanwhile = planned, _meanwhile(stage, meanwhile)
    stage.runtime.put_once()
    sink.planned, sink.meanwhile = "stored", nothing


def _get(stage: Stage, sent: Sent, load: str, meanwhile: Happening | None) -> None:
    source = _end(stage.source)
    source.arrival, source.load, source.meanwhile = sent, load, _meanwhile(stage, meanwhile)
    stage.runtime.source_once()
    source.load, source.meanwhile = "sound", nothing


def _hear(stage: Stage, notice: Notice) -> None:
    sink = _end(stage.sink)
    if isinstance(notice, StopSent):
        sink.said.append(Stopped(notice.identity, notice.cause))
    elif sink.ledger.grant(
        notice.identity,
        frames=notice.frames,
        nbytes=notice.nbytes,
        taken_frames=notice.taken_frames,
        taken_bytes=notice.taken_bytes,
    ):
        sink.said.append(CreditReturned(notice.identity))
    stage.runtime.sink_once()


def _lose(stage: Stage, edge: str) -> None:
    if edge == "sink":
        sink = _end(stage.sink)
        sink.ledger.clear()
        sink.connected = False
        sink.said.append(PeerLost())
        stage.runtime.sink_once()
    else:
        _end(stage.source).said.append(PeerLost())
        stage.runtime.source_once()


def _go_off(runtime: StageRuntime, key: Hashable) -> None:
    core = runtime._core
    with core.turn() as turn:
        core.timers.cancel(key)
        runtime._go_off(turn, key)


# What a local state is


def stray_state(stage: Stage) -> str:
    """Producer state that outlives its generation, in words; empty when there is none."""
    store = stage.runtime._core.state
    for external_id in store._entries:
        owner = store._owners.get(external_id)
        if owner is None or _is_over(stage.runtime, owner.identity):
            return "state is left of a life that is over"
    return ""


def unbound(stage: Stage) -> str:
    """A half that goes on although the request's other half has failed, in words; empty when there is none."""
    for request in stage.runtime._core.tables.snapshot():
        sender, receiver = request.sender, request.receiver
        if sender is None or receiver is None:
            continue
        over = sender.is_final and sender.cause is not None and sender.cause.outcome is Outcome.ERROR
        if (over or sender.state is SenderState.FAILED) and receiver.state is ReceiverState.ACTIVE:
            return "the sender has failed, and its stage's receiver goes on"
        if receiver.state is ReceiverState.FAILED and sender.state in (
            SenderState.ACTIVE,
            SenderState.TERMINAL_PENDING,
        ):
            return "the receiver has failed, and its stage's sender goes on"
    return ""


def unrecorded(stage: Stage) -> str:
    """A failed half whose failure was not recorded, in words; empty when there is none."""
    for request in stage.runtime._core.tables.snapshot():
        failed = any(half is not None and half.state == "failed" for half in (request.sender, request.receiver))
        if failed and request.internal_id not in stage.watcher.failed:
            return "a failure is not recorded"
    return ""


def value_of(stage: Stage) -> Hashable:
    """All that decides how a stage goes on."""
    core = stage.runtime._core
    tables, feedback = core.tables, core.feedback
    return (
        tuple(_request_value(request) for request in tables.by_internal.values()),
        tuple(tuple(life.internal_id for life in lives) for lives in tables.lives.values()),
        tuple(request.internal_id for request in core.ready),
        tuple(request.internal_id for request in core.puts),
        tuple(request.internal_id for request in core.urgent_puts),
        tuple((name, _shown(getattr(feedback, name))) for name in feedback.__slots__),
        tuple(core.paused),
        tuple(core.lost),
        tuple((identity, tuple(waiting.frames), waiting.orphaned) for identity, waiting in tables.unclaimed.items()),
        tuple((identity, cause) for identity, (cause, _) in tables.tombstones._graves.items()),
        tuple((identity, cause) for identity, (cause, _) in tables.turned_away._graves.items()),
        frozenset(core.timers._due_ns),
        tuple((name, owner.identity) for name, owner in core.state._owners.items()),
        tuple((name, _entry_value(entry)) for name, entry in core.state._entries.items()),
        _sink_value(stage.sink),
        stage.host.key(),
        tuple(stage.watcher.failed.items()),
        frozenset(stage.watcher.retained),
    )


def _shown(table: dict[Any, Any]) -> Hashable:
    return tuple(table.items())


def _entry_value(entry: Any) -> Hashable:
    return tuple((name, tuple(held.value)) for name, held in entry.items())


def _sink_value(sink: WorldEnd | None) -> Hashable:
    if sink is None:
        return None
    accounts = sink.ledger._accounts.items()
    return (sink.connected, sink.room_owed, tuple((identity, *_slots(account)) for identity, account in accounts))


def _slots(thing: Any) -> tuple[Any, ...]:
    return tuple(getattr(thing, name) for name in thing.__slots__)


def _request_value(request: Request) -> Hashable:
    return (
        request.internal_id,
        request.identity,
        _receiver_value(request.receiver),
        _sender_value(request.sender, request.hold),
        request.view is not None,
        request.scheduled,
        request.put_queued,
        request.hold_is_busy,
        request.busy_key,
        request.host_knows,
        request.reported,
    )


def _receiver_value(half: ReceiverHalf | None) -> Hashable:
    return half and (half.key(), tuple(staged.payload for staged in half.staged), half.taken_bytes)


def _sender_value(half: SenderHalf | None, hold: SendTask | None) -> Hashable:
    if half is None:
        return None
    return (
        half.key(),
        tuple(_task_value(task) for task in half.queue),
        half.in_flight and _task_value(half.in_flight),
        bool(half.queue) and half.queue[0] is hold,
    )


def _task_value(task: SendTask) -> Hashable:
    body = b"".join(task.frame.body.parts) if task.frame is not None and task.frame.body is not None else None
    return (task.item, task.frame is not None, body)


def describe(stage: Stage, frozen: bytes) -> Local:
    """What a world needs to know of a local state."""
    core, host = stage.runtime._core, stage.host
    requests = core.tables.snapshot()
    return Local(
        frozen=frozen,
        fair=tuple(_fair(stage)),
        live=tuple(request.internal_id for request in requests if not request.is_over),
        told=tuple(host.told.items()),
        offered=tuple(host.offered),
        refused=tuple(external_name(identity) for identity in core.tables.turned_away._graves),
        waits=tuple(request.internal_id for request in requests if request.receiver and request.receiver.waiting),
        unmarked=frozenset(host.lost),
        lost=frozenset(core.lost),
        held=_held(stage),
    )


def _fair(stage: Stage) -> list[Happening]:
    core, host = stage.runtime._core, stage.host
    fair: list[Happening] = []
    if core.ready:
        fair.append(("produce", None))
    if core.puts or core.urgent_puts:
        fair.append(("put", "stored", None))
    if core.feedback:
        fair.append(("cycle",))
    if stage.sink is not None and stage.sink.room_owed:
        fair.append(("room",))
    fair += [("take", name) for name in host.ready]
    fair += [("release", name) for name in sorted(host.owes_release)]
    for key in core.timers._due_ns:
        match key:
            case ("hold", Identity() as identity) if not core.tables.by_identity[identity].hold_is_busy:
                fair.append(("timer", key))
            case ("unclaimed", _) | ("lost", _, _):
                fair.append(("timer", key))
            case _:
                pass
    if host.role.front or not host.role.source:
        fair += [("end", request.internal_id) for request in core.tables.snapshot() if _may_end(host, request)]
    return fair


def _may_end(host: WorldHost, request: Request) -> bool:
    return not request.is_over and request.internal_id not in host.ended and request.internal_id not in host.told


def _held(stage: Stage) -> str:
    """What is left in a stage, in words; the graves do not count, nor the timer that clears them."""
    left = dict(stage.runtime.residue())
    left["tombstones"] = 0
    left["timers"] -= ("tombstones",) in stage.runtime._core.timers
    return ", ".join(f"{count} {name}" for name, count in left.items() if count)
