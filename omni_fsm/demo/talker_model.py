"""The talker: hibari's acoustic net turns a clause into frames, and a cutter makes equal chunks of them."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_fsm.demo.models import CHUNK_FRAMES, DEMO_COMMAND, FRAME_WIDTH, package_dir, require
from omni_fsm.demo.text import speakable
from omni_fsm.protocol.errors import ConfigError

Frames = NDArray[np.float32]
"""Acoustic frames, float32 ``[n, 3006]``, 12.5 ms each; the columns are told in ``AcousticNet.speak``."""

_N_SPECTRA: Final = 5


def no_frames() -> Frames:
    """Give an array of no frames, ``[0, 3006]``."""
    return np.empty((0, FRAME_WIDTH), np.float32)


def check_frames(frames: Frames) -> None:
    """Refuse what is not float32 ``[n, 3006]``.

    Raises:
        ConfigError: The shape or dtype is another.
    """
    if frames.ndim != 2 or frames.shape[1] != FRAME_WIDTH or frames.dtype != np.float32:  # noqa: PLR2004 - [n, width]
        raise ConfigError("frames", f"{frames.dtype} {list(frames.shape)}", f"float32 [n, {FRAME_WIDTH}]")


class AcousticNet:
    """hibari-tts: English text to acoustic frames; stateless between clauses, so shared by all requests of a process.

    Called by: one process, one call at a time. One onnxruntime thread, operators in sequence. Loading takes 0.5 s.

    Raises:
        MissingPackageError: hibari-tts or onnxruntime is not installed.
    """

    def __init__(self) -> None:
        runtime = require("onnxruntime", DEMO_COMMAND)
        assets = package_dir("hibari", DEMO_COMMAND) / "assets"
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        self._session = runtime.InferenceSession(
            str(assets / "hibari.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._ids: dict[str, int] = json.loads((assets / "vocab.json").read_text(encoding="utf-8"))
        self._phonemes: Any = require("hibari.g2p", DEMO_COMMAND).G2P()

    def speak(self, text: str) -> Frames:
        """Make the frames of one clause: about 8 ms of work a second of sound.

        Returns:
            float32 ``[n, 3006]``, C order, owned by the caller: log magnitude and phase of the harmonic part,
            log magnitude of the noise, log magnitude and phase of the free part (601 bins each), f0 in Hz.
            No frames for a clause without anything to say (punctuation, symbols, a script it does not read).
        """
        phonemes = self._phonemes(speakable(text))
        if not any(char.isalpha() for char in phonemes):
            return no_frames()
        ids = [0, *(self._ids[char] for char in phonemes if char in self._ids), 0]
        inputs = {"ids": np.array([ids], np.int64), "speed": np.ones(1, np.float32)}
        *spectra, f0_hz = self._session.run(None, inputs)
        columns = [spectrum[0].T for spectrum in spectra[:_N_SPECTRA]]  # [1, 601, n] -> [n, 601]
        return np.ascontiguousarray(np.concatenate([*columns, f0_hz[0][:, None]], axis=1), np.float32)


@dataclass(slots=True)
class FrameCutter:
    """One request's frames that do not fill a chunk yet. Chunks cross clauses: all have 25 frames but the tail.

    Attributes:
        held: Fewer than ``CHUNK_FRAMES`` frames, float32 ``[n, 3006]``; at most 288,576 bytes.
    """

    held: Frames = field(default_factory=no_frames)

    def push(self, frames: Frames) -> list[Frames]:
        """Add a clause's frames ``[n, 3006]``; give the full chunks, ``[25, 3006]`` each, owned by the caller.

        Raises:
            ConfigError: ``frames`` has another shape or dtype; nothing was added.
        """
        check_frames(frames)
        joined = np.concatenate([self.held, frames])
        full = len(joined) - len(joined) % CHUNK_FRAMES
        self.held = joined[full:].copy()
        return [joined[at : at + CHUNK_FRAMES].copy() for at in range(0, full, CHUNK_FRAMES)]

    def flush(self) -> Frames | None:
        """Give the tail after the last push, 1 to 24 frames, or None if the chunks had taken all; empty after it."""
        tail, self.held = self.held, no_frames()
        return tail if len(tail) else None
