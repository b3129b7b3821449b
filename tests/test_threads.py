"""A stage with its real threads: a producer that hangs or raises, a step that raises, starts, shutdowns, observers."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_peer import End
from scripted import IN, OTHER, OUT, R1, Recorder, ScriptedConnector, ScriptedHost, sender_only, words

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Connector, Hello, memory_pair, shm_receiver, shm_sender
from omni_fsm.protocol.errors import OmniFsmError
from omni_fsm.protocol.frames import Cause
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import (
    Failure,
    Feedback,
    ProducerContext,
    StageConfig,
    StageRuntime,
    StageThreads,
    TakenKind,
    Transition,
    passthrough,
)

PATIENCE_S = 10.0


def stage_with(
    sink: Connector, source: Connector | None = None, producer: Any = passthrough, **config: Any
) -> tuple[StageThreads, Recorder]:
    seen = Recorder()
    runtime = StageRuntime(
        StageConfig(stage="thinker", **config),
        source=source,
        sink=sink,
        host=ScriptedHost(),
        producer=producer,
        observers=(seen,),
    )
    return StageThreads(runtime), seen


def threads_alive() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("thinker-"))


@pytest.fixture
def no_threads() -> Iterator[None]:
    """Every thread of the stage ends with it."""
    assert threads_alive() == []
    yield
    assert threads_alive() == []


def collect_until(runtime: StageRuntime, enough: Callable[[Feedback], bool]) -> None:
    """Collect until something was told."""
    until_s = time.monotonic() + PATIENCE_S
    while not enough(runtime.collect_feedback(0.1)):
        assert time.monotonic() < until_s, "it was not told in time"


# Producers


def raise_what_comes(context: ProducerContext) -> Any:
    if isinstance(context.output, BaseException):
        raise context.output
    return context.output


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError("left"), KeyboardInterrupt("key")])
def test_a_worker_outlives_whatever_its_producer_raises(raised: BaseException) -> None:
    sink, source = memory_pair(Hello(OUT))
    peer = End(source)
    threads, seen = stage_with(sink, producer=raise_what_comes, workers=1)
    threads.start()
    runtime = threads.runtime
    assert runtime.register("r", R1).accepted
    assert runtime.submit_chunk("r", raised).accepted
    end = f"end error({type(raised).__name__}: {raised})"
    peer.until(lambda: end in [words(frame) for frame, _ in peer.frames])
    assert runtime.register("o", OTHER).accepted
    assert runtime.submit_chunk("o", "c0").accepted
    peer.until(lambda: any(frame.identity == OTHER and frame.seq == 0 for frame, _ in peer.frames))
    assert [name for name in threads_alive() if "producer" in name] == ["thinker-producer-0"]
    assert seen.reasons == [("failed", "r", f"{type(raised).__name__}: {raised}")]
    runtime.release("r")
    assert threads.shutdown()


HANGING = """
import threading
from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Hello, memory_pair
from omni_fsm.protocol import Edge
from omni_fsm.runtime import StageConfig

started = threading.Event()

def hang(context):
    started.set()
    threading.Event().wait()

sink, source = memory_pair(Hello(Edge("here", "there")))
here = StageRunnerAdapter(StageConfig(stage="here"), sink=sink, producer=hang)
there = StageRunnerAdapter(StageConfig(stage="there"), source=source)
here.start()
there.start()
request, _ = here.open("r")
here.submit_chunk(request, 1)
assert started.wait(20)
assert here.shutdown(0.05) is False
there.shutdown(0.05)
print("the last line")
"""


def test_a_producer_that_hangs_for_ever_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "the last line\n"), done.stderr


# A step that raises


class BlockingConnector(ScriptedConnector):
    """A scripted connector that a thread can wait for, and whose calls can be made to raise."""

    def __init__(self, edge: Edge, *, sends: bool) -> None:
        super().__init__(edge, sends=sends)
        self.closed = threading.Event()
        self.faults: dict[str, Exception] = {}
        self._stirred = threading.Event()

    def break_in(self, method: str, fault: Exception) -> None:
        self.faults[method] = fault
        self.wake()

    def wait(self, timeout_s: float | None) -> bool:
        self._stirred.wait(timeout_s)
        self._stirred.clear()
        self._may_fail("wait")
        return True

    def wake(self) -> None:
        self._stirred.set()

    def get(self) -> Any:
        self._may_fail("get")
        return super().get()

    def signals(self) -> Any:
        self._may_fail("signals")
        return super().signals()

    def close(self) -> None:
        self.closed.set()
        self._stirred.set()

    def _may_fail(self, method: str) -> None:
        if method in self.faults:
            raise self.faults[method]


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize(("end", "method"), [("source", "get"), ("source", "wait"), ("sink", "signals")])
def test_a_step_that_raises_fails_every_request_and_ends_the_stage(end: str, method: str) -> None:
    ends = {"source": BlockingConnector(IN, sends=False), "sink": BlockingConnector(OUT, sends=True)}
    threads, seen = stage_with(ends["sink"], ends["source"])
    threads.start()
    loops = [thread for thread in threading.enumerate() if thread.name.startswith("thinker-")]
    runtime = threads.runtime
    assert runtime.register("r", R1).accepted
    assert runtime.register("o", OTHER).accepted
    ends[end].break_in(method, RuntimeError("bug"))
    failed: dict[str, Cause] = {}

    def both_failed(feedback: Feedback) -> bool:
        failed.update(feedback.failed)
        return failed.keys() == {"r", "o"}

    collect_until(runtime, both_failed)
    reason = "stage thinker: RuntimeError: bug"
    assert {cause.reason for cause in failed.values()} == {reason}
    assert all(connector.closed.wait(PATIENCE_S) for connector in ends.values())
    admission = runtime.register("n", Identity("new", 1))
    assert (admission.accepted, admission.reason) == (False, reason)
    for thread in loops:
        thread.join(PATIENCE_S)
    assert threads_alive() == []  # by itself: nobody may know yet that it must be shut down
    began_s = time.monotonic()
    assert not threads.shutdown()  # no end went out
    assert time.monotonic() - began_s < 1.0
    assert sorted({what for what, _, _ in seen.reasons}) == ["crashed", "failed"]


# Starting and ending


@pytest.mark.usefixtures("no_threads")
def test_a_stage_starts_once_and_never_after_its_shutdown() -> None:
    sink, _ = memory_pair(Hello(OUT))
    threads, _ = stage_with(sink)
    threads.start()
    names = threads_alive()
    threads.start()
    assert threads_alive() == names == ["thinker-outbox", "thinker-sink", "thinker-timer"]
    assert threads.shutdown()
    with pytest.raises(OmniFsmError, match="connector thinker: event started refused in state closed"):
        threads.start()


@pytest.mark.usefixtures("no_threads")
def test_a_shutdown_that_is_broken_off_closes_the_stage_all_the_same() -> None:
    sink, _ = memory_pair(Hello(OUT))  # nobody steps the other end: it cannot flush
    threads, _ = stage_with(sink)
    threads.start()
    assert threads.runtime.register("r", R1).accepted
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        threads.shutdown(5.0)
    interrupt.join()
    assert threads.state == "closed"
    assert threads.shutdown(float("inf")) is False  # at once


class ClosesBadly(BlockingConnector):
    def close(self) -> None:
        super().close()
        raise OSError("the descriptor is gone")


@pytest.mark.usefixtures("no_threads")
def test_an_end_that_cannot_be_closed_does_not_keep_the_other_open() -> None:
    source, sink = ClosesBadly(IN, sends=False), ClosesBadly(OUT, sends=True)
    threads, _ = stage_with(sink, source)
    threads.start()
    with pytest.raises(OSError, match="the descriptor is gone"):
        threads.shutdown(0.0)
    assert source.closed.is_set()
    assert sink.closed.is_set()
    assert threads.state == "closed"
    threads.shutdown()  # again: it neither waits nor raises


@pytest.mark.usefixtures("no_threads")
def test_a_shutdown_meets_a_start_that_is_not_through(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        if thread.name == "thinker-outbox":
            time.sleep(0.2)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    sink = BlockingConnector(OUT, sends=True)
    threads, _ = stage_with(sink)
    starting = threading.Thread(target=threads.start)
    starting.start()
    time.sleep(0.05)
    assert threads.shutdown(0.1)
    starting.join()
    assert sink.closed.is_set()
    deadline_s = time.monotonic() + PATIENCE_S
    while threads_alive() and time.monotonic() < deadline_s:
        time.sleep(0.01)


@pytest.mark.usefixtures("no_threads")
def test_a_shutdown_that_cannot_flush_reports_each_request_that_is_left() -> None:
    sink, _ = memory_pair(Hello(OUT))  # nobody steps the other end: every put is busy
    threads, seen = stage_with(sink)
    threads.start()
    for name, identity in (("r", R1), ("o", OTHER)):
        assert threads.runtime.register(name, identity).accepted
    assert threads.shutdown(0.02) is False
    reason = "shutdown: its end was not out within 0.02 s"
    assert sorted(seen.reasons) == [("marker_lost", "o", reason), ("marker_lost", "r", reason)]


# Observers


class HeldObserver:
    """Takes its time over the first transition."""

    def __init__(self) -> None:
        self.holds, self.go_on = threading.Event(), threading.Event()
        self.told: list[tuple[str, str]] = []

    def on_transition(self, transition: Transition) -> None:
        if not self.holds.is_set():
            self.holds.set()
            assert self.go_on.wait(PATIENCE_S)
        self.told.append((transition.internal_id, str(transition.event)))

    def on_failure(self, failure: Failure) -> None:
        self.told.append((failure.internal_id, failure.what))


def test_observers_are_told_in_the_order_of_what_happened_whichever_thread_it_was() -> None:
    """And the thread that did not get to tell does not wait for the slow observer."""
    held = HeldObserver()
    stage = sender_only(observers=[held])
    first = threading.Thread(target=stage.runtime.register, args=("r", R1))
    first.start()
    assert held.holds.wait(PATIENCE_S)
    assert stage.runtime.register("o", OTHER).accepted
    stage.runtime.fail("o", "host")
    assert held.told == []
    held.go_on.set()
    first.join(PATIENCE_S)
    assert held.told == [("r", "task_begun"), ("o", "task_begun"), ("o", "host_failed"), ("o", "failed")]
    assert [transition.internal_id for transition in stage.seen.transitions] == ["r", "o", "o"]


class RaisingObserver:
    def on_transition(self, transition: Transition) -> None:
        raise OSError("disk full")

    def on_failure(self, failure: Failure) -> None:
        raise OSError("disk full too")


def test_what_an_only_observer_raises_is_printed_and_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ScriptedConnector(OUT, sends=True)
    runtime = StageRuntime(
        StageConfig(stage="thinker"), source=None, sink=sink, host=ScriptedHost(), observers=(RaisingObserver(),)
    )
    assert runtime.register("r", R1).accepted
    assert runtime.submit_chunk("r", "c0").accepted
    runtime.put_once()
    runtime.produce_once()
    runtime.put_once()
    runtime.fail("r", "host")
    runtime.put_once()
    assert [words(frame) for frame in sink.stored] == ["open", "data 0", "end error(host)"]
    printed = capsys.readouterr().err
    assert "OSError: disk full\n" in printed
    assert "OSError: disk full too\n" in printed


# Over shared memory


@pytest.mark.usefixtures("no_threads")
def test_odd_ids_arrive_unchanged_in_the_next_stage(tmp_path: Path) -> None:
    odd = ["a\0b", "é" * 4_000]
    hello, folder = Hello(Edge("thinker", "talker")), tmp_path / "edge"
    talker = StageRunnerAdapter(StageConfig(stage="talker"), source=shm_receiver(hello, folder))
    thinker = StageRunnerAdapter(StageConfig(stage="thinker"), sink=shm_sender(hello, folder))
    with talker, thinker:
        opened: list[Identity] = []
        for external_id in odd:
            request, identity = thinker.open(external_id)
            assert thinker.submit_chunk(request, external_id).accepted
            opened.append(identity)
        names: dict[str, Identity] = {}
        came: dict[Identity, Any] = {}

        def both_came(feedback: Feedback) -> bool:
            names.update(feedback.registered)
            for name in feedback.ready:
                taken = talker.take(name)
                assert taken.kind is TakenKind.CHUNK
                came[names[name]] = taken.payload
            return len(came) == len(odd)

        collect_until(talker.runtime, both_came)
        assert came == dict(zip(opened, odd, strict=True))
        assert [identity.external_id for identity in opened] == odd
