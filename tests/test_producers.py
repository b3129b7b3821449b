"""Producers written for older runners: how they are called, what they find, and what is left of them: nothing."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import OTHER, R1, R2, Stage, error, sender_only

from omni_fsm.adapters import (
    BatchCountError,
    Edge,
    Hello,
    Identity,
    LegacyBatchProducer,
    LegacyConnector,
    LegacyProducer,
    LegacyStep,
    ProducerContext,
    StageConfig,
    StageRunnerAdapter,
    TakenKind,
    memory_pair,
)
from omni_fsm.connectors.port import PeerLost, Stopped
from omni_fsm.payload import decode
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.state import Owner, StateRetiredError, StateStore
from omni_fsm.testing import ProducerConformance

quick = settings(derandomize=True, deadline=None, max_examples=100)


def new_store() -> StateStore:
    return StateStore(threading.RLock())


def context_of(
    store: StateStore, output: Any = None, *, identity: Identity = R1, internal_id: str = "", **fields: Any
) -> ProducerContext:
    """What the runtime calls a producer with; the generation owns its state from here on."""
    internal_id = internal_id or f"int-{identity}"
    values = {"is_finished": False, "is_segment_finished": False, "segment": 0, "seq": 0} | fields
    state = store.own(Owner(internal_id, identity))
    return ProducerContext(request=internal_id, identity=identity, output=output, state=state, **values)


# How it is called


def by_new_name(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> Any:  # noqa: FBT001, FBT002
    return ("new", multimodal_output, request.external_req_id, is_finished)


def by_old_name(transfer_manager: Any, pooling_output: Any, request: Any, is_finished: Any) -> Any:
    return ("old", pooling_output, request.external_req_id, is_finished)


def without_finished(transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
    return ("old", pooling_output, request.external_req_id, request.is_finished())


def with_both_names(
    transfer_manager: Any = None, pooling_output: Any = None, multimodal_output: Any = None, request: Any = None
) -> Any:
    return (
        "new" if pooling_output is None else "old",
        multimodal_output,
        request.external_req_id,
        request.is_finished(),
    )


def by_keyword_only(*, pooling_output: Any, **kwargs: Any) -> Any:
    return ("old", pooling_output, kwargs["request"].external_req_id, kwargs["is_finished"])


class Callee:
    def method(self, transfer_manager: Any, multimodal_output: Any, request: Any, *, is_finished: bool) -> Any:
        return ("new", multimodal_output, request.external_req_id, is_finished)

    def __call__(self, transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
        return without_finished(transfer_manager, pooling_output, request)


def with_more(scale: int, transfer_manager: Any, pooling_output: Any, request: Any, flag: Any = None) -> Any:
    return without_finished(transfer_manager, pooling_output, request)


FITTING: list[tuple[Callable[..., Any], str]] = [
    (by_new_name, "new"),
    (by_old_name, "old"),
    (without_finished, "old"),
    (with_both_names, "new"),
    (by_keyword_only, "old"),
    (Callee().method, "new"),
    (Callee(), "old"),
    (functools.partial(with_more, 2), "old"),
    (functools.partial(with_more, scale=2), "old"),
]


@pytest.mark.parametrize(("function", "name"), FITTING)
@pytest.mark.parametrize("is_finished", [True, False])
def test_both_historical_forms_are_called_with_what_they_ask_for(
    function: Callable[..., Any], name: str, is_finished: Any
) -> None:
    payload = LegacyProducer(function)(context_of(new_store(), {"a": 1}, is_finished=is_finished))
    assert payload == (name, {"a": 1}, "r1", is_finished)


def no_output(transfer_manager: Any, request: Any) -> None: ...
def other_output(transfer_manager: Any, pooled: Any, request: Any) -> None: ...
def anything(**kwargs: Any) -> None: ...
def needs_more(transfer_manager: Any, pooling_output: Any, request: Any, stage: Any) -> None: ...
def needs_both(transfer_manager: Any, pooling_output: Any, multimodal_output: Any, request: Any) -> None: ...
def no_request(transfer_manager: Any, pooling_output: Any) -> None: ...
def by_position(transfer_manager: Any, pooling_output: Any, request: Any, /) -> None: ...
async def asynchronous(transfer_manager: Any, pooling_output: Any, request: Any) -> None: ...
def generator(transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    "function",
    [
        no_output,
        other_output,
        anything,
        needs_more,
        needs_both,
        no_request,
        by_position,
        asynchronous,
        generator,
        dict,
        7,
        None,
    ],
)
def test_another_form_is_refused_when_it_is_given_not_when_it_is_called(function: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        LegacyProducer(function)
    text = str(refused.value)
    assert text.startswith("producer ")
    assert getattr(function, "__qualname__", "") in text
    assert all(
        word in text for word in ("transfer_manager", "request", "multimodal_output or pooling_output", "is_finished")
    )


def test_the_form_is_decided_once_by_the_signature_and_a_type_error_of_its_own_is_not_a_reason_to_call_again() -> None:
    calls = []

    def raising(transfer_manager: Any, pooling_output: Any, request: Any, is_finished: Any) -> None:
        calls.append(is_finished)
        raise TypeError("raising() got an unexpected keyword argument 'is_finished'")

    producer = LegacyProducer(raising)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        producer(context_of(new_store()))
    assert calls == [False]


def test_what_it_raises_reaches_the_caller_as_it_is_and_the_life_goes_on() -> None:
    class OwnError(Exception):
        pass

    def sometimes(transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
        transfer_manager.code_prompt_token_ids[request.external_req_id].append(pooling_output)
        if pooling_output == 2:
            raise OwnError(pooling_output)
        return transfer_manager.code_prompt_token_ids[request.external_req_id]

    producer, store = LegacyProducer(sometimes), new_store()
    producer(context_of(store, 1))
    with pytest.raises(OwnError):
        producer(context_of(store, 2))
    assert producer(context_of(store, 3)) == [1, 2, 3]


def test_a_runner_may_submit_the_engine_s_request_with_the_output() -> None:
    def tokens(transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
        return [pooling_output, request.output_token_ids]

    step = LegacyStep("hidden", SimpleNamespace(output_token_ids=[1, 2]))
    assert LegacyProducer(tokens)(context_of(new_store(), step)) == ["hidden", [1, 2]]


def test_what_it_returns_may_be_converted_but_nothing_stays_nothing() -> None:
    producer = LegacyProducer(lambda transfer_manager, pooling_output, request: pooling_output, convert=vars)
    store = new_store()
    assert producer(context_of(store, SimpleNamespace(a=1))) == {"a": 1}
    assert producer(context_of(store, None)) is None


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("requests_max", {"requests_max": 0}),
        ("per_segment", {"per_segment": "_cached"}),
        ("per_segment", {"per_segment": [1]}),
        ("extras", {"extras": {"a": 1}}),
        ("convert", {"convert": 3}),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        LegacyProducer(without_finished, **options)
    assert refused.value.field == field


# What it finds


class Spy:
    """A producer that keeps the manager and does to it what the test says."""

    def __init__(self) -> None:
        self.managers: list[Any] = []
        self.act: Callable[[Any, str], Any] = lambda manager, name: None

    def __call__(self, transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
        self.managers.append(transfer_manager)
        return self.act(transfer_manager, request.external_req_id)

    def run(self, producer: LegacyProducer, context: ProducerContext, act: Callable[[Any, str], Any]) -> Any:
        self.act = act
        return producer(context)


def spied(**options: Any) -> tuple[Spy, LegacyProducer, StateStore]:
    spy = Spy()
    return spy, LegacyProducer(spy, **options), new_store()


def test_request_payload_is_the_stage_s_own() -> None:
    spy, producer, store = spied()

    def act(manager: Any, name: str) -> None:
        assert manager.request_payload.get(name) is None
        manager.request_payload[name] = {"ref": 1}

    spy.run(producer, context_of(store), act)
    assert spy.managers[0].request_payload is store.raw
    assert store.raw["r1"] == {"ref": 1}


def test_tables_read_as_default_dicts_for_the_request_and_as_dicts_for_others() -> None:
    spy, producer, store = spied()

    def act(manager: Any, name: str) -> None:
        codes = manager.code_prompt_token_ids
        assert name not in codes
        assert codes.get(name) is None
        assert codes.pop(name, "none") == "none"
        codes[name].append([1, 2])
        assert (codes[name], list(codes), len(codes), list(codes.items())) == ([[1, 2]], [name], 1, [(name, [[1, 2]])])
        assert codes.pop(name) == [[1, 2]]
        assert codes[name] == []
        del codes[name]
        with pytest.raises(KeyError):
            codes["nobody"]
        with pytest.raises(KeyError):
            del codes[name]
        assert codes.get("nobody", 3) == 3
        with pytest.raises(StateRetiredError, match="an entry of code_prompt_token_ids"):
            codes["nobody"] = []
        assert manager.put_req_chunk[name] == manager.put_req_chunk.get(name, 9) == 0

    spy.run(producer, context_of(store), act)


def test_chunks_are_counted_by_the_frames_that_were_made_and_anew_in_each_segment() -> None:
    spy, producer, store = spied()

    def counts(manager: Any, name: str) -> Any:
        manager.code_prompt_token_ids[name].append(0)
        names = ("put_req_chunk", "ramp_chunk_count", "requests_num_chunks_sent", "code_prompt_token_ids")
        return [getattr(manager, n)[name] for n in names[:3]] + [len(manager.code_prompt_token_ids[name])]

    steps = [(0, 0), (0, 0), (0, 1), (0, 2), (1, 3), (1, 3), (1, 4)]  # a call that returns nothing makes no frame
    found = [spy.run(producer, context_of(store, seq=seq, segment=segment), counts) for segment, seq in steps]
    assert found == [
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [1, 1, 1, 3],
        [2, 2, 2, 4],
        [3, 0, 0, 1],
        [3, 0, 0, 2],
        [4, 1, 1, 3],
    ]


def test_the_connector_and_further_attributes_are_as_they_were_given() -> None:
    connector = LegacyConnector({"extra": {"codec_chunk_frames": 25}}, stage_id=1)
    spy, producer, store = spied(connector=connector, extras=lambda: {"scheduler_max_num_seqs": 8, "_pending": {}})

    def act(manager: Any, name: str) -> None:
        assert (manager.connector.config["extra"]["codec_chunk_frames"], manager.connector.stage_id) == (25, 1)
        assert manager.scheduler_max_num_seqs == 8
        manager._pending[name] = 1

    spy.run(producer, context_of(store), act)
    spy.run(producer, context_of(store, identity=OTHER), act)
    assert [manager._pending for manager in spy.managers] == [{"r1": 1}, {"r2": 1}]
    assert LegacyProducer(without_finished)._offers.connector == LegacyConnector({}, 0)
    _, wrong, store = spied(extras=lambda: {"put_req_chunk": {}})
    with pytest.raises(ConfigError, match="extras: 'put_req_chunk'"):
        wrong(context_of(store))


def cached(manager: Any, name: str) -> Any:
    """As older producers do it: a cache that they hang on the manager, made when it is not there."""
    cache = getattr(manager, "_cached", None)
    if cache is None:
        cache = manager._cached = {}
    cache[name] = cache.get(name, 0) + 1
    return cache[name]


def test_attributes_of_its_own_are_one_life_s_and_go_with_a_segment_only_if_declared() -> None:
    spy, producer, store = spied(per_segment=["_cached"])
    plain_spy, plain, plain_store = spied()
    for number, segment in enumerate((0, 0, 1, 1, 1)):
        assert spy.run(producer, context_of(store, segment=segment), cached) == (1, 2, 1, 2, 3)[number]
        assert plain_spy.run(plain, context_of(plain_store, segment=segment), cached) == number + 1
    assert spy.run(producer, context_of(store, identity=OTHER), cached) == 1


# One life, and nothing of another


def test_a_later_life_finds_nothing_of_the_earlier_one_though_nobody_told_that_it_is_over() -> None:
    spy, producer, store = spied()

    def act(manager: Any, name: str) -> Any:
        manager.code_prompt_token_ids[name].append(1)
        return [len(manager.code_prompt_token_ids[name]), cached(manager, name)]

    assert spy.run(producer, context_of(store), act) == [1, 1]
    store.release(R1)
    assert spy.run(producer, context_of(store, identity=R2), act) == [1, 1]
    assert producer.lives == 1
    assert not producer.forget(R1)  # a late cleanup of the first life
    assert spy.run(producer, context_of(store, identity=R2), act) == [2, 2]
    assert producer.forget(R2)
    assert not producer.forget(R2)
    assert producer.lives == 0


def test_a_manager_kept_past_the_cleanup_writes_nowhere() -> None:
    spy, producer, store = spied()
    spy.run(producer, context_of(store), lambda manager, name: manager.code_prompt_token_ids[name].append(1))
    kept = spy.managers[0]
    store.release(R1)
    producer.forget(R1)
    for write in (
        lambda: kept.code_prompt_token_ids["r1"],
        lambda: kept.put_req_chunk.update(r1=5),
        lambda: kept.request_payload.update(r1=5),
    ):
        with pytest.raises(StateRetiredError):
            write()
    spy.run(
        producer, context_of(store, identity=R2), lambda manager, name: manager.code_prompt_token_ids[name].append(2)
    )
    with pytest.raises(StateRetiredError):
        kept.put_req_chunk["r1"] = 7
    with pytest.raises(StateRetiredError):
        kept.code_prompt_token_ids.pop("r1")
    with pytest.raises(StateRetiredError):
        del kept.code_prompt_token_ids["r1"]
    assert producer._book.columns["put_req_chunk"] == {"r1": 0}
    assert producer._book.columns["code_prompt_token_ids"] == {"r1": [2]}


def test_a_call_that_overlaps_the_cleanup_leaves_nothing() -> None:
    _, producer, store = spied()
    context = context_of(store)
    store.release(R1)
    with pytest.raises(StateRetiredError, match="a call of its producer refused"):
        producer(context)
    assert producer.lives == 0
    assert all(not column for column in producer._book.columns.values())
    assert len(store) == 0


def test_one_request_cannot_write_to_another_s_entries_but_sees_how_many_work() -> None:
    spy, producer, store = spied()
    spy.run(producer, context_of(store), lambda manager, name: manager.code_prompt_token_ids[name].append(1))

    def act(manager: Any, name: str) -> int:
        for write in (
            lambda: manager.code_prompt_token_ids.update(r1=[]),
            lambda: manager.code_prompt_token_ids.pop("r1"),
            manager.code_prompt_token_ids.clear,
        ):
            with pytest.raises(StateRetiredError):
                write()
        manager.code_prompt_token_ids[name].append(1)
        return sum(len(value) > 0 for value in manager.code_prompt_token_ids.values())

    assert spy.run(producer, context_of(store, identity=OTHER), act) == 2


def test_an_observer_that_was_forgotten_is_noticed() -> None:
    _, producer, store = spied(requests_max=3)
    for number in range(3):
        producer(context_of(store, identity=Identity(f"r{number}", 1)))
    with pytest.raises(ConfigError, match=r"observers: .* 3 lives, and none was reported as over"):
        producer(context_of(store, identity=Identity("r3", 1)))
    assert producer.lives == 3


# In a stage


def gathering(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: Any = None) -> Any:
    """Two frames a chunk; what is left goes with the end."""
    name = request.external_req_id
    codes = transfer_manager.code_prompt_token_ids[name]
    if multimodal_output is not None:
        if multimodal_output == "boom":
            raise ValueError("boom")
        codes.append(multimodal_output)
        transfer_manager.request_payload[name] = codes
        transfer_manager._seen = {name: len(codes)}
    if not is_finished and len(codes) < 2:
        return None
    made, codes[:] = list(codes), []
    return {"codes": made, "chunk": transfer_manager.put_req_chunk[name]}


def staged() -> tuple[Stage, LegacyProducer]:
    producer = LegacyProducer(gathering)
    return sender_only(producer=producer, observers=[producer]), producer


def payloads(stage: Stage) -> list[Any]:
    bodies = [b"".join(frame.body.parts) for frame in stage.sink.stored if frame.body is not None]
    return [decode(body) for body in bodies]


def test_a_request_that_ends_well_leaves_nothing_once_its_end_is_out() -> None:
    stage, producer = staged()
    stage.open("i", R1)
    stage.submit("i", 1, 2, 3, 4, 5)
    stage.run()
    assert producer.lives == 1
    assert stage.runtime.request_payload["r1"] == [5]
    stage.runtime.end("i")
    stage.run()
    assert payloads(stage) == [{"codes": [1, 2], "chunk": 0}, {"codes": [3, 4], "chunk": 1}, {"codes": [5], "chunk": 2}]
    assert producer.lives == 0
    assert stage.rest() == {}


def test_a_raise_ends_the_request_in_its_own_words_and_its_entries_stay_until_it_is_released() -> None:
    stage, producer = staged()
    stage.open("i", R1)
    stage.submit("i", 1, "boom")
    stage.run()
    assert [str(cause) for cause in stage.collect().failed.values()] == ["error(ValueError: boom)"]
    assert producer.lives == 1
    stage.runtime.release("i")
    stage.run()
    assert producer.lives == 0
    assert stage.rest() == {}


@pytest.mark.parametrize(
    "leave",
    [
        lambda stage: stage.runtime.cancel("i"),
        lambda stage: stage.runtime.release("i"),
        lambda stage: stage.runtime.begin_shutdown(),
        lambda stage: stage.hear(Stopped(R1, error())),
        lambda stage: stage.hear(PeerLost("gone")),
        lambda stage: (stage.runtime.fail("i", "host"), stage.runtime.release("i")),
    ],
    ids=["cancel", "release", "shutdown", "stop", "peer lost", "fail"],
)
def test_every_road_out_leaves_nothing_and_frees_what_was_kept(leave: Callable[[Stage], Any]) -> None:
    large = []

    def keeping(transfer_manager: Any, pooling_output: Any, request: Any) -> None:
        tensor = torch.zeros(10)
        large.append(weakref.ref(tensor))
        transfer_manager.code_prompt_token_ids[request.external_req_id].append(tensor)
        transfer_manager._mine = tensor

    producer = LegacyProducer(keeping)
    stage = sender_only(producer=producer, observers=[producer])
    stage.open("i", R1)
    stage.submit("i", 1)
    stage.run()
    assert (producer.lives, large[0]() is not None) == (1, True)
    leave(stage)
    stage.run()
    gc.collect()
    assert (producer.lives, large[0]()) == (0, None)


def test_a_life_that_begins_at_once_after_a_cancel_counts_from_nothing() -> None:
    stage, producer = staged()
    for number in range(20):
        identity = Identity("r1", number)
        stage.open(f"i{number}", identity)
        stage.submit(f"i{number}", number, number, number)
        stage.run()
        assert payloads(stage)[-1] == {"codes": [number, number], "chunk": 0}
        stage.runtime.cancel(f"i{number}")
    stage.run()
    assert producer.lives == 0


@quick
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["submit", "submit", "end", "cancel"])), max_size=40))
def test_any_order_of_requests_gives_each_life_its_own(steps: list[tuple[str, str]]) -> None:
    stage, producer = staged()
    generation, sent, number = dict.fromkeys("abc", 0), {}, 0
    for name, step in steps:
        identity = Identity(name, generation[name])
        internal_id = str(identity)
        if identity not in sent:
            stage.open(internal_id, identity)
            sent[identity] = []
        if step == "submit":
            number += 1
            stage.submit(internal_id, number)
            sent[identity].append(number)
        else:
            getattr(stage.runtime, step)(internal_id)
            generation[name] += 1
        stage.run()
    for identity, numbers in sent.items():
        bodies = [frame.body for frame in stage.sink.stored if frame.identity == identity and frame.body is not None]
        made = [decode(b"".join(body.parts)) for body in bodies]
        assert [payload["chunk"] for payload in made] == list(range(len(made)))
        codes = [code for payload in made for code in payload["codes"]]
        assert codes == numbers[: len(codes)]
        assert len(numbers) - len(codes) in (0, 1)
    open_lives = [
        identity for identity, numbers in sent.items() if generation[identity.external_id] == identity.generation
    ]
    assert producer.lives <= len(open_lives)


def cumulative(transfer_manager: Any, pooling_output: Any, request: Any, is_finished: Any) -> Any:
    """Its output is all rows so far, some of them invalid; it sends what is new, one row behind, and the held one at the end."""
    name = request.external_req_id
    sent = getattr(transfer_manager, "_sent", 0)
    if pooling_output is not None:
        transfer_manager._rows = [row for row in pooling_output if row >= 0]
    rows = getattr(transfer_manager, "_rows", [])
    ready = rows[sent : len(rows) if is_finished else len(rows) - 1]
    if not ready:
        return None
    transfer_manager._sent = sent + len(ready)
    return {"rows": ready, "chunk": transfer_manager.put_req_chunk[name]}


def test_case_54_nothing_new_of_a_cumulative_producer_is_no_chunk_and_its_held_tail_goes_before_the_end() -> None:
    producer = LegacyProducer(cumulative)
    stage = sender_only(producer=producer, observers=[producer])
    stage.open("i", R1)
    stage.submit("i", [10], [10, -1, -1], [10, 11], [10, 11, -1])
    stage.run()
    assert stage.wire() == ["open", "data 0"]
    stage.runtime.end("i")  # a step without rows
    stage.run()
    assert payloads(stage) == [{"rows": [10], "chunk": 0}, {"rows": [11], "chunk": 1}]
    assert len(stage.wire()) == 3  # the tail is in the end itself: nothing can come between


def test_it_runs_between_real_stages() -> None:
    sink, source = memory_pair(Hello(Edge("talker", "vocoder")))
    producer = LegacyProducer(gathering)
    talker = StageRunnerAdapter(StageConfig(stage="talker"), sink=sink, producer=producer)
    with talker, StageRunnerAdapter(StageConfig(stage="vocoder"), source=source) as vocoder:
        request, _ = talker.open("any/thing")
        for number in range(101):
            assert talker.submit_chunk(request, number).accepted
        talker.end(request)
        codes, cause = [], None
        while cause is None:
            for ready in vocoder.collect_feedback(timeout_s=10.0).ready:
                while (taken := vocoder.take(ready)).kind in (TakenKind.CHUNK, TakenKind.END):
                    codes += taken.payload["codes"]
                    cause = taken.cause
        assert (codes, str(cause)) == (list(range(101)), "ok")
        talker.runtime.wait_idle(10.0)
    assert producer.lives == 0


class TestAnOlderProducer(ProducerConformance):
    """The kit's rules hold for what is adapted."""

    interleavings, segmentations, rounds = 8, 4, 2

    def make_producer(self) -> LegacyProducer:
        def function(transfer_manager: Any, pooling_output: Any, request: Any, is_finished: Any) -> Any:
            codes = transfer_manager.code_prompt_token_ids[request.external_req_id]
            transfer_manager._count = getattr(transfer_manager, "_count", 0) + 1
            if pooling_output is not None:
                codes.append(int(pooling_output))
            return {"codes": list(codes), "count": transfer_manager._count, "last": is_finished}

        return LegacyProducer(function)

    def make_steps(self) -> list[Any]:
        return [1, 2, 3, 4]

    @pytest.mark.skip(
        reason="what an older producer hangs on its manager is in the adapter, not in the request's state"
    )
    def test_any_producer_goes_on_with_a_request(self) -> None: ...


# A whole step in one call


def batched(
    transfer_manager: Any, pooling_outputs: list[Any], requests: list[Any], is_finished: list[bool]
) -> list[Any]:
    made = []
    for output, request, finished in zip(pooling_outputs, requests, is_finished, strict=True):
        name = request.external_req_id
        transfer_manager.code_prompt_token_ids[name].append(output)
        count = cached(transfer_manager, name)
        made.append(
            None
            if output is None
            else {"codes": transfer_manager.code_prompt_token_ids[name], "n": count, "f": finished}
        )
    return made


def batch_of(store: StateStore, *outputs: Any, **fields: Any) -> list[ProducerContext]:
    identities = [Identity(name, 1) for name in "ABCDEFG"]
    return [
        context_of(store, output, identity=identity, internal_id=f"int-{identity.external_id}", **fields)
        for identity, output in zip(identities, outputs, strict=False)
    ]


def test_case_21_each_request_of_a_step_keeps_its_own_payload_and_absence_is_said() -> None:
    producer, store = LegacyBatchProducer(batched), new_store()
    assert producer(batch_of(store, "a0", "b0", "c0")) == [
        {"codes": ["a0"], "n": 1, "f": False},
        {"codes": ["b0"], "n": 1, "f": False},
        {"codes": ["c0"], "n": 1, "f": False},
    ]
    second = producer(batch_of(store, "a1", None, "c1", is_finished=True))
    assert second == [{"codes": ["a0", "a1"], "n": 2, "f": True}, None, {"codes": ["c0", "c1"], "n": 2, "f": True}]


@pytest.mark.parametrize("outputs", ["multimodal_outputs", "pooling_outputs"])
@pytest.mark.parametrize("told", [True, False])
def test_both_names_of_the_outputs_with_and_without_is_finished(outputs: str, told: Any) -> None:
    names = ["transfer_manager", outputs, "requests", *(["is_finished"] if told else [])]
    function = eval(f"lambda {', '.join(names)}: [({outputs}[0], {'is_finished' if told else None})]")  # noqa: S307 - ours
    assert LegacyBatchProducer(function)(batch_of(new_store(), 5)) == [(5, [False] if told else None)]


@pytest.mark.parametrize("function", [without_finished, by_new_name, anything])
def test_a_producer_of_one_request_is_no_batched_one(function: Any) -> None:
    with pytest.raises(ConfigError, match="requests, multimodal_outputs or pooling_outputs"):
        LegacyBatchProducer(function)


@pytest.mark.parametrize(
    ("given_back", "found"),
    [
        ([1], "1 payloads"),
        ([], "0 payloads"),
        ([1, 2, 3, 4], "4 payloads"),
        (None, "a NoneType"),
        ({"A": 1, "B": 2, "C": 3}, "a dict"),
        ("abc", "a str"),
    ],
)
def test_a_wrong_number_of_payloads_is_an_error_that_names_each_request(given_back: Any, found: str) -> None:
    def wrong(transfer_manager: Any, pooling_outputs: Any, requests: Any) -> Any:
        return given_back

    with pytest.raises(BatchCountError) as refused:
        LegacyBatchProducer(wrong)(batch_of(new_store(), 1, 2, 3))
    assert (refused.value.requests, refused.value.found) == (("int-A", "int-B", "int-C"), found)
    assert f"wrong gave {found} for 3 requests" in str(refused.value)
    assert all(name in str(refused.value) for name in refused.value.requests)


def test_what_a_batched_producer_raises_reaches_the_caller() -> None:
    def raising(transfer_manager: Any, pooling_outputs: Any, requests: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LegacyBatchProducer(raising)(batch_of(new_store(), 1))


def test_a_step_without_requests_calls_nobody_and_a_request_is_in_a_step_once() -> None:
    producer, store = LegacyBatchProducer(batched), new_store()
    assert producer([]) == []
    with pytest.raises(ConfigError, match="each request once"):
        producer(batch_of(store, 1) * 2)


def test_a_life_that_is_over_is_refused_before_anyone_is_called() -> None:
    calls = []
    producer, store = (
        LegacyBatchProducer(lambda transfer_manager, pooling_outputs, requests: calls.append(1)),
        new_store(),
    )
    contexts = batch_of(store, 1, 2)
    store.release(contexts[1].identity)
    with pytest.raises(StateRetiredError):
        producer(contexts)
    assert calls == []


def test_of_a_batched_producer_s_tables_each_entry_goes_with_its_request_and_settings_stay() -> None:
    producer, store = (
        LegacyBatchProducer(batched, extras=lambda: {"_settings": {"A": "kept"}, "_pending": {}}),
        new_store(),
    )
    producer(batch_of(store, "a0", "b0"))
    manager = producer._book.shared
    manager._pending |= {"A": 1, "B": 2}
    manager._parsed = {"A": "a setting that is named like a request"}
    producer.forget(Identity("A", 1))
    assert (manager._cached, manager._pending) == ({"B": 1}, {"B": 2})
    assert (manager._settings, list(manager._parsed)) == ({"A": "kept"}, ["A"])
    assert list(manager.code_prompt_token_ids) == ["B"]
    with pytest.raises(StateRetiredError):
        manager.code_prompt_token_ids["A"] = []
    store.release(Identity("B", 1))
    later = context_of(store, "b0", identity=Identity("B", 2))
    assert producer([later]) == [{"codes": ["b0"], "n": 1, "f": False}]


@quick
@given(st.lists(st.lists(st.sampled_from("ABC"), unique=True, max_size=3), max_size=8))
def test_any_steps_give_each_request_what_it_would_get_alone(steps: list[list[str]]) -> None:
    together, store, expected = LegacyBatchProducer(batched), new_store(), {name: [] for name in "ABC"}
    for number, names in enumerate(steps):
        contexts = [context_of(store, number, identity=Identity(name, 1)) for name in names]
        for name, payload in zip(names, together(contexts), strict=True):
            expected[name].append(number)
            assert payload == {"codes": expected[name], "n": len(expected[name]), "f": False}
    assert together.lives == len({name for names in steps for name in names})
