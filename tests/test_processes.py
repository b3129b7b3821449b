"""Two stages in two processes over shared memory: killed, stopped, restarted, misconfigured."""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from connector_peer import NOTICED_S

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Hello, shm_receiver, shm_sender
from omni_fsm.protocol import Cause, Edge
from omni_fsm.runtime import Feedback, StageConfig, TakenKind
from omni_fsm.tables import spec_digest

WITHIN_S = 10.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written


class Peer:
    """The stage in the other process."""

    def __init__(self, role: str, directory: Path, mode: str = "chunks") -> None:
        script = Path(__file__).parent / "stage_peer.py"
        command = [sys.executable, str(script), role, str(directory), mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self.next() == ["up"]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def next(self) -> list[Any] | None:
        """What it says next; None when it is gone."""
        return self._said.get(timeout=WITHIN_S)

    def rest(self) -> list[list[Any]]:
        return list(iter(self.next, None))

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def end(self, sig: signal.Signals) -> int:
        self.process.send_signal(sig)
        return self.process.wait(WITHIN_S)


@contextmanager
def peer(role: str, directory: Path, mode: str = "chunks") -> Iterator[Peer]:
    other = Peer(role, directory, mode)
    try:
        yield other
    finally:
        other.process.kill()
        other.process.wait()
        for stream in (other.process.stdin, other.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "edges"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def sender(directory: Path) -> Iterator[StageRunnerAdapter]:
    """This process as the stage before the peer."""
    sink = shm_sender(Hello(Edge("here", "peer"), spec_digest()), directory)
    with StageRunnerAdapter(StageConfig(stage="here", reconnect_s=0.5, shutdown_grace_s=0.0), sink=sink) as adapter:
        yield adapter


@pytest.fixture
def receiver(directory: Path) -> Iterator[StageRunnerAdapter]:
    """This process as the stage after the peer."""
    source = shm_receiver(Hello(Edge("peer", "here"), spec_digest()), directory)
    with StageRunnerAdapter(StageConfig(stage="here", reconnect_s=0.5, shutdown_grace_s=0.0), source=source) as adapter:
        yield adapter


def collect_until(adapter: StageRunnerAdapter, found: Callable[[Feedback], Any]) -> Any:
    """What ``found`` finds in the feedback, as soon as it finds something."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        if result := found(adapter.collect_feedback(0.5)):
            return result
    raise AssertionError("it did not happen in time")


def failure_of(adapter: StageRunnerAdapter, request: str) -> Cause:
    cause: Cause = collect_until(adapter, lambda feedback: feedback.failed.get(request))
    return cause


def take_chunks(adapter: StageRunnerAdapter, request: str, count: int) -> list[Any]:
    """The next payloads of a request, as they come."""
    chunks: list[Any] = []

    def enough(_feedback: Feedback) -> bool:
        while (taken := adapter.take(request)).kind is TakenKind.CHUNK:
            chunks.append(taken.payload)
        return len(chunks) >= count

    if not enough(Feedback()):
        collect_until(adapter, enough)
    return chunks


def test_kill_9_of_the_receiver_fails_its_senders_within_a_second_and_a_new_one_serves(
    directory: Path, sender: StageRunnerAdapter
) -> None:
    with peer("receives", directory) as first:
        request, _ = sender.open("a")
        sender.submit_chunk(request, 0)
        assert first.next() == ["chunk", "a", 0]
        killed_s = time.monotonic()
        first.end(signal.SIGKILL)
        assert failure_of(sender, request).reason == "peer_lost"
        assert time.monotonic() - killed_s < NOTICED_S
    sender.release(request)
    assert not sender.submit_chunk(request, 1).accepted
    assert list(directory.iterdir()) == []
    with peer("receives", directory) as second:
        again, _ = sender.open("a")
        sender.submit_chunk(again, 7)
        sender.end(again)
        assert [second.next(), second.next()] == [["chunk", "a", 7], ["end", "a", None]]


def test_kill_9_of_the_sender_gives_what_it_had_sent_and_then_the_failure(
    directory: Path, receiver: StageRunnerAdapter
) -> None:
    with peer("sends", directory) as other:
        other.tell("whole", 2, "whole")
        other.tell("open", 2, "")
        said = [other.next() for _ in range(3)]
        assert sorted(map(str, said)) == ["['out', 'whole']", "['submitted', 'open']", "['submitted', 'whole']"]
        names: dict[str, str] = {}
        ready: set[str] = set()

        def both_came(feedback: Feedback) -> bool:
            names.update({identity.external_id: request for request, identity in feedback.registered.items()})
            ready.update(feedback.ready)
            return len(ready) == 2

        collect_until(receiver, both_came)
        assert take_chunks(receiver, names["open"], 2) == [0, 1]
        time_s = time.monotonic()
        other.end(signal.SIGKILL)
        assert failure_of(receiver, names["open"]).reason == "peer_lost"
        assert time.monotonic() - time_s < NOTICED_S
    assert take_chunks(receiver, names["whole"], 2) == [0, 1]  # a committed end wins over the death
    assert receiver.take(names["whole"]).kind is TakenKind.GONE  # its end was taken with them
    assert receiver.take(names["open"]).kind is TakenKind.FAILED


def test_sigterm_of_the_sender_ends_its_streams_as_cancelled_by_shutdown(
    directory: Path, receiver: StageRunnerAdapter
) -> None:
    with peer("sends", directory) as other:
        other.tell("a", 1, "")
        request = collect_until(receiver, lambda feedback: next(iter(feedback.ready), None))
        assert other.end(signal.SIGTERM) == 0
        assert str(failure_of(receiver, request)) == "cancelled(shutdown)"
        assert ["down"] in other.rest()


def test_sigterm_of_the_receiver_stops_its_senders(directory: Path, sender: StageRunnerAdapter) -> None:
    with peer("receives", directory) as other:
        request, _ = sender.open("a")
        sender.submit_chunk(request, 0)
        assert other.next() == ["chunk", "a", 0]
        assert other.end(signal.SIGTERM) == 0
        assert str(failure_of(sender, request)) == "cancelled(shutdown)"


def test_a_request_that_opens_on_a_lost_edge_fails_when_the_peer_is_not_back_in_time(
    directory: Path, sender: StageRunnerAdapter
) -> None:
    with peer("receives", directory) as other:
        request, _ = sender.open("a")
        sender.submit_chunk(request, 0)
        other.next()
        other.end(signal.SIGKILL)
        failure_of(sender, request)
    late, _ = sender.open("b")
    assert failure_of(sender, late).reason == "peer_lost"


def test_two_ends_that_disagree_about_the_mode_refuse_each_other_with_both_values(
    directory: Path, sender: StageRunnerAdapter
) -> None:
    with peer("receives", directory, "full_payload"):
        request, _ = sender.open("a")
        reason = failure_of(sender, request).reason
        assert "mode is 'chunks' here and 'full_payload' at the peer" in reason


def test_what_is_left_after_a_kill_is_nothing(directory: Path, sender: StageRunnerAdapter) -> None:
    before = set(SHARED_MEMORY.iterdir())
    with peer("receives", directory) as other:
        request, _ = sender.open("big")
        sender.submit_chunk(request, b"x" * (1 << 20))
        assert other.next() == ["chunk", "big", 1 << 20]
        other.end(signal.SIGKILL)
        failure_of(sender, request)
    sender.release(request)
    sender.collect_feedback()
    assert {table: count for table, count in sender.residue().items() if count} == {}
    assert set(SHARED_MEMORY.iterdir()) == before
    assert list(directory.iterdir()) == []
