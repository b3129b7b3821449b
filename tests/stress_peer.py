"""A stage of the stress test in a process of its own: the front of a ring of two edges, or the worker that answers it.

Sizes and bytes of all that is sent are a function of seed, role, external id, generation and seq: whoever takes a frame
knows what must be in it. What a stage does on a whim (cancel, fail, release, raise, dawdle) it decides by dice of its own.
"""

import itertools
import os
import random
import re
import threading
import time
import traceback
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from omni_fsm.adapters import Generations
from omni_fsm.connectors import Hello, shm_receiver, shm_sender
from omni_fsm.protocol import Cause, Edge, Identity
from omni_fsm.runtime import (
    Failure,
    Feedback,
    Later,
    Offer,
    ProducerContext,
    Refuse,
    Register,
    StageConfig,
    StageRuntime,
    StageThreads,
    TakenKind,
    Transition,
    on_sigterm,
)

ROLES = ("front", "worker")
KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 6 * MIB
LARGEST_BYTES = 3 * MIB
SETTINGS: dict[str, Any] = {
    "input_wait_s": 600.0,  # nothing here may need it
    "reconnect_s": 2.0,
    "unclaimed_s": 1.0,
    "tombstone_s": 3.0,
    "window_frames": 4,
    "window_bytes": MIB,
    "backlog_bytes": 24 * MIB,
    "workers": 4,
    "shutdown_grace_s": 3.0,
}
ARENA_BYTES = 2 * MIB  # small: it wraps, it is full, and the largest bodies need regions of their own
IDS = 150
LIVES_OF_AN_ID = 3
STORIES_MAX = 3_000
OVER_WITHIN_S = 20.0
"""After the load has stopped, every request must be over by then: seconds for the work, far below ``input_wait_s``."""
REST_WITHIN_S = 20.0

EXPECTED_REASONS = re.compile(
    r"peer_lost|unclaimed|done|shutdown|released|released for a successor"
    r"|(ValueError: )?planned (cancel|fail|raise|refusal) at the (front|worker)"
)
LEFT_IN_A_HURRY = re.compile(r"shutdown: its end was not out within .*")
"""A SIGTERM while the other stage is gone: its last ends have nowhere to go."""


# -- what is sent ------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """One payload: its body is this piece of the pool."""

    start: int
    nbytes: int
    as_tensor: bool
    ends_segment: bool


def chunk_of(chance: random.Random) -> Chunk:
    largest = chance.choices((0, 200, 32 * KIB, 200 * KIB, LARGEST_BYTES), (10, 45, 30, 12, 3))[0]
    nbytes = chance.randint(0, largest)
    return Chunk(chance.randint(0, POOL_BYTES - nbytes), nbytes, chance.random() < 0.5, chance.random() < 0.1)


class Plan:
    """What the two stages do with one life, as both of them know it from its identity alone."""

    def __init__(self, seed: str, identity: Identity) -> None:
        chance = random.Random(f"{seed}/{identity}")  # noqa: S311 - a test's dice
        self.offer = chance.choices(("register", "later", "refuse", "never"), (80, 12, 4, 4))[0]
        count = chance.choice((0, 1, 2, 3, 5, 8, 13))
        self.early = chance.randint(0, count) if chance.random() < 0.1 else None  # the worker has enough by then
        self.chunks = {role: [chunk_of(chance) for _ in range(count)] for role in ("front", "worker")}
        self.tails = {role: chunk_of(chance) if chance.random() < 0.3 else None for role in ("front", "worker")}

    def count(self, role: str) -> int:
        """How many chunks of this role come before an ``end(ok)``."""
        return self.early if role == "worker" and self.early is not None else len(self.chunks[role])


class Pool:
    """Bytes that every process of one seed has: two pieces of it are equal only where they are the same piece."""

    def __init__(self, seed: str) -> None:
        self.octets = random.Random(f"{seed}/pool").randbytes(POOL_BYTES)  # noqa: S311 - a test's dice

    def payload(self, role: str, identity: Identity, seq: int, chunk: Chunk) -> dict[str, Any]:
        body: Any = self.octets[chunk.start : chunk.start + chunk.nbytes]
        if chunk.as_tensor:
            body = torch.from_numpy(np.frombuffer(body, np.uint8).copy())
        return {"of": [role, identity.external_id, identity.generation, seq], "body": body}

    def fault(self, payload: Any, expected: dict[str, Any]) -> str:
        """How a payload differs from what it must be; empty when it does not."""
        if payload is None or payload["of"] != expected["of"]:
            return f"{expected['of']} was due, {payload and payload['of']} came"
        body, due = payload["body"], expected["body"]
        if type(body) is not type(due):
            return f"a {type(due).__name__} was due in {expected['of']}, a {type(body).__name__} came"
        left, right = (np.frombuffer(x, np.uint8) if isinstance(x, bytes) else x.numpy() for x in (body, due))
        if len(left) != len(right):
            return f"{len(right)} bytes were due in {expected['of']}, {len(left)} came"
        differing = np.flatnonzero(left != right)
        return (
            f"{len(differing)} of {len(right)} bytes from {differing[0]} on differ in {expected['of']}"
            if len(differing)
            else ""
        )


class Raise:
    """An output that its producer cannot use."""


def produce(context: ProducerContext) -> Any:
    """Passes on what its runner submits, and makes sure that its state is of this life and in order."""
    life = context.state.get_or_create("stress.life", lambda: [context.identity, 0])
    if life[0] != context.identity:
        raise AssertionError(f"the producer of {context.identity} was given the state of {life[0]}")
    life[1] += 1
    if life[1] != context.seq + 1:
        raise AssertionError(f"the producer of {context.identity} is called for seq {context.seq} in call {life[1]}")
    if isinstance(context.output, Raise):
        raise ValueError(f"planned raise at the {context.request.partition('-')[0]}")  # noqa: TRY004 - it is no type error
    return context.output


# -- what is remembered ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Life:
    """One life of a request, as its stage's runner knows it."""

    name: str
    identity: Identity
    plan: Plan
    whim: str = ""
    whim_at: int = 0
    got: int = 0
    segment: int = 0
    sent: int = 0
    ended: bool = False  # its output, by the runner
    input_over: str = ""  # how
    output_over: bool = False
    told: str = ""  # what the feedback said of its failure

    @property
    def key(self) -> str:
        return self.identity.external_id

    def __str__(self) -> str:
        return (
            f"{self.name} {self.identity}: got {self.got}, sent {self.sent}, whim {self.whim or None} at {self.whim_at},"
            f" ended {self.ended}, input {self.input_over or 'open'}, output {'over' if self.output_over else 'open'}"
        )


class Stories:
    """The last transitions of each life, for the report; and what no stage may ever report."""

    def __init__(self) -> None:
        self._of: OrderedDict[Identity, deque[str]] = OrderedDict()
        self.faults: deque[tuple[Identity | None, str]] = deque()

    def on_transition(self, transition: Transition) -> None:
        story = self._of.setdefault(transition.identity, deque(maxlen=40))
        story.append(
            f"{transition.at_ns / 1e9:.4f} {transition.machine} {transition.before} -{transition.event}->"
            f" {transition.after} seq {transition.seq}{' ignored' if transition.ignored else ''}"
        )
        while len(self._of) > STORIES_MAX:
            self._of.popitem(last=False)

    def on_failure(self, failure: Failure) -> None:
        expected = EXPECTED_REASONS if failure.what == "failed" else LEFT_IN_A_HURRY
        if not expected.fullmatch(failure.cause.reason):
            raised = "".join(traceback.format_exception(failure.exception)) if failure.exception else ""
            self.faults.append((failure.identity, f"reported {failure.what}: {failure.cause} {raised}"))

    def of(self, identity: Identity | None) -> str:
        story = () if identity is None else tuple(self._of.get(identity, ()))
        return "".join(f"\n    {line}" for line in story)


# -- the two stages ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Side:
    """What front and worker have in common: lives that take, verify, send and leave."""

    seed: str
    chance: random.Random
    folder: Path
    pipe: Connection
    lives: dict[str, Life] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    sending: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)  # names of lives that this runner left on a whim
    counts: Counter[str] = field(default_factory=Counter)
    draining_since_s: float | None = None
    all_over_s: float = 0.0
    reported: bool = False
    ids: list[str] = field(default_factory=list)

    role: ClassVar[str]
    peer: ClassVar[str]

    def __post_init__(self) -> None:
        self.pool = Pool(self.seed)
        self.stories = Stories()
        self.stopping = threading.Event()
        source = shm_receiver(Hello(Edge(self.peer, self.role)), self.folder)
        sink = shm_sender(Hello(Edge(self.role, self.peer)), self.folder, arena_bytes=ARENA_BYTES)
        self.runtime = StageRuntime(
            StageConfig(stage=self.role, front=self.role == "front", **SETTINGS),
            source=source,
            sink=sink,
            host=self,
            producer=produce,
            observers=(self.stories,),
        )
        self.threads = StageThreads(self.runtime)

    # The host

    def stream_offered(self, identity: Identity) -> Offer:
        raise NotImplementedError

    def feedback_ready(self) -> None:
        """The loop waits in ``collect_feedback``."""

    # The loop

    def run(self) -> None:
        on_sigterm(self.threads, self.stopping.set)
        self.threads.start()
        self.pipe.send(("up", os.getpid()))
        while not self.stopping.is_set():
            while self.pipe.poll():
                self.obey(self.pipe.recv())
            self.hear(self.runtime.collect_feedback(0.02))
            self.work()
            while self.stories.faults:
                self.wrong(*self.stories.faults.popleft())
            if self.draining_since_s is not None and not self.reported:
                self.report_when_over(time.monotonic() - self.draining_since_s)
        self.threads.shutdown()
        self.pipe.send(("down", dict(self.counts)))

    def obey(self, command: Any) -> None:
        if isinstance(command, Identity):
            self.pipe.send(("story", f"the same life at the {self.role}:{self.stories.of(command)}"))
        elif command == "load":
            self.draining_since_s = None
            self.ids = [f"request/{number}" for number in range(IDS)]
        elif command == "drain":
            self.draining_since_s, self.all_over_s, self.reported = time.monotonic(), 0.0, False
        else:
            self.stopping.set()

    def wrong(self, identity: Identity | None, what: str) -> None:
        self.pipe.send(("wrong", (identity, f"{identity}: {what}{self.stories.of(identity)}")))

    def report_when_over(self, passed_s: float) -> None:
        """Once no request is left and then nothing at all; or, when it is too late, what is left."""
        residue = {table: count for table, count in self.runtime.residue().items() if count}
        connected = all(health.connected for health in self.runtime.health().values())
        if not self.is_over():
            if passed_s < OVER_WITHIN_S:
                return
            for life in self.lives.values():
                self.wrong(life.identity, f"stuck {passed_s:.1f} s after the load stopped: {life}")
        else:
            self.all_over_s = self.all_over_s or passed_s
            if (residue or not connected) and passed_s < OVER_WITHIN_S + REST_WITHIN_S:
                return
            if residue or not connected:
                self.wrong(None, f"residue {residue}, connected {connected} {passed_s:.1f} s after the load stopped")
        self.reported = True
        fds = sum(1 for _ in Path("/proc/self/fd").iterdir())
        counts, self.counts = dict(self.counts), Counter()
        self.pipe.send(("over", {"fds": fds, "over_s": self.all_over_s, "counts": counts}))

    def is_over(self) -> bool:
        return not self.lives

    # What the stage says

    def hear(self, feedback: Feedback) -> None:
        for name, identity in feedback.registered.items():
            self.begin(name, identity)
        self.ready |= feedback.ready.keys()
        self.sending |= feedback.resumed.keys()
        for name, cause in feedback.failed.items():
            self.hear_failed(name, cause)
        for name in feedback.output_ended:
            if (life := self.lives.get(name)) is not None:
                life.output_over = True
                self.forget_if_over(life)

    def hear_failed(self, name: str, cause: Cause) -> None:
        life = self.lives.get(name)
        if life is None or life.told:
            if name not in self.left:  # a failure may be on its way to a runner that leaves
                self.wrong(life and life.identity, f"{name} failed twice or after its end: {cause}")
            return
        life.told = str(cause)
        self.counts[f"failed: {cause.reason}"] += 1
        if not EXPECTED_REASONS.fullmatch(cause.reason):
            self.wrong(life.identity, f"failed with {cause}, which nobody planned")
        self.runtime.release(name)
        self.leave(life, life.told)

    def begin(self, name: str, identity: Identity) -> Life:
        life = self.lives[name] = Life(name, identity, Plan(self.seed, identity))
        if self.chance.random() < 0.25:
            life.whim = self.chance.choice(("cancel", "fail", "raise", "release"))
            life.whim_at = self.chance.randint(0, len(life.plan.chunks[self.role]) + 1)
        self.sending.add(name)
        self.counts["begun"] += 1
        return life

    def leave(self, life: Life, how: str) -> None:
        """Nothing more is taken or submitted."""
        life.input_over = life.input_over or how
        self.ready.discard(life.name)
        self.sending.discard(life.name)
        self.forget_if_over(life)

    def forget_if_over(self, life: Life) -> None:
        if life.input_over and life.output_over and self.lives.pop(life.name, None) is not None:
            self.ready.discard(life.name)
            self.sending.discard(life.name)

    # What the runner does

    def work(self) -> None:
        for name in self.some(self.ready, 48):
            if (life := self.lives.get(name)) is None or self.take(life, self.chance.randint(1, 4)):
                self.ready.discard(name)
        for name in self.some(self.sending, 32):
            if (life := self.lives.get(name)) is None:
                self.sending.discard(name)
            else:
                self.send(life, self.chance.randint(1, 4))

    def some(self, names: set[str], most: int) -> list[str]:
        return self.chance.sample(sorted(names), min(most, len(names)))

    def wants_more(self, life: Life) -> bool:
        return not life.input_over

    def take(self, life: Life, most: int) -> bool:
        """Take and verify a few frames. Returns whether no more is there now."""
        for _ in range(most):
            if not self.wants_more(life):
                return False
            taken = self.runtime.take(life.name)
            if taken.kind is TakenKind.CHUNK:
                self.verify_chunk(life, taken)
            elif taken.kind is TakenKind.END:
                self.verify_end(life, taken)
                return True
            else:  # a failure is told by the feedback
                return True
        return False

    def verify_chunk(self, life: Life, taken: Any) -> None:
        chunks = life.plan.chunks[self.peer]
        if life.got == life.plan.count(self.peer):
            self.wrong(life.identity, f"chunk {life.got} came, which was never sent: {taken.payload['of']}")
            return
        chunk = chunks[life.got]
        expected = self.pool.payload(self.peer, life.identity, life.got, chunk)
        fault = self.pool.fault(taken.payload, expected)
        if fault:
            self.wrong(life.identity, fault)
        if (taken.segment, taken.segment_end) != (life.segment, chunk.ends_segment):
            self.wrong(
                life.identity, f"chunk {life.got} came as {taken.segment, taken.segment_end}, not {life.segment}"
            )
        life.segment += chunk.ends_segment
        life.got += 1
        self.counts["chunks"] += 1
        self.counts["bytes"] += chunk.nbytes
        self.sending.add(life.name)

    def verify_end(self, life: Life, taken: Any) -> None:
        due = life.plan.count(self.peer)
        if life.got != due:
            self.wrong(life.identity, f"end(ok) came after {life.got} of {due} chunks")
        tail = life.plan.tails[self.peer]
        if tail is None and taken.payload is not None:
            self.wrong(life.identity, f"an end without a tail brought {taken.payload['of']}")
        elif tail is not None:
            fault = self.pool.fault(taken.payload, self.pool.payload(self.peer, life.identity, due, tail))
            if fault:
                self.wrong(life.identity, f"the tail is wrong: {fault}")
        self.counts["whole"] += 1
        life.input_over = "ok"
        self.ready.discard(life.name)
        self.sending.add(life.name)
        self.forget_if_over(life)

    def send(self, life: Life, most: int) -> None:
        """Submit a few chunks, or the end, or follow the whim."""
        for _ in range(most):
            if life.whim and life.sent + life.ended >= life.whim_at:
                self.follow_whim(life)
                return
            if life.sent < self.may_send(life):
                if not self.submit(life, self.pool_payload(life), life.plan.chunks[self.role][life.sent].ends_segment):
                    return
                life.sent += 1
            elif self.has_all(life) and not life.ended:
                self.end(life)
            else:
                self.sending.discard(life.name)
                return

    def pool_payload(self, life: Life) -> dict[str, Any]:
        return self.pool.payload(self.role, life.identity, life.sent, life.plan.chunks[self.role][life.sent])

    def may_send(self, life: Life) -> int:
        raise NotImplementedError

    def has_all(self, life: Life) -> bool:
        raise NotImplementedError

    def submit(self, life: Life, output: Any, ends_segment: bool) -> bool:  # noqa: FBT001 - one call
        admission = self.runtime.submit_chunk(life.name, output, segment_end=ends_segment)
        if not admission.accepted:
            self.counts["refused: backlog" if admission.reason.startswith("backlog") else "refused"] += 1
            self.sending.discard(life.name)  # until the feedback says that it is resumed, or that it failed
        return admission.accepted

    def end(self, life: Life) -> None:
        tail = life.plan.tails[self.role]
        output = None if tail is None else self.pool.payload(self.role, life.identity, life.sent, tail)
        self.runtime.end(life.name, output)
        life.ended = True

    def follow_whim(self, life: Life) -> None:
        whim, life.whim = life.whim, ""
        self.counts[f"whim: {whim}"] += 1
        reason = f"planned {whim} at the {self.role}"
        if whim == "raise":
            if not life.ended and self.submit(life, Raise(), ends_segment=False):
                life.sent = len(life.plan.chunks[self.role])  # nothing more: the feedback tells of the failure
                life.ended = True
            return
        if whim == "cancel":
            self.runtime.cancel(life.name, reason)
        elif whim == "fail":
            self.runtime.fail(life.name, reason)
            self.runtime.release(life.name)
        else:
            self.runtime.release(life.name)
        self.left.add(life.name)
        self.leave(life, reason)


class Front(Side):
    """Opens the next life of an id as soon as one is over, and sometimes before."""

    role, peer = "front", "worker"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generations = Generations()
        self.running: Counter[str] = Counter()

    def stream_offered(self, identity: Identity) -> Offer:
        self.counts["offered to the front"] += 1  # of a front that was killed
        return Refuse(f"planned refusal at the {self.role}")

    def open(self, external_id: str) -> None:
        identity = Identity(external_id, self.generations.next())
        name = f"front-{identity.generation}"
        if self.runtime.register(name, identity).accepted:
            self.running[external_id] += 1
            self.begin(name, identity)

    def work(self) -> None:
        if self.draining_since_s is None and not self.stopping.is_set():
            for external_id in self.ids:
                if not self.running[external_id]:
                    self.open(external_id)
        super().work()

    def forget_if_over(self, life: Life) -> None:
        before = len(self.lives)
        super().forget_if_over(life)
        self.running[life.key] -= before - len(self.lives)

    def leave(self, life: Life, how: str) -> None:
        super().leave(life, how)
        self.open_another(life.key)

    def end(self, life: Life) -> None:
        super().end(life)
        self.open_another(life.key)

    def open_another(self, external_id: str) -> None:
        """The next life of an id at once, while the last is still on its way out."""
        may = self.draining_since_s is None and self.running[external_id] < LIVES_OF_AN_ID
        if may and self.chance.random() < 0.5:
            self.counts["reused at once"] += 1
            self.open(external_id)

    def may_send(self, life: Life) -> int:
        return len(life.plan.chunks["front"])

    def has_all(self, life: Life) -> bool:
        return life.sent == len(life.plan.chunks["front"])


class Worker(Side):
    """Answers each chunk with one of its own."""

    role, peer = "worker", "front"

    def __post_init__(self) -> None:
        self.numbers = itertools.count()
        self.later: deque[Identity] = deque()
        super().__post_init__()

    def stream_offered(self, identity: Identity) -> Offer:
        match Plan(self.seed, identity).offer:
            case "register":
                return Register(f"worker-{next(self.numbers)}")
            case "refuse":
                return Refuse(f"planned refusal at the {self.role}")
            case "later":
                self.later.append(identity)
        return Later()

    def is_over(self) -> bool:
        return not self.lives and not self.later

    def work(self) -> None:
        for _ in range(len(self.later)):
            identity = self.later.popleft()
            if self.chance.random() < 0.3:
                self.later.append(identity)
                continue
            name = f"worker-{next(self.numbers)}"
            if self.runtime.register(name, identity).accepted:
                self.counts["registered later"] += 1
                self.begin(name, identity)
        super().work()

    def wants_more(self, life: Life) -> bool:
        return super().wants_more(life) and life.got - life.sent < 3 and life.got != life.plan.early

    def may_send(self, life: Life) -> int:
        return life.got

    def has_all(self, life: Life) -> bool:
        return life.sent == life.got and (life.input_over == "ok" or life.got == life.plan.early)

    def end(self, life: Life) -> None:
        super().end(life)
        life.input_over = life.input_over or "early"
        self.forget_if_over(life)


def serve(pipe: Connection, role: str, seed: str, number: int, folder: str) -> None:
    """Be one stage until the pipe says ``stop``, SIGTERM comes, or SIGKILL."""
    chance = random.Random(f"{seed}/{role}/{number}")  # noqa: S311 - a test's dice
    stage = Front if role == "front" else Worker
    try:
        stage(seed, chance, Path(folder), pipe).run()
    except EOFError:
        return  # the test is gone
    except BaseException:
        pipe.send(("wrong", (None, f"the loop of this stage raised:\n{traceback.format_exc()}")))
        raise
