"""One question through all three models in this process: what a run through stages must equal, byte by byte."""

from dataclasses import dataclass
from typing import Final

from omni_fsm.demo.models import seed_of
from omni_fsm.demo.talker_model import AcousticNet, FrameCutter, Frames
from omni_fsm.demo.text import ClauseBuffer
from omni_fsm.demo.thinker_model import Thinker
from omni_fsm.demo.vocoder import Vocoder

QUESTIONS: Final = (
    "What is the capital of France?",
    "What is the moon?",
    "What is a computer?",
)
"""The demo's questions: answers of one or two sentences that end by themselves, 2 to 15 s of sound."""

MAX_NEW_TOKENS: Final = 60


@dataclass(frozen=True, slots=True)
class Spoken:
    """One answer, whole.

    Attributes:
        text: What the thinker said.
        chunks: The talker's chunks, float32 ``[25, 3006]`` each; the last may be shorter.
        pcm: The sound: little-endian int16, mono, 24 kHz.
    """

    text: str
    chunks: tuple[Frames, ...]
    pcm: bytes


def answer_aloud(
    question: str, max_new_tokens: int = MAX_NEW_TOKENS, *, thinker: Thinker, acoustic_net: AcousticNet
) -> Spoken:
    """Answer one question, model after model, with nothing else between: no interleaving, no stages, no threads.

    Raises:
        ConfigError: From ``Thinker.start``.
    """
    text, clauses = _think(thinker, question, max_new_tokens)
    chunks = _speak(acoustic_net, clauses)
    vocoder = Vocoder(seed_of(question))
    sounds = [vocoder.push(chunk, last=False) for chunk in chunks]
    sounds.append(vocoder.finish())
    return Spoken(text, tuple(chunks), b"".join(sound.tobytes() for sound in sounds))


def _think(thinker: Thinker, question: str, max_new_tokens: int) -> tuple[str, list[str]]:
    """Give the answer's text and its clauses."""
    request, buffer = thinker.start(question, max_new_tokens), ClauseBuffer()
    text, clauses = "", []
    while step := thinker.step(request):
        text += step.piece
        clauses += buffer.push(step.piece)
    return text, [*clauses, *buffer.flush()]


def _speak(acoustic_net: AcousticNet, clauses: list[str]) -> list[Frames]:
    """Give the chunks of all clauses, and the tail if there is one."""
    cutter = FrameCutter()
    chunks = [chunk for clause in clauses for chunk in cutter.push(acoustic_net.speak(clause))]
    tail = cutter.flush()
    return chunks if tail is None else [*chunks, tail]
