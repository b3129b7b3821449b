"""The vocoder is exact: no cut, no interleaving and no late end changes a bit of a request's sound."""

import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_fsm.demo.models import FRAME_WIDTH, N_BINS, StreamFinishedError, seed_of
from omni_fsm.demo.talker_model import AcousticNet, Frames, no_frames
from omni_fsm.demo.vocoder import HOP, Vocoder
from omni_fsm.demo.wav import audio_s, pcm_sha256, to_pcm, write_wav
from omni_fsm.protocol.errors import ConfigError

N_FRAMES = 97
SEED_OF_FRANCE = 1_404_080_343_867_914_432
STATE_BOUND_BYTES = 50_000


def synthetic_frames(count: int, seed: int = 1) -> Frames:
    """Frames with the ranges of real ones: log magnitudes, any phase, f0 that comes and goes."""
    random = np.random.default_rng(seed)
    frames = random.normal(-2.0, 1.5, (count, FRAME_WIDTH)).astype(np.float32)
    frames[:, -1] = np.where(np.arange(count) // 9 % 3 == 2, 0.0, 180.0 + 60.0 * np.sin(np.arange(count) / 7.0))
    return frames


FRAMES = synthetic_frames(N_FRAMES)


def pushed(frames: Frames, sizes: Sequence[int], *, seed: int = 5, empty_end: bool = False) -> bytes:
    """PCM of frames pushed in pieces of these sizes; the rest of the frames is the last piece."""
    vocoder = Vocoder(seed)
    edges = [0, *(min(int(edge), len(frames)) for edge in np.cumsum(sizes, dtype=int)), len(frames)]
    pieces = [frames[start:end] for start, end in pairwise(edges)] + ([no_frames()] if empty_end else [])
    sounds = [vocoder.push(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    return b"".join(sound.tobytes() for sound in sounds)


WHOLE = pushed(FRAMES, [])


@pytest.fixture(scope="module")
def real_frames() -> Frames:
    pytest.importorskip("hibari")
    return AcousticNet().speak("A small model runs on a small machine.")


@pytest.mark.parametrize("size", [40, 25, 13, 7, 1])
@pytest.mark.parametrize("empty_end", [False, True])
def test_any_chunk_size_gives_the_same_bytes(size: int, empty_end: bool) -> None:  # noqa: FBT001 - a parameter
    assert pushed(FRAMES, [size] * (N_FRAMES // size), empty_end=empty_end) == WHOLE


@pytest.mark.parametrize("size", [40, 25, 13, 7, 1])
def test_any_chunk_size_gives_the_same_bytes_of_real_speech(size: int, real_frames: Frames) -> None:
    sizes = [size] * (len(real_frames) // size)
    assert pushed(real_frames, sizes, empty_end=True) == pushed(real_frames, [])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 30), max_size=30), empty_end=st.booleans())
def test_random_cuts_give_the_same_bytes(sizes: list[int], empty_end: bool) -> None:  # noqa: FBT001 - a parameter
    """Empty pushes in between change nothing either."""
    assert pushed(FRAMES, sizes, empty_end=empty_end) == WHOLE


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6])
def test_a_very_short_sound_has_300_samples_a_frame_and_no_cut_changes_it(count: int) -> None:
    whole = pushed(FRAMES[:count], [])
    assert len(whole) == 2 * HOP * count
    assert pushed(FRAMES[:count], [1] * count, empty_end=True) == whole
    assert pushed(FRAMES[:count], [], empty_end=True) == whole


def test_without_the_end_the_sound_is_1200_samples_short_and_otherwise_the_same() -> None:
    """Half a window, and two frames whose later neighbours are not known yet."""
    begun = Vocoder(5).push(FRAMES, last=False).tobytes()
    assert len(begun) == len(WHOLE) - 2 * 1200
    assert WHOLE.startswith(begun)


def test_two_interleaved_requests_do_not_mix() -> None:
    others = synthetic_frames(N_FRAMES, seed=2)
    first, second = Vocoder(5), Vocoder(6)
    heard: tuple[list[bytes], list[bytes]] = ([], [])
    for at in range(0, N_FRAMES, 7):
        heard[0].append(first.push(FRAMES[at : at + 7], last=False).tobytes())
        heard[1].append(second.push(others[at : at + 7], last=False).tobytes())
    heard[1].append(second.finish().tobytes())
    heard[0].append(first.finish().tobytes())
    assert b"".join(heard[0]) == WHOLE
    assert b"".join(heard[1]) == pushed(others, [], seed=6)


@pytest.mark.parametrize(
    "faulty",
    [
        pytest.param(np.delete(FRAMES, slice(25, 50), axis=0), id="a chunk lost"),
        pytest.param(np.concatenate([FRAMES[:50], FRAMES[25:]]), id="a chunk repeated"),
        pytest.param(np.concatenate([FRAMES[25:50], FRAMES[:25], FRAMES[50:]]), id="two chunks reordered"),
    ],
)
def test_every_fault_of_a_stream_is_heard(faulty: Frames) -> None:
    assert pushed(faulty, []) != WHOLE


def test_another_seed_is_another_sound() -> None:
    assert pushed(FRAMES, [], seed=6) != WHOLE


def test_the_state_is_bounded_after_every_push() -> None:
    vocoder = Vocoder(5)
    sizes = []
    for frame in FRAMES:
        vocoder.push(frame[None], last=False)
        sizes.append(vocoder.state_nbytes)
    assert max(sizes) <= STATE_BOUND_BYTES
    assert sizes[10] == sizes[-1]  # no growth with the length of the sound


def test_a_pickled_vocoder_goes_on_where_it_was() -> None:
    vocoder = Vocoder(5)
    begun = vocoder.push(FRAMES[:40], last=False).tobytes()
    copy = pickle.loads(pickle.dumps(vocoder))  # noqa: S301 - our own bytes
    assert begun + copy.push(FRAMES[40:], last=True).tobytes() == WHOLE


def test_a_push_after_the_last_is_refused() -> None:
    vocoder = Vocoder(5)
    vocoder.finish()
    with pytest.raises(StreamFinishedError, match="vocoder is finished; make a new one for each request"):
        vocoder.push(FRAMES, last=False)


@pytest.mark.parametrize("wrong", [FRAMES[0], FRAMES[:, :-1], FRAMES.astype(np.float64)])
def test_wrong_frames_are_refused_and_change_nothing(wrong: Frames) -> None:
    vocoder = Vocoder(5)
    with pytest.raises(ConfigError, match=r"accepted: float32 \[n, 3006\]"):
        vocoder.push(wrong, last=True)
    assert vocoder.push(FRAMES, last=True).tobytes() == WHOLE


@pytest.mark.parametrize("count", [1, 2, 3, 25, N_FRAMES])
def test_the_sound_is_that_of_the_package_given_the_same_noise(count: int) -> None:
    """hibari.dsp.synth takes the whole sound at once; only summation order and the FFT in use may differ."""
    dsp = pytest.importorskip("hibari.dsp")
    frames = FRAMES[:count]
    noise = np.random.Generator(np.random.PCG64(5)).standard_normal((count, 2 * N_BINS), dtype=np.float32)

    class SameNoise:
        def standard_normal(self, _shape: tuple[int, int], dtype: type) -> np.ndarray:
            assert dtype is np.float32
            return np.ascontiguousarray(noise.view(np.complex64).T).view(np.float32)

    spectra = [np.ascontiguousarray(part.T) for part in np.split(frames[:, :-1], 5, axis=1)]
    expected = dsp.synth(*spectra, frames[:, -1], SameNoise())
    samples = Vocoder(5).push_samples(frames, last=True)
    assert samples.shape == expected.shape
    np.testing.assert_allclose(samples, expected, atol=2e-6)


def test_a_seed_is_the_same_in_every_process() -> None:
    assert seed_of("What is the capital of France?") == SEED_OF_FRANCE
    assert seed_of("What is the capital of france?") != SEED_OF_FRANCE


def test_samples_are_rounded_to_nearest_and_clipped() -> None:
    samples = np.array([0.0, 1.0, -1.0, 2.0, -2.0, 0.5 / 32767, 1.5 / 32767, 0.6 / 32767], np.float32)
    assert to_pcm(samples).tolist() == [0, 32767, -32767, 32767, -32767, 0, 2, 1]
    assert to_pcm(samples).dtype == np.dtype("<i2")


def test_a_wav_file_holds_the_pcm_after_its_header(tmp_path: Path) -> None:
    write_wav(tmp_path / "sound.wav", WHOLE)
    assert (tmp_path / "sound.wav").read_bytes()[44:] == WHOLE
    assert audio_s(WHOLE) == pytest.approx(N_FRAMES * 0.0125)
    assert pcm_sha256(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
