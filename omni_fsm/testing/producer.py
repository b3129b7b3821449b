"""What every producer must do: its payloads depend on its own request and on nothing else."""

import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from omni_fsm.payload import PayloadEncodeError, encode
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime.ports import Producer, ProducerContext
from omni_fsm.state import StateStore
from omni_fsm.state.store import Owner
from omni_fsm.testing.edge import broken

Payloads = list[bytes | None]
"""What each call of one request gave, as bytes; None where there was nothing to send."""


_THREADS: Final = 4
_SWITCH_S: Final = 1e-6


def _store() -> StateStore:
    return StateStore(threading.RLock())


class _YieldingLock:
    """A lock of a state store that lets another thread run before it is taken: whatever a call keeps elsewhere is seen."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        time.sleep(0)
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()


@contextmanager
def _switching_often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


class _Request:
    """One life of a request, called as the runtime would call its producer: one call a step, then one with the end.

    Args:
        store: Where its state is.
        identity: External id and generation.
        steps: What its producer is called with.
        end: What the last call gets.
        rule: What a raise breaks.
        cuts: Numbers of the calls that end a segment, besides the last one.
    """

    def __init__(  # noqa: PLR0913 - one request
        self,
        store: StateStore,
        identity: Identity,
        steps: Sequence[Any],
        end: Any,
        rule: str,
        *,
        cuts: frozenset[int] = frozenset(),
    ) -> None:
        self.identity, self.rule, self._cuts, self._store = identity, rule, cuts, store
        self._state = store.own(Owner(f"internal {identity}", identity))
        self._outputs = [*steps, end]
        self.objects: list[Any] = []
        self.payloads: Payloads = []

    @property
    def calls_left(self) -> int:
        return len(self._outputs) - len(self.payloads)

    def context(self, output: Any, *, is_finished: bool) -> ProducerContext:
        return ProducerContext(
            request=f"internal {self.identity}",
            identity=self.identity,
            output=output,
            is_finished=is_finished,
            is_segment_finished=is_finished or len(self.payloads) in self._cuts,
            segment=sum(cut < len(self.payloads) for cut in self._cuts),
            seq=sum(p is not None or at in self._cuts for at, p in enumerate(self.payloads)),
            state=self._state,
        )

    def call(self, producer: Producer) -> None:
        """The next call; what the one before gave must be as it was, until now."""
        self.check_kept()
        at = len(self.payloads)
        context = self.context(self._outputs[at], is_finished=self.calls_left == 1)
        try:
            payload = producer(context)
        except Exception as error:
            raise AssertionError(f"rule {self.rule}: {self.identity}: call {at} raised {error!r}") from error
        self.objects.append(payload)
        self.payloads.append(self._bytes(at, payload))
        if at in self._cuts:
            self._store.reset_segment(self.identity)

    def check_kept(self) -> None:
        """What the last call gave still has the same bytes."""
        at = len(self.payloads) - 1
        if at >= 0 and self._bytes(at, self.objects[at]) != self.payloads[at]:
            broken("given-away", f"{self.identity}: a call of another request wrote to the payload of call {at}")

    def _bytes(self, at: int, payload: Any) -> bytes | None:
        try:
            return None if payload is None else b"".join(encode(payload).parts)
        except PayloadEncodeError as error:
            raise AssertionError(
                f"rule payload: {self.identity}: call {at} gave what cannot be sent: {error}"
            ) from error


def _compare(rule: str, request: _Request, alone: Payloads, how: str) -> None:
    """Each call gave the same bytes as it did alone."""
    for at, (was, now) in enumerate(zip(alone, request.payloads, strict=True)):
        if was != now:
            broken(
                rule, f"{request.identity}: call {at} gave {_size(was)} alone and {_size(now)} {how}{_same(was, now)}"
            )


def _size(payload: bytes | None) -> str:
    return "nothing" if payload is None else f"{len(payload)} bytes"


def _same(was: bytes | None, now: bytes | None) -> str:
    return ", other ones" if was and now and len(was) == len(now) else ""


class ProducerConformance:
    """Base class of a pytest class: give it a producer and the steps of one request, and each rule is a test.

    Attributes:
        interleavings: How many orders of the calls of three requests are tried.
        segmentations: How many cuts of a request into segments are tried.
        rounds: How often requests are run on several threads at once.
        whole_in_segments: Whether the payloads carry the same however a request is cut into segments.
        segments_alone: Whether a segment gives what it would give as the first one of a request.
    """

    interleavings: int = 25
    segmentations: int = 10
    rounds: int = 5
    whole_in_segments: bool = True
    segments_alone: bool = False

    def make_producer(self) -> Producer:
        """A new producer. Called by: each test, once or more."""
        raise NotImplementedError

    def make_steps(self) -> list[Any]:
        """The outputs of one request, anew and the same each time: the producer owns what it is called with.

        Any number of them, from the first one on, must be a request too.
        """
        raise NotImplementedError

    def make_end(self) -> Any:
        """What the last call, the one with ``is_finished``, gets as output; anew each time."""
        return None

    def make_bad_output(self) -> Any:
        """An output that the producer cannot take."""
        return object()

    def whole(self) -> bytes | None:
        """What all payloads of a request with all steps carry together; None: not compared."""
        return None

    def content(self, payload: Any) -> bytes:
        """What one payload contributes to `whole`."""
        raise NotImplementedError

    def _request(  # noqa: PLR0913 - one request
        self,
        store: StateStore,
        rule: str,
        *,
        name: str = "r0",
        steps: slice | int | None = None,
        generation: int = 1,
        cuts: frozenset[int] = frozenset(),
    ) -> _Request:
        wanted = steps if isinstance(steps, slice) else slice(steps)
        return _Request(store, Identity(name, generation), self.make_steps()[wanted], self.make_end(), rule, cuts=cuts)

    def _run(self, producer: Producer, rule: str, **request: Any) -> _Request:
        """A request alone, in a store of its own."""
        run = self._request(_store(), rule, **request)
        while run.calls_left:
            run.call(producer)
        return run

    def test_no_step_and_one_step_are_requests(self) -> None:
        """Rule runs: a request of no step, of one and of all raises nothing. Rule payload: each payload can be sent."""
        for steps in (0, 1, None):
            self._run(self.make_producer(), "runs", steps=steps)

    def test_a_request_run_twice_gives_the_same(self) -> None:
        """Rule state: nothing of a request is left on the producer, or anywhere but in its namespaces."""
        producer = self.make_producer()
        first = self._run(producer, "state")
        _compare("state", self._run(producer, "state"), first.payloads, "when it was run again with new state")

    def test_a_half_done_request_leaves_nothing(self) -> None:
        """Rule state: nor of one that was given up."""
        alone = self._run(self.make_producer(), "state").payloads
        producer = self.make_producer()
        for calls in range(len(alone)):
            given_up = self._request(_store(), "state")
            for _ in range(calls):
                given_up.call(producer)
        _compare("state", self._run(producer, "state"), alone, "after the same request was given up half done")

    def test_any_producer_goes_on_with_a_request(self) -> None:
        """Rule namespaces: with the state of a request, a new producer goes on where another left off."""
        alone = self._run(self.make_producer(), "namespaces").payloads
        request = self._request(_store(), "namespaces")
        while request.calls_left:
            request.call(self.make_producer())
        _compare("namespaces", request, alone, "where each call had a new producer")

    def test_requests_do_not_disturb_each_other(self) -> None:
        """Rule interleaving: in any order of their calls, requests give what they give alone. Rule given-away: and keep it."""
        count = len(self.make_steps())
        lengths = {"r0": count, "r1": count // 2, "r2": count}
        alone = {
            name: self._run(self.make_producer(), "interleaving", name=name, steps=steps).payloads
            for name, steps in lengths.items()
        }
        turns = [name for name, steps in lengths.items() for _ in range(steps + 1)]

        @settings(
            derandomize=True,
            deadline=None,
            max_examples=self.interleavings,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.permutations(turns))
        def holds(order: list[str]) -> None:
            producer, store = self.make_producer(), _store()
            requests = {
                name: self._request(store, "interleaving", name=name, steps=steps) for name, steps in lengths.items()
            }
            for name in order:
                requests[name].call(producer)
            for name, request in requests.items():
                request.check_kept()
                _compare("interleaving", request, alone[name], f"in the order {' '.join(order)}")

        try:
            holds()
        except Flaky as error:
            words = "the same order of calls gave two results: something is kept outside of the namespaces"
            raise AssertionError(f"rule interleaving: {words}") from error

    def test_a_raise_harms_no_other_request(self) -> None:
        """Rule raise: after a raise in one request, others go on, and its id can be used anew."""
        alone = self._run(self.make_producer(), "raise").payloads
        again = self._run(self.make_producer(), "raise", name="bad", generation=2).payloads
        producer, store = self.make_producer(), _store()
        good, bad = self._request(store, "raise"), self._request(store, "raise", name="bad")
        for _ in range(bad.calls_left // 2):
            bad.call(producer)
            good.call(producer)
        self._fail(producer, bad)
        while good.calls_left:
            good.call(producer)
        store.release(bad.identity)
        self._fail(producer, bad)  # a late call: its state is gone
        _compare("raise", good, alone, "beside a request that raised")
        anew = self._request(store, "raise", name="bad", generation=2)
        while anew.calls_left:
            anew.call(producer)
        _compare("raise", anew, again, "after the generation before it had raised")

    def _fail(self, producer: Producer, request: _Request) -> None:
        """Call with what the producer cannot take; it may raise anything, or take it."""
        try:
            producer(request.context(self.make_bad_output(), is_finished=False))
        except Exception:  # noqa: BLE001 - that is what this call is for
            return

    # -- segments --------------------------------------------------------------------------------------------------

    def _cuts(self) -> Iterator[frozenset[int]]:
        """Calls that end a segment: none, all steps, and some."""
        count = len(self.make_steps())
        yield frozenset()
        yield frozenset(range(count))
        chance = random.Random(count)  # noqa: S311 - the same cuts in every run
        for _ in range(self.segmentations - 2):
            yield frozenset(at for at in range(count) if chance.random() < 1 / 2)

    def test_any_cut_into_segments_is_a_request(self) -> None:
        """Rule segments: cut into segments in any way, it raises nothing, carries the same, and disturbs nobody."""
        whole = self.whole() if self.whole_in_segments else None
        for cuts in self._cuts():
            alone = self._run(self.make_producer(), "segments", cuts=cuts)
            how = f"with a segment's end at calls {sorted(cuts)}"
            if whole is not None and (carried := self._carried(alone)) != whole:
                lost = f"{len(carried)} bytes" if len(carried) != len(whole) else "other ones"
                broken("segments", f"the payloads carry {lost} where {len(whole)} bytes went in, {how}")
            plain = self._run(self.make_producer(), "segments", name="r1")
            producer, store = self.make_producer(), _store()
            cut, other = self._request(store, "segments", cuts=cuts), self._request(store, "segments", name="r1")
            while cut.calls_left:
                cut.call(producer)
                other.call(producer)
            _compare("segments", cut, alone.payloads, f"beside another request, {how}")
            _compare("segments", other, plain.payloads, f"beside a request {how}")

    def test_a_segment_is_as_the_first_one(self) -> None:
        """Rule segment-scope: where segments_alone says so, a segment gives what it gives as the first of a request."""
        if not self.segments_alone:
            pytest.skip("segments_alone does not say so")
        count = len(self.make_steps())
        for cut in range(count - 1):
            run = self._run(self.make_producer(), "segment-scope", cuts=frozenset({cut}))
            first = self._run(self.make_producer(), "segment-scope", steps=slice(cut + 1, None))
            for at, (was, now) in enumerate(zip(first.payloads, run.payloads[cut + 1 :], strict=True), cut + 1):
                if was != now:
                    sizes = f"{_size(was)} in a first segment and {_size(now)} in a second{_same(was, now)}"
                    broken("segment-scope", f"{run.identity}: call {at} gave {sizes}")

    # -- threads ---------------------------------------------------------------------------------------------------

    def test_threads_do_not_disturb_each_other(self) -> None:
        """Rule threads: called for several requests at once, on threads of their own, it gives what each gives alone."""
        names = [f"r{n}" for n in range(_THREADS)]
        alone = {name: self._run(self.make_producer(), "threads", name=name).payloads for name in names}
        for _ in range(self.rounds):
            producer, store = self.make_producer(), StateStore(_YieldingLock())
            requests = [self._request(store, "threads", name=name) for name in names]
            with _switching_often():
                self._run_at_once(producer, requests)
            for request in requests:
                request.check_kept()
                _compare("threads", request, alone[request.identity.external_id], "beside others on other threads")

    @staticmethod
    def _run_at_once(producer: Producer, requests: Sequence[_Request]) -> None:
        """Run each request on a thread of its own; they call together, each request one call behind the one before."""
        together, raised = threading.Barrier(len(requests)), list[BaseException]()
        turns = requests[0].calls_left + len(requests)

        def run(late: int, request: _Request) -> None:
            try:
                for turn in range(turns):
                    together.wait()
                    if turn >= late and request.calls_left:
                        request.call(producer)
            except BaseException as error:  # noqa: BLE001 - told below, by the test's own thread
                if not isinstance(error, threading.BrokenBarrierError):
                    raised.append(error)
                together.abort()

        threads = [threading.Thread(target=run, args=late, daemon=True) for late in enumerate(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]

    # -- the end ---------------------------------------------------------------------------------------------------

    def _carried(self, run: _Request) -> bytes:
        return b"".join(self.content(payload) for payload in run.objects if payload is not None)

    def test_the_end_loses_nothing(self) -> None:
        """Rule flush: the payloads of a request, that of the last call too, carry everything together."""
        whole = self.whole()
        if whole is None:
            pytest.skip("whole() gives nothing to compare with")
        run = self._run(self.make_producer(), "flush")
        carried = self._carried(run)
        if carried != whole:
            lost = f"{len(carried)} bytes" if len(carried) != len(whole) else "other ones"
            broken("flush", f"the payloads carry {lost} where {len(whole)} bytes went in")
