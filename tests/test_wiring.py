"""Which connectors a stage needs, from the edges of its pipeline; each wrong setting is refused by its name."""

from pathlib import Path
from typing import Any

import pytest

from omni_fsm.adapters import Ends, Role, StageConfig, StageRunnerAdapter, TakenKind, Wiring, register_connector
from omni_fsm.connectors import FULL_PAYLOAD, Connector, Hello, wiring
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge

LINE = [
    {"from_stage": "thinker", "to_stage": "talker", "connector": "memory"},
    {"from_stage": "talker", "to_stage": "code2wav", "connector": "memory", "mode": FULL_PAYLOAD},
]


def test_the_role_of_a_stage_follows_from_its_edges_and_only_its_leading_rank_has_one() -> None:
    line = Wiring(LINE)
    assert {stage: line.role(stage) for stage in line.stages} == {
        "thinker": Role.SENDER,
        "talker": Role.BOTH,
        "code2wav": Role.RECEIVER,
    }
    assert line.role("talker", local_rank=1) is Role.NONE
    assert line.open("talker", local_rank=1) == Ends(None, None)


def test_both_ends_of_an_edge_say_the_same_since_it_is_told_once() -> None:
    line = Wiring(LINE)
    thinker, talker, code2wav = (line.open(stage) for stage in line.stages)
    assert thinker.source is None
    assert code2wav.sink is None
    for sink, source, mode in ((thinker.sink, talker.source, "chunks"), (talker.sink, code2wav.source, FULL_PAYLOAD)):
        assert sink is not None
        assert source is not None
        assert (sink.sends, source.sends) == (True, False)
        assert sink.hello() == source.hello()
        assert sink.hello().mode == mode


def test_a_stage_runs_on_the_ends_that_it_was_given(tmp_path: Path) -> None:
    both = Wiring(
        [{"from_stage": "a", "to_stage": "b"}], {"directory": str(tmp_path / "edges"), "arena_bytes": 1 << 20}
    )
    source, sink = both.open("b").source, both.open("a").sink
    with (
        StageRunnerAdapter(StageConfig(stage="b"), source=source) as after,
        StageRunnerAdapter(StageConfig(stage="a"), sink=sink) as before,
    ):
        request, _ = before.open("r")
        assert before.end(request, {"tokens": [1, 2]}).accepted
        told = after.collect_feedback(10.0)
        while not told.ready:
            told = after.collect_feedback(10.0)
        (name,) = told.ready
        taken = after.take(name)
        assert (taken.kind, taken.payload) == (TakenKind.END, {"tokens": [1, 2]})


def test_an_end_in_memory_is_open_once_and_its_successor_meets_the_neighbour() -> None:
    line = Wiring(LINE)
    sink, talker = line.open("thinker").sink, line.open("talker")
    assert sink is not None
    assert talker.source is not None
    assert talker.sink is not None
    with pytest.raises(ConfigError, match="an edge whose sending end is not open already"):
        line.open("thinker")
    for end in (talker.source, talker.sink):
        end.close()
    successor = line.open("talker").source
    assert successor is not None
    for _ in range(3):
        sink.wait(0.0)
        successor.wait(0.0)
    assert successor.health().connected


def test_copies_of_a_pipeline_in_one_directory_never_meet(tmp_path: Path) -> None:
    both = Wiring([{"from_stage": "a", "to_stage": "b"}], {"directory": str(tmp_path / "edges")})
    first, second = both.open("b"), both.open("b", replica_id=1)
    for ends, edge in ((first, Edge("a", "b")), (second, Edge("a@1", "b@1"))):
        assert ends.source is not None
        assert ends.source.edge == edge
        ends.source.close()
    assert both.input_edge("b", 1) == Edge("a@1", "b@1")


def test_a_connector_of_ones_own_is_named_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "_FACTORIES", dict(wiring._FACTORIES))
    made: list[tuple[Hello, bool, Any]] = []
    memory = Wiring(LINE)

    def factory(hello: Hello, sends: bool, extra: Any) -> Connector:  # noqa: FBT001 - the port's
        made.append((hello, sends, extra))
        end = memory.open("thinker").sink
        assert end is not None
        return end

    register_connector("pigeon", factory)
    edge = {"from_stage": "a", "to_stage": "b", "connector": "pigeon", "extra": {"loft": 3}}
    Wiring([edge], {"loft": 1, "seed": "maize"}).open("a")
    assert made == [(Hello(Edge("a", "b")), True, {"loft": 3, "seed": "maize"})]
    with pytest.raises(ConfigError, match="name: 'pigeon' cannot be used"):
        register_connector("pigeon", factory)


AB = {"from_stage": "a", "to_stage": "b"}


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        (
            ["a->b"],
            "edges[0]: 'a->b' cannot be used; accepted: a table of from_stage, to_stage, connector, mode, extra",
        ),
        (
            [{"from_stage": "a"}],
            "edges[0]: {'from_stage': 'a'} cannot be used; accepted: a table with `to_stage`",
        ),
        ([{**AB, "to": "c"}], "edges[0].to: 'c' cannot be used; accepted: one of from_stage, to_stage"),
        ([{**AB, "connector": 7}], "edges[0].connector: 7 cannot be used; accepted: `str`"),
        ([{**AB, "extra": "edges"}], "edges[0].extra: 'edges' cannot be used; accepted: a table"),
        ([{**AB, "connector": "fax"}], "edges[0].connector: 'fax' cannot be used; accepted: shm or memory"),
        ([{**AB, "mode": "half"}], "edges[0].mode: 'half' cannot be used; accepted: chunks or full_payload"),
        ([AB, {"from_stage": "c", "to_stage": "b"}], "edges[1].to_stage: 'b' cannot be used; accepted: a stage of no"),
        ([AB, {"from_stage": "a", "to_stage": "c"}], "edges[1].from_stage: 'a' cannot be used"),
        ([{**AB, "extra": {1: 2}}], "edges[0].extra: 1 cannot be used; accepted: keys that are text"),
        ([{**AB, "connector": "memory", "extra": {"room": 1}}], "edges[0].extra: {'room': 1} cannot be used"),
        ([{"from_stage": "a", "to_stage": "a"}], "edges[0].to_stage: 'a' cannot be used; accepted: another stage"),
        ([{"from_stage": "", "to_stage": "a"}], "edges[0].from_stage: '' cannot be used"),
        (
            [{"from_stage": "a@1", "to_stage": "b"}],
            "edges[0].from_stage: 'a@1' cannot be used; accepted: a name without @",
        ),
        (None, "edges: None cannot be used; accepted: a list of edges"),
    ],
)
def test_an_edge_that_cannot_be_is_refused_by_the_name_of_the_field(edges: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Wiring(edges)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "edges[0].extra: {} cannot be used; accepted: a table with `directory`"),
        ({"directory": 5}, "edges[0].extra.directory: 5 cannot be used; accepted: `str`"),
        ({"directory": "{}", "size": 1}, "edges[0].extra.size: 1 cannot be used; accepted: one of directory"),
        ({"directory": "{}", "arena_bytes": 1}, "edges[0].extra.arena_bytes: 1 cannot be used"),
        ({"directory": "{}/no/such"}, "edges[0].extra.directory: "),
        ({"directory": "\0"}, "edges[0].extra: {'directory': '\\x00'} cannot be used; accepted: what can be used: "),
    ],
)
def test_settings_of_a_connector_are_refused_with_their_edge(tmp_path: Path, extra: dict[str, Any], said: str) -> None:
    if isinstance(extra.get("directory"), str):
        extra = {**extra, "directory": extra["directory"].format(tmp_path / "edges")}
    with pytest.raises(ConfigError) as refused:
        Wiring([{**AB, "extra": extra}]).open("a")
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("stage", "numbers", "said"),
    [
        (
            "vocoder",
            {},
            "stage: 'vocoder' cannot be used; accepted: a stage of the pipeline: thinker, talker, code2wav",
        ),
        ("talker", {"local_rank": -1}, "local_rank: -1 cannot be used"),
        ("talker", {"replica_id": "1"}, "replica_id: '1' cannot be used"),
    ],
)
def test_a_stage_or_number_that_there_is_not_is_refused(stage: str, numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Wiring(LINE).open(stage, **numbers)
    assert str(refused.value).startswith(said)
    with pytest.raises(ConfigError, match="stage: 'thinker' cannot be used; accepted: a stage that an edge reaches"):
        Wiring(LINE).input_edge("thinker")


def test_an_end_that_was_made_is_closed_when_the_other_cannot_be(tmp_path: Path) -> None:
    folder = str(tmp_path / "edges")
    edges = [
        {**AB, "extra": {"directory": folder}},
        {"from_stage": "b", "to_stage": "c", "extra": {"directory": folder, "arena_bytes": 0}},
    ]
    with pytest.raises(ConfigError, match=r"edges\[1\].extra.arena_bytes: 0"):
        Wiring(edges).open("b")
    assert list(Path(folder).iterdir()) == []
