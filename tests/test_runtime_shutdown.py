"""A stage that shuts down or crashes, stepped by hand: what it says to both sides, and that nothing is left."""

import pytest
from scripted import (
    IN,
    OTHER,
    OUT,
    R1,
    ScriptedConnector,
    cancelled,
    data,
    error,
    make_stage,
    middle,
    opening,
)

from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Later, Offer, Refuse, Register

NEW = Identity("new", 1)


def test_a_shutdown_stops_the_streams_that_nobody_has_claimed() -> None:
    stage = middle(answer=lambda _: Later())
    stage.come(opening(), data(0, "c0"), opening(OTHER))
    stage.runtime.begin_shutdown()
    assert stage.source.stopped == [(R1, cancelled("shutdown")), (OTHER, cancelled("shutdown"))]
    assert stage.runtime.residue()["unclaimed"] == 0
    assert stage.rest() == {}


@pytest.mark.parametrize("answer", [Register("r"), Refuse("nobody"), Later()])
def test_an_offer_that_is_answered_while_the_stage_shuts_down_is_cancelled_once(answer: Offer) -> None:
    stage = middle()

    def slow_answer(_: Identity) -> Offer:
        stage.runtime.begin_shutdown()
        return answer

    stage.host.answer = slow_answer
    stage.come(opening(), data(0, "c0"))
    assert stage.source.stopped == [(R1, cancelled("shutdown"))]
    assert stage.collect().registered == {}
    assert stage.rest() == {}


def test_an_offer_that_comes_after_the_shutdown_began_is_cancelled() -> None:
    stage = middle(answer=lambda _: Register("r"))
    stage.runtime.begin_shutdown()
    stage.come(opening())
    assert stage.source.stopped == [(R1, cancelled("shutdown"))]
    assert stage.rest() == {}


def test_what_a_shutdown_is_for_ends_every_request_and_each_that_comes_later() -> None:
    stage = middle(answer=lambda identity: Register(str(identity)))
    stage.come(opening(), data(0, "c0"))
    lost = Cause(Outcome.ERROR, "the device is gone")
    stage.runtime.begin_shutdown(lost)
    stage.runtime.begin_shutdown()  # the first holds
    stage.come(opening(NEW))
    stage.run()
    assert stage.source.stopped == [(R1, lost), (NEW, lost)]
    assert stage.wire(R1)[-1] == "end error(the device is gone)"
    assert stage.rest() == {}


def test_an_offer_that_is_put_off_while_the_stage_shuts_down_is_told_at_once() -> None:
    stage = middle(answer=lambda _: Later())
    lost = Cause(Outcome.ERROR, "the device is gone")
    stage.runtime.begin_shutdown(lost)
    stage.come(opening(NEW))
    assert stage.source.stopped == [(NEW, lost)]


@pytest.mark.parametrize(
    ("edges", "at_front"),
    [({"source"}, False), ({"sink"}, False), ({"source", "sink"}, False), ({"source", "sink"}, True)],
)
def test_a_crash_fails_every_request_and_refuses_what_is_new(*, edges: set[str], at_front: bool) -> None:
    both = {"source": ScriptedConnector(IN, sends=False), "sink": ScriptedConnector(OUT, sends=True)}
    stage = make_stage(**{name: both[name] for name in edges}, front=at_front)
    stage.open("r", R1)
    stage.open("o", OTHER)
    if stage.source is not None:
        stage.come(opening())
    stage.collect()
    stage.runtime.crash(RuntimeError("bug"))
    cause = error("stage thinker: RuntimeError: bug")
    assert stage.collect().failed == {"r": cause, "o": cause}
    admission = stage.runtime.register("n", NEW)
    assert (admission.accepted, admission.reason) == (False, cause.reason)
    assert sorted(stage.seen.reasons) == [
        ("crashed", "", cause.reason),
        ("failed", "o", cause.reason),
        ("failed", "r", cause.reason),
    ]
    assert stage.runtime.wait_idle(0.0)
