"""What a scheduler learns of a payload, and what of a payload wakes a request."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_fsm.payload import (
    MetadataError,
    MetadataKeys,
    Placement,
    SchedulingMetadata,
    is_consumable,
    place_chunk,
    scheduling_metadata,
    wakes,
)
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError

quick = settings(derandomize=True, deadline=None, max_examples=200)
CODES = torch.arange(6).view(2, 3)


# What is read


@pytest.mark.parametrize(
    "payload",
    [
        {
            "meta": {"next_stage_prompt_len": 6, "left_context_size": 1, "finished": torch.tensor(data=True)},
            "codes": {"audio": CODES},
        },
        {"next_stage_prompt_len": 6, "left_context_size": 1, "finished": True, "code_predictor_codes": CODES},
        {
            "meta.next_stage_prompt_len": torch.tensor([6]),
            "meta.left_context_size": np.int64(1),
            "meta.finished": np.array([1]),
            "codes.audio": CODES.tolist(),
        },
    ],
    ids=["nested", "flat", "dotted"],
)
def test_the_same_is_read_of_newer_and_of_older_payloads(payload: dict[str, Any]) -> None:
    metadata = scheduling_metadata(payload)
    assert metadata == SchedulingMetadata(6, (2, 3), 1, finished=True)
    assert (metadata.audio_codes_len, metadata.tokens) == (6, 6)
    assert all(
        type(n) is int for n in (metadata.next_prompt_len, metadata.left_context_size, *metadata.audio_codes_shape)
    )
    assert type(metadata.finished) is bool


@pytest.mark.parametrize("payload", [None, {}, [], torch.ones(3), "text", {"meta": 5}, {"meta": {"finished": None}}])
def test_what_a_payload_does_not_say_is_none(payload: Any) -> None:
    assert scheduling_metadata(payload) == SchedulingMetadata()
    assert scheduling_metadata(payload).audio_codes_len is None


def test_newer_keys_count_before_older_ones() -> None:
    payload = {"next_stage_prompt_len": 1, "meta": {"next_stage_prompt_len": 2, "left_context_size": None}}
    assert scheduling_metadata(payload | {"left_context_size": 3}) == SchedulingMetadata(2, left_context_size=3)


@pytest.mark.parametrize(
    ("codes", "shape", "count"),
    [
        ([], (0,), 0),
        ([1, 2, 3], (3,), 3),
        ((), (0,), 0),
        (np.zeros((4, 8)), (4, 8), 32),
        (torch.empty(0, 8), (0, 8), 0),
    ],
)
def test_codes_are_counted_and_not_copied(codes: Any, shape: tuple[int, ...], count: int) -> None:
    metadata = scheduling_metadata({"codes": {"audio": codes}})
    assert (metadata.audio_codes_shape, metadata.audio_codes_len, metadata.tokens) == (shape, count, count)


def test_keys_can_be_named_otherwise() -> None:
    keys = MetadataKeys(next_prompt_len=("info.tokens",), content=("frames",), light=("info",))
    assert scheduling_metadata({"info": {"tokens": 9}}, keys).next_prompt_len == 9
    assert not is_consumable({"info": {"tokens": 9}}, keys)
    assert is_consumable({"frames": [0]}, keys)


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        ({"meta": {"next_stage_prompt_len": -1}}, "meta.next_stage_prompt_len"),
        ({"next_stage_prompt_len": True}, "next_stage_prompt_len"),
        ({"meta": {"next_stage_prompt_len": 1.5}}, "meta.next_stage_prompt_len"),
        ({"left_context_size": torch.tensor([1, 2])}, "left_context_size"),
        ({"left_context_size": "3"}, "left_context_size"),
        ({"codes": {"audio": [[1, 2], [3]]}}, "codes.audio"),
        ({"codes": {"audio": 5}}, "codes.audio"),
        ({"meta": {"finished": torch.tensor([True, False])}}, "meta.finished"),
        ({"finished": "yes"}, "finished"),
        ({"finished": 2}, "finished"),
        ({"finished": torch.empty(0)}, "finished"),
    ],
)
def test_what_cannot_be_is_the_senders_fault_and_named(payload: dict[str, Any], key: str) -> None:
    with pytest.raises(MetadataError) as refused:
        scheduling_metadata(payload)
    assert refused.value.key == key
    assert str(refused.value).startswith(f"{key}: ")
    assert refused.value.accepted in str(refused.value)
    assert isinstance(refused.value, RemoteProtocolError)


@pytest.mark.parametrize("value", ["meta", ("",), (1,), ["meta.finished"]])
def test_keys_that_are_no_names_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        MetadataKeys(finished=value)
    assert refused.value.field == "MetadataKeys.finished"


# What wakes a request

LIGHT: list[Any] = [
    None,
    {},
    {"meta": {"finished": False}},
    {"meta": {"next_stage_prompt_len": 50, "plan": [("assistant", 0, 3)]}},
    {"next_stage_prompt_len": 50, "left_context_size": 3, "finished": torch.tensor(data=False)},
    {"ids": {"output": [1, 2]}},
    {"embed": {"decode_token_start": 1, "decode_token_end": 2}},
    {"codes": {"audio": torch.empty(0)}, "speaker": "amy"},
    {"embed": {"decode": torch.empty(0, 8)}, "ids": {"all": [1]}},
    {"anything": [], "text": "", "none": None, "deep": {"er": {}}},
    [],
    torch.empty(0, 3),
]
HEAVY: list[Any] = [
    {"codes": {"audio": torch.tensor([1])}},
    {"code_predictor_codes": [7]},
    {"embed": {"decode": torch.tensor(1.0)}},
    {"embed": {"decode": torch.empty(0, 8)}, "codes": {"audio": [1]}},
    {"ids": {"output": [1], "all": [1]}},
    {"schema/9": {"x": 0}},
    {"text": "a"},
    {"audio": np.zeros(3)},
    torch.zeros(1),
    [None],
    "text",
    0,
]


@pytest.mark.parametrize("payload", LIGHT)
def test_metadata_alone_and_empty_content_wake_nobody_unless_they_come_with_the_end(payload: Any) -> None:
    assert not is_consumable(payload)
    assert not wakes(payload, is_end=False)
    assert wakes(payload, is_end=True)


@pytest.mark.parametrize("payload", HEAVY)
def test_content_wakes(payload: Any) -> None:
    assert is_consumable(payload)
    assert wakes(payload, is_end=False)


@pytest.mark.parametrize("flag", [True, torch.tensor(data=True), torch.tensor([True])])
def test_a_payload_that_says_it_is_the_last_wakes_though_there_is_nothing_in_it(flag: Any) -> None:
    assert wakes({"meta": {"finished": flag}, "codes": {"audio": []}}, is_end=False)
    assert wakes({"finished": flag}, is_end=False)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(torch.empty(0)) | st.just(CODES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@quick
@given(TREES)
def test_whatever_is_below_meta_alone_wakes_nobody_and_any_tree_has_an_answer(tree: Any) -> None:
    assert not is_consumable({"meta": {"unknown": tree}})
    assert is_consumable(tree) in (True, False)
    assert wakes(tree, is_end=True)
    assert is_consumable({"meta": tree, "codes": {"audio": CODES}})


# Where a chunk goes


@quick
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_case_55_a_chunk_is_placed_whole_or_not_in_this_cycle(tokens: int, left: int, budget: int) -> None:
    """A budget that has room for a part of it defers it; only what no budget holds is refused."""
    left = min(left, budget)
    placed = place_chunk(SchedulingMetadata(next_prompt_len=tokens), left_tokens=left, budget_tokens=budget)
    expected = Placement.WHOLE if tokens <= left else Placement.DEFER if tokens <= budget else Placement.REFUSE
    assert placed is expected


def test_case_55_the_metadata_of_what_is_placed_describe_all_of_it() -> None:
    """Ten tokens a cycle, chunks of six: each cycle takes one whole chunk, and what it is told of it is what it computes."""
    waiting = [
        {"codes": {"audio": torch.full((2, 3), number)}, "meta": {"left_context_size": 1}} for number in range(3)
    ]
    cycles = []
    while waiting:
        left, taken = 10, []
        while waiting:
            metadata = scheduling_metadata(waiting[0])
            if place_chunk(metadata, left_tokens=left, budget_tokens=10) is not Placement.WHOLE:
                break
            payload, left = waiting.pop(0), left - metadata.tokens
            assert payload["codes"]["audio"].numel() == metadata.audio_codes_len
            taken.append(metadata)
        cycles.append(taken)
    assert cycles == [[SchedulingMetadata(None, (2, 3), 1)]] * 3
    large = scheduling_metadata({"codes": {"audio": torch.zeros(11)}})
    assert place_chunk(large, left_tokens=10, budget_tokens=10) is Placement.REFUSE
