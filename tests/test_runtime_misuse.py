"""What a host does wrong is named at the call, and nothing hangs."""

from typing import Any

import pytest
from scripted import IN, OUT, R1, ScriptedConnector, ScriptedHost, middle

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge
from omni_fsm.runtime import StageConfig, StageRuntime


def make(source: ScriptedConnector | None, sink: ScriptedConnector | None) -> StageRuntime:
    return StageRuntime(StageConfig(stage="thinker"), source=source, sink=sink, host=ScriptedHost())


def sending(edge: Edge) -> ScriptedConnector:
    return ScriptedConnector(edge, sends=True)


def receiving(edge: Edge) -> ScriptedConnector:
    return ScriptedConnector(edge, sends=False)


@pytest.mark.parametrize(
    ("source", "sink", "words"),
    [
        (sending(IN), None, "source: 'the sending end of front->thinker' cannot be used; accepted: the receiving end"),
        (None, receiving(OUT), "sink: 'the receiving end of thinker->talker' cannot be used; accepted: the sending"),
        (sending(OUT), receiving(IN), "source: 'the sending end of thinker->talker' cannot be used"),
        (receiving(OUT), sending(IN), "source: 'the receiving end of thinker->talker' cannot be used"),
    ],
)
def test_ends_given_the_wrong_way_round_are_refused_by_name(source: Any, sink: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(source, sink)
    assert words in str(refused.value)


def test_ends_given_the_right_way_round_are_taken() -> None:
    make(receiving(IN), sending(OUT))
    make(receiving(IN), None)
    make(None, sending(OUT))


def adapter(**config: Any) -> StageRunnerAdapter:
    return StageRunnerAdapter(StageConfig(stage="thinker", **config), source=receiving(IN), sink=sending(OUT))


def test_opening_requests_in_a_stage_that_is_no_front_names_the_setting() -> None:
    """They would never end: its end would release the input that brings the answer."""
    stage = adapter()
    with pytest.raises(ConfigError, match=r"^front: False cannot be used; accepted: True in the config") as refused:
        stage.open("r")
    assert refused.value.field == "front"
    assert stage.residue()["requests"] == 0


def test_a_front_and_a_stage_without_input_open_requests() -> None:
    adapter(front=True).open("r")
    StageRunnerAdapter(StageConfig(stage="thinker"), sink=sending(OUT)).open("r")


@pytest.mark.parametrize("identity", ["r1", ("r1", 1), None, 7])
def test_an_identity_of_another_type_is_named(identity: Any) -> None:
    stage = middle()
    with pytest.raises(ConfigError, match=r"^identity: .* accepted: an Identity"):
        stage.runtime.register("r", identity)
    assert stage.held() == {}
    stage.open("r", R1)


@pytest.mark.parametrize("front", ["yes", 1, None])
def test_a_front_that_is_neither_true_nor_false_is_named(front: Any) -> None:
    with pytest.raises(ConfigError, match=r"^front: .* accepted: a bool"):
        StageConfig(stage="thinker", front=front)
