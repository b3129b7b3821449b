"""Names that cross stages are compared whole, never cut, and never become a path."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, FrameKey, Identity

EDGE = Edge("thinker", "talker")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
Parts = tuple[str, str, str, int, int | str]
PARTS = st.tuples(TEXT, TEXT, TEXT, st.integers(0, 2**64 - 1), st.integers(0, 99) | st.sampled_from(["open", "end"]))


def key(from_stage: str, to_stage: str, external_id: str, generation: int, slot: int | str) -> FrameKey:
    return FrameKey(Edge(from_stage, to_stage), Identity(external_id, generation), slot)


@pytest.mark.parametrize(
    ("external_id", "words"),
    [
        ("", "''"),
        (None, "None"),
        (7, "7"),
        (b"r7", "b'r7'"),
        ("\ud800", "without lone surrogates"),
        ("x" * 16_385, r"16387 characters"),
        ("é" * 8_193, "16,?384"),
    ],
)
def test_an_external_id_that_cannot_be_used_is_refused_by_field_and_value(external_id: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Identity(external_id, 0)  # type: ignore[arg-type]
    assert (refused.value.field, refused.value.value) == ("external_id", external_id)
    assert len(str(refused.value)) < 250  # whatever the value is, the message stays a few lines


@pytest.mark.parametrize("generation", [-1, 2**64, True, 1.0, "1", None])
def test_a_generation_that_is_no_unsigned_64_bit_number_is_refused(generation: object) -> None:
    with pytest.raises(ConfigError, match="an int from 0 to 2") as refused:
        Identity("r7", generation)  # type: ignore[arg-type]
    assert (refused.value.field, refused.value.value) == ("generation", generation)


@pytest.mark.parametrize("generation", [0, 1, 2**64 - 1])
def test_both_ends_of_the_range_are_generations(generation: int) -> None:
    assert Identity("r7", generation).generation == generation


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        (("", "b"), "edge.from_stage"),
        (("a", ""), "edge.to_stage"),
        (("a", "x" * 256), "edge.to_stage"),
        ((1, "b"), "edge.from_stage"),
    ],
)
def test_an_edge_names_the_end_that_cannot_be_used(stages: tuple[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Edge(*stages)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "external_id", ["/", "../../etc/passwd", "a\0b", "a\nb", " ", "r7#2", "x" * 16_384, "日本", "."]
)
def test_any_other_text_is_an_external_id_and_its_key_is_64_hexadecimal_characters(external_id: str) -> None:
    text = FrameKey(EDGE, Identity(external_id, 3), 0).text
    assert re.fullmatch("[0-9a-f]{64}", text)


def test_an_identity_is_shown_on_one_short_line() -> None:
    assert str(Identity("r7", 2)) == "r7#2"
    assert str(Identity("a\nb\0", 1)) == r"a\nb\x00#1"
    assert str(Identity("x" * 41, 1)) == "x" * 40 + "...#1"
    assert str(EDGE) == "thinker->talker"


def test_case_72_ids_with_a_common_prefix_are_different_requests() -> None:
    """An identity is carried, never derived from text."""
    names = ["r", "r7", "r7-0", "r7-0-1", "r7#2", " r7", "R7", "r\u0301", "ŕ"]
    lives = {Identity(name, generation) for name in names for generation in (0, 1)}
    assert len(lives) == 2 * len(names)
    assert len({FrameKey(EDGE, life, 0).text for life in lives}) == 2 * len(names)


@given(one=PARTS, other=PARTS)
@example(one=("ab", "c", "r", 1, 0), other=("a", "bc", "r", 1, 0))
@example(one=("a", "b", "cr", 1, 0), other=("a", "bc", "r", 1, 0))
@example(one=("a", "b", "r", 1, 12), other=("a", "b", "r", 11, 2))
@example(one=("a", "b", "r1", 1, 0), other=("a", "b", "r", 11, 0))
@example(one=("a", "b", "r", 1, "open"), other=("a", "b", "r", 1, "end"))
@settings(derandomize=True, deadline=None)
def test_case_73_one_key_function_gives_different_texts_to_different_keys(one: Parts, other: Parts) -> None:
    assert (key(*one).text == key(*other).text) == (one == other)
    assert (key(*one) == key(*other)) == (one == other)
    assert key(*one).text == key(*one).text


R7 = Identity("r7", 2)


@pytest.mark.parametrize(
    ("frame", "slot", "uses_credit"),
    [
        (Frame(EDGE, R7, FrameKind.OPEN), "open", False),
        (Frame(EDGE, R7, FrameKind.DATA, seq=4), 4, True),
        (Frame(EDGE, R7, FrameKind.END, seq=5, cause=Cause(Outcome.OK)), 5, True),
        (Frame(EDGE, R7, FrameKind.END, cause=Cause(Outcome.ERROR, "oom")), "end", False),
        (Frame(EDGE, R7, FrameKind.END, cause=Cause(Outcome.CANCELLED, "user")), "end", False),
    ],
    ids=["open", "data", "end ok", "end error", "end cancelled"],
)
def test_a_failed_end_has_a_key_of_its_own_and_needs_no_credit(
    frame: Frame,
    slot: int | str,
    uses_credit: bool,  # noqa: FBT001
) -> None:
    """So a burned seq is never met again, and no failure waits for a consumer."""
    assert frame.key == FrameKey(EDGE, R7, slot)
    assert frame.uses_credit is uses_credit


def test_two_causes_with_the_same_words_are_equal_whenever_they_arose() -> None:
    assert Cause(Outcome.ERROR, "oom", at_ns=1) == Cause(Outcome.ERROR, "oom", at_ns=2)
    assert Cause(Outcome.ERROR, "oom") != Cause(Outcome.CANCELLED, "oom")
    assert [str(Cause(Outcome.ERROR, "oom")), str(Cause(Outcome.OK))] == ["error(oom)", "ok"]


def test_a_reason_is_cut_at_2048_characters() -> None:
    assert Cause(Outcome.ERROR, "x" * 2_048).reason == "x" * 2_048
    assert Cause(Outcome.ERROR, "x" * 2_049).reason == "x" * 2_045 + "..."
