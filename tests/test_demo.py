"""The speech pipeline for real: three models in three processes, broken on purpose, compared byte by byte."""

import json
import os
import subprocess
import sys
import wave
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from omni_fsm.demo.faults import Faults
from omni_fsm.demo.processes import StageDiedError, StageProcess
from omni_fsm.demo.stage_process import Plan

pytestmark = pytest.mark.speech


def run_demo(*flags: str, out: Path, code: int = 0) -> dict[str, Any]:
    """Run ``omni-fsm demo --json`` and return its object."""
    command = [sys.executable, "-m", "omni_fsm", "demo", "--json", "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == code, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["shared_memory_left"] == 0
    assert report["foreign_frames"] == 0
    for name, residue in report["residue"].items():
        assert residue is None or not any(residue.values()), (name, residue)
    return report


def the_others(report: dict[str, Any], *but: int) -> list[tuple[str, bool]]:
    return [
        (request["outcome"], request["pcm_identical"])
        for index, request in enumerate(report["requests"])
        if index not in but
    ]


OK = ("ok", True)


def test_three_answers_equal_the_one_process_run_whatever_the_id(tmp_path: Path) -> None:
    name = "../../etc/\u00fc\u4e2d\U0001f600 " + "x" * 3_980
    report = run_demo("--id", name, out=tmp_path)
    assert the_others(report) == [OK, OK, OK]
    assert report["requests"][0]["id"] == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.wav", "1.wav", "2.wav"]
    for request in report["requests"]:
        assert request["text"].endswith(".")
        assert request["chunks"] > 1
        assert request["audio_s"] > 1
        assert len({r["generation"] for r in report["requests"]}) == 3


def test_a_cancel_at_the_front_reaches_every_stage_that_had_not_ended(tmp_path: Path) -> None:
    report = run_demo("--cancel", "1", out=tmp_path)
    assert the_others(report, 1) == [OK, OK]
    cancelled = report["requests"][1]
    assert (cancelled["outcome"], cancelled["pcm_identical"]) == ("cancelled", None)
    assert cancelled["stages"]["code2wav"] == "cancelled"
    assert set(cancelled["stages"].values()) <= {"ok", "cancelled"}
    assert cancelled["stopped_after_ms"] is None or cancelled["stopped_after_ms"] < 1_000
    assert cancelled["late_forwards"] == 0


def test_a_cancel_at_the_last_stage_stops_the_first(tmp_path: Path) -> None:
    report = run_demo("--cancel-at", "code2wav:1", out=tmp_path)
    assert the_others(report, 1) == [OK, OK]
    cancelled = report["requests"][1]
    assert (cancelled["outcome"], cancelled["reason"]) == ("cancelled", "code2wav cancels request 1")
    assert cancelled["stages"] == {"thinker": "cancelled", "talker": "cancelled", "code2wav": "cancelled"}
    assert cancelled["stopped_after_ms"] < 500
    assert cancelled["late_forwards"] == 0
    assert cancelled["terminal_latency_ms"] < 500


def test_a_producer_that_raises_is_heard_at_the_front_in_its_own_words(tmp_path: Path) -> None:
    report = run_demo("--raise", "talker:2", out=tmp_path)
    assert the_others(report, 2) == [OK, OK]
    failed = report["requests"][2]
    assert failed["outcome"] == "error"
    assert failed["reason"] == "RuntimeError: the talker cannot go on with request 2"
    assert failed["terminal_latency_ms"] < 500
    assert failed["stopped_after_ms"] < 500


def test_kill_9_fails_every_open_request_also_one_that_no_later_stage_had_heard_of(tmp_path: Path) -> None:
    report = run_demo("--kill", "thinker", out=tmp_path)
    assert report["residue"]["thinker"] is None
    open_at_kill = [request for request in report["requests"] if request["thinker_open_at_kill"]]
    assert open_at_kill
    assert report["requests"][2] in open_at_kill  # submitted just before the kill
    for request in report["requests"]:
        if request in open_at_kill:
            assert (request["outcome"], request["reason"]) == ("error", "peer_lost")
            assert 0 <= request["after_kill_ms"] < 2_000
        else:
            assert (request["outcome"], request["pcm_identical"]) == OK


def test_a_hundred_cancelled_lives_of_one_id_leave_nothing_to_the_next(tmp_path: Path) -> None:
    report = run_demo("--reuse-id", out=tmp_path)
    outcomes = [request["outcome"] for request in report["requests"]]
    assert outcomes == ["cancelled"] * 100 + ["ok"]
    assert report["requests"][-1]["pcm_identical"] is True
    assert len({request["generation"] for request in report["requests"]}) == 101
    assert len({request["id"] for request in report["requests"]}) == 1
    assert sum(request["chunks"] for request in report["requests"][:-1]) >= 5  # some were cancelled while they flushed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--id", ""), "external_id: '' cannot be used"),
        (("--cancel", "3"), "--cancel: 3 cannot be used"),
        (("--cancel-at", "vocoder:1"), "--cancel-at: 'vocoder:1' cannot be used"),
        (("--raise", "talker:9"), "--raise: 'talker:9' cannot be used"),
        (("--kill", "front"), "--kill: 'front' cannot be used"),
        (("--kill", "thinker", "--cancel", "1"), "one fault a run"),
        (("--kill", "code2wav.2", "--tp", "2"), "accepted: a process: thinker, talker, code2wav, code2wav.1"),
        (("--tp", "0"), "--tp: 0 cannot be used; accepted: a number of ranks from 1 to 4"),
        (("--segments", "0"), "--segments: 0 cannot be used"),
        (("--segments", "4"), "--segments: 4 cannot be used; accepted: a number of questions from 1 to 3"),
        (("--segments", "2", "--kill", "thinker"), "--segments without a fault"),
        (("--segments", "3", "--mode", "full"), "--mode: 'full' cannot be used; accepted: chunks, with --segments"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_by_name(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-m", "omni_fsm", "demo", "--json", "--out", str(tmp_path / "out"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_payload_between_two_stages_gives_the_same_sound(tmp_path: Path) -> None:
    report = run_demo("--mode", "full", out=tmp_path)
    assert the_others(report) == [OK, OK, OK]


def test_two_ranks_consume_the_same_frames_and_make_one_sound(tmp_path: Path) -> None:
    report = run_demo("--tp", "2", out=tmp_path)
    assert the_others(report) == [OK, OK, OK]
    leading, following = report["ranks"]["code2wav"], report["ranks"]["code2wav.1"]
    assert leading == following
    assert leading["samples"] * 2 == sum(request["bytes"] for request in report["requests"])


def test_a_killed_follower_ends_every_open_request_also_one_that_comes_later(tmp_path: Path) -> None:
    report = run_demo("--tp", "2", "--kill", "code2wav.1", out=tmp_path)
    assert report["residue"]["code2wav.1"] is None
    open_at_kill = [request for request in report["requests"] if request["thinker_open_at_kill"]]
    assert report["requests"][2] in open_at_kill  # submitted just before the kill
    for request in report["requests"]:
        if request in open_at_kill:
            assert request["outcome"] == "error"
            assert request["reason"].startswith("rank_lost: ")
            assert 0 <= request["after_kill_ms"] < 2_000
        else:
            assert (request["outcome"], request["pcm_identical"]) == OK


def test_three_turns_of_one_request_sound_as_three_requests_do(tmp_path: Path) -> None:
    """Of the last producer the count of turns goes on, the vocoder does not: what of it was left would be heard."""
    report = run_demo("--segments", "3", "--id", "one/request", out=tmp_path)
    (request,) = report["requests"]
    assert (request["id"], request["outcome"], request["pcm_identical"]) == ("one/request", *OK)
    assert request["stages"] == {"thinker": "ok", "talker": "ok", "code2wav": "ok"}
    segments = request["segments"]
    assert [(segment["number"], segment["turn"], segment["pcm_identical"]) for segment in segments] == [
        (0, 1, True),
        (1, 2, True),
        (2, 3, True),
    ]
    assert len({segment["question"] for segment in segments}) == 3
    assert all(segment["text"].endswith(".") for segment in segments)
    assert request["bytes"] == sum(segment["bytes"] for segment in segments)
    for place, segment in enumerate(segments):
        with wave.open(str(tmp_path / f"{place}.wav"), "rb") as sound:
            assert sha256(sound.readframes(sound.getnframes())).hexdigest() == segment["pcm_sha256"]


@pytest.mark.parametrize(
    ("stage", "within_s", "how"),
    [("nobody", 200.0, "ended with code 1"), ("thinker", 0.01, "was killed: it said nothing for 0 s")],
)
def test_a_stage_that_does_not_start_is_named_with_how_it_ended(
    tmp_path: Path, stage: str, within_s: float, how: str
) -> None:
    process = StageProcess(Plan(stage, str(tmp_path), Faults(), "chunks"))
    try:
        with pytest.raises(StageDiedError, match=f"the process of stage {stage} {how}; "):
            process.answer(within_s)
    finally:
        process.close()
