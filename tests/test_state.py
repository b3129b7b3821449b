"""Producer state: one container a request, fenced by ownership alone. Every test here can fail.

A view is taken while its generation owns the state and used after that is over: never read from what is empty anyway.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import SenderEffect
from omni_fsm.protocol.sender import SenderHalf, SenderMoved
from omni_fsm.state import MixedStateError, Owner, Scope, StateError, StateRetiredError, StateStore, StateView
from omni_fsm.tables import sender_table

PATIENCE_S = 10.0
OLD = Owner("old", Identity("r7", 11))
NEW = Owner("new", Identity("r7", 4))  # a later life with a smaller number: generations have no order
OTHER = Owner("other", Identity("r8", 11))


def new_store() -> StateStore:
    return StateStore(threading.RLock())


def filled() -> tuple[StateStore, StateView]:
    """A store in which one generation keeps a list."""
    store = new_store()
    view = store.own(OLD)
    view.get_or_create("codec.history", list).append("a")
    return store, view


def unused() -> Any:
    raise AssertionError("the factory ran")


# B1: typed, namespaced, one container a request


def test_a_namespace_is_made_once_and_then_given_again() -> None:
    store, view = filled()
    assert view.get_or_create("codec.history", unused) == ["a"]
    assert store.get_or_create(OLD, "codec.history", unused) is view.get_or_create("codec.history", unused)


@pytest.mark.parametrize("value", [None, 0, "", [], {}])
def test_a_value_that_is_false_is_a_value(value: object) -> None:
    view = new_store().own(OLD)
    assert view.get_or_create("n", lambda: value) is value
    assert view.get_or_create("n", unused) is value


def test_namespaces_and_requests_do_not_see_each_other() -> None:
    store, view = filled()
    assert view.get_or_create("codec.tail", list) == []
    assert store.own(OTHER).get_or_create("codec.history", list) == []
    assert view.get_or_create("codec.history", unused) == ["a"]


@pytest.mark.parametrize("namespace", ["", None, 7, b"codec", ("a",)])
def test_a_namespace_that_is_no_text_is_refused_and_nothing_is_made(namespace: Any) -> None:
    view = new_store().own(OLD)
    with pytest.raises(ConfigError) as refused:
        view.get_or_create(namespace, unused)
    assert (refused.value.field, refused.value.value) == ("namespace", namespace)


def test_a_wrong_internal_id_is_refused_with_both_ids() -> None:
    """Identity names both ids: state is keyed by one, cleanup may be called with the other (case 71)."""
    store, view = filled()
    with pytest.raises(StateError, match="internal id 'wrong' is wrong, it is 'old' here"):
        store.get_or_create(Owner("wrong", OLD.identity), "codec.history", unused)
    assert view.get_or_create("codec.history", unused) == ["a"]


def test_case_71_both_names_of_a_request_lead_to_the_same_record() -> None:
    store = new_store()
    store.own(Owner("internal-1", Identity("external-1", 1))).get_or_create("n", list)
    assert len(store) == 1
    assert store.release(Identity("external-1", 1))
    assert len(store) == 0


# B2: fenced by ownership of the generation alone


def test_an_accessor_taken_inside_the_producer_reaches_nothing_after_the_release() -> None:
    store, view = filled()
    kept: Callable[..., Any] = view.get_or_create  # what a producer may have stored away
    assert kept("codec.history", unused) == ["a"]
    assert store.release(OLD.identity)
    with pytest.raises(StateRetiredError) as refused:
        kept("codec.history", list)
    assert (refused.value.request, refused.value.owner) == (OLD.identity, None)
    assert str(refused.value) == "state of r7#11: namespace 'codec.history' refused: no generation owns it"
    with pytest.raises(StateRetiredError):
        kept("codec.other", unused)
    assert len(store) == 0


def test_a_replaced_generation_neither_reads_nor_changes_its_successors_state() -> None:
    store, old = filled()
    store.release(OLD.identity)
    new = store.own(NEW)
    new.get_or_create("codec.history", list).append("b")
    with pytest.raises(StateRetiredError, match=r"generation 4 owns it") as refused:
        old.get_or_create("codec.history", unused)
    assert refused.value.owner == NEW
    with pytest.raises(StateRetiredError):
        old.get_or_create("codec.tail", list)
    assert not store.release(OLD.identity)  # a late cleanup of the first life
    store.reset_segment(OLD.identity)
    assert new.get_or_create("codec.history", unused) == ["b"]
    assert new.get_or_create("codec.tail", lambda: "new") == "new"


def test_a_generation_that_was_never_opened_owns_nothing() -> None:
    store = new_store()
    with pytest.raises(StateRetiredError, match="no generation owns it"):
        store.get_or_create(OLD, "n", unused)
    assert len(store) == 0


def test_a_second_owner_waits_until_the_first_is_released() -> None:
    store, old = filled()
    with pytest.raises(StateError, match=r"state of r7#4: r7#11 owns it, as 'old'"):
        store.own(NEW)
    assert old.get_or_create("codec.history", unused) == ["a"]
    assert store.own(OLD).get_or_create("codec.history", unused) == ["a"]  # owning twice is owning once
    store.release(OLD.identity)
    assert store.own(NEW).get_or_create("codec.history", list) == []


def test_a_cancelled_but_current_generation_still_reads_its_state() -> None:
    """Property 8. The fence is the ownership: the half is cancelled, its end has not been put."""
    store, view = filled()
    half = sender()
    half.submit_end(at_ns=1)
    half.on_task_begun()
    half.on_cancelled(Cause(Outcome.CANCELLED, "user left"))
    assert half.state == "cancelled_current"
    assert view.get_or_create("codec.history", unused) == ["a"]
    half.on_produced(None)
    perform(store, half.on_stored())
    with pytest.raises(StateRetiredError):
        view.get_or_create("codec.history", list)
    assert len(store) == 0


def test_a_factory_that_overlaps_the_cleanup_brings_nothing_back() -> None:
    """The factory itself releases: the cleanup is complete before the value would be stored."""
    store, view = filled()

    def factory() -> str:
        assert store.release(OLD.identity)
        return "late"

    with pytest.raises(StateRetiredError):
        view.get_or_create("codec.tail", factory)
    assert len(store) == 0


def test_a_factory_that_overlaps_cleanup_and_successor_leaves_the_successor_alone() -> None:
    store, view = filled()

    def factory() -> str:
        store.release(OLD.identity)
        store.own(NEW).get_or_create("codec.tail", lambda: "new")
        return "late"

    with pytest.raises(StateRetiredError, match="generation 4 owns it"):
        view.get_or_create("codec.tail", factory)
    assert store.get_or_create(NEW, "codec.tail", unused) == "new"


def test_a_factory_on_another_thread_overlaps_the_cleanup_and_runs_without_the_lock() -> None:
    lock = threading.RLock()
    store = StateStore(lock)
    view = store.own(OLD)
    inside, go_on = threading.Event(), threading.Event()

    def factory() -> str:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        return "late"

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(view.get_or_create, "n", factory)
        assert inside.wait(PATIENCE_S)
        assert lock.acquire(blocking=False)  # from this thread: the factory's does not hold it
        lock.release()
        assert store.release(OLD.identity)
        go_on.set()
        with pytest.raises(StateRetiredError):
            made.result(PATIENCE_S)
    assert len(store) == 0


def test_a_factory_runs_with_the_lock_free_when_the_namespace_is_new_and_when_it_is_not() -> None:
    lock = threading.RLock()
    store = StateStore(lock)
    view = store.own(OLD)
    free: list[bool] = []

    def is_free() -> bool:
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    with ThreadPoolExecutor(1) as pool:

        def factory() -> list[str]:
            free.append(pool.submit(is_free).result(PATIENCE_S))
            return []

        view.get_or_create("first", factory)
        view.get_or_create("second", factory)  # the container exists now
    assert free == [True, True]


def test_two_factories_that_meet_both_get_the_first_value() -> None:
    store = new_store()
    view = store.own(OLD)
    both_inside = threading.Barrier(2, timeout=PATIENCE_S)
    values = iter(["one", "two"])

    def factory() -> str:
        both_inside.wait()
        return next(values)

    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(view.get_or_create, "n", factory) for _ in range(2)]
        results = {future.result(PATIENCE_S) for future in made}
    assert len(results) == 1
    assert view.get_or_create("n", unused) in results


def test_of_two_factories_the_one_that_returns_first_wins_for_both() -> None:
    view = new_store().own(OLD)

    def slow() -> str:
        assert view.get_or_create("n", lambda: "fast") == "fast"
        return "slow"

    assert view.get_or_create("n", slow) == "fast"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_factory_that_raises_leaves_nothing_behind(earlier: bool) -> None:  # noqa: FBT001
    store = new_store()
    view = store.own(OLD)
    if earlier:
        view.get_or_create("before", list)

    def factory() -> None:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        view.get_or_create("n", factory)
    if not earlier:
        store.raw["r7"] = "legacy"  # no empty container is in the way of the other kind
        assert store.raw["r7"] == "legacy"
    else:
        assert view.get_or_create("n", lambda: "second try") == "second try"
        assert view.get_or_create("before", unused) == []


def test_a_factory_may_use_other_namespaces_of_its_request() -> None:
    view = new_store().own(OLD)
    assert view.get_or_create("outer", lambda: [view.get_or_create("inner", list)]) == [[]]
    assert view.get_or_create("inner", unused) == []


# B3: legacy raw entries


@pytest.mark.parametrize("entry", [{"codes": [1, 2]}, [], "text", None, object()])
def test_a_raw_entry_goes_on_working(entry: object) -> None:
    store = new_store()
    store.own(OLD)
    store.raw["r7"] = entry
    assert store.raw["r7"] is entry
    assert "r7" in store.raw
    assert (list(store.raw), len(store.raw)) == (["r7"], 1)
    assert store.raw.pop("r7") is entry
    assert ("r7" in store.raw, store.raw.get("r7")) == (False, None)
    assert store.raw.setdefault("r7", {}) == {}
    del store.raw["r7"]
    with pytest.raises(KeyError):
        store.raw["r7"]


def test_a_namespace_is_refused_where_a_raw_entry_is_and_the_entry_stays() -> None:
    store = new_store()
    view = store.own(OLD)
    store.raw["r7"] = {"codes": [1]}
    with pytest.raises(MixedStateError) as refused:
        view.get_or_create("codec.history", unused)
    assert (refused.value.external_id, refused.value.held) == ("r7", "a raw entry")
    assert "holds a raw entry, namespace 'codec.history' refused" in str(refused.value)
    assert store.raw["r7"] == {"codes": [1]}


def test_a_raw_entry_is_refused_where_namespaces_are_and_they_stay() -> None:
    store, view = filled()
    for touch in (
        lambda: store.raw.__setitem__("r7", {"codes": [1]}),
        lambda: store.raw["r7"],
        lambda: store.raw.__delitem__("r7"),
        lambda: store.raw.setdefault("r7", {}),
    ):
        with pytest.raises(MixedStateError, match="holds namespaces, a raw entry refused"):
            touch()
    assert view.get_or_create("codec.history", unused) == ["a"]
    assert (list(store.raw), len(store.raw)) == ([], 0)


def test_a_raw_entry_that_was_written_while_the_factory_ran_is_not_overwritten() -> None:
    store = new_store()
    view = store.own(OLD)

    def factory() -> str:
        store.raw["r7"] = "legacy"
        return "namespaced"

    with pytest.raises(MixedStateError):
        view.get_or_create("n", factory)
    assert store.raw["r7"] == "legacy"


def test_both_kinds_live_side_by_side_in_different_requests() -> None:
    store, view = filled()
    store.own(OTHER)
    store.raw["r8"] = {"codes": []}
    assert list(store.raw) == ["r8"]
    assert view.get_or_create("codec.history", unused) == ["a"]


@pytest.mark.parametrize("before", ["never opened", "released"])
def test_a_raw_write_for_an_id_that_nobody_owns_is_refused(before: str) -> None:
    store = new_store()
    if before == "released":
        store.own(OLD)
        store.raw["r7"] = "first"
        store.release(OLD.identity)
    with pytest.raises(StateRetiredError, match="a raw entry refused: no generation owns it"):
        store.raw["r7"] = "late"
    with pytest.raises(StateRetiredError):
        store.raw.setdefault("r7", "late")
    assert ("r7" in store.raw, len(store.raw), len(store)) == (False, 0, 0)


def test_a_raw_write_that_is_refused_names_no_generation_that_never_was() -> None:
    """A legacy producer gives an external id and nothing else: the message must not make a generation up."""
    store = new_store()
    with pytest.raises(StateRetiredError) as refused:
        store.raw["r7"] = "late"
    assert "r7" in str(refused.value)
    assert "#0" not in str(refused.value)


# B4, B6: cleanup of the whole request, and of a segment


@pytest.mark.parametrize("kind", ["namespaces", "raw", "nothing"])
def test_a_release_drops_everything_of_its_generation_once(kind: str) -> None:
    store = new_store()
    view = store.own(OLD)
    bystander = store.own(OTHER)
    bystander.get_or_create("n", lambda: "kept")
    if kind == "namespaces":
        view.get_or_create("a", list)
        view.get_or_create("b", list, Scope.SEGMENT)
    if kind == "raw":
        store.raw["r7"] = {}
    assert len(store) == 2
    assert [store.release(OLD.identity) for _ in range(3)] == [True, False, False]
    assert len(store) == 1
    assert "r7" not in store.raw
    assert bystander.get_or_create("n", unused) == "kept"
    assert store.own(NEW).get_or_create("a", lambda: "fresh") == "fresh"


def test_a_segments_end_resets_only_what_was_declared_segment_scoped() -> None:
    store, view = filled()
    view.get_or_create("segment.tail", list, Scope.SEGMENT).append("t")
    bystander = store.own(OTHER)
    bystander.get_or_create("segment.tail", lambda: "kept", Scope.SEGMENT)
    store.reset_segment(OLD.identity)
    assert view.get_or_create("codec.history", unused) == ["a"]
    assert view.get_or_create("segment.tail", list, Scope.SEGMENT) == []
    assert bystander.get_or_create("segment.tail", unused) == "kept"


def test_a_scope_is_fixed_when_the_value_is_made() -> None:
    store, view = filled()
    view.get_or_create("codec.history", unused, Scope.SEGMENT)
    store.reset_segment(OLD.identity)
    assert view.get_or_create("codec.history", unused) == ["a"]


def test_a_segments_end_leaves_raw_entries_alone() -> None:
    """Nobody declared them segment-scoped."""
    store = new_store()
    store.own(OLD)
    store.raw["r7"] = {"codes": [1]}
    store.reset_segment(OLD.identity)
    assert store.raw["r7"] == {"codes": [1]}


def test_a_segments_end_that_nobody_owns_does_nothing() -> None:
    store = new_store()
    store.reset_segment(OLD.identity)
    store.own(OLD)
    store.reset_segment(OLD.identity)
    assert len(store) == 1


def test_the_length_counts_requests_that_own_or_hold_state() -> None:
    store = new_store()
    lengths = [len(store)]
    store.own(OLD)
    lengths.append(len(store))
    store.raw["r7"] = {}
    lengths.append(len(store))
    store.own(OTHER).get_or_create("n", list)
    lengths.append(len(store))
    store.release(OLD.identity)
    lengths.append(len(store))
    store.release(OTHER.identity)
    lengths.append(len(store))
    assert lengths == [0, 1, 1, 2, 1, 0]


# B6: when the sender's effects touch the state


def sender() -> SenderHalf:
    half = SenderHalf(sender_table(), Edge("thinker", "talker"), OLD.identity)
    half.on_task_begun()
    half.on_stored()
    return half


def perform(store: StateStore, moved: SenderMoved) -> None:
    """What the runtime does for the effects that concern state."""
    if SenderEffect.RESET_SEGMENT in moved.effects:
        store.reset_segment(OLD.identity)
    if SenderEffect.RELEASE in moved.effects:
        store.release(OLD.identity)


def test_a_failed_send_keeps_state_until_the_failure_is_finalized() -> None:
    store, view = filled()
    half = sender()
    half.submit_chunk("a", segment_end=True)
    half.on_task_begun()
    half.on_produced(None)  # a segment's end makes a frame without a payload
    perform(store, half.on_given_up(Cause(Outcome.ERROR, "refused")))
    half.on_task_begun()
    perform(store, half.on_stored())  # its end(error) is out
    assert half.state == "failed"
    assert view.get_or_create("codec.history", unused) == ["a"]
    perform(store, half.on_released(Cause(Outcome.CANCELLED, "done with it")))
    with pytest.raises(StateRetiredError):
        view.get_or_create("codec.history", list)
    assert len(store) == 0


def test_a_failure_that_was_let_go_before_its_end_keeps_state_until_the_end_is_out() -> None:
    store, view = filled()
    half = sender()
    perform(store, half.on_host_failed(Cause(Outcome.ERROR, "oom")))
    perform(store, half.on_released(Cause(Outcome.CANCELLED, "done with it")))
    assert view.get_or_create("codec.history", unused) == ["a"]
    half.on_task_begun()
    perform(store, half.on_stored())
    assert len(store) == 0


def test_a_committed_terminal_releases_every_namespace() -> None:
    store, view = filled()
    view.get_or_create("segment.tail", list, Scope.SEGMENT)
    half = sender()
    perform(store, half.submit_end(at_ns=1))
    perform(store, half.on_task_begun())
    perform(store, half.on_produced(None))
    assert view.get_or_create("codec.history", unused) == ["a"]
    perform(store, half.on_stored())
    assert len(store) == 0


def test_a_producer_that_buffers_and_returns_nothing_keeps_its_state() -> None:
    store, view = filled()
    half = sender()
    half.submit_chunk("a")
    half.on_task_begun()
    perform(store, half.on_produced(None))
    assert (half.state, half.next_seq) == ("active", 0)
    assert view.get_or_create("codec.history", unused) == ["a"]


def test_a_lost_peer_releases_the_state_of_a_producer_that_still_runs() -> None:
    """What it returns afterwards changes nothing, and its view brings nothing back."""
    store, view = filled()
    half = sender()
    half.submit_chunk("a")
    half.on_task_begun()

    def factory() -> str:
        perform(store, half.on_peer_lost(Cause(Outcome.ERROR, "peer_lost")))
        return "late"

    with pytest.raises(StateRetiredError):
        view.get_or_create("codec.tail", factory)
    perform(store, half.on_produced(None))
    assert half.is_final
    assert len(store) == 0
