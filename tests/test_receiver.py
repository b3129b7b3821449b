"""The receiving half, row by row: what PROTOCOL says of "Receiver", with states, effects and stages written by hand."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from walks import check_walks

from omni_fsm.protocol.errors import LocalProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.receiver import ReceiverHalf, ReceiverMoved
from omni_fsm.tables import receiver_table

EDGE = Edge("thinker", "talker")
R7 = Identity("r7", 2)
RETRIES = 3
WALKS, STEPS = 2_000, 30
ROWS_FLOOR = 36  # all but an opening that ends a get: it has no body to fetch


def error(reason: str = "boom", at_ns: int = 5) -> Cause:
    return Cause(Outcome.ERROR, reason, at_ns)


def cancel(reason: str = "user left", at_ns: int = 7) -> Cause:
    return Cause(Outcome.CANCELLED, reason, at_ns)


DONE = Cause(Outcome.DONE, "done", 8)

# Frames


OPEN = Frame(EDGE, R7, FrameKind.OPEN)


def data(seq: int, *, segment: int = 0, segment_end: bool = False) -> Frame:
    return Frame(EDGE, R7, FrameKind.DATA, segment=segment, seq=seq, segment_end=segment_end)


def ok_end(seq: int, at_ns: int = 3) -> Frame:
    return Frame(EDGE, R7, FrameKind.END, seq=seq, cause=Cause(Outcome.OK, at_ns=at_ns))


def failed_end(cause: Cause) -> Frame:
    return Frame(EDGE, R7, FrameKind.END, cause=cause)


# Drivers and situations


def new(retries: int = RETRIES) -> ReceiverHalf:
    return ReceiverHalf(receiver_table(), EDGE, R7, retries)


def arrive(half: ReceiverHalf, *payloads: str) -> None:
    """Chunks come in order, 10 bytes each."""
    for payload in payloads:
        half.on_frame(data(half.next_seq), payload, 10)


def active(*payloads: str) -> ReceiverHalf:
    half = new()
    arrive(half, *payloads)
    return half


def ending(*payloads: str) -> ReceiverHalf:
    """The end(ok) is staged behind the chunks."""
    half = active(*payloads)
    half.on_frame(ok_end(half.next_seq), "tail", 4)
    return half


def getting() -> ReceiverHalf:
    half = active("a")
    half.on_get_begun()
    return half


def leaving() -> ReceiverHalf:
    """Cancelled while a get is in flight."""
    half = getting()
    half.on_cancelled(cancel())
    return half


def failed() -> ReceiverHalf:
    half = active("a")
    half.on_deadline(error())
    return half


def failed_in_get() -> ReceiverHalf:
    half = getting()
    half.on_peer_lost(error())
    return half


def consumed() -> ReceiverHalf:
    half = ending()
    half.on_consumed()
    return half


def cancelled() -> ReceiverHalf:
    half = active("a")
    half.on_cancelled(cancel())
    return half


Situation = Callable[[], ReceiverHalf]
Happening = Callable[[ReceiverHalf], ReceiverMoved]


def staged(half: ReceiverHalf) -> list[str]:
    return [f"end {frame.payload}" if frame.is_end else str(frame.payload) for frame in half.staged]


def told(moved: ReceiverMoved) -> tuple[str, str, list[str]]:
    """Event, state after, effects; what is ignored is no row."""
    assert not moved.ignored, moved
    return str(moved.event), str(moved.after), [str(effect) for effect in moved.effects]


def refusal(moved: ReceiverMoved) -> str:
    assert moved.ignored
    assert moved.before is moved.after
    assert moved.effects == ()
    return moved.ignored


# While it is active: frames


def test_a_registration_begins_waiting() -> None:
    half = new()
    assert (half.state, half.waiting, half.wants_body, half.next_seq, half.opened) == ("active", True, True, 0, False)


def test_the_opening_says_that_the_sender_exists_and_gives_it_credit() -> None:
    half = new()
    assert told(half.on_frame(OPEN)) == ("open_arrived", "active", ["report_open", "grant_credit"])
    assert (half.opened, half.next_seq, half.staged, half.waiting) == (True, 0, half.staged, True)
    assert not half.staged


def test_chunks_are_staged_in_order_and_wake_the_scheduler() -> None:
    half = new()
    for seq, payload in enumerate("abc"):
        half.on_get_begun()
        assert told(half.on_frame(data(seq), payload, 10)) == ("data_arrived", "active", ["wake_scheduler"])
        assert (half.getting, half.waiting) == (False, False)
    assert (staged(half), half.next_seq) == (["a", "b", "c"], 3)


def test_a_staged_frame_knows_its_segment_and_the_seq_goes_on_over_segments() -> None:
    half = new()
    half.on_frame(data(0, segment_end=True), "a")
    half.on_frame(data(1, segment=1), "b")
    assert [(f.seq, f.segment, f.segment_end) for f in half.staged] == [(0, 0, True), (1, 1, False)]


@pytest.mark.parametrize("old", [data(0), data(1), ok_end(1)], ids=["first", "last", "end"])
def test_a_repeated_frame_is_dropped(old: Frame) -> None:
    """A put that reported failure was stored after all, and came again."""
    half = active("a", "b")
    half.on_get_begun()
    assert told(half.on_frame(old, "again", 10)) == ("frame_repeated", "active", [])
    assert (staged(half), half.next_seq, half.getting) == (["a", "b"], 2, False)
    assert half.on_frame(data(2), "c").event == "data_arrived"


@pytest.mark.parametrize("ahead", [data(3), ok_end(3), data(2**40)], ids=["data", "end", "far"])
def test_a_frame_ahead_fails_the_stream_and_is_never_silently_skipped(ahead: Frame) -> None:
    half = active("a", "b")
    half.on_get_begun()
    moved = half.on_frame(ahead, "c", 10)
    assert told(moved) == ("frame_ahead", "failed", ["stop_sender", "record_failure", "tell_sender"])
    assert (staged(half), half.next_seq, half.getting) == ([], 2, False)
    assert str(half.cause) == f"error(frame_ahead: seq {ahead.seq} came, 2 was expected)"


def test_an_ok_end_is_staged_with_its_payload() -> None:
    half = active("a")
    half.on_get_begun()
    assert told(half.on_frame(ok_end(1, at_ns=3), "tail", 4)) == (
        "ok_end_arrived",
        "terminal_pending",
        ["wake_scheduler"],
    )
    assert (staged(half), half.next_seq, half.getting) == (["a", "end tail"], 2, False)
    assert (str(half.cause), half.cause.at_ns) == ("ok", 3)
    assert not half.waiting  # no clock runs any more
    assert not half.wants_body


def test_full_payload_is_one_end_that_carries_it_all() -> None:
    half = new()
    half.on_frame(ok_end(0), "everything", 4_000)
    frame, moved = half.on_consumed()
    assert (frame.payload, frame.is_end) == ("everything", True)
    assert told(moved) == ("end_consumed", "finalized", ["report_end", "retire"])


@pytest.mark.parametrize(
    "end", [failed_end(error("oom", 11)), failed_end(cancel("user left", 11))], ids=["error", "cancelled"]
)
@pytest.mark.parametrize("seq", [-1, 0, 1, 2, 99])
def test_a_failed_end_is_accepted_whatever_its_seq(end: Frame, seq: int) -> None:
    """A burned seq may be missing before it. The sender knows: it is not stopped."""
    half = active("a", "b")
    half.on_get_begun()
    moved = half.on_frame(replace(end, seq=seq))
    assert told(moved) == ("failed_end_arrived", "failed", ["record_failure", "tell_sender"])
    assert (staged(half), half.getting, half.next_seq) == ([], False, 2)
    assert (half.cause, half.cause.at_ns) == (end.cause, 11)


# While it is active: gets


def test_a_get_stops_the_clock_and_is_retried_until_its_budget_is_used_up() -> None:
    half = new(retries=2)
    assert told(half.on_get_begun()) == ("get_begun", "active", [])
    assert (half.getting, half.waiting) == (True, False)
    for attempt in (1, 2):
        assert told(half.on_get_failed(error("no room"))) == ("get_retried", "active", [])
        assert (half.getting, half.attempts) == (True, attempt)
    moved = half.on_get_failed(error("no room", 11))
    assert told(moved) == ("get_given_up", "failed", ["stop_sender", "record_failure", "tell_sender"])
    assert (half.getting, str(half.cause), half.cause.at_ns) == (False, "error(no room)", 11)


def test_each_get_has_a_budget_of_its_own() -> None:
    half = new(retries=1)
    for seq in range(3):
        half.on_get_begun()
        assert half.on_get_failed(error()).event == "get_retried"
        half.on_frame(data(seq), "x")
    assert half.state == "active"


# While it is active: failures, which all drop what is staged


STOPPED = ["stop_sender", "record_failure", "tell_sender"]
FAILURES: dict[str, tuple[Happening, list[str]]] = {
    "frame_invalid": (lambda half: half.on_frame_invalid(error("first", 11)), STOPPED),
    "deadline_passed": (lambda half: half.on_deadline(error("first", 11)), STOPPED),
    "unclaimed": (lambda half: half.on_unclaimed(error("first", 11)), STOPPED),
    "peer_lost": (lambda half: half.on_peer_lost(error("first", 11)), ["record_failure", "tell_sender"]),
    "request_failed": (lambda half: half.on_request_failed(error("first", 11)), ["stop_sender", "record_failure"]),
}


@pytest.mark.parametrize(("event", "fail", "effects"), [(e, *rest) for e, rest in FAILURES.items()], ids=FAILURES)
def test_a_failure_drops_what_is_staged_and_keeps_its_cause(event: str, fail: Happening, effects: list[str]) -> None:
    """A lost peer needs no stop; at the front the sender knows already, since it said so."""
    half = active("a", "b")
    assert told(fail(half)) == (event, "failed", effects)
    assert staged(half) == []
    assert (half.taken_frames, half.taken_bytes) == (2, 20)  # dropped is taken: nobody waits for this credit
    assert (half.cause, half.cause.at_ns, half.waiting, half.wants_body) == (error("first"), 11, False, False)


@pytest.mark.parametrize(("event", "fail", "effects"), [(e, *rest) for e, rest in FAILURES.items()], ids=FAILURES)
def test_a_failure_comes_in_the_middle_of_a_get(event: str, fail: Happening, effects: list[str]) -> None:
    half = getting()
    assert told(fail(half)) == (event, "failed", effects)
    assert refusal(half.on_frame(data(1), "late", 10)) == "the first cause is kept; what comes is discarded"
    assert staged(half) == []


# consuming


def test_frames_are_consumed_in_order_each_once_and_their_credit_goes_back() -> None:
    half = active("a", "b")
    for count, payload in enumerate("ab", start=1):
        frame, moved = half.on_consumed()
        assert frame.payload == payload
        assert told(moved) == ("consumed", "active", ["grant_credit"])
        assert (half.taken_frames, half.taken_bytes) == (count, 10 * count)
    assert half.waiting


def test_what_was_staged_before_the_end_is_consumed_before_the_end() -> None:
    half = ending("a")
    frame, moved = half.on_consumed()
    assert (frame.payload, *told(moved)) == ("a", "consumed", "terminal_pending", ["grant_credit"])
    frame, moved = half.on_consumed()
    assert (frame.payload, frame.is_end) == ("tail", True)
    assert told(moved) == ("end_consumed", "finalized", ["report_end", "retire"])
    assert (half.is_final, half.taken_frames, half.taken_bytes, str(half.cause)) == (True, 2, 14, "ok")


def test_a_failed_receiver_gives_the_failure_and_no_data() -> None:
    half = active("a", "b")
    half.on_frame(failed_end(error("oom")))
    for _ in range(2):
        frame, moved = half.on_consumed()
        assert frame is None
        assert told(moved) == ("failure_consumed", "failed", [])
    assert str(half.cause) == "error(oom)"


@pytest.mark.parametrize("situation", [consumed, cancelled])
def test_a_take_from_a_finalized_receiver_gives_nothing(situation: Situation) -> None:
    frame, moved = situation().on_consumed()
    assert frame is None
    assert refusal(moved) == "nothing is left of this registration: a take gives nothing"


def test_a_take_after_a_cancel_gives_nothing() -> None:
    frame, moved = leaving().on_consumed()
    assert frame is None
    assert refusal(moved) == "a take gives nothing after a cancel"


# leaving


@pytest.mark.parametrize(
    ("situation", "leave", "event", "state", "effects"),
    [
        (lambda: active("a"), "cancel", "cancelled", "finalized", ["tell_sender", "stop_sender", "retire"]),
        (lambda: active("a"), "release", "released", "finalized", ["stop_sender", "retire"]),
        (getting, "cancel", "cancelled_in_get", "cancelled_current", ["tell_sender", "stop_sender"]),
        (getting, "release", "released_in_get", "cancelled_current", ["stop_sender"]),
        (lambda: ending("a"), "cancel", "cancelled", "finalized", ["tell_sender", "retire"]),
        (lambda: ending("a"), "release", "released", "finalized", ["retire"]),
    ],
    ids=["active", "active, released", "in get", "in get, released", "ending", "ending, released"],
)
def test_leaving_drops_what_is_staged(
    situation: Situation, leave: str, event: str, state: str, effects: list[str]
) -> None:
    """The sender is stopped before its end has come; a release is nothing that this stage's own sender must hear."""
    half = situation()
    count = len(half.staged)
    cause = cancel("gone", 9) if leave == "cancel" else DONE
    moved = half.on_cancelled(cause) if leave == "cancel" else half.on_released(cause)
    assert told(moved) == (event, state, effects)
    assert (staged(half), half.taken_frames) == ([], count)
    assert half.cause is cause  # with its time stamp, also over the ok of an end that nobody took
    assert not half.wants_body


RETURNS: dict[str, Happening] = {
    "data": lambda half: half.on_frame(data(1), "late", 10),
    "repeated": lambda half: half.on_frame(data(0), "late", 10),
    "ahead": lambda half: half.on_frame(data(9), "late", 10),
    "ok end": lambda half: half.on_frame(ok_end(1), "late", 10),
    "failed end": lambda half: half.on_frame(failed_end(error("late", 99))),
    "open": lambda half: half.on_frame(OPEN),
    "invalid": lambda half: half.on_frame_invalid(error("late", 99)),
    "retried": lambda half: half.on_get_failed(error("late", 99)),
}


@pytest.mark.parametrize("returned", RETURNS.values(), ids=RETURNS)
@pytest.mark.parametrize("leave", [lambda h: h.on_cancelled(cancel("gone")), lambda h: h.on_released(DONE)])
def test_a_get_that_returns_after_the_cancel_publishes_nothing_whatever_it_brought(
    leave: Happening, returned: Happening
) -> None:
    half = getting()
    leave(half)
    cause = half.cause
    moved = returned(half)
    assert told(moved)[1:] == ("finalized", ["retire"])
    assert (staged(half), half.getting, half.next_seq, half.opened) == ([], False, 1, False)
    assert half.cause is cause


def test_a_get_that_is_given_up_after_the_cancel_ends_it_too() -> None:
    half = new(retries=0)
    half.on_get_begun()
    half.on_cancelled(cancel())
    assert told(half.on_get_failed(error("late"))) == ("get_given_up", "finalized", ["retire"])
    assert str(half.cause) == "cancelled(user left)"


@pytest.mark.parametrize("situation", [failed, failed_in_get])
@pytest.mark.parametrize("leave", [lambda h: h.on_cancelled(cancel("gone")), lambda h: h.on_released(DONE)])
def test_a_failed_receiver_is_finalized_when_it_is_let_go(situation: Situation, leave: Happening) -> None:
    half = situation()
    assert told(leave(half))[1:] == ("finalized", ["retire"])
    assert str(half.cause) == "error(boom)"


def test_a_get_that_returns_after_a_failed_receiver_was_let_go_brings_nothing_back() -> None:
    half = failed_in_get()
    half.on_released(DONE)
    assert refusal(half.on_frame(data(1), "late", 10))
    assert (staged(half), half.is_final) == ([], True)


# ignores


NOTICES: dict[str, Happening] = {
    "deadline": lambda half: half.on_deadline(error("late", 99)),
    "peer lost": lambda half: half.on_peer_lost(error("late", 99)),
    "request failed": lambda half: half.on_request_failed(error("late", 99)),
}
FRAMES: dict[str, Happening] = {
    "next": lambda half: half.on_frame(data(half.next_seq), "late", 10),
    "repeated": lambda half: half.on_frame(data(0), "late", 10),
    "ahead": lambda half: half.on_frame(data(9), "late", 10),
    "same end": lambda half: half.on_frame(ok_end(half.next_seq - 1), "late", 10),
    "another end": lambda half: half.on_frame(ok_end(half.next_seq), "late", 10),
    "failed end": lambda half: half.on_frame(failed_end(error("late", 99))),
    "open": lambda half: half.on_frame(OPEN),
    "invalid": lambda half: half.on_frame_invalid(error("late", 99)),
}
LETTING_GO: dict[str, Happening] = {
    "cancel": lambda half: half.on_cancelled(cancel("late", 99)),
    "release": lambda half: half.on_released(DONE),
}


@pytest.mark.parametrize("happening", [*NOTICES.values(), *FRAMES.values()], ids=[*NOTICES, *FRAMES])
def test_a_receiver_with_its_end_has_all_it_needs(happening: Happening) -> None:
    """A retried end may come again; the deadline and the death of the sender mean nothing any more."""
    half = ending("a")
    before, cause = half.copy(), half.cause
    assert refusal(happening(half)).startswith("it has all it needs")
    assert half == before
    assert half.cause is cause
    assert [half.on_consumed()[0].payload, half.on_consumed()[0].payload] == ["a", "tail"]


@pytest.mark.parametrize("happening", [*NOTICES.values(), *LETTING_GO.values()], ids=[*NOTICES, *LETTING_GO])
def test_a_receiver_that_leaves_ignores_all_but_the_return_of_its_get(happening: Happening) -> None:
    half = leaving()
    before, cause = half.copy(), half.cause
    assert refusal(happening(half))
    assert half == before
    assert half.cause is cause


@pytest.mark.parametrize("happening", [*NOTICES.values(), *FRAMES.values()], ids=[*NOTICES, *FRAMES])
@pytest.mark.parametrize("situation", [failed, failed_in_get])
def test_case_77_a_failed_receiver_keeps_its_first_cause(situation: Situation, happening: Happening) -> None:
    half = situation()
    before, cause = half.copy(), half.cause
    assert "the first cause is kept" in refusal(happening(half))
    assert half == before
    assert half.cause is cause


@pytest.mark.parametrize("retries", [0, 3])
def test_a_failed_receiver_ignores_the_failures_of_its_get(retries: int) -> None:
    half = new(retries)
    half.on_get_begun()
    half.on_peer_lost(error())
    before = half.copy()
    assert refusal(half.on_get_failed(error("late", 99)))
    assert half == before


EVERYTHING: dict[str, Happening] = {
    **NOTICES,
    **FRAMES,
    **LETTING_GO,
    "get begun": lambda half: half.on_get_begun(),
    "get failed": lambda half: half.on_get_failed(error("late", 99)),
    "unclaimed": lambda half: half.on_unclaimed(error("late", 99)),
    "consumed": lambda half: half.on_consumed()[1],
}


@pytest.mark.parametrize("happening", EVERYTHING.values(), ids=EVERYTHING)
@pytest.mark.parametrize("situation", [consumed, cancelled])
def test_nothing_is_left_of_a_finalized_registration(situation: Situation, happening: Happening) -> None:
    half = situation()
    before, cause = half.copy(), half.cause
    assert refusal(happening(half)) == "nothing is left of this registration: a take gives nothing"
    assert half == before
    assert half.cause is cause
    assert not half.staged


# what is refused


@pytest.mark.parametrize("situation", [lambda: ending("a"), leaving, failed])
def test_a_get_is_begun_only_for_a_stream_that_wants_it(situation: Situation) -> None:
    half = situation()
    assert not half.wants_body
    before = half.copy()
    with pytest.raises(LocalProtocolError) as refused:
        half.on_get_begun()
    assert half == before
    assert (refused.value.event, refused.value.state) == ("get_begun", before.state)
    assert refused.value.stream == "r7#2 thinker->talker"


def test_only_a_fresh_registration_can_be_unclaimed() -> None:
    with pytest.raises(LocalProtocolError, match="unclaimed refused in state terminal_pending"):
        ending().on_unclaimed(error("unclaimed"))


HOSTILE: dict[str, Frame] = {
    "end without an outcome": Frame(EDGE, R7, FrameKind.END, seq=1),
    "end that says done": Frame(EDGE, R7, FrameKind.END, seq=1, cause=DONE),
}


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE)
def test_an_end_without_an_outcome_of_its_own_fails_the_stream(frame: Frame) -> None:
    """The wire of our connectors refuses these before; a connector of someone else may not."""
    half = active("a")
    half.on_frame(frame, "x", 1)
    assert half.state == "failed"


def test_consuming_needs_something_staged() -> None:
    """Nothing is staged: a take is illegal, so it is refused; it must not return what a taken frame would."""
    half = new()
    before = half.copy()
    with pytest.raises(LocalProtocolError):
        half.on_consumed()
    assert half == before


# values


def test_a_copy_is_equal_hashes_alike_and_is_independent() -> None:
    half = ending("a")
    twin = half.copy()
    assert (twin, hash(twin)) == (half, hash(half))
    twin.on_consumed()
    twin.on_cancelled(cancel())
    assert twin != half
    assert (half.state, staged(half), half.taken_frames, str(half.cause)) == (
        "terminal_pending",
        ["a", "end tail"],
        0,
        "ok",
    )
    half.on_consumed()
    assert (staged(half), staged(twin)) == (["end tail"], [])


def test_payloads_sizes_and_times_are_no_part_of_the_value() -> None:
    one, other = new(), new()
    one.on_frame(data(0), "a", 1)
    other.on_frame(data(0), "b", 2)
    one.on_deadline(error(at_ns=1))
    other.on_deadline(error(at_ns=2))
    assert one == other
    assert len({one, other}) == 1


@pytest.mark.parametrize(
    "happening", [*EVERYTHING.values(), lambda half: half.on_frame(OPEN)], ids=[*EVERYTHING, "opening"]
)
def test_whatever_changes_the_behaviour_changes_the_value(happening: Happening) -> None:
    half = active("a")
    before = half.copy()
    try:
        moved = happening(half)
    except LocalProtocolError:
        assert half == before
        return
    if moved.event != "frame_repeated":
        assert half != before


# a hostile peer and a careless clock: any frame, any order, any time


class ReceiverLife:
    """One half, an inbox that fetches one body at a time, and a peer that sends anything a wire lets through."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.half = new(retries=dice.randrange(3))
        self.trace: list[tuple[str, str]] = []
        self.came: list[int] = []
        self.taken: list[int] = []
        self.failures = self.retired = 0

    def did(self, moved: ReceiverMoved) -> None:
        self.trace.append((str(moved.before), str(moved.event)))
        if moved.ignored:
            assert (moved.before, moved.effects) == (moved.after, ())
            return
        self.failures += "record_failure" in moved.effects
        self.retired += "retire" in moved.effects
        assert ("retire" in moved.effects) == self.half.is_final
        assert ("record_failure" in moved.effects) == (moved.after == "failed" != moved.before)
        assert ("wake_scheduler" in moved.effects) == (moved.event in ("data_arrived", "ok_end_arrived")) or (
            moved.before == "cancelled_current"
        )

    def live(self, steps: int) -> None:
        for _ in range(steps):
            act = self.dice.choices([self.frame, self.consume, self.notice, self.leave], [10, 5, 1, 1])[0]
            act()
            self.check()
        if not self.half.is_final:
            self.check_that_it_can_end()

    def frame(self) -> None:
        half, dice = self.half, self.dice
        if half.wants_body and not half.getting and dice.random() < 0.6:
            self.did(half.on_get_begun())
            return
        if half.getting and dice.random() < 0.3:
            self.did(half.on_get_failed(error("get")))
            return
        if dice.random() < 0.05:
            self.did(half.on_frame_invalid(error("invalid")))
            return
        if half.getting and half.state == "active" and dice.random() < 0.2:
            return  # an opening has no body and never ends a get
        seq = max(0, half.next_seq + dice.choice([0, 0, 0, 0, 0, 0, 0, 0, -1, -1, 1]))
        kinds = [data(seq)] * 9 + [ok_end(seq), failed_end(error("sent"))] + ([] if half.getting else [OPEN])
        frame = dice.choice(kinds)
        moved = half.on_frame(frame, seq, 1)
        self.did(moved)
        if not moved.ignored and moved.event in ("data_arrived", "ok_end_arrived") and not half.is_final:
            self.came.append(seq)

    def consume(self) -> None:
        half = self.half
        if half.staged or half.state in ("failed", "finalized", "cancelled_current"):
            frame, moved = half.on_consumed()
            self.did(moved)
            if frame is not None:
                assert moved.before in ("active", "terminal_pending")
                self.taken.append(frame.payload)

    def notice(self) -> None:
        half = self.half
        if not self.trace:
            self.did(half.on_unclaimed(error("unclaimed")))
        elif half.state != "active" or half.waiting or self.dice.random() < 0.3:
            self.did(self.dice.choice(list(NOTICES.values()))(half))

    def leave(self) -> None:
        if self.dice.random() < 0.7:
            self.did(self.dice.choice(list(LETTING_GO.values()))(self.half))

    def check(self) -> None:
        half = self.half
        assert self.taken == list(range(len(self.taken))), "out of order, or twice"
        assert self.came == list(range(len(self.came)))
        if half.state in ("failed", "cancelled_current", "finalized"):
            assert not half.staged
        if half.state in ("active", "terminal_pending"):
            assert len(self.taken) + len(half.staged) == len(self.came)
        assert half.taken_frames + len(half.staged) == len(self.came)
        assert half.taken_bytes + sum(f.nbytes for f in half.staged) == len(self.came)
        assert (half.state == "terminal_pending") == any(f.is_end for f in half.staged)
        assert self.failures <= 1
        assert self.retired == half.is_final
        assert half.cause is not None or half.state == "active"
        twin = half.copy()
        assert (twin, hash(twin)) == (half, hash(half))

    def check_that_it_can_end(self) -> None:
        """Eventually: the deadline ends the wait, a cancel ends the rest; nobody is parked for ever."""
        half = self.half.copy()
        if half.waiting:
            half.on_deadline(error("deadline"))
            assert half.state == "failed"
        half.on_cancelled(cancel())
        if half.getting and not half.is_final:
            assert half.state == "cancelled_current"
            half.on_get_failed(error("late"))
        assert half.is_final


def test_any_frame_in_any_order_gets_an_answer_and_the_walk_reaches_the_rows() -> None:
    check_walks(ReceiverLife, receiver_table(), walks=WALKS, steps=STEPS, floor=ROWS_FLOOR)
