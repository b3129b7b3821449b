"""The command line: ``omni-fsm demo``, ``omni-fsm engines``, ``omni-fsm explore`` and ``omni-fsm bench``."""

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from omni_fsm.protocol.errors import ConfigError, OmniFsmError

_CASES = ("accumulate", "engines", "idle")
"""The modules of `omni_fsm.bench` that measure."""

_ROWS = 10
"""How many requests the table shows: of a hundred lives the last ones."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The inter-stage protocol of model pipelines.")


@app.callback()
def callback() -> None:
    """The inter-stage protocol of model pipelines, as explicit state machines."""


@contextlib.contextmanager
def _refusals(console: Console) -> Iterator[None]:
    """What cannot be done is said in one line, and the exit status is 2."""
    try:
        yield
    except OmniFsmError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def demo(  # noqa: PLR0913 - each is a flag
    *,
    out: Annotated[Path, typer.Option(help="Directory of the WAV files: 0.wav and so on.")] = Path("out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    cancel: Annotated[int | None, typer.Option(help="Cancel this request at the front, in mid-stream.")] = None,
    cancel_at: Annotated[str | None, typer.Option(help="STAGE:INDEX: that stage cancels that request.")] = None,
    raise_at: Annotated[
        str | None, typer.Option("--raise", help="STAGE:INDEX: its producer raises on the request's fifth chunk.")
    ] = None,
    kill: Annotated[
        str | None,
        typer.Option(help="Kill the process of this stage, or of a rank such as code2wav.1 (kill -9), in mid-stream."),
    ] = None,
    reuse_id: Annotated[
        bool, typer.Option("--reuse-id", help="Live a hundred cancelled lives of one id, and one more.")
    ] = False,
    mode: Annotated[
        str, typer.Option(help="chunks, or full: the talker sends all its frames as one payload, with the end.")
    ] = "chunks",
    segments: Annotated[
        int | None, typer.Option(help="1 to 3: ask so many of the questions in one request, as its turns.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Run code2wav as so many ranks, each in a process, over gloo.")] = 1,
    engine: Annotated[str, typer.Option(help="What runs the thinker: torch, or vllm.")] = "torch",
    external_id: Annotated[str | None, typer.Option("--id", help="External id of request 0: any text.")] = None,
) -> None:
    """Answer three questions aloud with three models in three processes, and check the sound byte by byte."""
    from omni_fsm.demo import run as demo_run  # noqa: PLC0415 - loads torch: other commands need not
    from omni_fsm.demo.command import order_of  # noqa: PLC0415

    console = Console(stderr=as_json)
    with _refusals(console):
        order = order_of(
            out=out,
            cancel=cancel,
            cancel_at=cancel_at,
            raise_at=raise_at,
            kill=kill,
            reuse=reuse_id,
            external_id=external_id,
            mode=mode,
            segments=segments,
            tp=tp,
            engine=engine,
        )
        report = _with_progress(console, order)
    wrong = demo_run.as_asked(order, report)
    _show(console, report, wrong)
    if as_json:
        typer.echo(json.dumps(report))
    raise typer.Exit(1 if wrong else 0)


def _with_progress(console: Console, order: Any) -> dict[str, Any]:
    """Run the demo with one line of progress for each request."""
    from omni_fsm.demo.front import Answer  # noqa: PLC0415 - as above
    from omni_fsm.demo.run import run  # noqa: PLC0415
    from omni_fsm.demo.wav import audio_s  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        stage = progress.add_task("", total=1)
        rows: dict[int, Any] = {}

        def show(answer: Answer) -> None:
            row = rows.setdefault(answer.index, None)
            if row is None:
                row = rows[answer.index] = progress.add_task("", total=1)
            state = answer.cause.outcome if answer.cause is not None else "speaking" if answer.sounds else "thinking"
            text = f"request {answer.index}: {audio_s(answer.pcm):5.1f} s of audio, {state}"
            progress.update(row, description=text, completed=int(answer.cause is not None))

        report = run(order, show, lambda line: progress.update(stage, description=line))
        progress.update(stage, description="done", completed=1)
        return report


def _show(console: Console, report: dict[str, Any], wrong: list[str]) -> None:
    """The table of requests, the residue, and what went wrong."""
    table = Table("request", "outcome", "chunks", "bytes", "audio s", "first audio s", "same PCM")
    for request in report["requests"][-_ROWS:]:
        outcome = request["outcome"] + (f": {request['reason']}" if request["reason"] else "")
        first = request["first_audio_s"]
        table.add_row(
            Text(_cut(request["id"])),
            Text(_cut(outcome)),
            str(request["chunks"]),
            str(request["bytes"]),
            f"{request['audio_s']:.2f}",
            f"{first:.2f}" if first is not None else "-",
            {True: "yes", False: "NO", None: "-"}[request["pcm_identical"]],
        )
    console.print(table)
    for request in report["requests"][-_ROWS:]:
        for text in [answer["text"].strip() for answer in _answers(request)]:
            if text:
                console.print(f"{_cut(request['id'])}: {text}", markup=False, highlight=False)
    same = [answer["pcm_identical"] for request in report["requests"] for answer in _answers(request)]
    compared = [is_same for is_same in same if is_same is not None]
    console.print(f"byte for byte as in one process: {sum(compared)} of {len(compared)} answers", highlight=False)
    for name, residue in report["residue"].items():
        total = "killed" if residue is None else sum(residue.values())
        console.print(f"residue of {name}: {total}", highlight=False)
    console.print(f"shared memory left: {report['shared_memory_left']}", highlight=False)
    for line in wrong:
        console.print(f"not as asked: {line}", style="red", markup=False, highlight=False)


def _answers(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a request: one, or those of its segments."""
    answers: list[dict[str, Any]] = request.get("segments", [request])
    return answers


def _cut(text: str, chars: int = 60) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."


@app.command()
def engines(
    *,
    requests: Annotated[int, typer.Option(min=1, max=64, help="How many requests, all at once.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Let the states of one vLLM engine be the prompt of another, and compare with asking that one directly."""
    from omni_fsm.demo import engine_pair  # noqa: PLC0415 - loads torch: other commands need not

    console = Console(stderr=as_json)
    with _refusals(console):
        found = engine_pair.run(requests)
    for line in engine_pair.in_words(found):
        console.print(line, highlight=False)
    if as_json:
        typer.echo(json.dumps(found))
    raise typer.Exit(0 if engine_pair.is_well(found) else 1)


@app.command(name="explore")
def explore_command(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also the scopes that take minutes.")] = False,
    fault: Annotated[
        str | None,
        typer.Option(
            help="Put this fault of the catalogue in, and find it; all: every one, and every one-cell mutant."
        ),
    ] = None,
    diagram: Annotated[
        bool, typer.Option("--diagram", help="Also draw the trace as a mermaid sequence diagram.")
    ] = False,
    cases: Annotated[
        bool, typer.Option("--cases", help="List the faults met in the field, and where each stands.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Explore every interleaving of the real code in small worlds, and check the protocol's properties."""
    from omni_fsm.verify import command  # noqa: PLC0415 - other commands need not load it

    console = Console(stderr=as_json)
    with _refusals(console):
        if cases:
            report = command.show_cases(console)
        elif fault is not None:
            report = command.show_faults(console, fault, diagram=diagram)
        else:
            report = command.show_scopes(console, deep=deep, diagram=diagram)
    if as_json:
        typer.echo(json.dumps(report.content))
    raise typer.Exit(0 if report.is_well else 1)


@app.command()
def bench(
    *,
    case: Annotated[str, typer.Option(help=f"What to measure: {', '.join(_CASES)}.")] = _CASES[0],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Measure, within one run: medians of rounds that alternate."""
    console = Console(stderr=as_json)
    with _refusals(console):
        if case not in _CASES:
            raise ConfigError("--case", case, ", ".join(_CASES))
        measurement = importlib.import_module(f"omni_fsm.bench.{case}")  # loads torch: other commands need not
        found = measurement.measure()
    for line in measurement.in_words(found):
        console.print(line, highlight=False)
    if as_json:
        typer.echo(json.dumps(found))


def main() -> None:
    """Entry point of ``omni-fsm``."""
    app()


if __name__ == "__main__":
    main()
