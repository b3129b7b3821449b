"""What every producer must do: its payloads depend on its own request and on nothing else."""

import threading
from collections.abc import Sequence
from typing import Any

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


def _store() -> StateStore:
    return StateStore(threading.RLock())


class _Request:
    """One life of a request, called as the runtime would call its producer: one call a step, then one with the end."""

    def __init__(self, store: StateStore, identity: Identity, steps: Sequence[Any], end: Any, rule: str) -> None:
        self.identity, self.rule = identity, rule
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
            is_segment_finished=is_finished,
            segment=0,
            seq=sum(payload is not None for payload in self.payloads),
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
    """

    interleavings: int = 25

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

    def _request(
        self, store: StateStore, rule: str, *, name: str = "r0", steps: int | None = None, generation: int = 1
    ) -> _Request:
        return _Request(store, Identity(name, generation), self.make_steps()[:steps], self.make_end(), rule)

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

    def test_the_end_loses_nothing(self) -> None:
        """Rule flush: the payloads of a request, that of the last call too, carry everything together."""
        whole = self.whole()
        if whole is None:
            pytest.skip("whole() gives nothing to compare with")
        run = self._run(self.make_producer(), "flush")
        carried = b"".join(self.content(payload) for payload in run.objects if payload is not None)
        if carried != whole:
            lost = f"{len(carried)} bytes" if len(carried) != len(whole) else "other ones"
            broken("flush", f"the payloads carry {lost} where {len(whole)} bytes went in")
