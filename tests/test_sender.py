"""The sending half, row by row: what PROTOCOL says of "Sender", with states, effects and queues written by hand."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from walks import check_walks

from omni_fsm.protocol.errors import LocalProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf, SenderMoved, SendTask, TaskKind
from omni_fsm.tables import receiver_table, sender_table

EDGE = Edge("thinker", "talker")
R7 = Identity("r7", 2)
RETRIES = 3
WALKS, STEPS = 5_000, 60
ROWS_FLOOR = 81


@dataclass(frozen=True)
class Blob:
    """A body that remembers which chunk it was made of."""

    tag: str
    nbytes: int = 0
    copies: int = 0

    @property
    def parts(self) -> Sequence[memoryview]:
        return (memoryview(self.tag.encode()),)

    def owned(self) -> "Blob":
        return replace(self, copies=self.copies + 1)


def error(reason: str = "boom", at_ns: int = 5) -> Cause:
    return Cause(Outcome.ERROR, reason, at_ns)


def cancel(reason: str = "user left", at_ns: int = 7) -> Cause:
    return Cause(Outcome.CANCELLED, reason, at_ns)


# Drivers: what a runtime does with one half, one step at a time


def new(*chunks: str, end: bool = False, retries: int = RETRIES) -> SenderHalf:
    """A life whose opening is still queued."""
    half = SenderHalf(sender_table(), EDGE, R7, retries)
    for chunk in chunks:
        half.submit_chunk(chunk, nbytes=10)
    if end:
        half.submit_end(at_ns=1)
    return half


def opened(*chunks: str, end: bool = False, retries: int = RETRIES) -> SenderHalf:
    """A life whose opening was put."""
    half = new(*chunks, end=end, retries=retries)
    put(half)
    return half


def build(half: SenderHalf) -> Frame:
    """Take the head and make its frame: what a chunk ``a`` becomes is a body ``a``."""
    half.on_task_begun()
    task = half.in_flight
    assert task is not None
    if task.runs_producer:
        half.on_produced(None if task.item is None else Blob(task.item, 10))
    return frame_of(half)


def frame_of(half: SenderHalf) -> Frame:
    assert half.in_flight is not None
    assert half.in_flight.frame is not None
    return half.in_flight.frame


def put(half: SenderHalf) -> Frame:
    """Build the head and store it."""
    frame = build(half)
    half.on_stored()
    return frame


def give_up(half: SenderHalf, reason: str = "refused") -> SenderMoved:
    return half.on_given_up(error(reason))


def fail_put(half: SenderHalf, reason: str = "no link") -> SenderMoved:
    return half.on_put_failed(error(reason), frame_of(half))


def defer_put(half: SenderHalf) -> SenderMoved:
    return half.on_busy(frame_of(half))


def look(task: SendTask | None) -> str:
    """One task in words: ``chunk a``, ``frame 3`` once it is built, ``end error(boom)``."""
    match task:
        case None:
            return "nothing"
        case SendTask(kind=TaskKind.END, cause=cause):
            return f"end {cause}"
        case SendTask(kind=TaskKind.OPEN):
            return "open"
        case SendTask(frame=None):
            return f"{task.kind} {task.item}"
        case _:
            return f"frame {task.frame.seq}"


def queue(half: SenderHalf) -> list[str]:
    return [look(task) for task in half.queue]


def told(moved: SenderMoved) -> tuple[str, str, list[str]]:
    """Event, state after, effects; a refusal or a no-op is no row."""
    assert not moved.ignored, moved
    return str(moved.event), str(moved.after), [str(effect) for effect in moved.effects]


def refusal(moved: SenderMoved) -> str:
    """Why nothing happened."""
    assert moved.ignored
    assert moved.before is moved.after
    assert moved.effects == ()
    return moved.ignored


# Situations, by name


def cancelled_with_ok_end(*, in_flight: bool = False) -> SenderHalf:
    """Cancelled when nothing was left to drop: the end is still ok."""
    half = opened(end=True)
    if in_flight:
        build(half)
    half.on_cancelled(cancel())
    return half


def cancelled_behind_chunk() -> SenderHalf:
    """Chunk a is at the connector, the end(ok) waits, the runner cancels: nothing is dropped yet."""
    half = opened("a", end=True)
    build(half)
    half.on_cancelled(cancel())
    return half


def cancelled() -> SenderHalf:
    half = opened()
    half.on_cancelled(cancel())
    return half


def failed() -> SenderHalf:
    half = opened()
    half.on_host_failed(error())
    return half


def failed_behind_chunk() -> SenderHalf:
    """Chunk a is at the connector, the end(error) waits."""
    half = opened("a")
    build(half)
    half.on_host_failed(error())
    return half


def failed_with_ok_end_in_flight() -> SenderHalf:
    half = opened(end=True)
    build(half)
    half.on_host_failed(error())
    return half


def cancelled_behind_chunk_without_ok() -> SenderHalf:
    half = opened("a")
    build(half)
    half.on_cancelled(cancel())
    return half


def settled() -> SenderHalf:
    """Failed, and its end is out."""
    half = failed()
    put(half)
    return half


def finalized() -> SenderHalf:
    half = opened(end=True)
    put(half)
    return half


def ending_behind_chunk() -> SenderHalf:
    half = opened("a", end=True)
    build(half)
    return half


def active_behind_chunk() -> SenderHalf:
    half = opened("a")
    build(half)
    return half


LIVE_BEHIND_CHUNK = pytest.mark.parametrize(
    ("situation", "state", "waiting"),
    [
        (active_behind_chunk, "active", []),
        (ending_behind_chunk, "terminal_pending", ["end ok"]),
        (cancelled_behind_chunk, "cancelled_current", ["end ok"]),
        (cancelled_behind_chunk_without_ok, "cancelled_current", ["end cancelled(user left)"]),
        (failed_behind_chunk, "failed", ["end error(boom)"]),
    ],
)
Situation = Callable[[], SenderHalf]


# What the runner offers


def test_a_life_begins_with_its_opening_which_has_no_seq_and_no_body() -> None:
    half = new()
    assert (half.state, queue(half), half.announced) == ("active", ["open"], False)
    frame = build(half)
    assert frame == Frame(EDGE, R7, FrameKind.OPEN, segment=0, seq=-1)
    assert not half.announced
    assert told(half.on_stored()) == ("open_put", "active", [])
    assert (half.announced, half.next_seq, half.queue, half.in_flight) == (True, 0, half.queue, None)
    assert not half.queue


def test_chunks_queue_in_the_order_in_which_they_are_offered() -> None:
    half = new()
    assert told(half.submit_chunk("a", 10)) == ("chunk_submitted", "active", [])
    assert told(half.submit_chunk("b", 5)) == ("chunk_submitted", "active", [])
    assert told(half.submit_chunk("c", 1, segment_end=True)) == ("segment_end_submitted", "active", [])
    assert queue(half) == ["open", "chunk a", "chunk b", "segment_end c"]
    assert half.queued_bytes == 16


def test_the_end_queues_behind_the_chunks_and_carries_the_last_output() -> None:
    half = opened("a")
    assert told(half.submit_end(at_ns=3, item="tail", nbytes=4)) == ("end_submitted", "terminal_pending", [])
    assert queue(half) == ["chunk a", "end ok"]
    assert half.queued_bytes == 14
    put(half)
    frame = put(half)
    assert (frame.kind, frame.seq, frame.body) == (FrameKind.END, 1, Blob("tail", 10))
    assert (frame.cause, frame.cause.at_ns) == (Cause(Outcome.OK), 3)


def test_case_02_an_empty_result_is_still_a_result() -> None:
    """A producer with nothing to flush returns nothing: the end goes out at once, without a body."""
    half = opened()
    half.submit_end(at_ns=1)
    half.on_task_begun()
    assert told(half.on_produced(None)) == ("frame_built", "terminal_pending", [])
    assert (frame_of(half).seq, frame_of(half).body, str(frame_of(half).cause)) == (0, None, "ok")


def test_frames_carry_edge_identity_and_contiguous_seqs() -> None:
    half = opened("a", "b", end=True)
    frames = [put(half), put(half), put(half)]
    assert [(f.edge, f.identity, f.kind, f.seq) for f in frames] == [
        (EDGE, R7, FrameKind.DATA, 0),
        (EDGE, R7, FrameKind.DATA, 1),
        (EDGE, R7, FrameKind.END, 2),
    ]
    assert [f.body and f.body.tag for f in frames] == ["a", "b", None]


# live: a task is begun, built, buffered, put


@LIVE_BEHIND_CHUNK
def test_a_chunk_that_is_put_moves_the_seq_and_nothing_else(
    situation: Situation, state: str, waiting: list[str]
) -> None:
    half = situation()
    assert told(half.on_stored()) == ("data_put", state, [])
    assert (half.next_seq, half.in_flight, queue(half)) == (1, None, waiting)


@LIVE_BEHIND_CHUNK
def test_a_chunk_that_is_buffered_takes_no_seq_and_drops_nothing(
    situation: Situation, state: str, waiting: list[str]
) -> None:
    """The producer keeps it for later: the end stays ok. (It returns nothing only before a frame was built.)"""
    half = unbuilt(situation)
    assert told(half.on_produced(None)) == ("chunk_buffered", state, [])
    assert (half.next_seq, half.in_flight, queue(half), half.dropped) == (0, None, waiting, False)


def unbuilt(situation: Situation) -> SenderHalf:
    """The same situation while the producer still runs."""
    half = opened("a", end=situation in (ending_behind_chunk, cancelled_behind_chunk))
    half.on_task_begun()
    if situation in (cancelled_behind_chunk, cancelled_behind_chunk_without_ok):
        half.on_cancelled(cancel())
    if situation is failed_behind_chunk:
        half.on_host_failed(error())
    return half


@LIVE_BEHIND_CHUNK
def test_a_frame_is_built_in_every_live_state(situation: Situation, state: str, waiting: list[str]) -> None:
    half = unbuilt(situation)
    assert told(half.on_produced(Blob("a", 7))) == ("frame_built", state, [])
    assert (frame_of(half).seq, frame_of(half).body, half.in_flight.nbytes) == (0, Blob("a", 7), 7)
    assert half.in_flight.item is None  # the runner's output is not kept longer than it is needed


@pytest.mark.parametrize(
    ("situation", "state", "cause"),
    [
        (cancelled, "cancelled_current", "cancelled(user left)"),
        (failed, "failed", "error(boom)"),
        (cancelled_with_ok_end, "cancelled_current", "ok"),
        (lambda: opened(end=True), "terminal_pending", "ok"),
        (lambda: opened("a"), "active", None),
    ],
    ids=["cancelled", "failed", "cancelled, end ok", "ending", "active"],
)
def test_a_task_is_begun_in_every_live_state_and_only_an_ok_end_runs_its_producer(
    situation: Situation, state: str, cause: str | None
) -> None:
    half = situation()
    assert half.ready
    assert told(half.on_task_begun()) == ("task_begun", state, [])
    task = half.in_flight
    assert task is not None
    assert not half.ready
    if cause in (None, "ok"):
        assert task.runs_producer
        assert task.frame is None
    else:
        assert not task.runs_producer
        assert (str(task.frame.cause), task.frame.seq, task.frame.body) == (cause, -1, None)
        assert task.frame.key.slot == "end"


def test_an_open_frame_is_put_after_a_cancel_and_after_a_failure_too() -> None:
    for leave in (lambda h: h.on_cancelled(cancel()), lambda h: h.on_host_failed(error())):
        half = new("a")
        build(half)
        leave(half)
        assert half.on_stored().event == "open_put"
        assert len(half.queue) == 1


# retries and busy


@pytest.mark.parametrize(
    ("situation", "state"),
    [
        (active_behind_chunk, "active"),
        (ending_behind_chunk, "terminal_pending"),
        (cancelled_behind_chunk, "cancelled_current"),
    ],
)
def test_a_retry_keeps_its_place_and_its_frame(situation: Situation, state: str) -> None:
    half = situation()
    if state == "active":
        half.submit_chunk("b", 10)
    kept = replace(frame_of(half), body=frame_of(half).body.owned())
    assert told(half.on_put_failed(error("no link"), kept)) == ("put_retried", state, [])
    assert queue(half)[0] == "frame 0"
    assert half.queue[0].attempts == 1
    assert half.queue[0].frame is kept
    half.on_task_begun()
    assert half.in_flight.frame is kept  # its producer does not run again
    assert not half.in_flight.runs_producer
    half.on_stored()
    assert half.next_seq == 1


@pytest.mark.parametrize(
    ("situation", "state"),
    [
        (active_behind_chunk, "active"),
        (ending_behind_chunk, "terminal_pending"),
        (cancelled_behind_chunk, "cancelled_current"),
    ],
)
def test_busy_keeps_the_place_and_counts_no_attempt(situation: Situation, state: str) -> None:
    half = situation()
    for _ in range(20):
        assert told(defer_put(half)) == ("put_deferred", state, [])
        assert (queue(half)[0], half.queue[0].attempts) == ("frame 0", 0)
        half.on_task_begun()
    assert half.on_stored().after == state


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_chunk_is_given_up_when_its_retries_are_used_up(retries: int) -> None:
    half = opened("a", "b", retries=retries)
    build(half)
    for _ in range(retries):
        assert fail_put(half).event == "put_retried"
        half.on_task_begun()
    assert told(fail_put(half, "dead link")) == ("data_given_up", "failed", ["record_failure", "tell_receiver"])
    assert queue(half) == ["end error(dead link)"]


def test_the_attempts_of_one_frame_are_not_charged_to_the_next() -> None:
    half = opened("a", "b")
    build(half)
    for _ in range(RETRIES):
        fail_put(half)
        half.on_task_begun()
    half.on_stored()
    build(half)
    assert half.in_flight.attempts == 0


def test_each_end_has_a_retry_budget_of_its_own() -> None:
    """The end(error) that replaces a given-up end(ok) starts from zero."""
    half = opened(end=True)
    build(half)
    for _ in range(RETRIES):
        fail_put(half)
        half.on_task_begun()
    assert fail_put(half).event == "ok_end_given_up"
    for _ in range(RETRIES):
        build(half)
        assert told(fail_put(half)) == ("put_retried", "failed", [])
    build(half)
    assert told(fail_put(half)) == ("end_given_up", "failed", ["report_marker_lost"])


def test_an_emptied_end_starts_with_a_budget_of_its_own() -> None:
    """Its producer raises before any put, so only a later raise could inherit attempts; none may."""
    half = opened(end=True)
    half.on_task_begun()
    half.on_producer_raised(error())
    assert half.in_flight.attempts == 0


@pytest.mark.parametrize("finish", [fail_put, defer_put])
@pytest.mark.parametrize(
    ("situation", "state", "end"),
    [
        (failed_behind_chunk, "failed", "end error(boom)"),
        (cancelled_behind_chunk_without_ok, "cancelled_current", "end cancelled(user left)"),
    ],
)
def test_data_that_cannot_be_put_now_is_dropped_when_a_failed_end_waits_behind_it(
    situation: Situation, state: str, end: str, finish: Callable[[SenderHalf], SenderMoved]
) -> None:
    """Its seq is burned: it may have been stored."""
    half = situation()
    assert told(finish(half)) == ("put_abandoned", state, [])
    assert (half.in_flight, queue(half), half.next_seq, half.dropped) == (None, [end], 1, True)


@pytest.mark.parametrize("finish", [fail_put, defer_put])
@pytest.mark.parametrize("situation", [failed, cancelled])
def test_a_failed_end_itself_is_retried_and_deferred_not_dropped(
    situation: Situation, finish: Callable[[SenderHalf], SenderMoved]
) -> None:
    half = situation()
    build(half)
    kept = look(half.in_flight)
    assert finish(half).event in ("put_retried", "put_deferred")
    assert queue(half) == [kept]


@pytest.mark.parametrize("finish", [fail_put, defer_put])
def test_an_opening_is_retried_even_if_a_failed_end_waits_behind_it(
    finish: Callable[[SenderHalf], SenderMoved],
) -> None:
    half = new("a")
    build(half)
    half.on_host_failed(error())
    finish(half)
    assert queue(half) == ["open", "end error(boom)"]


@pytest.mark.parametrize("situation", [failed_with_ok_end_in_flight, lambda: cancelled_with_ok_end(in_flight=True)])
def test_an_ok_end_that_decides_is_retried_in_its_place(situation: Situation) -> None:
    half = situation()
    assert fail_put(half).event == "put_retried"
    half.on_task_begun()
    assert defer_put(half).event == "put_deferred"
    assert queue(half) == ["end ok"]
    assert half.queue[0].attempts == 1


# failures


def producer_raises(half: SenderHalf) -> SenderMoved:
    return half.on_producer_raised(error("ValueError: bad", 9))


def is_given_up(half: SenderHalf) -> SenderMoved:
    return half.on_given_up(error("ValueError: bad", 9))


@pytest.mark.parametrize("ended", [False, True])
def test_a_producer_that_raises_fails_the_stream_at_once(ended: bool) -> None:  # noqa: FBT001
    half = opened("a", "b", end=ended)
    half.on_task_begun()
    assert told(producer_raises(half)) == ("producer_raised", "failed", ["record_failure", "tell_receiver"])
    assert (queue(half), half.in_flight) == (["end error(ValueError: bad)"], None)
    frame = put(half)
    assert (frame.seq, frame.body, frame.cause, frame.cause.at_ns) == (-1, None, error("ValueError: bad"), 9)
    assert half.next_seq == 0  # no frame was built: no seq is burned


@pytest.mark.parametrize("ended", [False, True])
def test_a_given_up_chunk_fails_the_stream_and_burns_its_seq(ended: bool) -> None:  # noqa: FBT001
    half = opened("a", "b", end=ended)
    build(half)
    assert told(give_up(half)) == ("data_given_up", "failed", ["record_failure", "tell_receiver"])
    assert (queue(half), half.in_flight, half.next_seq) == (["end error(refused)"], None, 1)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("fail", "event", "effects"),
    [
        (lambda half: half.on_upstream_failed(error("oom")), "upstream_failed", ["record_failure"]),
        (lambda half: half.on_host_failed(error("oom")), "host_failed", ["record_failure", "tell_receiver"]),
    ],
    ids=["upstream", "host"],
)
def test_a_failure_from_outside_drops_the_queue_and_ends_with_its_reason(
    ended: bool,  # noqa: FBT001
    fail: Callable[[SenderHalf], SenderMoved],
    event: str,
    effects: list[str],
) -> None:
    """Upstream is this stage's own receiver, which knows already; the host's failure is passed on to it."""
    half = opened("a", "b", end=ended)
    build(half)
    assert told(fail(half)) == (event, "failed", effects)
    assert queue(half) == ["end error(oom)"]
    assert (look(half.in_flight), half.queued_bytes) == ("frame 0", 0)
    half.on_stored()
    assert str(put(half).cause) == "error(oom)"
    assert half.next_seq == 1


def test_an_end_in_flight_decides_when_another_cause_comes() -> None:
    """Nothing is queued behind it: if it is stored, the stream was complete."""
    half = opened(end=True)
    build(half)
    assert told(half.on_upstream_failed(error("oom"))) == ("upstream_failed", "failed", ["record_failure"])
    assert (queue(half), look(half.in_flight)) == ([], "end ok")
    assert told(half.on_stored()) == ("end_put", "failed", [])
    assert (half.in_flight, queue(half), half.marker_settled) == (None, [], True)
    assert told(half.on_released(cancel())) == ("released_after_end", "finalized", ["release"])


@pytest.mark.parametrize(
    "fail", [lambda half: half.on_upstream_failed(error("oom")), lambda half: half.on_host_failed(error("oom"))]
)
def test_an_ok_end_whose_put_reported_failure_decides_between_its_attempts_too(
    fail: Callable[[SenderHalf], SenderMoved],
) -> None:
    """It may have been stored: a second end goes out only after the first was given up (property 1)."""
    half = opened(end=True)
    build(half)
    fail_put(half)
    fail(half)
    assert (half.state, queue(half)) == ("failed", ["end ok"])
    build(half)
    give_up(half)
    assert queue(half) == ["end error(oom)"]


@pytest.mark.parametrize("back", [None, defer_put])
def test_an_ok_end_that_was_never_tried_or_only_found_busy_becomes_an_end_error(
    back: Callable[[SenderHalf], SenderMoved] | None,
) -> None:
    """It cannot have been stored."""
    half = opened(end=True)
    if back is not None:
        build(half)
        back(half)
    half.on_upstream_failed(error("oom"))
    assert (half.state, queue(half), half.in_flight) == ("failed", ["end error(oom)"], None)


def test_an_end_that_its_producer_still_makes_decides_too() -> None:
    half = opened(end=True)
    half.on_task_begun()
    half.on_host_failed(error("oom"))
    assert (queue(half), look(half.in_flight)) == ([], "end ok")
    half.on_produced(Blob("tail"))
    assert str(frame_of(half).cause) == "ok"


def test_the_ends_own_producer_raising_sends_it_empty_as_error() -> None:
    half = opened("a")
    half.submit_end(at_ns=1, item="tail", nbytes=8)
    put(half)
    half.on_task_begun()
    assert told(producer_raises(half)) == ("end_producer_raised", "failed", ["record_failure", "tell_receiver"])
    frame = frame_of(half)
    assert (str(frame.cause), frame.cause.at_ns, frame.seq, frame.body) == ("error(ValueError: bad)", 9, -1, None)
    assert queue(half) == []
    assert half.on_stored().after == "failed"
    assert half.marker_settled


def test_an_end_that_raises_after_another_failure_goes_out_empty_with_the_first_reason() -> None:
    half = opened(end=True)
    half.on_task_begun()
    half.on_host_failed(error("oom", 5))
    assert told(producer_raises(half)) == ("end_producer_raised", "failed", [])
    assert (str(frame_of(half).cause), frame_of(half).cause.at_ns, queue(half)) == ("error(oom)", 5, [])


def test_an_end_that_raises_after_a_cancel_goes_out_empty_as_cancelled() -> None:
    half = opened(end=True)
    half.on_task_begun()
    half.on_cancelled(cancel(at_ns=7))
    assert told(producer_raises(half)) == ("end_producer_raised", "cancelled_current", [])
    assert (str(frame_of(half).cause), frame_of(half).cause.at_ns) == ("cancelled(user left)", 7)
    assert (frame_of(half).seq, frame_of(half).body) == (-1, None)


def test_the_chunk_in_flight_when_it_failed_adds_nothing_by_raising() -> None:
    half = opened("a")
    half.on_task_begun()
    half.on_upstream_failed(error("oom"))
    assert told(producer_raises(half)) == ("producer_raised", "failed", [])
    assert (half.in_flight, queue(half), str(half.cause)) == (None, ["end error(oom)"], "error(oom)")


def test_the_chunk_in_flight_when_it_failed_adds_nothing_by_being_given_up() -> None:
    half = failed_behind_chunk()
    assert told(is_given_up(half)) == ("data_given_up", "failed", [])
    assert (half.in_flight, queue(half), half.next_seq) == (None, ["end error(boom)"], 1)


@pytest.mark.parametrize(("event", "make"), [("producer_raised", producer_raises), ("data_given_up", is_given_up)])
def test_a_chunk_lost_after_the_cancel_makes_the_ok_end_a_cancelled_one(
    event: str, make: Callable[[SenderHalf], SenderMoved]
) -> None:
    """An ok end after a dropped chunk would be a lie."""
    half = opened("a")
    half.submit_end(at_ns=1, item="tail", nbytes=8)
    half.on_task_begun() if event == "producer_raised" else build(half)
    half.on_cancelled(cancel())
    assert queue(half) == ["end ok"]
    assert told(make(half)) == (event, "cancelled_current", [])
    assert (half.in_flight, queue(half), half.queued_bytes) == (None, ["end cancelled(user left)"], 0)
    frame = put(half)
    assert (frame.seq, frame.body, frame.cause.at_ns) == (-1, None, 7)


def test_a_chunk_lost_after_the_cancel_leaves_a_cancelled_end_as_it_is() -> None:
    half = cancelled_behind_chunk_without_ok()
    assert told(is_given_up(half)) == ("data_given_up", "cancelled_current", [])
    assert (queue(half), half.next_seq) == (["end cancelled(user left)"], 1)
    half = opened("a")
    half.on_task_begun()
    half.on_cancelled(cancel())
    assert told(producer_raises(half)) == ("producer_raised", "cancelled_current", [])
    assert (queue(half), half.next_seq) == (["end cancelled(user left)"], 0)


# the end is put or given up


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("cancelled_too", [False, True])
def test_a_committed_end_releases_every_namespace(released: bool, cancelled_too: bool) -> None:  # noqa: FBT001
    half = opened(end=True)
    if released:
        half.on_released(cancel())
    if cancelled_too:
        half.on_cancelled(cancel())
    build(half)
    event = "end_put_after_release" if released else "end_put"
    assert told(half.on_stored()) == (event, "finalized", ["release"])
    assert (half.in_flight, queue(half), half.is_final) == (None, [], True)


def test_a_cancelled_end_that_is_put_releases_too() -> None:
    half = cancelled()
    build(half)
    assert told(half.on_stored()) == ("end_put", "finalized", ["release"])


def test_an_ok_end_that_is_given_up_becomes_an_end_error() -> None:
    half = opened("a", end=True)
    put(half)
    build(half)
    assert told(give_up(half)) == ("ok_end_given_up", "failed", ["record_failure", "tell_receiver"])
    assert (queue(half), half.in_flight, half.next_seq) == (["end error(refused)"], None, 2)  # 1 is burned
    assert put(half).key.slot == "end"


def test_an_ok_end_that_is_given_up_after_a_failure_becomes_an_end_error_with_the_first_reason() -> None:
    """Not marker_lost: there is still something to send."""
    half = failed_with_ok_end_in_flight()
    assert told(give_up(half)) == ("ok_end_given_up", "failed", [])
    assert (queue(half), half.marker_settled) == (["end error(boom)"], False)
    assert told(half.on_cancelled(cancel()))[1] == "failed"  # a marker is owed again: noted
    build(half)
    assert told(half.on_stored()) == ("end_put_after_release", "finalized", ["release"])


LOST = ["report_marker_lost", "release"]


def test_a_cancelled_life_whose_ok_end_is_given_up_reports_the_marker_lost() -> None:
    half = cancelled_with_ok_end(in_flight=True)
    assert told(give_up(half)) == ("ok_end_given_up", "finalized", LOST)


def test_a_cancelled_life_whose_end_is_given_up_reports_the_marker_lost() -> None:
    half = cancelled()
    build(half)
    assert told(give_up(half)) == ("end_given_up", "finalized", LOST)


def test_a_cancelled_life_that_was_released_before_reports_it_too() -> None:
    half = opened("a", end=True)
    build(half)
    half.submit_end(at_ns=2)
    half.on_released(cancel("let go"))
    half.on_cancelled(cancel())
    give_up(half)
    build(half)
    assert told(give_up(half)) == ("end_given_up_after_release", "finalized", LOST)


def test_a_failed_life_keeps_its_state_after_its_end_until_it_is_let_go() -> None:
    half = failed()
    build(half)
    assert told(half.on_stored()) == ("end_put", "failed", [])
    assert half.marker_settled


def test_a_failed_life_that_was_let_go_is_released_with_its_end() -> None:
    half = failed()
    half.on_released(cancel())
    build(half)
    assert told(half.on_stored()) == ("end_put_after_release", "finalized", ["release"])


def test_a_failed_life_whose_end_is_given_up_reports_the_marker_lost_and_keeps_its_state() -> None:
    half = failed()
    build(half)
    assert told(give_up(half)) == ("end_given_up", "failed", ["report_marker_lost"])
    assert half.marker_settled
    assert told(half.on_closed(cancel())) == ("released_after_end", "finalized", ["release"])


def test_a_failed_life_that_was_let_go_ends_when_its_end_is_given_up() -> None:
    half = failed()
    half.on_released(cancel())
    build(half)
    assert told(give_up(half)) == ("end_given_up_after_release", "finalized", LOST)


# cancel, release, close, stop


def cancels(half: SenderHalf) -> SenderMoved:
    return half.on_cancelled(cancel("gone", 9))


def releases(half: SenderHalf) -> SenderMoved:
    return half.on_released(cancel("gone", 9))


def closes(half: SenderHalf) -> SenderMoved:
    return half.on_closed(cancel("gone", 9))


def stops(half: SenderHalf) -> SenderMoved:
    return half.on_receiver_stopped(error("gone", 9))


def loses_peer(half: SenderHalf) -> SenderMoved:
    return half.on_peer_lost(error("peer_lost", 9))


def upstream_fails(half: SenderHalf) -> SenderMoved:
    return half.on_upstream_failed(error("gone", 9))


def host_fails(half: SenderHalf) -> SenderMoved:
    return half.on_host_failed(error("gone", 9))


Happening = Callable[[SenderHalf], SenderMoved]
LEAVE = pytest.mark.parametrize(
    ("leave", "event"),
    [(cancels, "cancelled"), (releases, "released"), (closes, "closed")],
    ids=["cancel", "release", "close"],
)


@pytest.mark.parametrize(
    ("leave", "event", "effects"),
    [
        (cancels, "cancelled", []),
        (releases, "released", []),
        (closes, "closed", []),
        (stops, "receiver_stopped", ["tell_receiver"]),
    ],
)
def test_leaving_an_active_stream_drops_its_chunks_and_owes_an_end(
    leave: Happening, event: str, effects: list[str]
) -> None:
    """A stream that nobody ended is not complete; a stop is also passed on, so that nobody computes for nobody."""
    half = opened("a", "b", "c")
    build(half)
    assert told(leave(half)) == (event, "cancelled_current", effects)
    assert (queue(half), look(half.in_flight)) == (["end cancelled(gone)"], "frame 0")
    assert (half.queued_bytes, half.dropped) == (0, True)
    half.on_stored()
    frame = put(half)
    assert (frame.cause, frame.cause.at_ns, frame.seq, frame.body) == (cancel("gone"), 9, -1, None)
    assert half.is_final


def test_a_life_that_is_cancelled_while_it_waits_for_its_predecessor_still_opens_and_ends() -> None:
    half = new("a", "b")
    cancels(half)
    assert queue(half) == ["open", "end cancelled(gone)"]
    assert [put(half).kind, put(half).kind] == [FrameKind.OPEN, FrameKind.END]
    assert half.is_final


@pytest.mark.parametrize(("leave", "effects"), [(cancels, []), (stops, ["tell_receiver"])])
def test_a_cancel_that_drops_nothing_leaves_the_end_ok(leave: Happening, effects: list[str]) -> None:
    half = ending_behind_chunk()
    assert told(leave(half))[1:] == ("cancelled_current", effects)
    assert (look(half.in_flight), queue(half), half.dropped) == ("frame 0", ["end ok"], False)
    half.on_stored()
    frame = put(half)
    assert (str(frame.cause), frame.seq) == ("ok", 1)
    assert half.is_final


@pytest.mark.parametrize(("leave", "effects"), [(cancels, []), (stops, ["tell_receiver"])])
def test_a_cancel_that_drops_a_chunk_makes_the_end_a_cancelled_one(leave: Happening, effects: list[str]) -> None:
    half = opened("a", "b")
    half.submit_end(at_ns=1, item="tail", nbytes=8)
    build(half)
    assert told(leave(half))[1:] == ("cancelled_current", effects)
    assert (look(half.in_flight), queue(half)) == ("frame 0", ["end cancelled(gone)"])
    assert (half.dropped, half.queued_bytes) == (True, 0)


@pytest.mark.parametrize("back", [fail_put, defer_put])
def test_a_chunk_that_waits_for_its_retry_is_dropped_by_a_cancel_like_any_other(
    back: Callable[[SenderHalf], SenderMoved],
) -> None:
    half = ending_behind_chunk()
    back(half)
    cancels(half)
    assert (queue(half), half.queued_bytes, half.dropped) == (["end cancelled(gone)"], 0, True)


@pytest.mark.parametrize("leave", [cancels, stops])
def test_a_cancel_meets_an_ok_end_in_flight_and_leaves_it_ok(leave: Happening) -> None:
    half = opened(end=True)
    build(half)
    leave(half)
    assert (queue(half), look(half.in_flight)) == ([], "end ok")
    assert told(half.on_stored()) == ("end_put", "finalized", ["release"])


@pytest.mark.parametrize(("leave", "event"), [(releases, "released"), (closes, "closed")])
def test_letting_go_of_an_ended_stream_is_noted_and_everything_still_flushes(leave: Happening, event: str) -> None:
    half = opened("a", "b", end=True)
    assert told(leave(half)) == (event, "terminal_pending", [])
    assert queue(half) == ["chunk a", "chunk b", "end ok"]
    assert told(leave(half))[1] == "terminal_pending"  # twice is once
    assert [put(half).seq, put(half).seq, str(put(half).cause)] == [0, 1, "ok"]
    assert half.is_final


def test_a_release_noted_before_the_failure_is_remembered_after_it() -> None:
    half = opened("a", end=True)
    releases(half)
    build(half)
    give_up(half)
    assert (half.state, queue(half)) == ("failed", ["end error(refused)"])
    build(half)
    assert told(half.on_stored()) == ("end_put_after_release", "finalized", ["release"])


@LEAVE
def test_a_failed_life_notes_that_it_was_let_go_while_its_end_is_owed(leave: Happening, event: str) -> None:
    half = failed()
    assert told(leave(half)) == (event, "failed", [])
    assert (queue(half), half.release_noted) == (["end error(boom)"], True)
    build(half)
    assert told(leave(half)) == (event, "failed", [])  # in flight: owed too
    assert half.on_stored().after == "finalized"


@LEAVE
def test_a_failed_life_whose_end_is_out_is_released_at_once(leave: Happening, event: str) -> None:
    half = settled()
    assert told(leave(half)) == ("released_after_end", "finalized", ["release"])


@pytest.mark.parametrize(
    ("situation", "effects"),
    [
        (lambda: opened("a", "b"), ["record_failure", "tell_receiver", "release", "reclaim_unread"]),
        (ending_behind_chunk, ["record_failure", "tell_receiver", "release", "reclaim_unread"]),
        (cancelled_behind_chunk, ["release", "reclaim_unread"]),
        (failed_behind_chunk, ["release", "reclaim_unread"]),
        (settled, ["release", "reclaim_unread"]),
    ],
    ids=["active", "ending", "cancelled", "failed", "settled"],
)
def test_a_lost_peer_ends_any_live_half_without_a_marker(situation: Situation, effects: list[str]) -> None:
    half = situation()
    first = half.cause
    assert told(loses_peer(half)) == ("peer_lost", "finalized", effects)
    assert (queue(half), half.in_flight, half.queued_bytes) == ([], None, 0)
    assert half.cause == (first or error("peer_lost"))


# ignores


@pytest.mark.parametrize("situation", [cancelled, cancelled_with_ok_end, cancelled_behind_chunk])
@pytest.mark.parametrize("happening", [cancels, releases, closes, stops, upstream_fails, host_fails])
def test_a_cancelled_life_owes_all_of_it_already(situation: Situation, happening: Happening) -> None:
    half = situation()
    before = half.copy()
    assert refusal(happening(half))
    assert half == before


@pytest.mark.parametrize("situation", [failed, failed_behind_chunk, failed_with_ok_end_in_flight, settled])
@pytest.mark.parametrize("happening", [stops, upstream_fails, host_fails])
def test_a_failed_life_keeps_its_first_cause(situation: Situation, happening: Happening) -> None:
    half = situation()
    before = half.copy()
    assert refusal(happening(half)) == "the first cause is kept"
    assert half == before
    assert (str(half.cause), half.cause.at_ns) == ("error(boom)", 5)


def late_frame() -> Frame:
    return Frame(EDGE, R7, FrameKind.DATA, seq=0, body=Blob("late"))


LATE: dict[str, Happening] = {
    "chunk": lambda half: half.submit_chunk("late"),
    "segment end": lambda half: half.submit_chunk("late", segment_end=True),
    "end": lambda half: half.submit_end(at_ns=9),
    "begun": lambda half: half.on_task_begun(),
    "produced": lambda half: half.on_produced(Blob("late")),
    "buffered": lambda half: half.on_produced(None),
    "producer raised": producer_raises,
    "stored": lambda half: half.on_stored(),
    "busy": lambda half: half.on_busy(late_frame()),
    "put failed": lambda half: half.on_put_failed(error(), late_frame()),
    "given up": is_given_up,
    "cancelled": cancels,
    "released": releases,
    "closed": closes,
    "host failed": host_fails,
    "upstream failed": upstream_fails,
    "receiver stopped": stops,
    "peer lost": loses_peer,
}


def lost_in_the_middle() -> SenderHalf:
    """A producer or a put was under way when the peer was lost."""
    half = opened("a", "b")
    build(half)
    loses_peer(half)
    return half


def let_go_after_failure() -> SenderHalf:
    half = settled()
    releases(half)
    return half


@pytest.mark.parametrize("happening", LATE.values(), ids=LATE)
@pytest.mark.parametrize("situation", [finalized, lost_in_the_middle, let_go_after_failure])
def test_case_40_whatever_comes_late_changes_nothing(situation: Situation, happening: Happening) -> None:
    half = situation()
    before, cause = half.copy(), half.cause
    assert refusal(happening(half)) == "a late completion or notice changes nothing"
    assert half == before
    assert half.cause is cause
    assert (half.state, queue(half), half.in_flight, half.queued_bytes) == ("finalized", [], None, 0)


# submits


SUBMITS: dict[str, Happening] = {
    "chunk": lambda half: half.submit_chunk("late", 10),
    "segment end": lambda half: half.submit_chunk("late", 10, segment_end=True),
}


@pytest.mark.parametrize("submit", SUBMITS.values(), ids=SUBMITS)
@pytest.mark.parametrize("situation", [lambda: opened(end=True), ending_behind_chunk])
def test_a_submit_after_ones_own_end_raises_and_changes_nothing(submit: Happening, situation: Situation) -> None:
    half = situation()
    before, nbytes = half.copy(), half.queued_bytes
    with pytest.raises(LocalProtocolError) as refused:
        submit(half)
    assert (refused.value.state, refused.value.stream) == ("terminal_pending", "r7#2 thinker->talker")
    assert "segment_end_submitted" not in refused.value.accepted
    assert (half == before, half.queued_bytes) == (True, nbytes)
    assert half.on_cancelled(cancel()).after == "cancelled_current"  # and it goes on working


@pytest.mark.parametrize(
    "submit", [*SUBMITS.values(), lambda half: half.submit_end(at_ns=9, item="tail", nbytes=3)], ids=[*SUBMITS, "end"]
)
@pytest.mark.parametrize("situation", [cancelled, cancelled_with_ok_end, failed, settled])
def test_a_submit_after_a_cancel_or_a_failure_is_refused_with_a_reason(situation: Situation, submit: Happening) -> None:
    """A value, not an exception: the runner cannot know what has just happened."""
    half = situation()
    before, nbytes = half.copy(), half.queued_bytes
    assert "refused with a reason" in refusal(submit(half))
    assert (half == before, half.queued_bytes) == (True, nbytes)


def test_a_repeated_end_is_a_no_op() -> None:
    half = opened("a", end=True)
    assert refusal(half.submit_end(at_ns=9, item="other tail", nbytes=99)) == "a repeated end is a no-op"
    assert (queue(half), half.queue[-1].item, half.queue[-1].cause.at_ns) == (["chunk a", "end ok"], None, 1)
    assert half.queued_bytes == 10


# the first cause


def test_the_first_cause_is_kept_with_its_time_all_the_way_to_the_frame() -> None:
    half = opened("a")
    build(half)
    half.on_upstream_failed(error("oom", at_ns=11))
    half.on_host_failed(error("second", at_ns=12))
    half.on_given_up(error("third", at_ns=13))
    half.on_cancelled(cancel("fourth", at_ns=14))
    frame = put(half)
    assert (frame.cause, frame.cause.at_ns) == (error("oom"), 11)
    assert half.cause.at_ns == 11


def test_a_stop_with_an_error_ends_as_cancelled_with_its_reason_and_time() -> None:
    half = opened()
    half.on_receiver_stopped(error("deadline_passed", at_ns=21))
    assert half.cause.outcome is Outcome.ERROR  # what this stage's receiver is told
    frame = put(half)
    assert (frame.cause, frame.cause.at_ns) == (cancel("deadline_passed"), 21)


def test_a_release_that_was_only_noted_is_not_the_cause_of_a_later_failure() -> None:
    half = opened(end=True)
    half.on_released(cancel("let go"))
    half.on_upstream_failed(error("oom"))
    assert str(half.cause) == "error(oom)"
    assert queue(half) == ["end error(oom)"]


def test_a_happening_that_is_ignored_leaves_no_cause_behind() -> None:
    half = finalized()
    cancels(half)
    assert half.cause is None


# segments


def test_a_segment_end_advances_the_segment_after_it_was_put_and_the_seq_goes_on() -> None:
    half = opened("a")
    half.submit_chunk("b", segment_end=True)
    half.submit_chunk("c")
    first = put(half)
    last = build(half)
    assert (half.segment, half.next_seq) == (0, 1)
    assert told(half.on_stored()) == ("segment_end_put", "active", ["reset_segment"])
    assert (half.segment, half.next_seq) == (1, 2)
    following = put(half)
    assert [(f.segment, f.seq, f.segment_end) for f in (first, last, following)] == [
        (0, 0, False),
        (0, 1, True),
        (1, 2, False),
    ]


def test_a_segment_end_always_makes_a_frame_even_without_payload() -> None:
    half = opened()
    half.submit_chunk(None, segment_end=True)
    half.on_task_begun()
    assert told(half.on_produced(None)) == ("frame_built", "active", [])
    frame = frame_of(half)
    assert (frame.kind, frame.seq, frame.segment_end, frame.body) == (FrameKind.DATA, 0, True, None)


def test_a_retried_segment_end_resets_once_when_it_is_put() -> None:
    half = opened()
    half.submit_chunk("a", segment_end=True)
    build(half)
    assert told(fail_put(half)) == ("put_retried", "active", [])
    half.on_task_begun()
    assert defer_put(half).effects == ()
    assert half.segment == 0
    half.on_task_begun()
    assert told(half.on_stored())[2] == ["reset_segment"]
    assert half.segment == 1


@pytest.mark.parametrize(
    ("leave", "state"),
    [(None, "terminal_pending"), (cancels, "cancelled_current"), (host_fails, "failed")],
    ids=["ending", "cancelled", "failed"],
)
def test_a_segment_end_is_put_in_every_live_state(leave: Happening | None, state: str) -> None:
    half = opened()
    half.submit_chunk("a", segment_end=True)
    half.submit_end(at_ns=1)
    build(half)
    if leave is not None:
        leave(half)
    assert told(half.on_stored()) == ("segment_end_put", state, ["reset_segment"])
    assert (half.segment, half.next_seq) == (1, 1)


def test_a_dropped_segment_end_neither_resets_nor_advances() -> None:
    half = opened()
    half.submit_chunk("a", segment_end=True)
    build(half)
    half.on_cancelled(cancel())
    assert told(fail_put(half)) == ("put_abandoned", "cancelled_current", [])
    assert (half.segment, half.next_seq, half.dropped) == (0, 1, True)


# accounts and values


def test_queued_bytes_follow_the_queue_wherever_a_task_goes() -> None:
    half = new("a", "b")  # 10 bytes each
    assert half.queued_bytes == 20
    put(half)
    half.on_task_begun()
    assert half.queued_bytes == 10
    half.on_produced(Blob("a", 4))  # what waits from here on is the frame
    half.on_busy(frame_of(half))
    assert half.queued_bytes == 14
    half.on_task_begun()
    half.on_stored()
    assert half.queued_bytes == 10
    half.submit_end(at_ns=1, item="tail", nbytes=7)
    assert half.queued_bytes == 17
    half.on_upstream_failed(error())
    assert half.queued_bytes == 0


def test_a_copy_is_equal_hashes_alike_and_is_independent() -> None:
    half = ending_behind_chunk()
    half.submit_end(at_ns=1)
    twin = half.copy()
    assert twin == half
    assert hash(twin) == hash(half)
    twin.on_stored()
    twin.on_cancelled(cancel())
    assert twin != half
    assert (half.state, queue(half), look(half.in_flight), half.cause) == (
        "terminal_pending",
        ["end ok"],
        "frame 0",
        None,
    )
    half.on_stored()
    put(half)
    assert half.is_final
    assert (twin.state, queue(twin)) == ("cancelled_current", ["end ok"])


def test_payloads_and_times_are_no_part_of_the_value() -> None:
    """An explorer may not tell two halves apart that behave alike."""
    one, other = opened("a"), opened("b")
    one.on_cancelled(cancel(at_ns=1))
    other.on_cancelled(cancel(at_ns=2))
    assert one == other
    assert len({one, other}) == 1
    assert one != opened("a")


DIFFERENT: dict[str, Happening] = {
    "state": cancels,
    "queue": lambda half: half.submit_chunk("b"),
    "in flight": lambda half: half.on_task_begun(),
}


@pytest.mark.parametrize("happening", DIFFERENT.values(), ids=DIFFERENT)
def test_whatever_decides_the_behaviour_is_part_of_the_value(happening: Happening) -> None:
    half = opened("a")
    before = half.copy()
    happening(half)
    assert half != before


def test_attempts_are_part_of_the_value() -> None:
    once, never = active_behind_chunk(), active_behind_chunk()
    fail_put(once)
    defer_put(never)
    assert queue(once) == queue(never)
    assert once != never


def test_a_sender_is_not_equal_to_a_receiver() -> None:
    assert SenderHalf(sender_table(), EDGE, R7) != ReceiverHalf(receiver_table(), EDGE, R7)


# misuse: an illegal happening is refused like any other, with the same message, and changes nothing


def idle() -> SenderHalf:
    return opened()


MISUSE: dict[str, tuple[Situation, Happening]] = {
    "begun, nothing queued": (idle, lambda half: half.on_task_begun()),
    "begun, one in flight": (lambda: new_begun("a"), lambda half: half.on_task_begun()),
    "produced, nothing in flight": (idle, lambda half: half.on_produced(Blob("x"))),
    "buffered, nothing in flight": (idle, lambda half: half.on_produced(None)),
    "raised, nothing in flight": (idle, producer_raises),
    "stored, nothing in flight": (idle, lambda half: half.on_stored()),
    "busy, nothing in flight": (idle, lambda half: half.on_busy(late_frame())),
    "put failed, nothing in flight": (idle, lambda half: half.on_put_failed(error(), late_frame())),
    "given up, nothing in flight": (idle, is_given_up),
    "stored before it was built": (lambda: opened_begun("a"), lambda half: half.on_stored()),
}


def new_begun(*chunks: str) -> SenderHalf:
    half = new(*chunks)
    half.on_task_begun()
    return half


def opened_begun(*chunks: str) -> SenderHalf:
    half = opened(*chunks)
    half.on_task_begun()
    return half


@pytest.mark.parametrize(("situation", "happening"), MISUSE.values(), ids=MISUSE)
def test_a_completion_without_its_task_is_a_local_protocol_error_and_changes_nothing(
    situation: Situation, happening: Happening
) -> None:
    half = situation()
    before = half.copy()
    with pytest.raises(LocalProtocolError):
        happening(half)
    assert half == before


# A walk over everything that a runtime may do to one half


class SenderLife:
    """One half, a runtime that does anything legal in any order, a connector that may lie, and a receiver.

    The worker holds at most one task. A put that reports failure, and one that is refused, may have been stored.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.half = SenderHalf(sender_table(), EDGE, R7, retries=dice.randrange(3))
        self.peer = ReceiverHalf(receiver_table(), EDGE, R7)
        self.worker: SendTask | None = None
        self.frame: Frame | None = None  # what the worker made of it
        self.accepted: list[str] = []
        self.produced: list[str] = []
        self.buffered: list[str] = []
        self.delivered: list[str] = []
        self.end_reported = False  # the sender knows that its end is stored
        self.end_in_store: Frame | None = None
        self.end_given_up = False
        self.first: Cause | None = None
        self.effects: Counter[str] = Counter()
        self.trace: list[tuple[str, str]] = []

    def did(self, moved: SenderMoved) -> SenderMoved:
        """What holds of every single transition."""
        half = self.half
        self.trace.append((str(moved.before), str(moved.event)))
        self.effects.update(str(effect) for effect in moved.effects)
        self.first = self.first or half.cause
        assert half.cause is self.first
        if moved.ignored:
            assert moved.before is moved.after
            assert moved.effects == ()
            return moved
        assert ("reset_segment" in moved.effects) == (moved.event == "segment_end_put")
        assert ("release" in moved.effects) == half.is_final
        assert ("record_failure" in moved.effects) == (
            (moved.after == "failed" and moved.before != "failed")
            or (moved.event == "peer_lost" and moved.before in ("active", "terminal_pending"))
        )
        self.end_given_up = self.end_given_up or moved.event == "ok_end_given_up" or moved.after == "failed"
        return moved

    def live(self, steps: int) -> None:
        """Rare are the faults that end a life; the rest is work."""
        for _ in range(steps):
            act = self.dice.choices([self.work, self.submit, self.end, self.leave], [12, 4, 1, 1])[0]
            act()
            self.check_queue()
            if self.half.is_final and self.worker is None and self.dice.random() < 0.5:
                break
        self.check_that_it_can_end()

    # the runner, the stage, the peer

    def submit(self) -> None:
        name, segment_end = f"c{len(self.accepted)}", self.dice.random() < 0.3
        if self.half.state == "terminal_pending":
            before = self.half.key()
            with pytest.raises(LocalProtocolError):
                self.half.submit_chunk(name, 5, segment_end=segment_end)
            assert self.half.key() == before
            return
        moved = self.did(self.half.submit_chunk(name, self.dice.randrange(9), segment_end=segment_end))
        assert bool(moved.ignored) == (moved.before != "active")
        if not moved.ignored:
            self.accepted.append(name)

    def end(self) -> None:
        self.did(self.half.submit_end(1, "tail", self.dice.randrange(9)))

    def leave(self) -> None:
        happenings = [cancels, cancels, releases, closes, host_fails, upstream_fails, stops, loses_peer]
        self.did(self.dice.choice(happenings)(self.half))

    # whoever has the task

    def work(self) -> None:
        if self.frame is not None:
            how = self.dice.choice(["stored", "stored", "stored", "busy", "retry", "retry", "refused"])
            self.put(how, lie=self.dice.random() < 0.5)
        elif self.worker is not None:
            self.produce(self.dice.choice(["payload", "payload", "payload", "nothing", "raise"]))
        elif self.half.ready:
            self.begin()

    def begin(self) -> None:
        assert self.did(self.half.on_task_begun()).event == "task_begun"
        self.worker = self.half.in_flight
        self.frame = self.worker.frame
        if self.worker.runs_producer:
            assert self.worker.item not in self.produced, "a producer ran again"
            self.produced.append(self.worker.item)

    def produce(self, how: str) -> None:
        buffers = how == "nothing" and self.worker.kind is TaskKind.CHUNK
        if how == "raise":
            self.did(producer_raises(self.half))
        else:
            moved = self.did(self.half.on_produced(None if buffers else Blob(self.worker.item, self.dice.randrange(9))))
            if buffers and not moved.ignored:
                assert moved.event == "chunk_buffered"
                self.buffered.append(self.worker.item)
        self.worker = self.half.in_flight
        self.frame = self.worker.frame if self.worker else None
        if self.frame is not None and self.frame.seq >= 0:
            assert self.frame.seq == self.half.next_seq

    def put(self, how: str, *, lie: bool) -> None:
        frame, half = self.frame, self.half
        self.worker = self.frame = None
        if how == "stored" or (lie and how != "busy"):
            self.arrive(frame)
        match how:
            case "stored":
                self.end_reported = frame.kind is FrameKind.END
                self.did(half.on_stored())
            case "busy":
                self.did(half.on_busy(frame))
            case "retry":
                self.did(half.on_put_failed(error("no link"), frame))
            case _:
                self.did(half.on_given_up(error("refused")))
        assert half.in_flight is None

    # the receiver

    def arrive(self, frame: Frame) -> None:
        """The frame is in the store, whatever the sender is told."""
        assert not self.end_reported, "a frame after a stored end"
        if self.end_in_store is not None and not self.end_given_up:
            assert frame == self.end_in_store, "a second end, and the first was not given up"
        if frame.kind is FrameKind.END:
            self.end_in_store = frame
            assert frame.cause.outcome is Outcome.OK or frame.cause.reason == self.half.cause.reason
        moved = self.peer.on_frame(frame, frame.body)
        assert moved.event != "frame_ahead", "a frame is missing"
        if moved.ignored:
            return
        if moved.event == "data_arrived":
            self.delivered.append(frame.body.tag)
        if moved.event == "ok_end_arrived":
            sent = [name for name in self.accepted if name not in self.buffered]
            assert self.delivered == sent, "an end(ok) that is not complete"

    # what always holds

    def check_queue(self) -> None:
        half = self.half
        assert half.queued_bytes == sum(task.nbytes for task in half.queue)
        tasks = [*([half.in_flight] if half.in_flight else []), *half.queue]
        ends = [at for at, task in enumerate(tasks) if task.kind is TaskKind.END]
        owed = half.state in ("terminal_pending", "cancelled_current") or (
            half.state == "failed" and not half.marker_settled
        )
        assert ends == ([len(tasks) - 1] if owed else [])
        assert not (half.dropped and any(task.is_ok_end for task in tasks))
        waiting = [task.item for task in tasks if task.item is not None and task.kind is not TaskKind.END]
        assert waiting == sorted(waiting, key=lambda name: int(name[1:]))
        assert half.copy() == half
        assert hash(half.copy()) == hash(half)

    def check_that_it_can_end(self) -> None:
        """Leads to: from any state, with no more faults and a release, the life is finalized."""
        twin = self.half.copy()
        drain(twin)
        if not twin.is_final:
            assert twin.state in ("active", "failed")  # the others owe nothing but their end
            releases(twin)
            drain(twin)
        assert twin.is_final
        assert not twin.queue
        assert self.effects["record_failure"] <= 1
        assert self.effects["release"] <= 1


def drain(half: SenderHalf) -> None:
    """Finish what is in flight and all that is queued, with success."""
    for _ in range(3 * len(half.queue) + 3):
        task = half.in_flight
        if task is None:
            if half.ready:
                half.on_task_begun()
        elif task.frame is None:
            half.on_produced(Blob("drained"))
        else:
            half.on_stored()
    assert not half.ready
    assert half.in_flight is None


def test_a_walk_over_all_that_a_runtime_may_do_keeps_what_must_hold_and_reaches_the_rows() -> None:
    check_walks(SenderLife, sender_table(), walks=WALKS, steps=STEPS, floor=ROWS_FLOOR)
