"""The measurements measure what they say; how fast it is on a machine is no test."""

import json

import pytest
from typer.testing import CliRunner

from omni_fsm.bench import accumulate
from omni_fsm.cli import app


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


def test_a_case_that_there_is_not_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "--case", "speed"])
    assert done.exit_code == 2
    assert "accumulate" in done.output
