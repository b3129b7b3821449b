"""Payloads gathered piece by piece: what is joined, what is replaced, what is refused, what it costs, and what nobody shares."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_fsm.payload import (
    AccumulateError,
    AccumulateLimitError,
    ChunkAccumulator,
    FullPayload,
    accumulate,
    tree_nbytes,
)
from omni_fsm.protocol.errors import ConfigError

quick = settings(derandomize=True, deadline=None, max_examples=200)


def same(left: Any, right: Any) -> bool:
    """Equal in type, order, dtype, shape and content, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right)
    return bool(left == right)


def gathered(accumulator: ChunkAccumulator | FullPayload, *payloads: Any) -> Any:
    for payload in payloads:
        accumulator.add(payload)
    return accumulator.take()


def chunked(*payloads: Any, **settings_: Any) -> Any:
    return gathered(ChunkAccumulator(**settings_), *payloads)


def full(*payloads: Any, **settings_: Any) -> Any:
    return gathered(FullPayload(**settings_), *payloads)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value, -value] for value in values], dtype=torch.float32)


# Chunks


def test_tensors_are_concatenated_lists_extended_and_the_rest_keeps_the_latest() -> None:
    taken = chunked(
        {"hidden": rows(1, 2), "ids": [1, 2], "speaker": "amy", "step": 1, "scale": torch.tensor(0.5)},
        {"hidden": rows(3), "ids": [3], "speaker": "bob", "step": 2, "scale": torch.tensor(0.7)},
    )
    assert same(
        taken,
        {"hidden": rows(1, 2, 3), "ids": [1, 2, 3], "speaker": "bob", "step": 2, "scale": torch.tensor(0.7)},
    )


def test_dicts_are_joined_key_by_key_and_keys_keep_the_order_in_which_they_came() -> None:
    taken = chunked({"b": {"x": [1]}}, {"a": 1, "b": {"y": [5], "x": [2]}}, {7: torch.tensor([1])})
    assert same(taken, {"b": {"x": [1, 2], "y": [5]}, "a": 1, 7: torch.tensor([1])})


def test_arrays_are_joined_as_tensors_are() -> None:
    assert same(chunked({"a": np.zeros((1, 2))}, {"a": np.ones((2, 2))}), {"a": np.array([[0.0, 0], [1, 1], [1, 1]])})


@pytest.mark.parametrize("key", ["embed.decode", ("embed", "decode")])
def test_declared_keys_replace_whatever_their_kind(key: Any) -> None:
    pieces = ({"embed": {"decode": rows(1)}}, {"embed": {"decode": rows(2, 3)}}, {"embed": {"decode": [4]}})
    assert same(chunked(*pieces, override_keys=[key]), {"embed": {"decode": [4]}})


def test_a_key_spelt_with_its_dots_has_the_same_name() -> None:
    assert same(
        chunked({"codes.ref": rows(1)}, {"codes.ref": rows(2)}, override_keys=["codes.ref"])["codes.ref"], rows(2)
    )


def test_a_chunk_may_name_the_keys_that_it_replaces_itself() -> None:
    chunks = ChunkAccumulator()
    chunks.add({"ids": [1], "more": {"a": [1], "b": 2}})
    chunks.add({"ids": [2], "more": {"c": 3}}, override_keys=["ids", ["more"]])
    chunks.add({"ids": [3]})
    assert same(chunks.take(), {"ids": [2, 3], "more": {"c": 3}})


@pytest.mark.parametrize("flag", [False, torch.tensor(data=False), torch.tensor([False]), np.zeros(1, bool)[0]])
def test_end_flags_are_replaced_bools_of_any_name_and_declared_keys_of_any_shape(flag: Any) -> None:
    last = {"meta": {"finished": torch.tensor([True])}, "mine": True, "done": torch.tensor([True])}
    taken = chunked(
        {"meta": {"finished": flag}, "mine": False, "done": torch.tensor([False])},
        last,
        flag_keys=["meta.finished", "done"],
    )
    assert same(taken, last)
    assert same(chunked({"meta": {"finished": flag}}, {"meta": last["meta"]}), {"meta": last["meta"]})


def test_metadata_alone_and_fields_that_nobody_knows_pass_through() -> None:
    odd = {"meta": {"plan": ("assistant", 0, 3)}, "schema/9": {"": {}}, "blob": b"x", "none": None}
    assert same(chunked(odd), odd)
    assert same(
        chunked({"codes": torch.tensor([1])}, {"meta": {"n": 1}}), {"codes": torch.tensor([1]), "meta": {"n": 1}}
    )


def test_none_says_nothing_new() -> None:
    assert same(chunked({"a": rows(1), "b": 2}, {"a": None, "b": None}, None), {"a": rows(1), "b": 2})
    assert same(chunked({"a": None}, {"a": rows(1)}), {"a": rows(1)})
    assert same(chunked({"a": 1}, {"a": None}, override_keys=["a"]), {"a": None})


def test_a_tensor_of_no_shape_adds_no_rows_before_or_after_others() -> None:
    void = torch.empty(0)
    assert same(chunked({"a": void}, {"a": rows(1)}, {"a": void.long()}, {"a": rows(2)}), {"a": rows(1, 2)})
    assert same(chunked({"a": void}), {"a": void})


@pytest.mark.parametrize("whole", [torch.arange(6), [1, 2, 3], np.arange(4)])
def test_a_payload_that_is_no_dict_is_joined_as_a_whole(whole: Any) -> None:
    assert same(chunked(whole[:1], whole[1:2], whole[2:]), whole)


@pytest.mark.parametrize(
    ("held", "came", "said"),
    [
        ([1], rows(1), "a tensor [1, 2] of float32 does not go with a list; accepted: more of a list"),
        (rows(1), [1], "a list does not go with a tensor [1, 2] of float32"),
        (rows(1), torch.ones(1, 3), "a tensor [1, 3] of float32 does not go with a tensor [1, 2] of float32"),
        (rows(1), torch.ones(2), "a tensor [2] of float32 does not go with"),
        (
            rows(1),
            rows(1).long(),
            "a tensor [1, 2] of int64 does not go with a tensor [1, 2] of float32; accepted: rows",
        ),
        (rows(1), rows(1).numpy(), "an array [1, 2] of float32 does not go with a tensor"),
        (rows(1), rows(1).to("meta"), "a tensor [1, 2] of float32 on meta does not go with"),
        (rows(1), "text", "a value of type str does not go with"),
        ({"b": 1}, 5, "a value of type int does not go with a dict"),
        ([1], {"b": 1}, "a dict does not go with a list"),
    ],
)
def test_a_change_of_kind_is_refused_by_name_and_nothing_of_the_chunk_is_added(held: Any, came: Any, said: str) -> None:
    chunks = ChunkAccumulator()
    chunks.add({"x": {"a": held}, "ids": [1]})
    before = chunks.nbytes
    with pytest.raises(AccumulateError) as refused:
        chunks.add({"ids": [2], "new": 1, "x": {"a": came}})
    assert refused.value.key == "x.a"
    assert said in str(refused.value)
    assert chunks.nbytes == before
    assert same(chunks.take(), {"x": {"a": held}, "ids": [1]})


def test_dicts_inside_themselves_are_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(AccumulateError, match="200 levels at most"):
        ChunkAccumulator().add(loop)


def test_a_take_hands_over_and_begins_anew() -> None:
    chunks = ChunkAccumulator()
    assert chunks.take() is None
    assert same(gathered(chunks, {"a": [1]}, {"a": [2]}), {"a": [1, 2]})
    assert chunks.take() is None
    assert same(gathered(chunks, {"a": rows(1)}), {"a": rows(1)})
    assert chunks.nbytes == 0


# Full payloads


def test_rows_of_two_dims_and_more_are_concatenated_and_all_else_keeps_the_latest() -> None:
    taken = full(
        {"codes": rows(1), "deep": torch.zeros(1, 2, 3), "one": torch.ones(4), "zero": torch.tensor(1), "ids": [1]},
        {"codes": rows(2, 3), "deep": torch.ones(1, 2, 3), "one": torch.ones(2), "zero": torch.tensor(2), "ids": [2]},
    )
    expected = {
        "codes": rows(1, 2, 3),
        "deep": torch.cat([torch.zeros(1, 2, 3), torch.ones(1, 2, 3)]),
        "one": torch.ones(2),
        "zero": torch.tensor(2),
        "ids": [2],
    }
    assert same(taken, expected)


def test_declared_replace_keys_replace() -> None:
    assert same(
        full({"model_outputs": rows(1)}, {"model_outputs": rows(1, 2)}, replace_keys=["model_outputs"]),
        {"model_outputs": rows(1, 2)},
    )


def test_other_trailing_dims_and_other_kinds_are_a_new_whole() -> None:
    assert same(full({"a": rows(1)}, {"a": torch.ones(1, 3)}, {"a": torch.ones(2, 3)}), {"a": torch.ones(3, 3)})
    assert same(full({"a": {"b": rows(1)}}, {"a": "text"}), {"a": "text"})
    assert same(full({"a": "text"}, {"a": {"b": rows(1)}}, {"a": {"b": rows(2)}}), {"a": {"b": rows(1, 2)}})


def test_rows_that_change_their_dtype_are_refused_not_converted() -> None:
    payload = FullPayload()
    payload.add({"codes": rows(1)})
    with pytest.raises(AccumulateError, match=r"^codes: a tensor \[1, 2\] of int64 does not go with"):
        payload.add({"codes": rows(1).long()})


def test_a_step_without_rows_does_not_wipe_out_those_before_it() -> None:
    assert same(full({"codes": rows(1)}, {"codes": torch.empty(0)}, {}, {"codes": rows(2)[:0]}), {"codes": rows(1)})


@pytest.mark.parametrize("empty", [{}, {"codes": torch.empty(0, 4)}, {"a": {}}, [], torch.empty(0)])
def test_an_empty_result_is_a_result(empty: Any) -> None:
    payload = FullPayload()
    assert payload.take() is None
    payload.add(None)
    assert payload.take() is None
    payload.add(empty)
    assert same(payload.take(), empty)
    assert payload.take() is None


def test_a_request_that_is_only_cleaned_up_gives_what_is_there() -> None:
    payload = FullPayload()
    payload.add({"codes": rows(1)})
    payload.add({"codes": rows(2)})
    assert same(payload.take(), {"codes": rows(1, 2)})  # no last step came


def numbered(first: int, last: int) -> torch.Tensor:
    return torch.arange(first, last + 1).float().view(-1, 1).expand(-1, 2).contiguous()


def test_case_53_rows_that_are_computed_again_after_a_preemption_are_not_appended_twice() -> None:
    """Rows 0 to 19; preempted; recomputed from the begin, 0 to 38; finished: 39 rows."""
    payload = FullPayload()
    for row in range(20):
        payload.add({"codes": numbered(row, row), "step": row}, position=row)
    payload.add({"codes": numbered(0, 38), "step": 38}, position=0)
    assert same(payload.take(), {"codes": numbered(0, 38), "step": 38})


def test_case_53_an_overlap_gives_way_from_its_first_row_and_a_gap_is_an_error() -> None:
    payload = FullPayload()
    payload.add({"codes": numbered(0, 3)}, position=0)
    payload.add({"codes": numbered(4, 7)})
    payload.add({"codes": -numbered(5, 8), "step": 1}, position=5)
    before = payload.nbytes
    with pytest.raises(AccumulateError, match=r"codes: a piece at row 10 does not go with 9 rows") as refused:
        payload.add({"step": 2, "codes": numbered(10, 11)}, position=10)
    assert (refused.value.key, payload.nbytes) == ("codes", before)
    with pytest.raises(AccumulateError, match="late: a piece at row 9 does not go with 0 rows"):
        payload.add({"late": numbered(9, 9)}, position=9)
    assert same(payload.take(), {"codes": torch.cat([numbered(0, 4), -numbered(5, 8)]), "step": 1})


@quick
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=12))
def test_any_preemptions_leave_the_rows_of_the_last_computation(runs: list[tuple[int, int]]) -> None:
    payload, model = FullPayload(), []
    for number, (start, count) in enumerate(runs):
        start = min(start, len(model))  # noqa: PLW2901 - a recomputation begins at a row that was there
        model[start:] = [float(number)] * count
        payload.add({"codes": torch.full((count, 2), float(number))}, position=start)
    taken = payload.take()
    assert ([] if taken is None else taken["codes"][:, 0].tolist()) == model


# Any cut of a sequence equals the whole

PIECES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "rows": st.integers(0, 4),
            "flat": st.integers(0, 4),
            "array": st.integers(0, 3),
            "ids": st.lists(st.integers(), max_size=3),
            "nested": st.fixed_dictionaries(
                {}, optional={"ids": st.lists(st.text(max_size=2), max_size=2), "n": st.integers()}
            ),
            "text": st.none() | st.text(max_size=3),
            "finished": st.booleans(),
            "whole": st.lists(st.integers(), max_size=3),
        },
    ),
    max_size=8,
)


def payload_of(number: int, piece: dict[str, Any]) -> dict[str, Any]:
    made = dict(piece)
    if "rows" in made:
        made["rows"] = torch.full((made["rows"], 2), float(number))
    if "flat" in made:
        made["flat"] = torch.full((made["flat"],), number)
    if "array" in made:
        made["array"] = np.full((made["array"], 1, 2), number)
    return made


@quick
@given(PIECES, st.data())
def test_any_cut_of_a_sequence_equals_the_whole(pieces: list[dict[str, Any]], data: st.DataObject) -> None:
    payloads = [payload_of(number, piece) for number, piece in enumerate(pieces)]
    whole = chunked(*payloads, override_keys=["whole"])
    groups, outer = [], ChunkAccumulator(override_keys=["whole"])
    while payloads:
        count = data.draw(st.integers(1, len(payloads)))
        groups.append(chunked(*payloads[:count], override_keys=["whole"]))
        payloads = payloads[count:]
    assert same(gathered(outer, *groups), whole)


@quick
@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_a_tensor_cut_anywhere_is_whole_again(sizes: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 3), max_size=3))
    tensor = torch.randn(sum(sizes), *dims)
    parts = [{"a": part} for part in tensor.split(sizes)] if sizes else [{"a": tensor}]
    assert same(chunked(*parts), {"a": tensor})
    if dims:
        assert same(full(*parts), {"a": tensor})


# What it costs


class CountedCat:
    """Stands in for ``torch.cat``: counts its calls and the bytes that it copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.nbytes = 0
        self._cat = torch.cat
        monkeypatch.setattr(accumulate.torch, "cat", self)

    def __call__(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        self.nbytes += sum(piece.nbytes for piece in pieces)
        return self._cat(pieces)


@pytest.mark.parametrize("make", [ChunkAccumulator, FullPayload])
@pytest.mark.parametrize("count", [1, 10, 1_000])
def test_many_chunks_cost_one_concatenation_a_key_and_each_byte_once(
    make: type[ChunkAccumulator | FullPayload], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat, payload = CountedCat(monkeypatch), make()
    for number in range(count):
        payload.add({"a": rows(number), "b": {"c": torch.full((3, 4), number)}})
    assert cat.calls == 0
    taken = payload.take()
    total = taken["a"].nbytes + taken["b"]["c"].nbytes
    assert (cat.calls, cat.nbytes) == ((2, total) if count > 1 else (0, 0))  # one piece is handed over as it came


def test_rows_that_give_way_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cat, payload = CountedCat(monkeypatch), FullPayload()
    for number in range(100):
        payload.add({"a": numbered(number, number)}, position=number)
    payload.add({"a": numbered(50, 199)}, position=50)
    assert cat.calls == 0
    assert (cat.nbytes, payload.take()["a"].nbytes, cat.nbytes) == (0, 200 * 8, 200 * 8)


# Who shares what


@pytest.mark.parametrize("make", [ChunkAccumulator, FullPayload])
def test_what_was_taken_is_not_what_goes_on_being_gathered(make: type[ChunkAccumulator | FullPayload]) -> None:
    payload = make()
    payload.add({"a": rows(1), "m": {"ids": [1]}})
    payload.add({"a": rows(2), "m": {"ids": [2]}})
    first = payload.take()
    kept = {"a": first["a"].clone(), "m": {"ids": list(first["m"]["ids"])}}
    payload.add({"a": rows(3), "m": {"ids": [3], "new": 1}})
    payload.add({"a": rows(4), "m": {"ids": [4]}})
    assert same(first, kept)
    first["a"].zero_()
    first["m"]["ids"].append("mine")
    first["m"]["other"] = first["new"] = 1
    second = payload.take()
    assert same(second["a"], rows(3, 4))
    assert "other" not in second["m"]
    assert "new" not in second


@quick
@given(PIECES)
def test_what_the_caller_gave_is_not_written_to_and_its_containers_are_not_handed_on(
    pieces: list[dict[str, Any]],
) -> None:
    given_ = [payload_of(number, piece) for number, piece in enumerate(pieces)]
    copies = [payload_of(number, piece) for number, piece in enumerate(pieces)]
    taken = chunked(*given_)
    for payload, copy in zip(given_, copies, strict=True):
        assert same(payload, copy)
        assert taken is not payload
        for key in ("ids", "nested"):
            assert key not in payload or taken[key] is not payload[key]


# Bounds


def test_the_bound_in_bytes_names_the_key_and_the_sizes_and_adds_nothing() -> None:
    chunks = ChunkAccumulator(limit_bytes=1_000)
    chunks.add({"a": {"b": torch.zeros(100)}, "n": 1})
    held = chunks.nbytes
    assert 400 < held < 500
    with pytest.raises(AccumulateLimitError) as refused:
        chunks.add({"n": 2, "a": {"b": torch.zeros(200)}})
    error = refused.value
    assert (error.key, error.held_bytes, error.limit_bytes) == ("a.b", held, 1_000)
    assert 800 <= error.came_bytes < 900
    assert str(error) == f"a.b: {error.came_bytes} bytes more than the {held} that are gathered pass the limit of 1000"
    chunks.add({"a": {"b": torch.zeros(100)}})
    assert same(chunks.take(), {"a": {"b": torch.zeros(200)}, "n": 1})
    chunks.add({"a": torch.zeros(200)})  # a take makes room


@pytest.mark.parametrize("make", [ChunkAccumulator, FullPayload])
def test_what_is_replaced_makes_room(make: type[ChunkAccumulator | FullPayload]) -> None:
    payload = make(["a"], limit_bytes=1_000)
    large = ({"a": torch.zeros(2, 100)}, {"a": {"deep": "y" * 700, "er": {"more": [1]}}}, {"a": {"deep": "z" * 800}})
    for piece in large * 5:
        payload.add(piece)
        assert payload.nbytes <= 1_000
        assert payload.nbytes == sum(slot.nbytes for slot in payload._slots.values())
    assert same(payload.take(), large[-1])


@quick
@given(PIECES)
def test_the_count_of_bytes_is_what_is_there(pieces: list[dict[str, Any]]) -> None:
    chunks = ChunkAccumulator()
    for number, piece in enumerate(pieces):
        chunks.add(payload_of(number, piece))
    counted = chunks.nbytes
    assert counted == sum(slot.nbytes for slot in chunks._slots.values())
    taken = chunks.take()
    assert taken is None or counted >= tree_nbytes(taken) - 8 * 40
    assert chunks.nbytes == 0


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ChunkAccumulator(override_keys="codes"), "override_keys"),
        (lambda: ChunkAccumulator(override_keys=[""]), "override_keys"),
        (lambda: ChunkAccumulator().add({}, override_keys="ids"), "override_keys"),
        (lambda: ChunkAccumulator(flag_keys=[()]), "flag_keys"),
        (lambda: ChunkAccumulator(flag_keys=[None]), "flag_keys"),  # type: ignore[list-item]
        (lambda: FullPayload(replace_keys=7), "replace_keys"),  # type: ignore[arg-type]
        (lambda: FullPayload(limit_bytes=0), "limit_bytes"),
        (lambda: ChunkAccumulator(limit_bytes=True), "limit_bytes"),
        (lambda: FullPayload().add({}, position=-1), "position"),
        (lambda: FullPayload().add({}, position=True), "position"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(make: Any, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert refused.value.field == field
