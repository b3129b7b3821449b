"""One run of the demo: processes, requests, faults, and the report."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_fsm.demo.faults import Faults
from omni_fsm.demo.front import Answer, Front, Segment, converse, reuse_one_id, serve_all
from omni_fsm.demo.models import package_dir, pin_threads
from omni_fsm.demo.models_convert import thinker_dir
from omni_fsm.demo.pipeline import Pipeline, load_pipeline
from omni_fsm.demo.processes import StageProcess, stage_processes
from omni_fsm.demo.reference import MAX_NEW_TOKENS, QUESTIONS, answer_aloud
from omni_fsm.demo.stage_process import settled_residue
from omni_fsm.demo.talker_model import AcousticNet
from omni_fsm.demo.thinker_model import Thinker
from omni_fsm.demo.wav import audio_s, pcm_sha256, write_wav
from omni_fsm.protocol.frames import Outcome

REPORT_S = 60.0
KILL_MS = 2_000.0
_PEER_LOST, _RANK_LOST = "peer_lost", "rank_lost"
REUSED_LIVES = 100
REUSED_MAX_NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Order:
    """What a run shall do.

    Attributes:
        out: Directory of the WAV files.
        questions: The questions, with the external id of each.
        faults: What to break.
        reuse: Whether to live a hundred lives of the first question's id instead.
        max_new_tokens: Bound of an answer, in tokens.
        mode: ``chunks``, or ``full``: the talker sends one payload.
        segments: Whether all questions go through one request, the first one's, each as a segment.
        ranks: How many ranks the last stage has.
        engine: Whether the thinker is a vLLM engine.
    """

    out: Path
    questions: list[tuple[str, str]]
    faults: Faults = field(default_factory=Faults)
    reuse: bool = False
    max_new_tokens: int = MAX_NEW_TOKENS
    mode: str = "chunks"
    segments: bool = False
    ranks: int = 1
    engine: bool = False


def default_questions(external_id: str | None = None) -> list[tuple[str, str]]:
    """The demo's questions; ``external_id`` names the first."""
    ids = [f"request-{index}" for index in range(len(QUESTIONS))]
    if external_id is not None:
        ids[0] = external_id
    return list(zip(QUESTIONS, ids, strict=True))


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory of mode 0700 for the edges' sockets; gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="omni-fsm-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(order: Order, progress: Callable[[Answer], None], says: Callable[[str], None]) -> dict[str, Any]:
    """Run the pipeline and return the report that ``omni-fsm demo --json`` prints.

    Args:
        order: What to do.
        progress: Called whenever an answer has changed.
        says: Called with one line at each step of the run.

    Raises:
        MissingPackageError: A model's package is not installed; names the command that installs it.
        StageDiedError: A stage's process ended by itself, or said nothing in time.
    """
    pin_threads()
    for package in ("transformers", "hibari", "onnxruntime"):
        package_dir(package)
    says("preparing the thinker's weights (half a minute the first time)")
    thinker_dir()
    pipeline = load_pipeline(order.mode)
    before = _shared_memory(order)
    with private_directory() as directory:
        says(f"loading three models in {len(pipeline.stages) + order.ranks - 1} processes")
        front = Front(
            pipeline.config(pipeline.front), pipeline.wiring(directory).open(pipeline.front), order.faults, progress
        )
        stages = stage_processes(
            pipeline.stages, directory, order.faults, order.mode, ranks=order.ranks, engine=order.engine
        )
        with front.adapter, stages as processes:
            says("answering")
            answers = _serve(order, front, processes)
            says("waiting until every table is empty")
            reports = _reports(front, processes)
        killed_ns = next((process.killed_ns for process in processes.values() if process.killed_ns is not None), None)
        left = len(_shared_memory(order) - before) + len(list(directory.iterdir())) + _own_memfds()
    says("answering the same questions in this one process")
    references = _references(order, answers)
    return _report(order, pipeline, answers, reports, references, killed_ns, left)


def _serve(order: Order, front: Front, processes: dict[str, StageProcess]) -> list[Answer]:
    if order.reuse:
        question, external_id = order.questions[0]
        return reuse_one_id(front, question, external_id, REUSED_LIVES, order.max_new_tokens)
    if order.segments:
        questions, (external_id, *_) = zip(*order.questions, strict=True)
        return [converse(front, list(questions), external_id, order.max_new_tokens)]
    if order.faults.kill is not None:
        return _serve_and_kill(order, front, processes[order.faults.kill])
    return serve_all(front, order.questions, order.max_new_tokens)


def _serve_and_kill(order: Order, front: Front, victim: StageProcess) -> list[Answer]:
    """Kill a stage at the first sound; the last question was submitted just before, no later stage has heard of it."""
    early, last = order.questions[:-1], order.questions[-1]
    answers = [
        front.submit(index, question, external_id, order.max_new_tokens)
        for index, (question, external_id) in enumerate(early)
    ]
    front.serve(lambda: not any(answer.sounds or answer.cause for answer in answers))
    answers.append(front.submit(len(early), *last, order.max_new_tokens))
    victim.kill()
    front.serve(lambda: any(answer.cause is None for answer in answers))
    return answers


def _reports(front: Front, processes: dict[str, StageProcess]) -> dict[str, dict[str, Any] | None]:
    """What each stage, and the front, has to tell once it is quiet; None of a killed one."""
    for process in processes.values():
        if process.killed_ns is None:
            process.ask()
    reports: dict[str, dict[str, Any] | None] = {
        stage: None if process.killed_ns is not None else process.answer(REPORT_S)
        for stage, process in processes.items()
    }
    front.adapter.collect_feedback()
    reports["front"] = {
        "residue": settled_residue(front.adapter.residue),
        "lives": front.record.report(),
        "foreign_frames": front.foreign_frames,
    }
    return reports


def _references(order: Order, answers: list[Answer]) -> dict[str, bytes]:
    """PCM of every question that was answered, from one process that runs one request after the other."""
    questions = {
        segment.question for answer in answers if _outcome(answer) == Outcome.OK for segment in answer.segments
    }
    if not questions:
        return {}
    thinker, acoustic_net = Thinker(), AcousticNet()
    return {
        question: answer_aloud(question, order.max_new_tokens, thinker=thinker, acoustic_net=acoustic_net).pcm
        for question in questions
    }


def _outcome(answer: Answer) -> str:
    return str(answer.cause.outcome) if answer.cause is not None else "open"


def _report(  # noqa: PLR0913, PLR0917 - all that a run has found out
    order: Order,
    pipeline: Pipeline,
    answers: list[Answer],
    reports: dict[str, dict[str, Any] | None],
    references: dict[str, bytes],
    killed_ns: int | None,
    left: int,
) -> dict[str, Any]:
    order.out.mkdir(parents=True, exist_ok=True)
    names = [pipeline.front, *pipeline.stages]
    for place, segment in enumerate(segment for answer in answers for segment in answer.segments):
        write_wav(order.out / f"{place}.wav", segment.pcm)
    requests = []
    for answer in answers:
        lives = _lives(answer, reports)
        requests.append(_request_report(answer, lives, references, names))
        if order.segments:
            requests[-1]["segments"] = [_segment_report(answer, segment, references) for segment in answer.segments]
        if killed_ns is not None:
            requests[-1] |= _kill_report(lives, lives.get(pipeline.front), killed_ns)
    return {
        "requests": requests,
        "residue": {name: report["residue"] if report else None for name, report in reports.items()},
        "ranks": {name: report["consumed"] for name, report in reports.items() if report and "consumed" in report},
        "foreign_frames": sum(report["foreign_frames"] for report in reports.values() if report),
        "shared_memory_left": left,
    }


def _lives(answer: Answer, reports: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """What each stage, by name, has to tell of one request."""
    identity = (answer.identity.external_id, answer.identity.generation)
    return {
        name: life
        for name, report in reports.items()
        if report is not None
        for life in report["lives"]
        if (life["external_id"], life["generation"]) == identity
    }


def _kill_report(lives: dict[str, dict[str, Any]], front: dict[str, Any] | None, killed_ns: int) -> dict[str, Any]:
    """What a kill did to one request."""
    is_open = any(
        life["sender_lost"] or life["receiver_lost"] or life["reason"].startswith(_RANK_LOST) for life in lives.values()
    )
    ended_ns = front["arrived_ns"] if front is not None and is_open else 0
    return {
        "thinker_open_at_kill": is_open,
        "after_kill_ms": (ended_ns - killed_ns) / 1e6 if ended_ns else None,
    }


def _request_report(
    answer: Answer, lives: dict[str, dict[str, Any]], references: dict[str, bytes], names: list[str]
) -> dict[str, Any]:
    return {
        "id": answer.identity.external_id,
        "generation": answer.identity.generation,
        "outcome": _outcome(answer),
        "reason": answer.cause.reason if answer.cause is not None else "",
        "text": answer.text,
        "chunks": len(answer.sounds),
        "bytes": len(answer.pcm),
        "audio_s": audio_s(answer.pcm),
        "first_audio_s": answer.first_audio_s,
        "pcm_sha256": pcm_sha256(answer.pcm),
        "pcm_identical": _is_identical(answer, answer.segments, references),
        "terminal_latency_ms": _terminal_latency_ms(answer, lives.get(names[0])),
        "stages": {name: lives[name]["outcome"] for name in names[1:] if name in lives},
        "stopped_after_ms": _stopped_after_ms(lives.get(names[1])),
        "late_forwards": sum(life["late_forwards"] for life in lives.values()),
    }


def _segment_report(answer: Answer, segment: Segment, references: dict[str, bytes]) -> dict[str, Any]:
    return {
        "number": segment.number,
        "turn": segment.turn,
        "question": segment.question,
        "text": segment.text,
        "bytes": len(segment.pcm),
        "audio_s": audio_s(segment.pcm),
        "pcm_sha256": pcm_sha256(segment.pcm),
        "pcm_identical": _is_identical(answer, [segment], references),
    }


def _is_identical(answer: Answer, segments: list[Segment], references: dict[str, bytes]) -> bool | None:
    """Whether segments of an answer sound as in one process; None where it did not end well."""
    if _outcome(answer) != Outcome.OK:
        return None
    return all(segment.pcm == references[segment.question] for segment in segments)


def _terminal_latency_ms(answer: Answer, front: dict[str, Any] | None) -> float | None:
    """From the happening that ended the request, in whatever stage, to the front's state change; None if it never came."""
    if answer.cause is None or front is None or not front["arrived_ns"]:
        return None
    return max(0.0, float(front["arrived_ns"] - answer.cause.at_ns) / 1e6)


def _stopped_after_ms(thinker: dict[str, Any] | None) -> float | None:
    """How long after the happening the thinker's sender left active; None where it had ended by itself."""
    if thinker is None or not thinker["cause_ns"]:
        return None
    return max(0.0, float(thinker["left_ns"] - thinker["cause_ns"]) / 1e6)


def _shared_memory(order: Order) -> set[str]:
    """The names in /dev/shm; without those of the kind that vLLM's own processes leave there when they are killed."""
    names = set(os.listdir("/dev/shm"))  # noqa: PTH208, S108 - counted, never opened
    return {name for name in names if not (order.engine and name.startswith(("psm_", "sem.mp-")))}


def _own_memfds() -> int:
    """Memory regions that this process still holds: those of the others went with them."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            count += str(Path("/proc/self/fd", name).readlink()).startswith("/memfd:")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return count


def as_asked(order: Order, report: dict[str, Any]) -> list[str]:
    """What did not end as the order asked; empty when all did."""
    wrong = []
    for place, request in enumerate(report["requests"]):
        expected = _expected(order, place, request, len(report["requests"]))
        if request["outcome"] not in expected:
            wrong.append(
                f"request {place} ended {request['outcome']} ({request['reason']}), not {' or '.join(expected)}"
            )
        lost = request["reason"] == _PEER_LOST or request["reason"].startswith(_RANK_LOST)
        if request.get("thinker_open_at_kill") and (not lost or request["after_kill_ms"] > KILL_MS):
            wrong.append(f"request {place}: {request['reason']}, {request['after_kill_ms']} ms after the kill")
        if request["pcm_identical"] is False:
            wrong.append(f"request {place} sounds different from the one-process run")
        if order.segments:
            wrong += _wrong_segments(request, len(order.questions))
    for name, residue in report["residue"].items():
        if residue is not None and any(residue.values()):
            wrong.append(f"{name} still holds { ({table: n for table, n in residue.items() if n}) }")
    if order.faults.kill is None and len({each["sha256"] for each in report["ranks"].values()}) > 1:
        wrong.append(f"the ranks have not consumed the same: {report['ranks']}")
    if report["shared_memory_left"] or report["foreign_frames"]:
        wrong.append(f"{report['shared_memory_left']} shared memory left, {report['foreign_frames']} foreign frames")
    return wrong


def _wrong_segments(request: dict[str, Any], questions: int) -> list[str]:
    """What is wrong with the numbers of a request's segments: from 0 at the front, from 1 as the last producer counts turns."""
    came = [(segment["number"], segment["turn"]) for segment in request["segments"]]
    expected = [(number, number + 1) for number in range(questions)]
    return [f"segments and turns came as {came}, not {expected}"] if came != expected else []


def _expected(order: Order, place: int, request: dict[str, Any], total: int) -> tuple[str, ...]:
    faults = order.faults
    if order.reuse:
        return (str(Outcome.OK if place == total - 1 else Outcome.CANCELLED),)
    if faults.kill is not None:
        return (str(Outcome.ERROR if request["thinker_open_at_kill"] else Outcome.OK),)
    if place == faults.cancel or (faults.cancel_at is not None and place == faults.cancel_at.request):
        return (str(Outcome.CANCELLED),)
    if faults.raise_at is not None and place == faults.raise_at.request:
        return (str(Outcome.ERROR),)
    return (str(Outcome.OK),)
