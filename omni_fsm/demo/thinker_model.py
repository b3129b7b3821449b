"""The thinker: SmolLM2-135M-Instruct answers a question, greedily, one token a step.

Every request has its own KV cache and every forward is of one request, so its numbers do not depend on the others.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from omni_fsm.demo.models import DEMO_COMMAND, require
from omni_fsm.demo.models_convert import thinker_dir
from omni_fsm.demo.text import TextPieces
from omni_fsm.protocol.errors import ConfigError

SYSTEM_PROMPT: Final = "Answer briefly, in two short sentences."
START_ID: Final = 1
"""``<|im_start|>``, before each turn of the chat."""
END_ID: Final = 2
"""``<|im_end|>``, after each turn: the model's own end. (The GGUF's tokenizer names START_ID as the end: wrong.)"""
MAX_PROMPT_TOKENS: Final = 1024
MAX_NEW_TOKENS: Final = 1024


class Step(NamedTuple):
    """What one step of a request gave.

    Attributes:
        token_id: The new token; ``END_ID`` is the model's own end and has no text.
        piece: Text that became certain; may be "". All pieces of a request, joined, are its answer.
        finished: This was the request's last step.
    """

    token_id: int
    piece: str
    finished: bool


class Chat:
    """The thinker's tokenizer and chat template, for whatever runs its model.

    Args:
        path: A directory as ``thinker_dir`` gives it.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = require("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.encode_special_tokens = True  # "<|im_end|>" in a question is text, not an end

    def decode(self, token_ids: Sequence[int]) -> str:
        """Give the text of token ids; bytes that are no UTF-8 become U+FFFD, special tokens nothing."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def prompt(self, question: str, max_new_tokens: int) -> list[int]:
        """Give the ids of the model's chat template: system turn, user turn, the opened turn of the assistant.

        Raises:
            ConfigError: The question, or the bound of its answer, is out of bounds; see `Thinker.start`.
        """
        if not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
            raise ConfigError("max_new_tokens", max_new_tokens, f"1 to {MAX_NEW_TOKENS}")
        system, user = self._turn("system", SYSTEM_PROMPT), self._turn("user", question)
        prompt = [*system, *user, START_ID, *self._encode("assistant\n")]
        if len(prompt) > MAX_PROMPT_TOKENS:
            raise ConfigError("question", question, f"up to {MAX_PROMPT_TOKENS} tokens; this has {len(prompt)}")
        return prompt

    def step(self, pieces: TextPieces, token_id: int, *, finished: bool) -> Step:
        """What a new token gives: the text that became certain by it."""
        piece = "" if token_id == END_ID else pieces.push(token_id, self.decode)
        if finished:
            piece += pieces.flush(self.decode)
        return Step(token_id, piece, finished)

    def _turn(self, role: str, text: str) -> list[int]:
        return [START_ID, *self._encode(f"{role}\n{text}"), END_ID, *self._encode("\n")]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(slots=True)
class ThinkerRequest:
    """One question in work: owned by the caller, advanced by ``Thinker.step``, dropped at any time to cancel it.

    Attributes:
        next_ids: What the next forward reads: int64 ``[1, prompt tokens]`` at first, then ``[1, 1]``.
        cache: The request's keys and values (fp32, 45 KB a token).
        tokens_left: New tokens that it may still make.
        pieces: The token ids so far and the text given out of them.
        finished: No further step does anything.
    """

    next_ids: torch.Tensor
    cache: Any
    tokens_left: int
    pieces: TextPieces = field(default_factory=TextPieces)
    finished: bool = False


class Thinker:
    """The language model and its tokenizer; shared by all requests of a process, which keep their own state.

    Called by: one process, after ``pin_threads``; one call at a time. Loading takes 4 s, half of it imports
    (30 s more on a machine's first load, ``thinker_dir``), and 1 GB of memory. Sets ``HF_HUB_OFFLINE``.

    Args:
        directory: A directory as ``thinker_dir`` gives it, which is the default.

    Raises:
        MissingPackageError: A package of the demo is not installed.
    """

    def __init__(self, directory: Path | None = None) -> None:
        path = thinker_dir() if directory is None else directory
        os.environ["HF_HUB_OFFLINE"] = "1"
        require("transformers", DEMO_COMMAND)
        self._model = _load_model(path)
        self._new_cache = require("transformers.cache_utils").DynamicCache
        self.chat = Chat(path)

    def start(self, question: str, max_new_tokens: int) -> ThinkerRequest:
        """Make the request of a question; no forward yet.

        Args:
            question: Plain text; with the system prompt at most ``MAX_PROMPT_TOKENS`` tokens.
            max_new_tokens: 1 to ``MAX_NEW_TOKENS``; the end token counts as one.

        Raises:
            ConfigError: Either is out of bounds.
        """
        prompt = self.chat.prompt(question, max_new_tokens)
        return ThinkerRequest(torch.tensor([prompt]), self._new_cache(config=self._model.config), max_new_tokens)

    def step(self, request: ThinkerRequest) -> Step | None:
        """Make the request's next token: one forward, about 55 ms (the first reads the prompt: 150 ms).

        Returns:
            The step, or None if the request had finished before: nothing was done.
        """
        if request.finished:
            return None
        with torch.inference_mode():
            output = self._model(
                input_ids=request.next_ids, past_key_values=request.cache, use_cache=True, logits_to_keep=1
            )
        token_id = int(output.logits[0, -1].argmax())
        request.next_ids = torch.tensor([[token_id]])
        request.tokens_left -= 1
        request.finished = token_id == END_ID or request.tokens_left == 0
        return self.chat.step(request.pieces, token_id, finished=request.finished)


def _load_model(path: Path) -> Any:
    """Load the model in fp32: built without memory, then given the bf16 weights widened into memory of its own.

    The widening is a copy out of the mapped file, which also aligns the weights: matrix products of unaligned
    memory may differ in their last bits from run to run.
    """
    config_class = require("transformers").LlamaConfig
    model_class = require("transformers.models.llama.modeling_llama").LlamaForCausalLM
    load_file = require("safetensors.torch").load_file
    config = config_class.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = model_class(config)
    weights = {name: weight.float() for name, weight in load_file(path / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied, so stored once
    model.load_state_dict(weights, assign=True)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # its tables are in no file
    return model.eval()
