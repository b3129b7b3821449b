"""The vocoder: acoustic frames to sound, as a stream.

The arithmetic is that of ``hibari.dsp.synth`` (hibari-tts 0.2.1, Apache-2.0), taken apart so that it runs on one frame
at a time and keeps what the next frame needs. A frame's spectrum is

    exp(harmonic) e^(i pi tanh(harmonic phase)) STFT(pulses of f0)  +  exp(noise) Z  +  exp(free) e^(i free phase)

and the sound is the overlap-add of its inverse (window 1,200 samples, hop 300, Hann, 24 kHz). Every operation is on one
frame, so how frames are cut into pushes cannot change a bit. The FFT is numpy's, whatever else is installed: hibari
takes scipy's when it finds it, whose last bits differ.
"""

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_fsm.demo.models import FRAME_WIDTH, N_BINS, StreamFinishedError
from omni_fsm.demo.talker_model import Frames, check_frames, no_frames
from omni_fsm.demo.wav import SAMPLE_RATE_HZ, Pcm, to_pcm

Samples = NDArray[np.float32]
Spectrum = NDArray[np.complex64]

HOP: Final = 300
"""Samples of one frame: 12.5 ms."""

_WINDOW: Final = 4 * HOP
_OVERLAPS: Final = _WINDOW // HOP
_CENTER: Final = _WINDOW // 2
_HALF_HOPS: Final = _CENTER // HOP
_VOICED_ABOVE_HZ: Final = np.float32(40.0)
_TOP_HARMONIC_HZ: Final = np.float32(11_000.0)
_MAX_LOG_MAGNITUDE: Final = np.float32(7.0)
_NEARLY_ZERO: Final = np.float32(2e-3)
_TINY_WEIGHT: Final = np.float32(1e-11)
_ONE: Final = np.float32(1.0)

_HANN: Final = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)).astype(np.float32)
_PULSE_HANN: Final = _HANN / (_WINDOW / 4)  # a unit cosine then peaks at one in the spectrum
_HANN_SQUARED: Final = (_HANN * _HANN).reshape(_OVERLAPS, HOP)
_RISING: Final = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
_FALLING: Final = (1.0 - _RISING).astype(np.float32)


class Vocoder:
    """One request's stream from frames to sound. At most 46 KB of state; it can be pickled between pushes.

    Sound lags the frames by 600 samples (half a window) and what the pulses of the next frames add, so each push gives
    fewer or more samples than its frames have; all pushes together give exactly 300 samples a frame. 25
    frames take about 4 ms.

    Args:
        seed: Of the noise: ``seed_of(question)``. Noise is drawn as each frame is made, in frame order.
    """

    def __init__(self, seed: int) -> None:
        self._noise = np.random.Generator(np.random.PCG64(seed))
        self._frames_in = 0
        self._frames_out = 0  # frames overlap-added so far
        self._f0_hz = np.zeros(2, np.float32)  # of the last two frames
        self._phase_hz = 0.0  # sum of the instantaneous f0: 24,000 a cycle
        self._pulses: Samples = np.zeros(0, np.float32)
        self._pulses_from = 0  # sample number of self._pulses[0]
        self._waiting: deque[Samples] = deque()  # frames whose pulses are not all known
        self._tail: Samples = np.zeros((_OVERLAPS - 1, HOP), np.float32)
        self._tail_weight: Samples = np.zeros((_OVERLAPS - 1, HOP), np.float32)
        self._finished = False

    def push(self, frames: Frames, *, last: bool) -> Pcm:
        """Add frames; give the sound that became certain.

        Called by: the owner of the request, in frame order, one call at a time.

        Args:
            frames: float32 ``[n, 3006]``, n from 0 up; borrowed until this returns. None are needed with ``last``:
                the end may be learned after the last chunk.
            last: No frames follow. The rest of the sound comes out, and the vocoder is finished.

        Returns:
            Little-endian int16 ``[samples]``, mono, 24 kHz; may be empty.

        Raises:
            StreamFinishedError: ``last`` was given before.
            ConfigError: ``frames`` has another shape or dtype. Nothing changed, in either case.
        """
        return to_pcm(self.push_samples(frames, last=last))

    def finish(self) -> Pcm:
        """End the sound after the last push: ``push`` of no frames with ``last``."""
        return self.push(no_frames(), last=True)

    def push_samples(self, frames: Frames, *, last: bool) -> Samples:
        """Do as ``push`` and give float32 samples before the rounding."""
        if self._finished:
            raise StreamFinishedError("vocoder")
        check_frames(frames)
        hops: list[Samples] = []
        for frame in frames:
            self._take(frame)
            hops += self._make_ready_frames()
        if last:
            hops += self._make_rest()
        return np.concatenate(hops) if hops else np.zeros(0, np.float32)

    @property
    def state_nbytes(self) -> int:
        """Bytes of all arrays kept between two pushes (the noise generator has 40 more)."""
        arrays = (self._f0_hz, self._pulses, self._tail, self._tail_weight, *self._waiting)
        return sum(array.nbytes for array in arrays)

    def _take(self, frame: Samples) -> None:
        """Keep one frame ``[3006]`` and make the pulses of the frame before it, whose two neighbours are now known."""
        f0_hz = frame[-1]
        if self._frames_in:
            self._add_pulses(f0_hz)
        else:
            self._f0_hz[:] = f0_hz  # the first frame's earlier neighbour is itself
        self._waiting.append(frame.copy())
        self._frames_in += 1

    def _add_pulses(self, next_f0_hz: np.float32) -> None:
        """Append the 300 pulse samples of the last frame and advance the phase past them."""
        before, current = self._f0_hz
        curve = _f0_curve(before, current, next_f0_hz)
        voiced = curve > _VOICED_ABOVE_HZ
        curve = np.maximum(curve, _VOICED_ABOVE_HZ)
        phases = np.cumsum(np.concatenate([[self._phase_hz], curve.astype(np.float64)]))
        self._phase_hz = float(phases[-1])
        self._pulses = np.concatenate([self._pulses, _pulse_train(phases[1:], curve, voiced)])
        self._f0_hz = np.array([current, next_f0_hz], np.float32)

    def _make_ready_frames(self) -> list[Samples]:
        """Make every waiting frame whose window lies in the known pulses; the first ones look at their mirror too."""
        hops: list[Samples] = []
        known = self._pulses_from + len(self._pulses)
        while known >= max(self._frames_out * HOP + _CENTER, _CENTER + 1):
            hops += self._make_frame(np.abs(self._window_positions()))
        return hops

    def _make_rest(self) -> list[Samples]:
        """Make the frames that waited for what now never comes, then the end of the overlap-add. Ends the stream."""
        self._finished = True
        if not self._frames_in:
            return []
        self._add_pulses(self._f0_hz[1])  # the last frame's later neighbour is itself
        hops: list[Samples] = []
        total = self._frames_in * HOP
        while self._waiting:
            hops += self._make_frame(_mirrored(self._window_positions(), total))
        early = max(0, _HALF_HOPS - self._frames_out)  # with one frame, a hop of the tail is before sample 0
        return [*hops, _unweighted(self._tail, self._tail_weight)[early:_HALF_HOPS].reshape(-1)]

    def _window_positions(self) -> NDArray[np.int64]:
        """Give the sample numbers under the next frame's window, some before the first sample or after the last."""
        start = self._frames_out * HOP - _CENTER
        return np.arange(start, start + _WINDOW)

    def _make_frame(self, positions: NDArray[np.int64]) -> list[Samples]:
        """Make the next waiting frame from the pulses at ``positions``: one hop ``[300]``, none for the first two."""
        spectrum = self._spectrum(self._waiting.popleft(), self._pulses[positions - self._pulses_from])
        windowed = np.fft.irfft(spectrum, n=_WINDOW).astype(np.float32) * _HANN
        nothing = np.zeros((1, HOP), np.float32)
        total = np.concatenate([self._tail, nothing]) + windowed.reshape(_OVERLAPS, HOP)
        weight = np.concatenate([self._tail_weight, nothing]) + _HANN_SQUARED
        self._tail, self._tail_weight = total[1:].copy(), weight[1:].copy()
        self._frames_out += 1
        self._forget_pulses()
        if self._frames_out <= _HALF_HOPS:  # the half window before sample 0
            return []
        return [_unweighted(total[0], weight[0])]

    def _spectrum(self, frame: Samples, pulses: Samples) -> Spectrum:
        """Give the spectrum ``[601]`` of one frame ``[3006]`` over its 1,200 pulse samples. Draws the frame's noise."""
        harmonic, harmonic_phase, noise, free, free_phase = frame[: FRAME_WIDTH - 1].reshape(-1, N_BINS)
        drawn = self._noise.standard_normal(2 * N_BINS, dtype=np.float32).view(np.complex64)
        spectrum = np.fft.rfft(pulses * _PULSE_HANN).astype(np.complex64)
        spectrum *= _polar(harmonic, np.tanh(harmonic_phase) * np.float32(np.pi))
        spectrum += drawn * _magnitude(noise)
        spectrum += _polar(free, free_phase)
        return spectrum

    def _forget_pulses(self) -> None:
        """Drop the pulses before the next frame's window. A mirror never looks back further than that."""
        start = max(self._pulses_from, self._frames_out * HOP - _CENTER)
        self._pulses = self._pulses[start - self._pulses_from :].copy()
        self._pulses_from = start


def _f0_curve(before: np.float32, current: np.float32, after: np.float32) -> Samples:
    """Give f0 in Hz at a frame's 300 samples: linear between the middles of this frame and its neighbours."""
    half = HOP // 2
    first = before * _FALLING[:half] + current * _RISING[:half]
    second = current * _FALLING[half:] + after * _RISING[half:]
    return np.concatenate([first, second])


def _pulse_train(phases_hz: NDArray[np.float64], f0_hz: Samples, voiced: NDArray[np.bool_]) -> Samples:
    """Give every harmonic below 11 kHz at unit amplitude: sum of cos(h t) = sin((H + 1/2) t) / (2 sin(t/2)) - 1/2."""
    angle = (np.modf(phases_hz * (1.0 / SAMPLE_RATE_HZ))[0] * (2 * np.pi)).astype(np.float32)
    harmonics = np.floor(_TOP_HARMONIC_HZ / f0_hz) + np.float32(0.5)
    divisor = np.sin(angle * np.float32(0.5)) * np.float32(2.0)
    at_pulse = np.abs(divisor) <= _NEARLY_ZERO  # the quotient's limit there is H + 1/2
    quotient = np.sin(harmonics * angle) / np.where(at_pulse, _ONE, divisor)
    pulses: Samples = np.where(at_pulse, harmonics, quotient) - np.float32(0.5)
    pulses[~voiced] = 0.0
    return pulses


def _mirrored(positions: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Reflect sample numbers into 0..total-1 at both ends, as often as a short sound needs."""
    period = 2 * (total - 1)
    folded = positions % period
    return np.minimum(folded, period - folded)


def _unweighted(total: Samples, weight: Samples) -> Samples:
    """Divide overlap-added samples by the sum of the squared windows that lie on them."""
    samples: Samples = np.divide(total, np.maximum(weight, _TINY_WEIGHT))
    return samples


def _magnitude(log_magnitude: Samples) -> Samples:
    magnitude: Samples = np.exp(np.minimum(log_magnitude, _MAX_LOG_MAGNITUDE))
    return magnitude


def _polar(log_magnitude: Samples, angle: Samples) -> Spectrum:
    """Give complex values ``[601]`` of a log magnitude and an angle in radians."""
    values = np.empty(log_magnitude.shape, np.complex64)
    values.real, values.imag = np.cos(angle), np.sin(angle)
    values *= _magnitude(log_magnitude)
    return values
