"""What the flags of ``omni-fsm demo`` mean."""

from pathlib import Path

from omni_fsm.demo.faults import Faults, parse_at
from omni_fsm.demo.pipeline import MODES, load_pipeline
from omni_fsm.demo.reference import MAX_NEW_TOKENS
from omni_fsm.demo.run import REUSED_MAX_NEW_TOKENS, Order, default_questions
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Identity

MAX_RANKS = 4
ENGINES = ("torch", "vllm")


def order_of(  # noqa: PLR0913 - one for each flag
    *,
    out: Path,
    cancel: int | None,
    cancel_at: str | None,
    raise_at: str | None,
    kill: str | None,
    reuse: bool,
    external_id: str | None,
    mode: str,
    segments: int | None,
    tp: int,
    engine: str,
) -> Order:
    """Read the flags.

    Raises:
        ConfigError: Names the flag, its value and what is accepted.
    """
    if external_id is not None:
        Identity(external_id, 0)  # refused before a model is loaded
    questions = default_questions(external_id)
    stages = load_pipeline().stages
    if mode not in MODES:
        raise ConfigError("--mode", mode, " or ".join(MODES))
    if cancel is not None and not 0 <= cancel < len(questions):
        raise ConfigError("--cancel", cancel, f"an index from 0 to {len(questions) - 1}")
    if engine not in ENGINES:
        raise ConfigError("--engine", engine, " or ".join(ENGINES))
    if not 1 <= tp <= MAX_RANKS:
        raise ConfigError("--tp", tp, f"a number of ranks from 1 to {MAX_RANKS}")
    processes = [*stages, *(f"{stages[-1]}.{rank}" for rank in range(1, tp))]
    if kill is not None and kill not in processes:
        raise ConfigError("--kill", kill, f"a process: {', '.join(processes)}")
    faults = Faults(
        cancel=cancel,
        cancel_at=parse_at("--cancel-at", cancel_at, stages, len(questions)),
        raise_at=parse_at("--raise", raise_at, stages, len(questions)),
        kill=kill,
    )
    flags = {
        "--cancel": faults.cancel,
        "--cancel-at": faults.cancel_at,
        "--raise": faults.raise_at,
        "--kill": faults.kill,
    }
    asked = [flag for flag, value in flags.items() if value is not None] + ["--reuse-id"] * reuse
    if len(asked) > 1:
        raise ConfigError("flags", ", ".join(asked), "one fault a run")
    if segments is not None:
        _check_segments(segments, len(questions), asked, mode)
    return Order(
        out,
        questions[:segments],
        faults,
        reuse,
        REUSED_MAX_NEW_TOKENS if reuse else MAX_NEW_TOKENS,
        mode,
        segments=segments is not None,
        ranks=tp,
        engine=engine == "vllm",
    )


def _check_segments(segments: int, questions: int, asked: list[str], mode: str) -> None:
    if not 1 <= segments <= questions:
        raise ConfigError("--segments", segments, f"a number of questions from 1 to {questions}")
    if asked:
        raise ConfigError("flags", ", ".join(["--segments", *asked]), "--segments without a fault")
    if mode != "chunks":
        raise ConfigError("--mode", mode, "chunks, with --segments: a full payload is one for the whole request")
