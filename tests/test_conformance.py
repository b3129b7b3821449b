"""The conformance kit: our connectors and producers pass it, and faulty ones fail with the name of the rule."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_fsm import testing
from omni_fsm.connectors import Hello, memory_pair, shm_receiver, shm_sender
from omni_fsm.connectors.port import (
    BUSY,
    STORED,
    EdgeRefused,
    HelloMismatchError,
    PeerLost,
    PutOutcome,
    PutStatus,
    RoomReturned,
    Signal,
)
from omni_fsm.demo.models import FRAME_WIDTH
from omni_fsm.demo.talker_model import FrameCutter, Frames
from omni_fsm.demo.vocoder import Vocoder
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime.ports import Producer, ProducerContext
from omni_fsm.state import Scope
from omni_fsm.testing import ConnectorConformance, ProducerConformance, RunnerConformance
from omni_fsm.testing.edge import Ends

HELLO = Hello(Edge("thinker", "talker"))
DOC = (Path(__file__).parent.parent / "docs" / "conformance.md").read_text(encoding="utf-8")
SEED = 5
LIMIT_BYTES = 16 << 20


class TestMemory(ConnectorConformance):
    frame_limit_bytes = LIMIT_BYTES

    def make_edge(self) -> Ends:
        return self.make_edge_between(HELLO, HELLO)

    def make_edge_between(self, sender_hello: Hello, receiver_hello: Hello) -> Ends:
        return memory_pair(sender_hello, receiver_hello, capacity_bytes=4 << 20, max_frame_bytes=LIMIT_BYTES)


class TestShm(ConnectorConformance):
    frame_limit_bytes = LIMIT_BYTES

    def make_edge(self) -> AbstractContextManager[Ends]:
        return self.make_edge_between(HELLO, HELLO)

    @contextmanager
    def make_edge_between(self, sender_hello: Hello, receiver_hello: Hello) -> Iterator[Ends]:
        with self.make_split_edge(sender_hello, receiver_hello) as (open_sender, open_receiver):
            yield open_sender(), open_receiver()

    @contextmanager
    def make_split_edge(self, sender_hello: Hello = HELLO, receiver_hello: Hello = HELLO) -> Iterator[Any]:
        with tempfile.TemporaryDirectory() as folder:
            limits = {"max_frame_bytes": LIMIT_BYTES, "retry_s": 0.01}
            yield (
                partial(shm_sender, sender_hello, folder, arena_bytes=4 << 20, **limits),
                partial(shm_receiver, receiver_hello, folder, **limits),
            )


def cut(context: ProducerContext) -> Any:
    """The talker's: chunks of 25 frames, the end brings the tail."""
    cutter = context.state.get_or_create("test.cutter", FrameCutter)
    if context.is_finished:
        tail = cutter.flush()
        return None if tail is None else {"frames": tail}
    chunks = cutter.push(context.output)
    return {"frames": np.concatenate(chunks)} if chunks else None


def vocode(context: ProducerContext) -> Any:
    """The code2wav's: the sound that became certain, the end brings the rest."""
    vocoder = context.state.get_or_create("test.vocoder", lambda: Vocoder(SEED))
    return {"pcm": vocoder.finish() if context.is_finished else vocoder.push(context.output, last=False)}


def synthetic_frames(sizes: tuple[int, ...]) -> list[Frames]:
    random = np.random.default_rng(1)
    frames = [random.normal(-2.0, 1.5, (size, FRAME_WIDTH)).astype(np.float32) for size in sizes]
    for piece in frames:
        piece[:, -1] = 180.0
    return frames


class TestCutter(ProducerConformance):
    def make_producer(self) -> Producer:
        return cut

    def make_steps(self) -> list[Any]:
        return synthetic_frames((10, 20, 0, 25, 3))

    def whole(self) -> bytes:
        return np.concatenate(self.make_steps()).tobytes()

    def content(self, payload: Any) -> bytes:
        return payload["frames"].tobytes()


class TestVocoder(ProducerConformance):
    def make_producer(self) -> Producer:
        return vocode

    def make_steps(self) -> list[Any]:
        return synthetic_frames((3, 1, 5))

    def whole(self) -> bytes:
        return Vocoder(SEED).push(np.concatenate(self.make_steps()), last=True).tobytes()

    def content(self, payload: Any) -> bytes:
        return payload["pcm"].tobytes()


def running_sums(context: ProducerContext) -> Any:
    """The sum of its segment so far: what it keeps is gone with the segment."""
    held = context.state.get_or_create("test.sums", list, Scope.SEGMENT)
    held.append(context.output or 0)
    return sum(held)


class TestRunningSums(ProducerConformance):
    segments_alone = True

    def make_producer(self) -> Producer:
        return running_sums

    def make_steps(self) -> list[Any]:
        return [1, 20, 300]


# -- faulty connectors -------------------------------------------------------------------------------------------------


class Wrapper:
    """An end that does what another does, but for what a subclass gets wrong."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Repeats(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        if frame.seq == 3:
            self.inner.put(frame)
        return self.inner.put(frame)


class Reorders(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        if frame.seq == 2:
            self.kept.append(frame)
            return STORED
        outcome = self.inner.put(frame)
        while self.kept and outcome == STORED:
            self.inner.put(self.kept.pop())
        return outcome


class Loses(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        return STORED if frame.seq == 3 else self.inner.put(frame)

    def get(self) -> Any:
        arrival = self.inner.get()
        return self.inner.get() if arrival is not None and arrival.frame.seq == 3 else arrival


class IgnoresCredit(Wrapper):
    def grant(self, identity: Identity, **numbers: int) -> None:
        self.inner.grant(identity, **{**numbers, "frames": 1 << 20, "nbytes": 1 << 40})


class NeverReturnsCredit(Wrapper):
    def signals(self) -> list[Signal]:
        return [signal for signal in self.inner.signals() if type(signal).__name__ != "CreditReturned"]


class HoldsFailedEnds(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        return BUSY if frame.cause is not None and frame.cause.outcome is not Outcome.OK else self.inner.put(frame)


class BlocksAll(Wrapper):
    """One queue for all streams: a busy one stands at its head."""

    def put(self, frame: Frame) -> PutOutcome:
        if self.kept and self.kept[0].identity != frame.identity:
            return BUSY
        outcome = self.inner.put(frame)
        self.kept = [frame] if outcome.status is PutStatus.BUSY else []
        return outcome


class ForgetsReasons(Wrapper):
    def stop(self, identity: Identity, cause: Cause) -> None:
        self.inner.stop(identity, Cause(cause.outcome, "stopped", cause.at_ns))


class TruncatesBodies(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        return self.inner.put(replace(frame, body=None) if frame.body is not None and not frame.body.nbytes else frame)


class LosesPeerEarly(Wrapper):
    def signals(self) -> list[Signal]:
        found = self.inner.signals()
        return found if self.inner.health().connected and not self.inner.get() else [*found, PeerLost()]


class Lends(Wrapper):
    """Copies a body when it has time."""

    def put(self, frame: Frame) -> PutOutcome:
        self.kept.append(frame)
        return STORED

    def signals(self) -> list[Signal]:
        while self.kept:
            self.inner.put(self.kept.pop(0))
        return self.inner.signals()


class Adds(Wrapper):
    """Takes the numbers of a grant for relative ones."""

    def grant(self, identity: Identity, *, frames: int, **numbers: int) -> None:
        self.kept.append(frames)
        self.inner.grant(identity, frames=sum(self.kept), **numbers)


class HidesLoss(Wrapper):
    def signals(self) -> list[Signal]:
        return [signal for signal in self.inner.signals() if not isinstance(signal, PeerLost)]


class CutsIds(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        short = Identity(frame.identity.external_id[:255], frame.identity.generation)
        return self.inner.put(replace(frame, identity=short))


class DropsSegmentEnds(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        return self.inner.put(replace(frame, segment_end=False))


class RaisesAlways(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        raise OSError(28, "no space")


class Spins(Wrapper):
    def wait(self, timeout_s: float | None) -> bool:
        self.inner.wait(0.0)
        return True


class Sleepy(Wrapper):
    def wake(self) -> None:
        """Nobody waits here, it says."""


class NeverForgets(Wrapper):
    def reclaim(self, identity: Identity, *, unread: bool) -> None:
        """It may come in useful."""


class TakesAfterClose(Wrapper):
    def close(self) -> None:
        """It closes itself, it says."""


class HidesRoom(Wrapper):
    def signals(self) -> list[Signal]:
        return [signal for signal in self.inner.signals() if not isinstance(signal, RoomReturned)]


class Retries(Wrapper):
    """Says "for now" of what will never be."""

    def put(self, frame: Frame) -> PutOutcome:
        outcome = self.inner.put(frame)
        return PutOutcome(PutStatus.RETRY, outcome.reason) if outcome.status is PutStatus.REFUSED else outcome


class RefusesWithoutWords(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        return PutOutcome(self.inner.put(frame).status)


class BusyAfterARefusal(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        if self.kept:
            return BUSY
        outcome = self.inner.put(frame)
        self.kept = [outcome] if outcome.status is PutStatus.REFUSED else []
        return outcome


class HidesRefusal(Wrapper):
    def signals(self) -> list[Signal]:
        return [signal for signal in self.inner.signals() if not isinstance(signal, EdgeRefused)]


class MixesUpHellos(Wrapper):
    def signals(self) -> list[Signal]:
        found = self.inner.signals()
        return [replace(one, error=swapped(one.error)) if isinstance(one, EdgeRefused) else one for one in found]


def swapped(error: HelloMismatchError) -> HelloMismatchError:
    return HelloMismatchError(error.edge, error.field, error.theirs, error.ours)


class MeetsOnlyOne(Wrapper):
    """Takes no other peer after the first."""

    def signals(self) -> list[Signal]:
        found = self.inner.signals()
        if any(isinstance(signal, PeerLost) for signal in found):
            self.inner.close()
        return found


class StoresForTheDead(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        return STORED if frame.identity.external_id == "r2" else self.inner.put(frame)


@pytest.mark.parametrize(
    ("faulty", "end", "rule", "words"),
    [
        (Repeats, 0, "frames_come_in_order_each_once", "rule exactly-once: frame data 3 came twice"),
        (Reorders, 0, "frames_come_in_order_each_once", "rule in-order: frame data 2 came after frame data 3"),
        (Loses, 0, "frames_come_in_order_each_once", "rule exactly-once: frame data 3 never came within 0.4 s"),
        (
            IgnoresCredit,
            1,
            "credit_bounds_the_frames_outstanding",
            "rule credit: frame data 2 was stored, not busy, though 2 frames were outstanding and 2 were granted",
        ),
        (NeverReturnsCredit, 0, "credit_bounds_the_frames_outstanding", "rule credit: no CreditReturned came after a"),
        (HoldsFailedEnds, 0, "open_and_failed_ends_need_no_credit", "rule free: frame end was busy"),
        (BlocksAll, 0, "no_stream_blocks_another", "rule no-blocking: frame data 0 of other#1 was not stored"),
        (ForgetsReasons, 1, "a_stop_comes_with_its_cause", "rule stop: r1#1 was stopped with cancelled(client went"),
        (TruncatesBodies, 0, "bodies_of_any_size_come_whole", "rule body: frame data 2 with 0 bytes was put and came"),
        (
            Lends,
            0,
            "a_body_is_a_private_copy",
            "rule private: a body of 10 bytes changed with the memory that it was put",
        ),
        (Adds, 1, "grants_are_absolute", "rule absolute: frame data 1 was stored, not busy"),
        (HidesLoss, 0, "a_closed_receiver_is_lost_to_the_sender", "rule peer-lost: no PeerLost came within 0.4 s"),
        (HidesLoss, 1, "a_closed_sender_s_frames_come_before_its_loss", "rule close: no PeerLost came within 0.4 s"),
        (CutsIds, 0, "any_id_crosses_unchanged", "rule ids: the frames of xxxx"),
        (DropsSegmentEnds, 0, "a_header_comes_whole", "rule header: frame data 1 was put as Frame("),
        (
            RaisesAlways,
            0,
            "frames_come_in_order_each_once",
            "rule free: frame open of r1#1 was not stored (puts raised OSE",
        ),
        (LosesPeerEarly, 1, "a_closed_sender_s_frames_come_before_its_loss", "rule close: PeerLost came before frame"),
        (Spins, 1, "an_idle_wait_uses_no_cpu", "rule idle: an idle wait of 0.15 s at the receiving end computed for"),
        (Sleepy, 0, "a_wake_before_the_wait_counts", "rule wakes: a wait was not ended by a wake() of the sending end"),
        (NeverForgets, 0, "a_reclaimed_life_leaves_nothing", "rule reclaim: entries {'ledger': 1} did not go"),
        (TakesAfterClose, 0, "a_put_after_close_raises", "rule closed: a put after close gave "),
        (HidesRoom, 0, "room_that_returns_is_told", "rule room: no RoomReturned came once all was read within 0.4 s"),
        (
            Retries,
            0,
            "a_body_over_the_limit_is_refused",
            "rule refused: a body of 16777217 bytes was retry, not refused",
        ),
        (
            RefusesWithoutWords,
            0,
            "a_body_over_the_limit_is_refused",
            "rule refused: a body of 16777217 bytes was refused without a reason",
        ),
        (
            BusyAfterARefusal,
            0,
            "a_body_over_the_limit_is_refused",
            "rule refused: the next frame of the stream was not stored, though a refused one uses no credit",
        ),
        (
            HidesRefusal,
            0,
            "hellos_that_differ_are_refused",
            "rule hello: the sending end said [], not EdgeRefused, where the hellos differ in version within 0.4 s",
        ),
        (
            MixesUpHellos,
            1,
            "hellos_that_differ_are_refused",
            "rule hello: the receiving end refused 1 and 2, not (2, 1) of version",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_connector_is_told_which_rule_it_breaks(
    faulty: type[Wrapper], end: int, rule: str, words: str
) -> None:
    class Faulty(TestMemory):
        patience_s = 0.4

        def make_edge(self) -> Any:
            return self.make_edge_between(HELLO, HELLO)

        @contextmanager
        def make_edge_between(self, *hellos: Hello) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
            ends: list[Any] = list(TestMemory.make_edge_between(self, *hellos))
            inner, ends[end] = ends[end], faulty(ends[end])
            yield tuple(ends)
            inner.close()

    with pytest.raises(AssertionError, match="^" + re.escape(words)):
        getattr(Faulty(), f"test_{rule}")()


@pytest.mark.parametrize(
    ("faulty", "end", "rule", "words"),
    [
        (HidesLoss, 1, "a_killed_sender_is_lost_after_its_frames", "rule killed: no PeerLost came after the other"),
        (
            Loses,
            1,
            "a_killed_sender_is_lost_after_its_frames",
            "rule killed: 5 chunks were put before the death, and 4",
        ),
        (MeetsOnlyOne, 1, "a_killed_sender_is_lost_after_its_frames", "rule restart: no open came from the other"),
        (
            HidesLoss,
            0,
            "a_killed_receiver_is_lost_and_replaced",
            "rule killed: no PeerLost came after the other process",
        ),
        (
            StoresForTheDead,
            0,
            "a_killed_receiver_is_lost_and_replaced",
            "rule killed: a frame was stored for a process",
        ),
        (MeetsOnlyOne, 0, "a_killed_receiver_is_lost_and_replaced", "rule restart: no PeerBack came, though the other"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_connector_that_is_faulty_beside_the_dead_is_told_so(
    faulty: type[Wrapper], end: int, rule: str, words: str
) -> None:
    class Faulty(TestShm):
        patience_s = 1.0

        @contextmanager
        def make_split_edge(self, *hellos: Hello) -> Iterator[Any]:  # type: ignore[override]
            with super().make_split_edge(*hellos) as made:
                openers: list[Any] = list(made)
                openers[end] = lambda opener=openers[end]: faulty(opener())
                yield tuple(openers)

    with pytest.raises(AssertionError, match="^" + re.escape(words)):
        getattr(Faulty(), f"test_{rule}")()


# -- faulty producers --------------------------------------------------------------------------------------------------


class OnItself:
    """Keeps the sum of all requests on itself."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, context: ProducerContext) -> Any:
        self.total += context.output or 0
        return self.total


class OneBuffer:
    """Gives every request the same array."""

    def __init__(self) -> None:
        self.array = np.zeros(1)

    def __call__(self, context: ProducerContext) -> Any:
        held = context.state.get_or_create("test.held", list)
        held.append(context.output or 0)
        self.array[:] = sum(held)
        return self.array


def drops_the_tail(context: ProducerContext) -> Any:
    held = context.state.get_or_create("test.held", list)
    if context.is_finished:
        return None
    held.append(context.output)
    return held.pop(0) if len(held) > 1 else None


def needs_a_step(context: ProducerContext) -> Any:
    return context.state.get_or_create("test.first", lambda: context.output + 1)


def sends_itself(context: ProducerContext) -> Any:
    return context


def forgets_with_the_segment(context: ProducerContext) -> Any:
    """Holds one number back, in a namespace that goes with the segment."""
    held = context.state.get_or_create("test.held", list, Scope.SEGMENT)
    if not context.is_finished:
        held.append(context.output)
    return held.pop(0) if len(held) > (not context.is_finished) else None


def counts_all(context: ProducerContext) -> Any:
    """Numbers its payloads through the segments of a request."""
    held = context.state.get_or_create("test.held", list)
    held.append(context.output)
    return len(held)


class Scratch:
    """Puts what it works on on itself for the time of a call."""

    def __call__(self, context: ProducerContext) -> Any:
        self.output = context.output
        held = context.state.get_or_create("test.held", list)
        held.append(self.output or 0)
        return sum(held)


OPEN_SUMS: dict[str, int] = {}


def by_external_id(context: ProducerContext) -> Any:
    """Survives the producer, but not a second life."""
    name = context.identity.external_id
    OPEN_SUMS[name] = OPEN_SUMS.get(name, 0) + (context.output or 0)
    return OPEN_SUMS[name]


@pytest.mark.parametrize(
    ("make", "rule", "words"),
    [
        (OnItself, "a_request_run_twice_gives_the_same", "rule state: r0#1: call 0 gave "),
        (OnItself, "any_producer_goes_on_with_a_request", "rule namespaces: r0#1: call 1 gave "),
        (OnItself, "requests_do_not_disturb_each_other", "rule interleaving: r"),
        (OnItself, "a_raise_harms_no_other_request", "rule raise: r0#1: call "),
        (OneBuffer, "requests_do_not_disturb_each_other", "rule given-away: r"),
        (drops_the_tail, "the_end_loses_nothing", "rule flush: the payloads carry 2 bytes where 3 bytes went"),
        (needs_a_step, "no_step_and_one_step_are_requests", "rule runs: r0#1: call 0 raised TypeError("),
        (sends_itself, "no_step_and_one_step_are_requests", "rule payload: r0#1: call 0 gave what cannot be"),
        (by_external_id, "a_half_done_request_leaves_nothing", "rule state: r0#1: call 0 gave "),
        (by_external_id, "requests_do_not_disturb_each_other", "rule interleaving: "),
        (
            forgets_with_the_segment,
            "any_cut_into_segments_is_a_request",
            "rule segments: the payloads carry 0 bytes where 3 bytes went in, with a segment's end at calls [0, 1, 2]",
        ),
        (counts_all, "a_segment_is_as_the_first_one", "rule segment-scope: r0#1: call 1 gave "),
        (Scratch, "threads_do_not_disturb_each_other", "rule threads: r"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_producer_is_told_which_rule_it_breaks(make: Any, rule: str, words: str) -> None:
    class Faulty(ProducerConformance):
        segments_alone = True

        def make_producer(self) -> Any:
            return make() if isinstance(make, type) else make

        def make_steps(self) -> list[Any]:
            return [1, 2, 3]

        def whole(self) -> bytes:
            return b"123"

        def content(self, payload: Any) -> bytes:
            return str(payload).encode()

    OPEN_SUMS.clear()
    with pytest.raises(AssertionError, match="^" + re.escape(words)):
        getattr(Faulty(), f"test_{rule}")()


# -- the page ----------------------------------------------------------------------------------------------------------

SECTIONS = dict(
    zip(("connector", "producer", "runner"), re.split(r"^## A \w+$", DOC, flags=re.MULTILINE)[1:], strict=True)
)
KITS = {
    ConnectorConformance: ("connector", "peers", "edge"),
    ProducerConformance: ("producer",),
    RunnerConformance: ("runner", "stage"),
}
RULE_IN_CODE = re.compile(
    r"""(?:broken|store|until|until_ended|busy|lost|said|shutdown|_compare|_run|_request|_check_\w+)\(
        \s*(?:[\w.()]+,\ )?"([a-z-]+)\"""",
    re.VERBOSE,
)


@pytest.mark.parametrize("kit", KITS)
def test_the_page_lists_every_rule(kit: type) -> None:
    told = [getattr(kit, name).__doc__ for name in dir(kit) if name.startswith("test_")]
    assert all(text and text.startswith("Rule ") for text in told)
    rules = {rule for text in told for rule in re.findall(r"Rule ([a-z-]+):", text)}
    sources = [Path(testing.__file__).with_name(f"{module}.py").read_text(encoding="utf-8") for module in KITS[kit]]
    used = {rule for source in sources for rule in RULE_IN_CODE.findall(source)}
    assert used <= rules
    assert len(used) >= 6
    table = SECTIONS[KITS[kit][0]].partition("| rule | what it asks |")[2]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(rules)


def test_the_page_s_examples_pass() -> None:
    names: dict[str, Any] = {}
    exec(compile("\n".join(re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)), "conformance.md", "exec"), names)  # noqa: S102 - the page is ours
    names["TestMyConnector"]().test_frames_come_in_order_each_once()
    for kit in (names["TestMyProducer"](), names["TestMyRunner"]()):
        for rule in dir(kit):
            if rule.startswith("test_"):
                with contextlib.suppress(pytest.skip.Exception):  # what the page does not override
                    getattr(kit, rule)()
