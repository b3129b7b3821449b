"""The measurements measure what they say; how fast it is on a machine is no test."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_fsm.bench import accumulate, engines
from omni_fsm.cli import app
from omni_fsm.demo.models import require_vllm


def test_gathering_is_measured_for_few_and_for_many() -> None:
    found = accumulate.measure(few=5, many=20, rounds=3)
    assert (found["few"]["chunks"], found["many"]["chunks"], found["rounds"]) == (5, 20, 3)
    assert found["few"]["median_s"] > 0
    assert found["ratio"] > 0


def test_the_command_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = accumulate.measure(few=2, many=4, rounds=1)
    monkeypatch.setattr(accumulate, "measure", lambda: found)
    done = CliRunner().invoke(app, ["bench", "--case", "accumulate", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1]) == found


def test_the_ratio_of_two_engines_is_that_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rounds(*_: object) -> list[dict[str, float]]:
        return [{"omni_fsm": 2.0, "queue": 1.0}, {"omni_fsm": 1.0, "queue": 1.0}, {"omni_fsm": 1.0, "queue": 0.8}]

    monkeypatch.setattr(engines, "_rounds", rounds)
    monkeypatch.setattr(engines, "require_vllm", lambda: None)
    found = engines.measure(pairs=3, requests=4, max_tokens=10)
    assert found["ratios"] == [0.5, 1.0, 0.8]
    assert found["ratio"] == 0.8
    assert found["tokens_per_s"] == {"omni_fsm": 80.0, "queue": 80.0}


@pytest.mark.vllm
def test_with_a_plain_queue_the_second_engine_gets_all_states(tmp_path: Path) -> None:
    async def script() -> float:
        pipeline = engines._pipeline("queue", tmp_path / "queue")
        try:
            return await engines._seconds(pipeline, 3, 4)  # raises where an answer is not whole
        finally:
            pipeline.close()

    require_vllm()
    assert asyncio.run(script()) > 0


def test_a_case_that_there_is_not_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "--case", "speed"])
    assert done.exit_code == 2
    assert "accumulate, engines, idle" in done.output
