"""What a stage writes of what happens in it."""

import logging

import pytest
from scripted import DONE, R1, CountingProducer, Stage, cancelled, middle, opening, sender_only

from omni_fsm.connectors.port import Stopped
from omni_fsm.observe import LogObserver
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Failure, Transition


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level and record.name == "omni_fsm"]


def logged(**options: object) -> Stage:
    stage = middle(observers=[LogObserver("thinker")], producer=CountingProducer(), **options)
    stage.open("r", R1)
    stage.come(opening())
    return stage


def test_a_failure_is_one_line_at_error_with_all_its_names(caplog: pytest.LogCaptureFixture) -> None:
    """Both halves end by it; it is one failure."""
    caplog.set_level(logging.DEBUG, logger="omni_fsm")
    stage = logged()
    stage.submit("r", "a", ValueError("boom"))
    stage.run()
    stage.runtime.release("r")
    stage.run()
    (line,) = lines(caplog, logging.ERROR)
    assert line == (
        "event='sender.failed' edge='thinker->talker' external_id='r1' generation=1 seq=1 stage='thinker'"
        " internal_id='r' outcome='error' reason='ValueError: boom' level='error'"
    )


def test_each_transition_is_one_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="omni_fsm")
    stage = sender_only(observers=[LogObserver("thinker")])
    stage.open("r", R1)
    stage.submit("r", "a")
    stage.run()
    stage.runtime.end("r")
    stage.run()
    found = lines(caplog, logging.DEBUG)
    assert len(found) == len(stage.seen.transitions)
    assert [line.split("'")[1] for line in found] == [
        "sender.task_begun",
        "sender.open_put",
        "sender.chunk_submitted",
        "sender.task_begun",
        "sender.frame_built",
        "sender.data_put",
        "sender.end_submitted",
        "sender.task_begun",
        "sender.frame_built",
        "sender.end_put",
    ]
    assert "before='active' after='terminal_pending'" in found[6]


def test_transitions_are_silent_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omni_fsm")
    logged()
    assert lines(caplog, logging.DEBUG) == []


@pytest.mark.parametrize("cause", [DONE, cancelled("left")])
def test_who_cancels_or_has_had_enough_is_no_error(caplog: pytest.LogCaptureFixture, cause: object) -> None:
    caplog.set_level(logging.INFO, logger="omni_fsm")
    stage = logged()
    stage.hear(Stopped(R1, cause))
    assert lines(caplog, logging.ERROR) == []
    assert len(lines(caplog, logging.INFO)) == 1


def test_an_id_with_a_line_break_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="omni_fsm")
    stage = sender_only(observers=[LogObserver("thinker")])
    stage.open("r", Identity("a\nevent='fake'", 1))
    stage.runtime.fail("r", "no\nway")
    stage.run()
    assert all("\n" not in line for line in lines(caplog, logging.DEBUG) + lines(caplog, logging.ERROR))


def test_who_wants_no_transitions_is_told_of_failures_alone() -> None:
    """It is asked each time: a setting may change while the stage runs."""

    class Choosy:
        def __init__(self) -> None:
            self.wants = False
            self.told: list[str] = []

        def wants_transitions(self) -> bool:
            return self.wants

        def on_transition(self, transition: Transition) -> None:
            self.told.append(str(transition.event))

        def on_failure(self, failure: Failure) -> None:
            self.told.append(failure.what)

    choosy = Choosy()
    stage = middle(observers=[choosy], producer=CountingProducer())
    stage.open("r", R1)
    stage.come(opening())
    assert choosy.told == []
    choosy.wants = True
    stage.submit("r", "a")
    assert choosy.told == ["chunk_submitted"]
    choosy.wants = False
    stage.submit("r", ValueError("boom"))
    stage.run()
    assert choosy.told == ["chunk_submitted", "failed"]
