"""The conformance kit for runners: a small one passes it, faulty ones fail with the name of the rule."""

import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from omni_fsm.adapters import (
    Identity,
    Later,
    Refuse,
    Register,
    SchedulerConfig,
    SchedulerCoordinator,
    StageConfig,
    StageRunnerAdapter,
    StageRunnerMixin,
    Step,
    TakenKind,
)
from omni_fsm.connectors.port import PutOutcome
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.runtime import Admission, ProducerContext, StageRuntime, StageThreads
from omni_fsm.testing import Made, OneCycle, RunnerConformance

GUIDE = (Path(__file__).parent.parent / "docs" / "guide.md").read_text(encoding="utf-8")


class Adder:
    """Adds up its input: two steps a number, one step of each request a cycle, a running total a step."""

    def __init__(self, source: Any, sink: Any) -> None:
        self.adapter = self.make_adapter(self.wrap_source(source), self.wrap_sink(sink))
        self.numbers: dict[str, deque[Any]] = {}
        self.complete: set[str] = set()
        self.totals: dict[Any, int] = {}
        self.keys: dict[str, Any] = {}

    def make_adapter(self, source: Any, sink: Any) -> Any:
        return StageRunnerAdapter(StageConfig(stage="adder"), source=source, sink=sink, producer=self.produce)

    def wrap_source(self, source: Any) -> Any:
        return source

    def wrap_sink(self, sink: Any) -> Any:
        return sink

    def cycle(self) -> None:
        feedback = self.adapter.collect_feedback(0.0 if any(self.numbers.values()) else 0.02)
        for request, identity in feedback.registered.items():
            self.numbers[request], self.keys[request] = deque(), self.key_of(identity)
        for request, cause in feedback.failed.items():
            self.drop(request, cause)
        for request in feedback.ready:
            self.take(request)
        for request in list(self.numbers):
            self.advance(request)

    def key_of(self, identity: Identity) -> Any:
        return identity

    def take(self, request: str) -> None:
        while (taken := self.adapter.take(request)).kind is TakenKind.CHUNK:
            self.numbers[request] += [taken.payload, taken.payload]
        if taken.kind is TakenKind.END:
            self.complete.add(request)

    def advance(self, request: str) -> None:
        if self.numbers[request]:
            try:
                total = self.step(request, self.numbers[request].popleft())
            except TypeError as error:
                self.failed(request, error)
            else:
                self.submitted(request, self.adapter.submit_chunk(request, total))
        elif request in self.complete:
            self.finish(request)

    def step(self, request: str, number: Any) -> int:
        key = self.keys[request]
        self.totals[key] = self.totals.get(key, 0) + number
        return self.totals[key]

    def failed(self, request: str, error: TypeError) -> None:
        self.adapter.fail(request, f"{type(error).__name__}: {error}")
        self.drop(request, Cause(Outcome.ERROR))

    def submitted(self, request: str, admission: Admission) -> None:
        if not admission.accepted:
            self.forget(request)

    def finish(self, request: str) -> None:
        self.adapter.end(request)
        self.forget(request)

    def drop(self, request: str, cause: Cause) -> None:
        self.adapter.release(request)
        self.forget(request)

    def forget(self, request: str) -> None:
        self.numbers.pop(request, None)
        self.complete.discard(request)
        self.totals.pop(self.keys.pop(request, None), None)

    def produce(self, context: ProducerContext) -> Any:
        return context.output


class AdderOnARuntime(Adder):
    """The same without the facade, and with names of its own."""

    def make_adapter(self, source: Any, sink: Any) -> Any:
        self.config = StageConfig(stage="adder")
        return StageRuntime(self.config, source=source, sink=sink, host=self, producer=self.produce)

    def stream_offered(self, identity: Identity) -> Register:
        return Register(f"adder {identity}")

    def feedback_ready(self) -> None:
        """It waits in collect_feedback."""


class InheritingAdder(StageRunnerMixin, Adder):
    """The same as a host that inherits its stage."""

    def make_adapter(self, source: Any, sink: Any) -> Any:
        self.init_stage(StageConfig(stage="adder"), source=source, sink=sink)
        return self.stage


@dataclass(eq=False)
class Scheduled:
    """A request as an engine has it."""

    request_id: str
    identity: Identity


class ScheduledAdder(Adder):
    """The same sums under a scheduler: two slots, a waiting and a running queue, and one preempted every third cycle.

    A request is parked by the coordinator while its next number is not there.
    """

    def __init__(self, source: Any, sink: Any) -> None:
        self.woken = threading.Event()
        super().__init__(source, sink)
        self.live: dict[str, Scheduled] = {}
        self.waiting: deque[Scheduled] = deque()
        self.running: list[Scheduled] = []
        self.coordinator: SchedulerCoordinator[Scheduled] = SchedulerCoordinator(
            self.adapter.runtime, self.live, SchedulerConfig(max_running=2)
        )
        self.cycles = 0

    def make_adapter(self, source: Any, sink: Any) -> Any:
        config = StageConfig(stage="adder")
        return StageRunnerAdapter(config, source=source, sink=sink, producer=self.produce, host=self)

    def stream_offered(self, identity: Identity) -> Register:
        return Register(f"adder {identity}")

    def feedback_ready(self) -> None:
        self.woken.set()

    def cycle(self) -> None:
        self.cycles += 1
        if self.running and self.cycles % 3 == 0:
            self.waiting.appendleft(self.running.pop())
        steps = self.schedule()
        for step in steps:
            if self.coordinator.settle(step) and step.chunk is not None:
                self.compute(step.request, step.chunk.payload)
        if not steps:
            self.woken.wait(0.02)
            self.woken.clear()

    def schedule(self) -> list[Step[Scheduled]]:
        with self.coordinator.cycle(self.waiting, self.running) as cycle:
            for name in cycle.failed:
                self.leave(name)
            for name in cycle.done:
                self.adapter.end(name)
                self.leave(name)
            for name, identity in cycle.feedback.registered.items():
                self.live[name] = Scheduled(name, identity)
                self.waiting.append(self.live[name])
            while self.waiting and len(self.running) < cycle.max_running:
                self.running.append(self.waiting.popleft())
            return [step for request in self.running if (step := cycle.step(request, budget_tokens=1))]

    def leave(self, name: str) -> None:
        self.coordinator.finish([name], self.waiting, self.running)
        request = self.live.pop(name, None)
        if request is not None:
            self.totals.pop(request.identity, None)

    def compute(self, request: Scheduled, number: Any) -> None:
        for _ in range(2):
            try:
                self.totals[request.identity] = self.totals.get(request.identity, 0) + number
            except TypeError as error:
                self.adapter.fail(request.request_id, f"{type(error).__name__}: {error}")
                return
            self.adapter.submit_chunk(request.request_id, self.totals[request.identity])


class AdderRules(RunnerConformance):
    stage = "adder"
    bad_words = "TypeError: unsupported operand"
    runner: Callable[[Any, Any], Any] = Adder

    def make_runner(self, source: Any, sink: Any) -> Made:
        self.made = type(self).runner(source, sink)
        adapter = self.made.adapter
        return StageThreads(adapter) if isinstance(adapter, StageRuntime) else adapter, self.made.cycle

    def make_inputs(self, number: int) -> list[Any]:
        return [number + 1, 20, 300, 4_000, 50_000]

    def make_bad_inputs(self) -> list[Any]:
        return [1, "x"]

    def held(self) -> dict[str, int]:
        return {name: len(getattr(self.made, name)) for name in ("numbers", "complete", "totals", "keys")}


class TestAdder(AdderRules):
    pass


class TestAdderOnARuntime(AdderRules):
    runner = AdderOnARuntime


class TestInheritingAdder(AdderRules):
    runner = InheritingAdder


class TestScheduledAdder(AdderRules):
    """A whole stage with its scheduler: parked, preempted and restored, a request keeps every rule."""

    runner = ScheduledAdder

    def held(self) -> dict[str, int]:
        made = self.made
        return {
            "totals": len(made.totals),
            "live": len(made.live),
            "queued": len(made.waiting) + len(made.running),
            "seats": len(made.coordinator.places),
        }


class TestDoublerOfTheGuide(RunnerConformance):
    """The loop of the guide as it stands there: a cycle is one pass of it."""

    stage = "doubler"
    bad_words = "TypeError: unsupported operand"
    names: dict[str, Any] = {}  # noqa: RUF012 - filled once, below

    def make_runner(self, source: Any, sink: Any) -> Made:
        config, producer = StageConfig(stage="doubler"), self.names["running_sum"]
        doubler = StageRunnerAdapter(config, source=source, sink=sink, producer=producer)
        return doubler, partial(self.names["run_doubler"], doubler, OneCycle())

    def make_inputs(self, number: int) -> list[Any]:
        return [number, 2, 3, 4, 5]

    def make_bad_inputs(self) -> list[Any]:
        return [1, "x"]


_stage_of_the_guide = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0].split("to_doubler =")[0]
exec(compile(_stage_of_the_guide, "guide.md", "exec"), TestDoublerOfTheGuide.names)  # noqa: S102 - the guide is ours


def test_a_rule_that_needs_an_input_that_raises_is_skipped_without_one() -> None:
    class Plain(AdderRules):
        def make_bad_inputs(self) -> None:  # type: ignore[override]
            return None

    with pytest.raises(pytest.skip.Exception, match="make_bad_inputs"):
        Plain().test_a_raise_ends_its_request_alone()


# -- faulty runners ----------------------------------------------------------------------------------------------------


class Wrapper:
    """An end that does what another does, but for what a subclass gets wrong."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class EndsTwiceOnTheWire(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        if frame.kind is FrameKind.END:
            self.inner.put(frame)
        return self.inner.put(frame)


class HasWordsOfItsOwn(Wrapper):
    def put(self, frame: Frame) -> PutOutcome:
        if frame.cause is not None and frame.cause.outcome is Outcome.ERROR:
            frame = replace(frame, cause=Cause(Outcome.ERROR, "input failed"))
        return self.inner.put(frame)


class StopsWithoutReasons(Wrapper):
    def stop(self, identity: Identity, cause: Cause) -> None:
        self.inner.stop(identity, Cause(cause.outcome, "stopped"))


class Crashes(Adder):
    def take(self, request: str) -> None:
        raise KeyError(request)


class Hangs(Adder):
    def take(self, request: str) -> None:
        threading.Event().wait(2.0)


class Hides(AdderOnARuntime):
    """Takes its time over the requests that it is offered."""

    def stream_offered(self, identity: Identity) -> Any:
        return Later()


class UsesOtherEnds(Adder):
    def wrap_source(self, source: Any) -> Any:
        source.close()
        return source


class NeverEnds(Adder):
    def finish(self, request: str) -> None:
        self.forget(request)


class EndsTwice(Adder):
    def wrap_sink(self, sink: Any) -> Any:
        return EndsTwiceOnTheWire(sink)


class WaitsForAChunk(Adder):
    def finish(self, request: str) -> None:
        if self.keys[request] in self.totals:
            super().finish(request)


class EndsWhenIdle(Adder):
    """Takes "not yet" for the end."""

    def advance(self, request: str) -> None:
        if not self.numbers[request] and self.keys[request] in self.totals:
            self.complete.add(request)
        super().advance(request)


class OneTotal(Adder):
    def key_of(self, identity: Identity) -> Any:
        return "total"


class RefusesPaths(AdderOnARuntime):
    def stream_offered(self, identity: Identity) -> Any:
        return Refuse("no id") if "/" in identity.external_id else super().stream_offered(identity)


class SaysInputFailed(Adder):
    def wrap_sink(self, sink: Any) -> Any:
        return HasWordsOfItsOwn(sink)


class DropsAll(Adder):
    def drop(self, request: str, cause: Cause) -> None:
        for other in list(self.numbers):
            super().drop(other, cause)


class SaysStopped(Adder):
    def wrap_source(self, source: Any) -> Any:
        return StopsWithoutReasons(source)


class ComputesOn(Adder):
    """Releases what failed, but goes on with it."""

    def drop(self, request: str, cause: Cause) -> None:
        self.adapter.release(request)
        self.numbers.setdefault(request, deque()).append(0)

    def submitted(self, request: str, admission: Admission) -> None:
        if not admission.accepted:
            self.numbers[request].append(0)


class EndsWell(Adder):
    """Calls what it has got so far the whole."""

    def failed(self, request: str, error: TypeError) -> None:
        self.finish(request)


class RaisesOn(Adder):
    def failed(self, request: str, error: TypeError) -> None:
        raise error


class DropsAllOnARaise(Adder):
    def failed(self, request: str, error: TypeError) -> None:
        super().failed(request, error)
        for other in list(self.numbers):
            self.drop(other, Cause(Outcome.ERROR))


class ByExternalId(Adder):
    """Keeps totals by external id, until the request is complete."""

    def key_of(self, identity: Identity) -> Any:
        return identity.external_id

    def drop(self, request: str, cause: Cause) -> None:
        self.adapter.release(request)
        self.numbers.pop(request, None)


class NeverReleases(Adder):
    def drop(self, request: str, cause: Cause) -> None:
        self.forget(request)


class KeepsKeys(Adder):
    def forget(self, request: str) -> None:
        self.numbers.pop(request, None)
        self.complete.discard(request)
        self.totals.pop(self.keys.get(request), None)


class DiesWithItsPeer(Adder):
    died = False

    def drop(self, request: str, cause: Cause) -> None:
        super().drop(request, cause)
        self.died |= cause.reason == "peer_lost"

    def take(self, request: str) -> None:
        if not self.died:
            super().take(request)


class InsistsOnBeingHeard(Adder):
    def submitted(self, request: str, admission: Admission) -> None:
        if not admission.accepted:
            raise RuntimeError(admission.reason)


@pytest.mark.parametrize(
    ("faulty", "rule", "words"),
    [
        (Crashes, "a_request_ends_once", "rule cycle: a cycle raised KeyError('adder-0')"),
        (Hangs, "a_request_ends_once", "rule cycle: a cycle did not return in 1."),
        (
            Hides,
            "nothing_is_left_of_requests_that_are_over",
            "rule peers: r0#1 was not announced to the next stage within 1.2 s",
        ),
        (UsesOtherEnds, "a_request_ends_once", "rule peers: the stage did not meet its neighbours within 1.2 s"),
        (NeverEnds, "a_request_ends_once", "rule one-end: r0#1 gave 10 payloads and did not end within 1.2 s"),
        (EndsTwice, "a_request_ends_once", "rule one-end: r0#1 ended 2 times: ok and ok"),
        (WaitsForAChunk, "an_input_without_a_chunk_ends", "rule empty: r0#1 gave 0 payloads and did not end within"),
        (EndsWhenIdle, "ok_means_all", "rule complete: w1048576#1 gave "),
        (OneTotal, "requests_do_not_disturb_each_other", "rule interleaving: r"),
        (RefusesPaths, "any_id_is_served", "rule ids: ../../etc/passwd#0 gave 0 payloads and did not end within 1.2 s"),
        (
            SaysInputFailed,
            "an_input_failure_goes_on",
            "rule failure: r0#1 ended with error(input failed), not error(the stage before is out of memory)",
        ),
        (
            DropsAll,
            "an_input_failure_goes_on",
            "rule unharmed: r1#1 ended with cancelled(released) beside one whose input ended with error(the stage before",
        ),
        (
            SaysStopped,
            "a_stop_goes_on_and_ends_the_work",
            "rule stop: r0#1 was stopped with cancelled(the listener left), and the stage before was told cancelled(stop",
        ),
        (
            ComputesOn,
            "a_stop_goes_on_and_ends_the_work",
            "rule computing: r0#1 was stopped, and the runner computed 3 steps more",
        ),
        (
            EndsWell,
            "a_raise_ends_its_request_alone",
            "rule raise: bad#1 ended with ok, not with error and the words 'TypeError: unsupported operand'",
        ),
        (RaisesOn, "a_raise_ends_its_request_alone", "rule raise: a cycle raised TypeError("),
        (
            DropsAllOnARaise,
            "a_raise_ends_its_request_alone",
            "rule unharmed: r1#1 ended with cancelled(released) beside one that raised",
        ),
        (ByExternalId, "an_id_that_is_used_again_is_new", "rule reuse: r#1 gave "),
        (NeverReleases, "nothing_is_left_of_requests_that_are_over", "rule residue: {'requests': "),
        (KeepsKeys, "nothing_is_left_of_requests_that_are_over", "rule residue: {'held.keys': 3} did not go within"),
        (
            SaysInputFailed,
            "the_death_of_the_stage_before_ends_what_is_open",
            "rule peer-lost: r0#1 ended with error(input failed), not error(peer_lost), though the stage before died",
        ),
        (
            SaysStopped,
            "the_death_of_the_stage_after_ends_what_is_open",
            "rule peer-lost: the stage after died, and the stage before was told error(stopped) of r0#1",
        ),
        (
            DiesWithItsPeer,
            "the_death_of_the_stage_before_ends_what_is_open",
            "rule serves: r2#1 gave 0 payloads and did not end within 1.2 s",
        ),
        (DiesWithItsPeer, "the_death_of_the_stage_after_ends_what_is_open", "rule serves: r2#1 gave 0 payloads and"),
        (InsistsOnBeingHeard, "a_shutdown_ends_everything", "rule shutdown: a cycle raised RuntimeError("),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_runner_is_told_which_rule_it_breaks(faulty: type[Adder], rule: str, words: str) -> None:
    class Faulty(AdderRules):
        runner = faulty
        patience_s = 1.2

    with pytest.raises(AssertionError, match="^" + re.escape(words)):
        getattr(Faulty(), f"test_{rule}")()
