"""KV transfers: the machine against a plain model, blocks that nobody gets too early, and whole caches over real connectors.

Released blocks are poisoned at once: an engine that still reads them reads poison, one that still writes them wipes it out.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scripted import HandClock, ScriptedArrival

from omni_fsm.connectors import Hello, memory_pair, shm_receiver, shm_sender
from omni_fsm.connectors.port import ConnectorClosedError, PutOutcome, PutStatus
from omni_fsm.payload import HeadPlan, encode
from omni_fsm.protocol.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.kv import KvTransferHalf, KvTransferMoved
from omni_fsm.protocol.names import KvTransferState
from omni_fsm.runtime import (
    BlockHolds,
    Failure,
    KvBlockReceiver,
    KvBlockSender,
    KvDirection,
    KvJob,
    KvReport,
    KvTransfers,
    PagedKvCache,
    Transition,
)
from omni_fsm.tables import kv_table

EDGE = Edge("thinker", "talker")
A, B, C, D = (Identity(name, 2) for name in ("a", "b", "c", "d"))
POISON = -777.0
LAYERS, BLOCK_SIZE, HEAD_SIZE, NUM_BLOCKS = 2, 4, 2, 10
SENT, RECEIVED = (5, 2, 7), (1, 4, 0)
PATIENCE_S = 10.0


def error(reason: str = "boom") -> Cause:
    return Cause(Outcome.ERROR, reason)


def cancelled(reason: str = "user left") -> Cause:
    return Cause(Outcome.CANCELLED, reason)


OK = Cause(Outcome.OK)

# The half, by hand


def half(state: str, *companions: str) -> KvTransferHalf:
    """A half that was led into a state, with pieces for ranks 0 and 1."""
    new = KvTransferHalf(kv_table(), EDGE, A, companions)
    if state == "idle":
        return new
    new.on_marked((3, 1))
    if state == "marked":
        return new
    new.on_begun((0, 1), 5)
    if state == "completed":
        new.on_all_acked(6)
    elif state in {"failed", "released"}:
        new.on_failed(error())
    if state == "released":
        new.on_quiet(error("quiet"))
    assert new.state == state
    return new


def moved(move: KvTransferMoved) -> tuple[str, str, list[str]]:
    return str(move.event), str(move.after), [str(effect) for effect in move.effects]


def test_a_transfer_that_goes_well_row_by_row() -> None:
    one = half("idle")
    assert moved(one.on_marked((3, 1))) == ("blocks_marked", "marked", ["hold_blocks"])
    assert (one.blocks, one.open_pieces, one.holds) == ((3, 1), frozenset(), True)
    assert moved(one.on_begun((0, 1), 5)) == ("begun", "active", [])
    assert one.open_ranks == {0, 1}
    assert moved(one.on_acked((1,), 6)) == ("piece_acked", "active", [])
    assert moved(one.on_acked((1,), 7)) == ("piece_repeated", "active", [])
    assert moved(one.on_acked((0,), 8)) == ("last_piece_acked", "completed", ["report_completed", "tell_parent"])
    assert (one.cause, one.repeats) == (OK, 1)
    assert one.cause is not None
    assert one.cause.at_ns == 8
    assert moved(one.on_drained()) == ("outcome_drained", "released", ["free_blocks"])
    assert not one.holds


def test_a_failed_transfer_keeps_its_blocks_until_the_engine_is_quiet() -> None:
    one = half("active")
    told = ["record_failure", "tell_parent", "cancel_companions", "abort_engine"]
    assert moved(one.on_failed(error())) == ("transfer_failed", "failed", told)
    assert one.holds
    assert one.on_failed(error("second")).ignored == "the first cause is kept"
    assert moved(one.on_acked((0,), 6)) == ("piece_acked", "failed", [])
    assert moved(one.on_quiet(error("quiet"))) == ("went_quiet", "released", ["free_blocks"])
    assert one.cause == error()


def test_a_failed_transfer_is_quiet_once_its_last_piece_is_over() -> None:
    one = half("failed")
    one.on_acked((0,), 6)
    assert moved(one.on_acked((1,), 7)) == ("last_piece_acked", "released", ["free_blocks"])
    assert (one.cause, one.open_pieces) == (error(), frozenset())


def test_nothing_was_touched_before_it_began_so_a_failure_gives_the_blocks_back_at_once() -> None:
    for state in ("idle", "marked"):
        one = half(state)
        told = ["record_failure", "tell_parent", "cancel_companions", "abort_engine", "free_blocks"]
        assert moved(one.on_failed(error())) == ("transfer_failed", "released", told)


def test_companions_are_pieces_that_touch_no_block_of_the_parent() -> None:
    one = half("idle", "negative", "image")
    assert moved(one.on_acked(("image",), 3)) == ("piece_acked", "idle", [])
    one.on_marked((1,))
    one.on_begun((0,), 4)
    assert moved(one.on_all_acked(5)) == ("piece_acked", "active", [])
    assert one.open_pieces == {"negative"}
    failed, left = one.copy(), one.copy()
    assert moved(one.on_acked(("negative",), 6))[:2] == ("last_piece_acked", "completed")
    assert moved(failed.on_companion_failed(error()))[:2] == ("companion_failed", "failed")
    assert moved(left.on_cancelled(cancelled()))[:2] == ("cancelled", "failed")
    assert failed.open_pieces == left.open_pieces == frozenset()
    assert len({one, failed, left}) == 3


def test_without_pieces_and_companions_it_completes_as_it_begins() -> None:
    one, parent = half("marked"), half("marked", "negative")
    assert moved(one.on_begun((), 5)) == ("begun_without_pieces", "completed", ["report_completed", "tell_parent"])
    assert one.cause == OK
    assert moved(parent.on_begun((), 5))[:2] == ("begun", "active")


CANCELLED = {
    "idle": "released",
    "marked": "released",
    "active": "failed",
    "completed": "completed",
    "failed": "failed",
    "released": "released",
}


@pytest.mark.parametrize(("state", "after"), CANCELLED.items())
def test_a_cancel_is_heard_in_every_state(state: str, after: str) -> None:
    one = half(state)
    before = one.cause
    move = one.on_cancelled(cancelled())
    assert one.state == after
    assert one.cause == (cancelled() if before is None else before)
    assert bool(move.ignored) == (state in {"completed", "failed", "released"})
    assert ("free_blocks" in move.effects) == (state in {"idle", "marked"})


# The half against a plain model


class PlainTransfer:
    """What a transfer is, said without a table: an outcome, whom it waits for, and whether an engine may touch blocks."""

    def __init__(self, roles: set[str]) -> None:
        self.marked = self.begun = self.touched = self.over = False
        self.roles, self.ranks = set(roles), set[int]()
        self.outcome = ""

    @property
    def state(self) -> str:
        if self.over:
            return "released"
        if self.outcome:
            return "completed" if self.outcome == "ok" else "failed"
        return "active" if self.begun else "marked" if self.marked else "idle"

    def end(self, outcome: str) -> None:
        if not self.outcome and not self.over:
            self.outcome, self.roles = outcome, set()
            self.over = not self.touched

    def ack(self, pieces: set[int | str]) -> None:
        waited = bool(self.ranks or self.roles)
        self.ranks -= pieces  # type: ignore[operator]
        self.roles -= pieces  # type: ignore[operator]
        if not self.begun or self.ranks or self.roles or not waited:
            return
        self.touched = False
        if self.outcome:
            self.over = True
        else:
            self.outcome = "ok"


def plainly(model: PlainTransfer, said: str, ranks: set[int]) -> None:
    """One happening, told to the model."""
    if said == "mark":
        model.marked = True
    elif said == "begin":
        model.begun, model.ranks = True, set(ranks)
        model.touched = bool(model.ranks or model.roles)
        if not model.touched:
            model.outcome = "ok"
    elif said == "quiet":
        model.touched = False
        if model.state == "failed":
            model.over = True
        model.end("error")
    elif said == "drain":
        model.over = True
    elif said.startswith("ack"):
        model.ack({said[4:]} if said[4:].isalpha() else {int(said[4:])})
    elif said == "complete":
        model.ack(set(model.ranks))
    else:
        model.end("cancelled" if said == "cancel" else "error")


SAYINGS = [
    "mark",
    "begin",
    "ack 0",
    "ack 1",
    "ack image",
    "complete",
    "fail",
    "deadline",
    "companion",
    "cancel",
    "quiet",
]


def tell(one: KvTransferHalf, said: str, ranks: set[int]) -> KvTransferMoved:
    calls: dict[str, Callable[[], KvTransferMoved]] = {
        "mark": lambda: one.on_marked((1,)),
        "begin": lambda: one.on_begun(ranks, 1),
        "ack 0": lambda: one.on_acked((0,), 1),
        "ack 1": lambda: one.on_acked((1,), 1),
        "ack image": lambda: one.on_acked(("image",), 1),
        "complete": lambda: one.on_all_acked(1),
        "fail": lambda: one.on_failed(error()),
        "deadline": lambda: one.on_deadline(error("deadline")),
        "companion": lambda: one.on_companion_failed(error("companion")),
        "cancel": lambda: one.on_cancelled(cancelled()),
        "quiet": lambda: one.on_quiet(error("quiet")),
        "drain": one.on_drained,
    }
    return calls[said]()


REACHED: set[tuple[str, str]] = set()


@given(data=st.data())
@settings(derandomize=True, max_examples=400, deadline=None)
def check_walk(data: st.DataObject) -> None:
    roles = data.draw(st.sampled_from([set[str](), {"image"}]))
    ranks = data.draw(st.sampled_from([set[int](), {0}, {0, 1}]))
    one, model = KvTransferHalf(kv_table(), EDGE, A, roles), PlainTransfer(roles)
    frees = outcomes = 0
    begins = data.draw(
        st.sampled_from([[], ["mark"], ["mark", "begin"], ["mark", "begin", "fail"], ["ack image", "mark"]])
    )
    for said in begins + data.draw(st.lists(st.sampled_from([*SAYINGS, "drain"]), max_size=12)):
        before = one.key()
        try:
            move = tell(one, said, ranks)
        except LocalProtocolError:
            assert one.key() == before  # a refusal changes nothing
            continue
        REACHED.add((str(move.before), str(move.event)))
        if not move.ignored:
            plainly(model, said, ranks)
        assert one.state == model.state, said
        frees += "free_blocks" in move.effects
        outcomes += "tell_parent" in move.effects
        assert frees == one.is_final
        assert outcomes == (one.cause is not None)
        if one.holds:
            assert not frees  # whatever is held was not given back


def test_every_walk_agrees_with_a_plain_model_and_every_row_is_walked() -> None:
    REACHED.clear()
    check_walk()
    rows = {(str(state), str(event)) for (state, event), cell in kv_table().cells.items() if not cell.ignored}
    assert rows - REACHED == set()
    assert len(rows) == 25


# Transfers whose engine is a test


class Engine:
    """Touches blocks whenever the test says so, until it has said that it is quiet."""

    def __init__(self) -> None:
        self.jobs: dict[Identity, KvJob] = {}
        self.aborted: dict[Identity, Cause] = {}
        self.raises = ""

    def send(self, job: KvJob, transfers: KvTransfers) -> None:
        if self.raises:
            raise RuntimeError(self.raises)
        assert transfers.blocks(job.identity) == job.blocks
        assert job.identity not in self.jobs
        self.jobs[job.identity] = job

    recv = send

    def abort(self, job: KvJob, transfers: KvTransfers, cause: Cause) -> None:
        self.aborted[job.identity] = cause


def transfers_of(engine: Engine | None = None, **settings: Any) -> KvTransfers:
    settings = {"ranks": (0, 1), "clock": HandClock(), **settings}
    return KvTransfers(EDGE, KvDirection.SEND, manager=engine, **settings)


def idle(transfers: KvTransfers) -> bool:
    """Nothing of any transfer is left but the memory of its identity."""
    left = transfers.residue()
    del left["remembered"]
    return not any(left.values()) and not transfers.has_pending


def test_marks_are_deduplicated_in_every_state() -> None:
    engine = Engine()
    transfers = transfers_of(engine)
    assert transfers.mark(A, (1, 2))
    for step in (
        transfers.drain_pending,
        lambda: transfers.ack(A, 0),
        lambda: transfers.fail(A, "boom"),
        lambda: transfers.quiet(A),
        transfers.drain_completed,
    ):
        assert not transfers.mark(A, (7, 8))
        assert 7 not in transfers.holds
        step()
    assert not transfers.mark(A, (7, 8))
    assert engine.jobs == {A: KvJob(A, (1, 2), (0, 1))}
    assert idle(transfers)


def test_what_is_pending_is_drained_once_and_in_order() -> None:
    transfers = transfers_of()
    for identity, blocks in ((B, (4,)), (A, (1, 2))):
        transfers.mark(identity, blocks)
    assert not transfers.is_triggered(C)
    assert transfers.is_triggered(A)
    assert transfers.drain_pending() == (KvJob(B, (4,), (0, 1)), KvJob(A, (1, 2), (0, 1)))
    assert transfers.drain_pending() == ()
    transfers.complete(B)
    assert transfers.drain_completed() == KvReport((B,), {}, {B: (4,)})
    assert transfers.drain_completed() == KvReport()
    assert transfers.has_pending
    transfers.complete(A)
    assert transfers.has_pending  # nobody has collected it
    transfers.drain_completed()
    assert idle(transfers)


@pytest.mark.parametrize("state", [state for state in KvTransferState if state is not KvTransferState.RELEASED])
def test_a_cancel_in_every_state_gives_the_blocks_back_once_and_not_too_early(state: str) -> None:
    engine = Engine()
    transfers = transfers_of(engine)
    if state == "idle":
        transfers.bind(A, {"image": B})
    else:
        transfers.mark(A, (1, 2))
    if state not in {"idle", "marked"}:
        transfers.drain_pending()
    if state == "completed":
        transfers.complete(A)
    if state == "failed":
        transfers.fail(A, "boom")
    assert transfers.state(A) == state
    for _ in range(2):
        transfers.cancel(A, "user left")
    assert (A in engine.aborted) == (state != "completed")
    reports = [transfers.drain_completed()]
    if state in {"active", "failed"}:
        assert 1 in transfers.holds
        assert reports[0].released == {}
        transfers.quiet(A)
    reports += [transfers.drain_completed(), transfers.drain_completed()]
    assert [one for report in reports for one in report.released.values()] == ([] if state == "idle" else [(1, 2)])
    assert [report.completed for report in reports if report.completed] == ([(A,)] if state == "completed" else [])
    assert [one for report in reports for one in report.failed.values()] == ([error()] if state == "failed" else [])
    assert idle(transfers)
    for late in (transfers.complete, transfers.quiet, transfers.cancel):
        late(A)
    assert idle(transfers)


def test_a_deadline_fails_it_and_its_blocks_stay_held() -> None:
    clock, engine = HandClock(), Engine()
    transfers = transfers_of(engine, clock=clock, deadline_s=5.0)
    transfers.mark(A, (1,))
    transfers.drain_pending()
    clock.advance(4)
    transfers.mark(B, (2,))
    clock.advance(2)
    assert transfers.tick_once()
    assert not transfers.tick_once()
    assert transfers.drain_completed() == KvReport((), {A: error("deadline: no outcome within 5.0 s")}, {})
    assert engine.aborted == {A: error("deadline: no outcome within 5.0 s")}
    clock.advance(1_000)
    assert transfers.tick_once()  # B, which nobody has drained
    assert transfers.drain_completed().released == {B: (2,)}
    assert 1 in transfers.holds
    transfers.quiet(A)
    assert transfers.drain_completed().released == {A: (1,)}
    assert idle(transfers)


def test_a_manager_that_raises_fails_the_transfer_in_its_own_words() -> None:
    engine = Engine()
    engine.raises = "no memory"
    transfers = transfers_of(engine)
    transfers.mark(A, (1,))
    transfers.drain_pending()
    assert transfers.drain_completed().failed == {A: error("send raised RuntimeError: no memory")}
    assert list(engine.aborted) == [A]
    assert 1 in transfers.holds  # nobody knows what it has begun


def test_an_engine_that_is_quiet_without_an_outcome_has_failed() -> None:
    transfers = transfers_of()
    transfers.mark(A, (1,))
    transfers.drain_pending()
    transfers.ack(A, 0)
    transfers.quiet(A)
    report = transfers.drain_completed()
    assert report.failed == {A: error("the engine stopped before all of it was delivered")}
    assert report.released == {A: (1,)}


def test_reports_on_what_was_never_begun_are_refused_and_late_ones_counted() -> None:
    transfers = transfers_of()
    transfers.mark(A, (1,))
    for early in (lambda: transfers.quiet(A), lambda: transfers.ack(A, 0)):
        with pytest.raises(LocalProtocolError, match="refused in state marked"):
            early()
    transfers.cancel(A)
    for _ in range(3):
        transfers.complete(A)
    transfers.fail(B, "who?")
    transfers.quiet(A)  # the engine's answer to the abort is not late
    assert transfers.late == 4


def test_only_the_newest_of_what_is_over_is_remembered() -> None:
    transfers = transfers_of(remembered_max=2)
    for identity in (A, B, C):
        transfers.mark(identity, ())
        transfers.cancel(identity)
    assert transfers.residue()["remembered"] == 2
    assert [transfers.is_triggered(one) for one in (A, B, C)] == [False, True, True]


def test_a_manager_is_never_told_to_abort_what_it_was_not_given() -> None:
    """The abort comes while the manager is still busy with the mark, from another thread."""
    told: list[str] = []
    sending, cancelled_now = threading.Event(), threading.Event()

    class SlowEngine(Engine):
        def send(self, job: KvJob, transfers: KvTransfers) -> None:
            sending.set()
            assert cancelled_now.wait(PATIENCE_S)
            told.append("send")

        def abort(self, job: KvJob, transfers: KvTransfers, cause: Cause) -> None:
            told.append("abort")
            transfers.quiet(job.identity)

    transfers = transfers_of(SlowEngine())
    transfers.mark(A, (1,))
    runner = threading.Thread(target=transfers.drain_pending)
    runner.start()
    assert sending.wait(PATIENCE_S)
    transfers.cancel(A)
    assert 1 in transfers.holds
    cancelled_now.set()
    runner.join(PATIENCE_S)
    assert told == ["send", "abort"]
    assert transfers.drain_completed().released == {A: (1,)}


class Log:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.failures: list[Failure] = []

    def on_transition(self, transition: Transition) -> None:
        self.transitions.append(transition)

    def on_failure(self, failure: Failure) -> None:
        self.failures.append(failure)


def test_observers_are_told_of_every_transition_and_once_of_a_failure() -> None:
    log = Log()
    transfers = transfers_of(observers=[log])
    transfers.mark(A, (1,))
    transfers.mark(A, (1,))
    transfers.drain_pending()
    transfers.fail(A, "boom")
    transfers.quiet(A)
    told = [(str(one.event), str(one.after), bool(one.ignored)) for one in log.transitions]
    assert told == [
        ("blocks_marked", "marked", False),
        ("blocks_marked", "marked", True),
        ("begun", "active", False),
        ("transfer_failed", "failed", False),
        ("went_quiet", "released", False),
    ]
    assert [(one.machine, one.identity, one.cause) for one in log.failures] == [("kv_transfer", A, error())]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda t: t.mark(A, (1, 1)), "blocks"),
        (lambda t: t.mark(A, (-1,)), "blocks"),
        (lambda t: t.bind(A, {}), "companions"),
        (lambda t: t.bind(A, {"": B}), "companions"),
        (lambda t: t.bind(A, {"image": A}), "companions"),
        (lambda t: t.bind(A, {"image": B, "text": B}), "companions"),
        (lambda t: (t.mark(B, (1,)), t.bind(A, {"image": B})), "companions"),
        (lambda t: transfers_of(deadline_s=0), "deadline_s"),
        (lambda t: transfers_of(remembered_max=0), "remembered_max"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: Callable[[KvTransfers], Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        wrong(transfers_of())
    assert refused.value.field == named


# Companions


def group(engine: Engine | None = None, **settings: Any) -> KvTransfers:
    """A parent A with the companions B and C, all marked."""
    transfers = transfers_of(engine, **settings)
    transfers.bind(A, {"negative": B, "image": C})
    for identity, block in ((A, 1), (B, 2), (C, 3)):
        transfers.mark(identity, (block,))
    return transfers


def test_a_parent_completes_after_its_companions() -> None:
    transfers = group()
    transfers.drain_pending()
    transfers.complete(A)
    transfers.complete(B)
    assert transfers.drain_completed().completed == (B,)
    assert transfers.state(A) is KvTransferState.ACTIVE
    transfers.complete(C)
    assert transfers.drain_completed().completed == (C, A)
    assert idle(transfers)


def test_case_03_a_companion_that_fails_fails_its_parent_once_under_the_parent_s_id() -> None:
    log, engine = Log(), Engine()
    transfers = group(engine, observers=[log])
    transfers.drain_pending()
    transfers.fail(B, "boom")
    transfers.fail(C, "boom too")
    transfers.fail(A, "and again")
    assert transfers.drain_completed().failed == {A: error()}
    assert [failure.identity for failure in log.failures] == [A]
    assert engine.aborted == {A: error(), B: error(), C: error()}
    for identity in (A, B, C):
        transfers.quiet(identity)
    report = transfers.drain_completed()
    assert report == KvReport((), {}, {A: (1,), B: (2,), C: (3,)})
    assert idle(transfers)


@pytest.mark.parametrize("begun", [False, True])
def test_a_cancel_of_the_parent_cancels_its_companions_and_of_a_companion_fails_its_parent(*, begun: bool) -> None:
    for first, failed in ((A, {}), (C, {A: cancelled()})):
        transfers = group()
        if begun:
            transfers.drain_pending()
        transfers.cancel(first, "user left")
        assert transfers.drain_completed().failed == failed
        assert all(transfers.cause(one) == cancelled() for one in (A, B, C))
        assert transfers.residue()["held_blocks"] == (3 if begun else 0)


def test_a_parent_whose_engine_stops_takes_its_companions_with_it() -> None:
    transfers = group()
    transfers.drain_pending()
    transfers.quiet(A)
    report = transfers.drain_completed()
    assert list(report.failed) == list(report.released) == [A]
    assert {transfers.state(one) for one in (B, C)} == {KvTransferState.FAILED}
    assert transfers.residue()["held_blocks"] == 2


def test_case_60_a_helper_is_done_when_its_blocks_are_stored_and_looking_takes_nothing_away() -> None:
    transfers = group()
    transfers.drain_pending()
    for ready in (A, B):
        transfers.complete(ready)
    assert transfers.bundle(A) is None  # C is under way: begun is not stored
    transfers.complete(C)
    for _ in range(3):
        bundle = transfers.bundle(A)
        assert bundle is not None
        assert {role: job.blocks for role, job in bundle.items()} == {"negative": (2,), "image": (3,)}
        transfers.drain_completed()
    assert transfers.bundle(B) == {}
    assert transfers.bundle(D) is None


# Field cases of one rank


def test_case_10_a_preempted_receiver_does_not_ask_again_for_a_one_shot_transfer() -> None:
    engine = Engine()
    transfers = transfers_of(engine)
    transfers.mark(A, (1, 2))
    transfers.drain_pending()
    transfers.complete(A)
    transfers.drain_completed()
    engine.jobs.clear()
    assert not transfers.mark(A, (5, 6))  # rescheduled, with other blocks: it computes them itself
    assert transfers.drain_pending() == ()
    assert engine.jobs == {}
    assert transfers.cause(A) == OK
    assert transfers.mark(Identity("a", 3), (5, 6))  # another life is another transfer


@pytest.mark.parametrize("last_words", ["complete", "fail", "quiet", "deadline"])
def test_case_13_a_transfer_that_outlives_its_request_reaches_exactly_one_outcome(last_words: str) -> None:
    clock = HandClock()
    transfers = transfers_of(clock=clock, deadline_s=5.0)
    transfers.mark(A, (1,))
    transfers.drain_pending()
    transfers.cancel(A)  # the request is gone, nobody asks for it any more
    if last_words == "complete":
        transfers.complete(A)
    elif last_words == "fail":
        transfers.fail(A, "boom")
        transfers.quiet(A)
    elif last_words == "deadline":
        clock.advance(60)
        assert not transfers.tick_once()  # it has its outcome; that it is not quiet is seen in the residue
        assert transfers.residue()["failed"] == 1
        transfers.quiet(A)
    else:
        transfers.quiet(A)
    report = transfers.drain_completed()
    assert (report.completed, report.failed, report.released) == ((), {}, {A: (1,)})
    assert transfers.cause(A) == cancelled("cancelled")
    assert idle(transfers)


def test_case_20_a_reference_to_blocks_that_were_released_is_refused() -> None:
    clock = HandClock()
    transfers = transfers_of(clock=clock, deadline_s=5.0)
    transfers.mark(A, (1, 2))
    transfers.drain_pending()
    clock.advance(6)
    transfers.tick_once()
    assert transfers.blocks(A) == (1, 2)  # the lease is over, yet the engine may be reading: nobody else gets them
    transfers.quiet(A)
    freed = transfers.drain_completed().released[A]
    transfers.mark(B, freed)
    for stale in (A, Identity("a", 1), C):
        with pytest.raises(LocalProtocolError, match=r"event blocks_read refused in state (released|idle)"):
            transfers.blocks(stale)
    assert transfers.blocks(B) == (1, 2)


def test_case_32_an_abort_in_the_middle_leaves_nothing_and_frees_the_blocks_once() -> None:
    engine = Engine()
    transfers = transfers_of(engine)
    transfers.mark(A, (1, 2))
    transfers.drain_pending()
    transfers.cancel(A)
    transfers.quiet(A)
    assert transfers.drain_completed().released == {A: (1, 2)}
    assert idle(transfers)
    transfers.mark(B, (1, 2))
    transfers.quiet(A)  # the engine says it twice: B's blocks are B's
    assert 1 in transfers.holds
    assert transfers.drain_completed() == KvReport()


@pytest.mark.parametrize("leave", ["never drained", "failed early", "looked up and left"])
def test_case_36_holds_are_given_back_on_every_early_way_out(leave: str) -> None:
    holds = BlockHolds()
    transfers = transfers_of(holds=holds)
    holds.hold("look-up of a", (1, 2))
    if leave != "looked up and left":
        transfers.mark(A, (1, 2))
        if leave == "failed early":
            transfers.fail(A, "boom")
        else:
            transfers.cancel(A)
        assert transfers.drain_completed().released == {A: ()}  # the look-up still holds them
    assert holds.drop("look-up of a") == (1, 2)
    assert len(holds) == 0
    assert idle(transfers)


def test_case_39_a_partial_or_empty_transfer_is_decided_when_its_owner_is_done() -> None:
    transfers = transfers_of()
    transfers.mark(A, ())
    transfers.mark(B, (1,))
    transfers.drain_pending()
    transfers.complete(A)  # of nothing at all
    transfers.ack(B, 0)
    assert transfers.drain_completed() == KvReport((A,), {}, {A: ()})
    transfers.cancel(B)  # its owner has finished: rank 1 is not waited for
    transfers.quiet(B)
    assert transfers.drain_completed() == KvReport((), {}, {B: (1,)})
    assert idle(transfers)
    nobody = transfers_of(ranks=())
    nobody.mark(C, (4,))
    assert nobody.drain_pending() == ()
    assert nobody.drain_completed() == KvReport((C,), {}, {C: (4,)})


def test_case_41_two_engines_that_report_one_load_complete_it_once() -> None:
    transfers = transfers_of(ranks=(0, 1))
    transfers.mark(A, (1,))
    transfers.drain_pending()
    for rank in (0, 0, 1, 1, 0):
        transfers.ack(A, rank)
    transfers.complete(A)
    assert transfers.drain_completed() == KvReport((A,), {}, {A: (1,)})
    transfers.ack(A, 0)
    assert transfers.drain_completed() == KvReport()


def test_case_42_a_hold_belongs_to_its_holder() -> None:
    holds = BlockHolds()
    transfers = transfers_of(holds=holds)
    transfers.mark(A, (7,))
    transfers.mark(B, (7,))
    transfers.drain_pending()
    transfers.complete(A)
    assert transfers.drain_completed().released == {A: ()}
    for _ in range(2):
        transfers.cancel(A)  # A lets go again: B's hold is not A's to give
        transfers.quiet(A)
    assert 7 in holds
    with pytest.raises(ConfigError, match=r"^holder: 'a' cannot be used; accepted: one that holds blocks$"):
        holds.drop("a")
    transfers.complete(B)
    assert transfers.drain_completed().released == {B: (7,)}


def test_case_62_a_failure_is_known_early_and_the_blocks_come_back_with_the_last_piece() -> None:
    transfers = transfers_of(ranks=(0, 1, 2))
    transfers.mark(A, (1,))
    transfers.drain_pending()
    transfers.fail(A, "piece 1 failed")
    report = transfers.drain_completed()
    assert (report.failed, report.released) == ({A: error("piece 1 failed")}, {})
    for rank in (1, 0):
        transfers.ack(A, rank)  # over, late
        assert transfers.drain_completed() == KvReport()
    transfers.ack(A, 2)
    assert transfers.drain_completed() == KvReport((), {}, {A: (1,)})


def test_case_63_blocks_that_several_engines_save_are_free_after_the_last() -> None:
    holds = BlockHolds()
    both = [transfers_of(holds=holds, ranks=(0,)) for _ in range(2)]
    for saver in both:
        saver.mark(A, (1, 2))
        saver.drain_pending()
    both[0].complete(A)
    assert both[0].drain_completed().released == {A: ()}
    assert 1 in holds
    both[1].complete(A)
    assert both[1].drain_completed().released == {A: (1, 2)}


def test_case_67_what_was_never_tried_is_not_taken_for_done() -> None:
    engine = Engine()
    engine.raises = "submit failed"
    transfers = transfers_of(engine)
    transfers.mark(A, (1,))
    transfers.drain_pending()
    transfers.mark(B, (2,))  # the batch broke off before it
    report = transfers.drain_completed()
    assert (report.completed, list(report.failed)) == ((), [A])
    assert transfers.state(B) is KvTransferState.MARKED
    assert transfers.cause(B) is None
    with pytest.raises(LocalProtocolError, match="event piece_repeated refused in state marked"):
        transfers.complete(B)


def test_case_74_who_looks_up_twice_holds_twice_and_gives_both_back() -> None:
    holds = BlockHolds()
    for look_up in (1, 2):
        holds.hold((A, look_up), (7,))
    with pytest.raises(ConfigError, match=r"accepted: one that holds nothing yet$"):
        holds.hold((A, 1), (8,))
    assert holds.drop((A, 1)) == ()
    assert holds.drop((A, 2)) == (7,)
    assert len(holds) == 0


# A pool of blocks, an engine that reads whenever it likes, and no early release


class BlockPool(RuleBasedStateMachine):
    """Blocks are poisoned as they are released, and given to the next request, which writes its own number into them."""

    @initialize(ranks=st.sampled_from([(), (0,), (0, 1)]))
    def begin(self, ranks: tuple[int, ...]) -> None:
        self.clock, self.engine, self.ranks = HandClock(), Engine(), ranks
        self.transfers = transfers_of(self.engine, ranks=ranks, clock=self.clock, deadline_s=50.0)
        self.memory = [POISON] * 8
        self.free = list(range(8))
        self.numbers = itertools.count(1)
        self.owned: dict[Identity, tuple[int, ...]] = {}  # marked and not released
        self.touching: dict[Identity, set[int]] = {}  # begun, and ranks that the engine is not done with
        self.cancelled: set[Identity] = set()
        self.outcomes: dict[Identity, str] = {}
        self.parent_of: dict[Identity, Identity] = {}
        self.waiting: list[Identity] = []  # bound, not marked

    def mark(self, identity: Identity, count: int) -> None:
        blocks = tuple(self.free[:count])
        del self.free[:count]
        for block in blocks:
            self.memory[block] = float(identity.generation)
        self.owned[identity] = blocks
        if not self.transfers.mark(identity, blocks):  # a group that failed meanwhile
            self.give_back(identity, blocks)

    def give_back(self, identity: Identity, blocks: tuple[int, ...]) -> None:
        assert self.owned.pop(identity) == blocks
        assert identity not in self.touching, "an engine may still touch them"
        for block in blocks:
            self.memory[block] = POISON
        self.free += blocks

    @rule(count=st.integers(0, 3))
    def a_request_is_marked(self, count: int) -> None:
        self.mark(Identity("r", next(self.numbers)), count)

    @rule()
    def a_group_is_bound(self) -> None:
        parent, image = (Identity("r", next(self.numbers)) for _ in range(2))
        self.transfers.bind(parent, {"image": image})
        self.parent_of[image] = parent
        self.waiting += [image, parent]

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(0, 2))
    def one_of_a_group_is_marked(self, count: int) -> None:
        self.mark(self.waiting.pop(), count)

    @rule()
    def the_runner_drains(self) -> None:
        for job in self.transfers.drain_pending():
            assert job.blocks == self.owned[job.identity]
            if job.ranks:  # one without waits for its companions only
                self.touching[job.identity] = set(job.ranks)

    @precondition(lambda self: any(self.touching.values()))
    @rule(data=st.data())
    def a_piece_is_delivered(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from([one for one, ranks in self.touching.items() if ranks]))
        rank = data.draw(st.sampled_from(sorted(self.touching[identity])))
        self.touching[identity].discard(rank)
        if not self.touching[identity]:
            del self.touching[identity]
        self.transfers.ack(identity, rank)

    @precondition(lambda self: self.touching)
    @rule(data=st.data())
    def the_engine_fails(self, data: st.DataObject) -> None:
        self.transfers.fail(data.draw(st.sampled_from(list(self.touching))), "boom")

    @precondition(lambda self: self.engine.aborted)
    @rule()
    def the_engine_answers_an_abort(self) -> None:
        identity, _ = self.engine.aborted.popitem()
        self.touching.pop(identity, None)
        self.transfers.quiet(identity)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def the_owner_cancels(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(list(self.owned)))
        if self.transfers.cause(identity) is None:
            self.cancelled.add(identity)
        self.transfers.cancel(identity)

    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        while self.transfers.tick_once():
            pass

    @rule()
    def the_scheduler_collects(self) -> None:
        report = self.transfers.drain_completed()
        for identity in report.completed:
            assert self.outcomes.setdefault(identity, "completed") == "completed"
            assert identity not in self.cancelled
        for identity, cause in report.failed.items():
            assert self.outcomes.setdefault(identity, f"failed: {cause}") == f"failed: {cause}", "two outcomes"
            assert identity not in self.parent_of, "a companion's failure is its parent's"
            assert identity not in self.cancelled, "its owner knows"
        for identity, blocks in report.released.items():
            self.give_back(identity, blocks)

    @invariant()
    def what_the_engine_reads_is_its_own(self) -> None:
        for identity in getattr(self, "touching", {}):
            job = self.engine.jobs[identity]
            assert [self.memory[block] for block in job.blocks] == [float(identity.generation)] * len(job.blocks)

    @invariant()
    def free_blocks_are_poisoned(self) -> None:
        assert all(self.memory[block] == POISON for block in getattr(self, "free", ()))

    def teardown(self) -> None:
        """No more work: everything ends, and everything is given back."""
        if not hasattr(self, "transfers"):
            return
        for _ in range(8):
            self.the_runner_drains()
            self.clock.advance(1_000)
            while self.transfers.tick_once():
                pass
            while self.engine.aborted:
                self.the_engine_answers_an_abort()
            self.the_scheduler_collects()
        assert idle(self.transfers)
        assert sorted(self.free) == list(range(8))
        assert self.touching == {}


def test_no_block_is_released_while_an_engine_may_touch_it_and_every_transfer_has_one_outcome() -> None:
    found = settings(derandomize=True, max_examples=200, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(BlockPool, settings=found)


# Whole caches over connectors

SIZES = (1, 2, 4)
PAIRS = [(a, b) for a in SIZES for b in SIZES]
Pair = Callable[[Edge], tuple[Any, Any]]


@pytest.fixture(params=["memory", "shm"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """Makes the two ends of an edge."""
    if request.param == "memory":
        return lambda edge: memory_pair(Hello(edge))

    def over_shm(edge: Edge) -> tuple[Any, Any]:
        source = shm_receiver(Hello(edge), tmp_path / "edge")
        return shm_sender(Hello(edge), tmp_path / "edge", arena_bytes=1 << 20), source

    return over_shm


class Rank:
    """One rank at one end: its cache, its blocks, its transfers."""

    def __init__(
        self, mover: type[Any], plan: HeadPlan, rank: int, cache: list[torch.Tensor], ends: dict[int, Any]
    ) -> None:
        self.clock = HandClock()
        sends = mover is KvBlockSender
        self.layers = cache
        heads = len(plan.heads(rank, of_sender=sends))
        self.mover = mover(PagedKvCache(cache, heads), plan, rank, edge=EDGE, connectors=ends, clock=self.clock)
        self.transfers = KvTransfers(
            EDGE, mover.direction, ranks=self.mover.ranks, manager=self.mover, clock=self.clock, deadline_s=50.0
        )
        self.completed: list[Identity] = []
        self.failed: dict[Identity, Cause] = {}
        self.kept: dict[Identity, list[torch.Tensor]] = {}  # what a completed transfer had in its blocks
        self.poisoned: set[int] = set()

    def mark(self, identity: Identity, blocks: tuple[int, ...]) -> None:
        assert self.transfers.mark(identity, blocks)
        self.poisoned.difference_update(blocks)

    def step(self) -> bool:
        self.transfers.drain_pending()
        done = [self.mover.step(rank) for rank in self.mover.ranks]
        return any(done)

    def collect(self) -> None:
        """Take what there is; released blocks are poisoned at once."""
        held = {one: self.transfers.blocks(one) for one in self.owned()}
        report = self.transfers.drain_completed()
        self.completed += report.completed
        self.failed.update(report.failed)
        for identity in report.completed:
            self.kept[identity] = [layer[:, list(held[identity])].clone() for layer in self.layers]
        for blocks in report.released.values():
            known = [block for block in blocks if block < NUM_BLOCKS]
            for layer in self.layers:
                layer[:, known] = POISON
            self.poisoned.update(known)

    def owned(self) -> list[Identity]:
        return [one for one in (A, B, C, D) if self.transfers.state(one) is KvTransferState.COMPLETED]

    def check(self) -> None:
        """Nothing was written into blocks that were given back, and nothing is left."""
        for layer in self.layers:
            assert torch.all(layer[:, sorted(self.poisoned)] == POISON)
        assert idle(self.transfers)
        left = self.mover.residue()
        left.pop("remembered", None)
        assert not any(left.values())
        assert not any(connector.health().entries["ledger"] for connector in self.mover._connectors.values())


class World:
    """All ranks of both stages in one process, joined by connectors."""

    def __init__(self, pair: Pair, from_tp: int, to_tp: int, heads: int = 4, block_size: int = BLOCK_SIZE) -> None:
        self.plan = plan = HeadPlan(from_tp, to_tp, heads)
        torch.manual_seed(7)
        self.whole = [torch.randn(2, NUM_BLOCKS, block_size, heads, HEAD_SIZE) for _ in range(LAYERS)]
        ends = {(a, b): pair(plan.edge(EDGE, a, b)) for a in range(from_tp) for b in plan.target_ranks(a)}
        self.senders = [
            Rank(
                KvBlockSender, plan, a, self.shard(a, of_sender=True), {b: ends[a, b][0] for b in plan.target_ranks(a)}
            )
            for a in range(from_tp)
        ]
        self.receivers = [
            Rank(
                KvBlockReceiver,
                plan,
                b,
                [torch.full_like(layer, POISON) for layer in self.shard(b, of_sender=False)],
                {a: ends[a, b][1] for a in plan.source_ranks(b)},
            )
            for b in range(to_tp)
        ]
        self.ranks = [*self.senders, *self.receivers]

    def shard(self, rank: int, *, of_sender: bool) -> list[torch.Tensor]:
        held = self.plan.heads(rank, of_sender=of_sender)
        return [layer[..., held.start : held.stop, :].clone() for layer in self.whole]

    def settle(self, *ranks: Rank) -> None:
        """Step until nothing happens, a few rounds in a row: a socket may need a moment."""
        still = 0
        for _ in range(10_000):
            done = [rank.step() for rank in ranks or self.ranks]
            still = 0 if any(done) else still + 1
            if still > 3:
                break
        else:
            raise AssertionError("no end of steps")
        for rank in ranks or self.ranks:
            rank.collect()

    def send(self, identity: Identity, blocks: tuple[int, ...] = SENT) -> None:
        for rank in self.senders:
            rank.mark(identity, blocks)

    def recv(self, identity: Identity, blocks: tuple[int, ...] = RECEIVED) -> None:
        for rank in self.receivers:
            rank.mark(identity, blocks)

    def check_arrived(self, identity: Identity, sent: tuple[int, ...] = SENT) -> None:
        for number, rank in enumerate(self.receivers):
            wanted = [layer[:, list(sent)] for layer in self.shard(number, of_sender=False)]
            assert all(torch.equal(one, other) for one, other in zip(rank.kept[identity], wanted, strict=True))
        assert all(rank.completed == [identity] and not rank.failed for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.mover.close()


Make = Callable[..., World]


@pytest.fixture
def world(pair: Pair) -> Iterator[Make]:
    made: list[World] = []

    def make(*args: Any, **kwargs: Any) -> World:
        made.append(World(pair, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(("from_tp", "to_tp"), PAIRS)
def test_every_receiving_rank_gets_its_heads_of_the_unsharded_cache(
    world: Make, from_tp: int, to_tp: int, heads: int
) -> None:
    w = world(from_tp, to_tp, heads)
    w.send(A)
    w.recv(A)
    w.settle()
    w.check_arrived(A)
    for rank in w.ranks:
        rank.check()


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 20_000], ids=["within early credit", "beyond it"])
def test_what_comes_before_it_is_asked_for_waits(world: Make, block_size: int) -> None:
    w = world(2, 1, block_size=block_size)
    w.send(A)
    w.settle()
    assert w.receivers[0].mover.residue()["early"] == 1
    w.recv(A)
    w.settle()
    w.check_arrived(A)
    for rank in w.ranks:
        rank.check()


def test_two_requests_at_a_time_and_none_of_their_blocks_are_mixed_up(world: Make) -> None:
    w = world(2, 2)
    for identity, sent, received in ((A, (0, 1), (3, 2)), (B, (1, 4, 9), (5, 6, 7))):
        w.send(identity, sent)
        w.recv(identity, received)
    w.settle()
    for number, rank in enumerate(w.receivers):
        for identity, sent in ((A, (0, 1)), (B, (1, 4, 9))):
            wanted = [layer[:, list(sent)] for layer in w.shard(number, of_sender=False)]
            assert all(torch.equal(one, other) for one, other in zip(rank.kept[identity], wanted, strict=True))
        rank.check()


def test_an_empty_transfer_arrives_too(world: Make) -> None:
    w = world(1, 2)
    w.send(A, ())
    w.recv(A, ())
    w.settle()
    w.check_arrived(A, ())


@pytest.mark.parametrize("when", ["before", "opened", "stored", "delivered"])
def test_a_sender_that_cancels_is_heard_by_its_receivers_and_no_block_is_used_again_too_early(
    world: Make, when: str
) -> None:
    w = world(2, 1, block_size=20_000)
    w.recv(A)
    w.send(A)
    first, receiver = w.senders[0], w.receivers[0]
    if when != "before":
        w.settle(*w.senders)
    if when in {"stored", "delivered"}:
        receiver.step()
        w.settle(first)
    if when == "delivered":
        w.settle()
    first.transfers.cancel(A, "user left")
    w.settle()
    if when == "delivered":
        w.check_arrived(A)
    else:
        assert receiver.completed == []
        assert receiver.failed == w.senders[1].failed == {A: cancelled()}
        assert first.failed == {}  # its owner knows
    for rank in w.ranks:
        rank.check()


def test_a_receiver_that_cancels_fails_its_senders_with_its_own_words(world: Make) -> None:
    w = world(1, 2)
    w.recv(A)
    w.settle()
    w.receivers[1].transfers.cancel(A, "user left")
    w.send(A)
    w.settle()
    assert w.senders[0].failed == {A: cancelled()}
    assert w.receivers[0].failed == {A: cancelled()} or w.receivers[0].completed == [A]
    assert w.receivers[1].completed == []
    for rank in w.ranks:
        rank.check()


@pytest.mark.parametrize("late", [False, True])
def test_a_sender_that_is_gone_fails_what_waits_for_it(world: Make, *, late: bool) -> None:
    w = world(2, 1, block_size=20_000)
    if not late:
        w.recv(A)
    w.settle()  # they meet
    w.send(A)
    w.settle(*w.senders)
    w.receivers[0].step()
    w.senders[1].mover.close()
    w.settle(w.receivers[0])
    if late:
        w.recv(A)
    w.settle()
    assert w.receivers[0].failed == {A: error("peer_lost")}
    assert w.senders[1].failed == {A: cancelled("shutdown")}
    assert w.senders[0].failed == {A: error("peer_lost")}  # with the words of the receiver that stopped it
    for rank in w.ranks:
        rank.check()


def test_a_receiver_that_is_gone_fails_its_senders(world: Make) -> None:
    w = world(1, 2, block_size=20_000)
    w.send(A)
    w.settle()
    w.receivers[0].mover.close()
    w.settle(w.senders[0])
    assert w.senders[0].failed == {A: error("peer_lost")}
    w.recv(A)
    w.settle(w.senders[0], w.receivers[1])
    assert w.receivers[1].failed == {A: error("peer_lost")}
    for rank in (w.senders[0], w.receivers[1]):
        rank.check()


def test_more_early_transfers_than_may_be_are_turned_away_the_oldest_first(pair: Pair) -> None:
    plan = HeadPlan(1, 1, 1)
    sink, source = pair(plan.edge(EDGE, 0, 0))
    layers = [torch.zeros(2, NUM_BLOCKS, 4, 1, 2)]
    cache = PagedKvCache(layers, 1)
    sender = Rank(KvBlockSender, plan, 0, layers, {0: sink})
    receiver = KvBlockReceiver(cache, plan, 0, edge=EDGE, connectors={0: source}, early_max=2)
    for identity, block in ((A, 1), (B, 2), (C, 3)):
        sender.mark(identity, (block,))
    for _ in range(50):
        sender.step()
        receiver.step(0)
    sender.collect()
    assert list(sender.failed) == [A]
    assert sender.failed[A].reason.startswith("unclaimed: ")
    transfers = KvTransfers(EDGE, KvDirection.RECV, manager=receiver)
    transfers.mark(A, (1,))
    transfers.drain_pending()
    assert transfers.drain_completed().failed == {A: sender.failed[A]}
    sender.mover.close()
    receiver.close()


def test_a_request_that_a_receiver_rejects_before_it_asks_for_it_fails_at_its_senders_at_once(world: Make) -> None:
    w = world(2, 1, block_size=20_000)
    w.send(A)
    w.settle()
    w.recv(A, ())
    w.receivers[0].transfers.fail(A, "rejected")
    w.settle()
    for rank in w.ranks:
        assert rank.failed == {A: error("rejected")}
        rank.check()


def test_of_what_ends_before_the_other_end_is_met_a_bounded_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_fsm.runtime.kv_blocks.UNTOLD_MAX", 2)
    plan = HeadPlan(1, 1, 1)
    sink, source = memory_pair(Hello(plan.edge(EDGE, 0, 0)))
    source.close()
    sender = Rank(KvBlockSender, plan, 0, [torch.zeros(2, NUM_BLOCKS, 4, 1, 2)], {0: sink})
    for identity in (A, B, C, D):
        sender.mark(identity, (1,))
        sender.transfers.cancel(identity)
        sender.step()
    assert sender.mover.residue() == {"pieces": 2, "given": 0}
    sender.mover.close()
    assert sender.mover.residue() == {"pieces": 0, "given": 0}


def test_what_its_sender_cancels_before_it_is_asked_for_leaves_nothing_early(world: Make) -> None:
    w = world(1, 1, block_size=20_000)
    w.send(A)
    w.settle()
    w.senders[0].transfers.cancel(A, "user left")
    w.settle()
    assert w.receivers[0].mover.residue()["early"] == 0
    w.recv(A)
    w.settle()
    assert w.receivers[0].failed == {A: cancelled()}
    for rank in w.ranks:
        rank.check()


class FaultyEnd:
    """A sending end whose puts fail as told, and else go on to the real one."""

    def __init__(self, real: Any, *faults: PutOutcome | Exception) -> None:
        self.real, self.faults = real, list(faults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def put(self, frame: Frame) -> PutOutcome:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        return self.real.put(frame) if fault is None else fault


UNUSED = PutOutcome(PutStatus.REFUSED, "nothing is put any more")
RETRY, REFUSED = PutOutcome(PutStatus.RETRY, "for now"), PutOutcome(PutStatus.REFUSED, "too large")


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([RETRY, OSError("no memory"), RETRY], ""),
        ([None, RETRY, RETRY, RETRY], ""),
        ([REFUSED], "put to rank 0 given up: too large"),
        ([None, REFUSED], "put to rank 0 given up: too large"),
        ([None, *[RETRY] * 4], "put to rank 0 given up: for now"),
        ([None, REFUSED, REFUSED, UNUSED], "put to rank 0 given up: too large"),  # nor does the failed end get through
        ([*[ConnectorClosedError("closed")] * 2], "put to rank 0 given up: closed"),
    ],
)
def test_a_put_is_tried_again_and_what_is_given_up_fails_with_its_reason(faults: list[Any], reason: str) -> None:
    plan = HeadPlan(1, 1, 1)
    sink, source = memory_pair(Hello(plan.edge(EDGE, 0, 0)))
    caches = [[torch.full((2, NUM_BLOCKS, 4, 1, 2), value)] for value in (1.0, POISON)]
    sender = Rank(KvBlockSender, plan, 0, caches[0], {0: FaultyEnd(sink)})
    receiver = Rank(KvBlockReceiver, plan, 0, caches[1], {0: source})
    for _ in range(3):
        sender.step(), receiver.step()
    unused = faults.count(UNUSED)
    sender.mover._connectors[0].faults = faults
    sender.mark(A, (1,))
    receiver.mark(A, (2,))
    for _ in range(20):
        sender.step(), receiver.step()
    sender.collect(), receiver.collect()
    assert len(faults) == unused
    assert sender.failed == ({A: error(reason)} if reason else {})
    assert (sender.completed, receiver.completed) == (([], []) if reason else ([A], [A]))
    receiver.clock.advance(60)  # the other end learns of it by the failed end, or by its deadline
    receiver.transfers.tick_once()
    receiver.collect()
    assert list(receiver.failed) == ([A] if reason else [])
    for rank in (sender, receiver):
        rank.check()
        rank.mover.close()


class WatchedCache(PagedKvCache):
    """A cache with something that happens as its blocks are about to be written."""

    meanwhile: Callable[[], None]

    def write(self, index: torch.Tensor, merged: Any) -> None:
        self.meanwhile()
        super().write(index, merged)


def watched(source: Any, meanwhile: Callable[[], None]) -> Rank:
    """A receiver of one head whose writes are watched."""
    layers = [torch.full((2, NUM_BLOCKS, 4, 1, 2), POISON)]
    receiver = Rank(KvBlockReceiver, HeadPlan(1, 1, 1), 0, layers, {0: source})
    receiver.mover._cache = WatchedCache(layers, 1)
    receiver.mover._cache.meanwhile = meanwhile
    return receiver


@pytest.mark.parametrize("how", ["cancel", "raise"])
def test_blocks_that_are_being_written_are_held_until_they_are_written(pair: Pair, how: str) -> None:
    plan = HeadPlan(1, 1, 1)
    sink, source = pair(plan.edge(EDGE, 0, 0))
    sender = Rank(KvBlockSender, plan, 0, [torch.ones(2, NUM_BLOCKS, 4, 1, 2)], {0: sink})
    seen: list[object] = []

    def meanwhile() -> None:
        if how == "raise":
            raise RuntimeError("no memory")
        receiver.transfers.cancel(A, "user left")
        seen.extend([str(receiver.transfers.state(A)), 2 in receiver.transfers.holds])

    receiver = watched(source, meanwhile)
    sender.mark(A, (1,))
    receiver.mark(A, (2,))
    for _ in range(20):
        sender.step(), receiver.step()
    receiver.collect(), sender.collect()
    if how == "cancel":
        assert seen == ["failed", True]
        assert receiver.transfers.cause(A) == cancelled()
        assert (receiver.failed, receiver.completed, sender.completed) == ({}, [], [A])
    else:
        assert receiver.failed == sender.failed == {A: error("writing the blocks raised RuntimeError: no memory")}
    for rank in (sender, receiver):
        rank.check()
        rank.mover.close()


def test_a_receiver_that_acknowledges_what_was_not_sent_is_not_believed(pair: Pair) -> None:
    plan = HeadPlan(1, 1, 1)
    sink, source = pair(plan.edge(EDGE, 0, 0))
    sender = Rank(KvBlockSender, plan, 0, [torch.ones(2, NUM_BLOCKS, 40_000, 1, 2)], {0: sink})
    sender.mark(A, (1,))
    for _ in range(10):
        sender.step()
        source.wait(0)
        source.signals()
        while (arrival := source.get()) is not None:
            arrival.discard()
    source.stop(A, Cause(Outcome.DONE, "done"))
    for _ in range(10):
        sender.step()
    sender.collect()
    assert sender.failed == {A: error("rank 0 says that it has what was not sent yet")}
    sender.check()
    sender.mover.close()
    source.close()


class FaultySource:
    """A receiving end whose bodies fail to load as told."""

    def __init__(self, real: Any, *faults: Exception) -> None:
        self.real, self.faults = real, list(faults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def get(self) -> Any:
        arrival = self.real.get()
        if arrival is None or arrival.frame.kind is not FrameKind.END:
            return arrival
        return ScriptedArrival(arrival.frame, bytes(arrival.load()), self.faults, lambda: None)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([MemoryError("for now"), OSError("for now"), RuntimeError("for now")], ""),
        ([OSError("no memory")] * 4, "body given up: no memory"),
        ([RemoteProtocolError("outside the arena")], "outside the arena"),
    ],
)
def test_a_body_that_cannot_be_loaded_is_tried_again_and_then_given_up(faults: list[Exception], reason: str) -> None:
    plan = HeadPlan(1, 1, 1)
    sink, source = memory_pair(Hello(plan.edge(EDGE, 0, 0)))
    caches = [[torch.full((2, NUM_BLOCKS, 4, 1, 2), value)] for value in (1.0, POISON)]
    sender = Rank(KvBlockSender, plan, 0, caches[0], {0: sink})
    receiver = Rank(KvBlockReceiver, plan, 0, caches[1], {0: FaultySource(source, *faults)})
    sender.mark(A, (1,))
    receiver.mark(A, (2,))
    for _ in range(20):
        sender.step(), receiver.step()
    for rank in (sender, receiver):
        rank.collect()
        assert rank.failed == ({A: error(reason)} if reason else {})
        assert rank.completed == ([] if reason else [A])
        rank.check()
        rank.mover.close()


# What cannot be read


def test_case_65_what_cannot_be_read_fails_and_never_decodes_garbage(pair: Pair) -> None:
    """An unknown block, a consumed reference, a lease that is over, an unreadable body, a piece of another shape."""
    plan = HeadPlan(1, 1, 1)
    sink, source = pair(plan.edge(EDGE, 0, 0))
    receiver = Rank(KvBlockReceiver, plan, 0, [torch.full((2, NUM_BLOCKS, 4, 1, 2), POISON)], {0: source})
    good = torch.zeros(2, 1, 4, 1, 2)
    pieces = {
        "nothing": encode([]),
        "no tensors": encode(["k"]),
        "another dtype": encode([good.half()]),
        "too short": encode([good[:, :0]]),
        "other heads": encode([torch.zeros(2, 1, 4, 2, 2)]),
        "a tree": encode({"0": good}),
    }
    names = itertools.count(1)

    def deliver(frame: Callable[[Identity], Frame], blocks: tuple[int, ...] = (3,)) -> Cause:
        identity = Identity("x", next(names))
        receiver.mark(identity, blocks)
        for _ in range(5):
            receiver.step()
            sink.wait(0)
            sink.signals()
            sink.put(Frame(sink.edge, identity, FrameKind.OPEN))
            sink.put(frame(identity))
        receiver.collect()
        assert receiver.completed == []
        assert receiver.transfers.state(identity) is KvTransferState.RELEASED
        return receiver.failed.pop(identity)

    for what, body in pieces.items():
        cause = deliver(lambda one, body=body: Frame(sink.edge, one, FrameKind.END, seq=0, cause=OK, body=body))
        assert "expected" in cause.reason, what
    chunk = deliver(lambda one: Frame(sink.edge, one, FrameKind.DATA, seq=0, body=encode([good])))
    assert chunk == error("frame_invalid: a chunk came where one frame carries all")
    gone = deliver(lambda one: Frame(sink.edge, one, FrameKind.END, cause=error("lease over")))
    assert gone == error("lease over")
    bad = deliver(lambda one: Frame(sink.edge, one, FrameKind.OPEN), (NUM_BLOCKS,))
    assert bad.reason == "recv raised ConfigError: block: 10 cannot be used; accepted: an id from 0 to 9"
    assert torch.all(receiver.layers[0] == POISON)
    sink.close()
    receiver.mover.close()


def test_case_66_a_rejected_request_is_never_sent_and_the_receiver_checks_what_was_delivered(world: Make) -> None:
    w = world(1, 1)
    w.send(A)
    w.senders[0].transfers.fail(A, "rejected at admission")
    assert w.senders[0].transfers.drain_pending() == ()
    w.send(B, (1, 2))
    w.recv(B, (4, 5, 6))
    w.settle()
    assert "was expected" in w.receivers[0].failed[B].reason
    assert w.senders[0].failed == {A: error("rejected at admission"), B: w.receivers[0].failed[B]}
    for rank in w.ranks:
        rank.check()


def test_an_unknown_block_at_the_sender_fails_it_there(world: Make) -> None:
    w = world(1, 1)
    w.senders[0].transfers.mark(A, (NUM_BLOCKS,))
    w.senders[0].step()
    report = w.senders[0].transfers.drain_completed()
    assert report.failed[A].reason.startswith("send raised ConfigError: block: 10 cannot be used")
    assert report.released == {A: (NUM_BLOCKS,)}


def test_a_mover_that_does_not_fit_the_plan_is_refused_by_name() -> None:
    plan = HeadPlan(1, 2, 2)
    layers = [torch.zeros(2, 3, 4, 2, 2)]
    sink, source = memory_pair(Hello(plan.edge(EDGE, 0, 1)))
    cache = PagedKvCache(layers, 2)
    for connectors, named in (
        ({1: sink}, "connectors"),
        ({0: sink, 1: sink}, r"connectors\[0\]"),
        ({0: source, 1: sink}, r"connectors\[0\]"),
    ):
        with pytest.raises(ConfigError, match=f"^{named}: "):
            KvBlockSender(cache, plan, 0, edge=EDGE, connectors=connectors)
    with pytest.raises(ConfigError, match=r"^cache: '2 heads' cannot be used; accepted: the 1 of rank 1$"):
        KvBlockReceiver(cache, plan, 1, edge=EDGE, connectors={0: source})
    with pytest.raises(ConfigError, match=r"^early_max: 0 cannot"):
        KvBlockReceiver(cache, plan, 1, edge=EDGE, connectors={0: source}, early_max=0)
    for wrong in ([], [layers[0][0]], [layers[0], layers[0].half()], [torch.zeros(2, 3, 4, 3, 2)]):
        with pytest.raises(ConfigError, match=r"^layers: "):
            PagedKvCache(wrong, 2)


def test_a_mover_serves_one_direction_and_the_ranks_of_its_plan() -> None:
    plan = HeadPlan(1, 1, 1)
    sink, source = memory_pair(Hello(plan.edge(EDGE, 0, 0)))
    cache = PagedKvCache([torch.zeros(2, 3, 4, 1, 2)], 1)
    sender = KvBlockSender(cache, plan, 0, edge=EDGE, connectors={0: sink})
    receiver = KvBlockReceiver(cache, plan, 0, edge=EDGE, connectors={0: source})
    for mover, direction, ranks, words in (
        (sender, KvDirection.RECV, (0,), "recv raised ConfigError: direction: 'recv'"),
        (receiver, KvDirection.SEND, (0,), "send raised ConfigError: direction: 'send'"),
        (sender, KvDirection.SEND, (0, 1), "send raised ConfigError: ranks: [0, 1]"),
        (receiver, KvDirection.RECV, (1,), "recv raised ConfigError: ranks: [1]"),
    ):
        transfers = KvTransfers(EDGE, direction, ranks=ranks, manager=mover)
        transfers.mark(A, (1,))
        transfers.drain_pending()
        report = transfers.drain_completed()
        assert report.failed[A].reason.startswith(words)
        assert report.released == {A: (1,)}


def run_lives(w: World, lives: int) -> None:
    """One after the other, every third one cancelled somewhere on its way; threads step the connectors."""
    for life in range(lives):
        identity, cancel = Identity("r", life), life % 3 == 2
        for rank in w.ranks:
            rank.transfers.mark(identity, SENT if rank in w.senders else RECEIVED)
            rank.transfers.drain_pending()
        if cancel:
            w.receivers[life % 4].transfers.cancel(identity, "user left")
        for _ in range(1_000):
            if all(rank.transfers.cause(identity) for rank in w.ranks):
                break
            threading.Event().wait(0.01)
        causes = {rank.transfers.cause(identity) for rank in w.ranks}
        assert causes <= {OK, cancelled()}
        if not cancel:
            assert causes == {OK}
            for number, rank in enumerate(w.receivers):
                wanted = [layer[:, list(SENT)] for layer in w.shard(number, of_sender=False)]
                got = [layer[:, list(RECEIVED)] for layer in rank.layers]
                assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        for rank in w.ranks:
            rank.transfers.drain_completed()


def test_ranks_in_threads_of_their_own(world: Make) -> None:
    """One thread a connector, and the scheduler beside them: whatever the order, every transfer arrives whole or fails."""
    w = world(2, 4)
    stop = threading.Event()

    def serve(rank: Rank, remote: int) -> None:
        while not stop.is_set():
            rank.mover.step(remote, 0.02)

    threads = [threading.Thread(target=serve, args=(one, remote)) for one in w.ranks for remote in one.mover.ranks]
    for thread in threads:
        thread.start()
    try:
        run_lives(w, 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert all(idle(rank.transfers) for rank in w.ranks)
