"""PCM: how samples are rounded, what identifies a sound, and how it becomes a file."""

import wave
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE_HZ: Final = 24_000
_FULL_SCALE: Final = 32_767
_SAMPLE_BYTES: Final = 2

Pcm = NDArray[np.int16]
"""Mono sound, little-endian int16 ``[samples]`` at 24 kHz."""


def to_pcm(samples: NDArray[np.float32]) -> Pcm:
    """Round float32 ``[samples]`` to int16: clipped to -1..1, times 32,767, half to even. The demo rounds only here.

    >>> to_pcm(np.array([0.0, -1.0, 1.5], np.float32)).tolist()
    [0, -32767, 32767]
    """
    pcm: Pcm = np.rint(np.clip(samples, -1.0, 1.0) * np.float32(_FULL_SCALE)).astype("<i2")
    return pcm


def pcm_sha256(pcm: bytes) -> str:
    """Give the hex digest of PCM bytes; two runs that agree in it agree in every sample."""
    return sha256(pcm).hexdigest()


def audio_s(pcm: bytes) -> float:
    """Give the length of PCM bytes in seconds."""
    return len(pcm) / _SAMPLE_BYTES / SAMPLE_RATE_HZ


def write_wav(path: Path, pcm: bytes) -> None:
    """Write int16 mono 24 kHz PCM bytes as a WAV file, over what was there."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_SAMPLE_BYTES)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(pcm)
