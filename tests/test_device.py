"""Tensors of a GPU on their way from the runner's stream to the next stage."""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from omni_fsm.adapters import Hello, ProducerContext, StageConfig, StageRunnerAdapter, TakenKind, memory_pair
from omni_fsm.payload import decode, encode
from omni_fsm.protocol.identity import Edge
from omni_fsm.runtime import device

PATIENCE_S = 10.0


def sent_on(chunks: Iterable[Any], end: Any, producer: Any) -> list[Any]:
    """What a stage behind gets of a runner's outputs."""
    there, here = memory_pair(Hello(Edge("thinker", "talker"), "digest"))
    thinker = StageRunnerAdapter(StageConfig(stage="thinker"), sink=there, producer=producer)
    talker = StageRunnerAdapter(StageConfig(stage="talker"), source=here)
    got: list[Any] = []
    with thinker, talker:
        internal_id, _ = thinker.open("r")
        for output in chunks:
            assert thinker.submit_chunk(internal_id, output).accepted
        thinker.end(internal_id, end)
        for _ in range(int(PATIENCE_S / 0.05)):
            told = talker.collect_feedback(0.05)
            for name in told.ready:
                while (taken := talker.take(name)).kind in (TakenKind.CHUNK, TakenKind.END):
                    got.append(taken.payload)
                    if taken.kind is TakenKind.END:
                        return got
    raise AssertionError(got)


class Stream:
    """A stream of a device that there is not: it only says what is asked of it."""

    device = torch.device("cuda:0")

    def __init__(self, said: list[str], numbers: Iterator[int]) -> None:
        self.said, self.numbers = said, numbers

    def record_event(self) -> str:
        event = f"event {next(self.numbers)}"
        self.said.append(f"{event} is recorded by the {self.who()}")
        return event

    def wait_event(self, event: str) -> None:
        self.said.append(f"{event} is awaited by the {self.who()}")

    @staticmethod
    def who() -> str:
        return "runner" if threading.current_thread() is threading.main_thread() else "worker"


def test_the_producer_s_stream_waits_for_the_runner_s(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    numbers = itertools.count()
    monkeypatch.setattr(device.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(device.torch.cuda, "current_stream", lambda _=None: Stream(said, numbers))

    def producer(context: ProducerContext) -> Any:
        said.append(f"produced from {context.output}")
        return context.output

    assert sent_on(["one"], "two", producer) == ["one", "two"]
    for output in ("one", "two"):
        at = said.index(f"produced from {output}")
        event, _, how = said[at - 1].partition(" is ")
        assert how == "awaited by the worker"
        assert said.index(f"{event} is recorded by the runner") < at - 1
    assert len({line.partition(" is ")[0] for line in said if line.startswith("event")}) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_an_output_stays_what_it_is() -> None:
    output = object()
    assert device.handed_in(output) is output
    assert device.handed_out(output) is output


def slowly(number: int) -> torch.Tensor:
    """A tensor that is not there yet when this returns, for about a tenth of a second."""
    torch.cuda._sleep(200_000_000)
    return torch.full((1000, 100), float(number), device="cuda")


@pytest.mark.gpu
def test_what_is_still_being_computed_on_a_stream_is_sent_as_it_will_be() -> None:
    def producer(context: ProducerContext) -> Any:
        return None if context.output is None else context.output * 2

    with torch.cuda.stream(torch.cuda.Stream()):
        got = sent_on(map(slowly, range(3)), slowly(3), producer)
    assert [payload.unique().tolist() for payload in got] == [[0.0], [2.0], [4.0], [6.0]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make", [lambda: torch.arange(12, device="cuda").reshape(3, 4).T, lambda: torch.empty(0, device="cuda")]
)
def test_a_tensor_of_a_gpu_is_encoded_as_on_the_cpu(make: Any) -> None:
    tensor = make()
    assert torch.equal(decode(b"".join(encode(tensor).parts)), tensor.cpu())


@pytest.mark.gpu
def test_memory_of_an_output_is_not_used_again_while_its_producer_s_work_is_queued() -> None:
    """The producer keeps a sum and returns at once: its own stream still has to read what it was given."""

    def producer(context: ProducerContext) -> Any:
        total = context.state.get_or_create("test.total", lambda: torch.zeros(1000, 100, device="cuda"))
        if context.output is not None:
            torch.cuda._sleep(200_000_000)
            total += context.output
        return total.clone() if context.is_finished else None

    def outputs() -> Iterator[Any]:
        for number in range(8):
            yield torch.full((1000, 100), float(number), device="cuda")  # in the memory of one before, if that is free
            time.sleep(0.02)

    with torch.cuda.stream(torch.cuda.Stream()):
        (got,) = sent_on(outputs(), None, producer)
    assert got.unique().tolist() == [28.0]
