"""An edge in the mode ``full_payload``: a stream of one frame, the end, which brings it all."""

from typing import Any

import pytest
import torch
from scripted import (
    IN,
    OUT,
    R1,
    R2,
    ScriptedConnector,
    Stage,
    cancelled,
    failed_end,
    make_stage,
    ok_end,
    opening,
)

from omni_fsm.connectors import FULL_PAYLOAD
from omni_fsm.connectors.port import Hello
from omni_fsm.payload.decoding import decode
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Frame
from omni_fsm.runtime import ProducerContext, StageConfig


class WholeConnector(ScriptedConnector):
    """An end of an edge in that mode."""

    def hello(self) -> Hello:
        return Hello(self.edge, "digest", mode=FULL_PAYLOAD)


def sends_whole(**options: Any) -> Stage:
    return make_stage(sink=WholeConnector(OUT, sends=True), **options)


def payload(frame: Frame) -> Any:
    assert frame.body is not None
    return decode(b"".join(frame.body.parts))


def rows(*values: int) -> dict[str, Any]:
    return {"codes": torch.tensor([[value] for value in values]), "last": values[-1]}


def test_what_the_producer_gives_goes_out_as_one_frame_with_the_end() -> None:
    stage = sends_whole()
    stage.open("r", R1)
    stage.submit("r", rows(1, 2), rows(3))
    stage.run()
    assert stage.wire() == ["open"]
    stage.runtime.end("r", rows(4))
    stage.run()
    assert stage.wire() == ["open", "end 0 ok"]
    whole = payload(stage.sink.stored[-1])
    assert whole["codes"].tolist() == [[1], [2], [3], [4]]
    assert whole["last"] == 4
    assert stage.rest() == {}


def test_a_request_that_gave_nothing_ends_without_a_payload_and_one_of_no_rows_is_a_result() -> None:
    stage = sends_whole()
    stage.open("nothing", R1)
    stage.runtime.end("nothing")
    stage.open("no rows", R2)
    stage.submit("no rows", {"codes": torch.empty(0, 4)})
    stage.runtime.end("no rows")
    stage.run()
    ends = [frame for frame in stage.sink.stored if frame.cause is not None]
    assert ends[0].body is None
    assert payload(ends[1])["codes"].shape == (0, 4)


def test_keys_that_are_declared_replace() -> None:
    stage = sends_whole(replace_keys=("codes",))
    stage.open("r", R1)
    stage.submit("r", rows(1), rows(1, 2))
    stage.runtime.end("r")
    stage.run()
    assert payload(stage.sink.stored[-1])["codes"].tolist() == [[1], [2]]


def test_a_request_that_is_cancelled_sends_none_of_it_and_leaves_none() -> None:
    stage = sends_whole()
    stage.open("r", R1)
    stage.submit("r", rows(1))
    stage.run()
    stage.runtime.cancel("r", "enough")
    stage.run()
    assert stage.wire() == ["open", "end cancelled(enough)"]
    assert stage.rest() == {}


def test_payloads_that_do_not_go_together_end_the_request_with_these_words() -> None:
    stage = sends_whole()
    stage.open("r", R1)
    stage.submit("r", rows(1), {"codes": torch.tensor([[1.5]])})
    stage.run()
    assert "AccumulateError: codes" in stage.wire()[-1]


def test_the_next_life_of_an_id_gathers_its_own() -> None:
    stage = sends_whole()
    stage.open("a", R1)
    stage.submit("a", rows(1))
    stage.run()
    stage.runtime.cancel("a")
    stage.open("b", R2)
    stage.submit("b", rows(2))
    stage.runtime.end("b")
    stage.run()
    assert payload(stage.sink.stored[-1])["codes"].tolist() == [[2]]


def test_a_producer_of_its_own_is_called_once_for_each_submit() -> None:
    calls: list[Any] = []

    def producer(context: ProducerContext) -> Any:
        calls.append((context.output, context.is_finished))
        return context.output

    stage = sends_whole(producer=producer)
    stage.open("r", R1)
    stage.submit("r", {"a": 1}, {"a": 2})
    stage.runtime.end("r")
    stage.run()
    assert calls == [({"a": 1}, False), ({"a": 2}, False), (None, True)]
    assert payload(stage.sink.stored[-1]) == {"a": 2}


def test_the_receiver_waits_for_a_full_payload_as_long_as_its_own_limit_says() -> None:
    stage = make_stage(source=WholeConnector(IN, sends=False), input_wait_s=5.0, full_payload_wait_s=50.0)
    stage.open("r", R1)
    stage.come(opening())
    stage.pass_time(49.0)
    assert not stage.collect().failed
    stage.pass_time(1.0)
    assert "no frame for 50 s" in stage.collect().failed["r"].reason


def test_the_receiver_takes_it_whole_with_the_end_or_hears_the_failure() -> None:
    stage = make_stage(source=WholeConnector(IN, sends=False))
    stage.open("a", R1)
    stage.come(opening(), ok_end(0, rows(1, 2)))
    taken = stage.take("a")
    assert (taken.kind, taken.payload["codes"].tolist()) == ("end", [[1], [2]])
    stage.open("b", R2)
    stage.come(opening(R2), failed_end("enough", R2, cancelled().outcome))
    assert stage.take("b").kind == "failed"


@pytest.mark.parametrize("keys", [["codes"], ("codes", 1)])
def test_replace_keys_that_are_no_names_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="replace_keys"):
        StageConfig(stage="thinker", replace_keys=keys)


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hello\.mode"):
        Hello(OUT, mode="full")
