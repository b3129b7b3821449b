"""What came from the stage before, as the prompt of a vLLM request."""

from typing import Any, NamedTuple

import torch
from vllm.v1.request import Request

from omni_fsm.payload import tree_nbytes
from omni_fsm.protocol.errors import OmniFsmError

_EMBEDS, _TOKENS = "prompt_embeds", "prompt_token_ids"


class PromptError(OmniFsmError, ValueError):
    """A payload cannot be the prompt of a request of this engine.

    Attributes:
        key: Which part of it.
        came: What came, in words.
        accepted: What could have come.
    """

    def __init__(self, key: str, came: str, accepted: str) -> None:
        self.key, self.came, self.accepted = key, came, accepted
        super().__init__(f"{key}: {came} cannot be a prompt here; accepted: {accepted}")


class Prompt(NamedTuple):
    """One of the two is there.

    Attributes:
        token_ids: Each within the model's vocabulary.
        embeds: ``[tokens, hidden]`` in the model's dtype, on the CPU.
    """

    token_ids: list[int] | None
    embeds: torch.Tensor | None


def prompt_of(payload: Any, model_config: Any) -> Prompt:
    """Check a whole input against the model: what vLLM would refuse, or what would break its engine, is refused here.

    Args:
        payload: A dict with ``prompt_embeds``, a floating-point tensor ``[tokens, hidden]``, or with ``prompt_token_ids``, a list
            of ints or a tensor of one dim. Other keys are ignored.
        model_config: vLLM's.

    Raises:
        PromptError: It has neither, of a wrong kind, or too much of it.
    """
    given = payload if isinstance(payload, dict) else {}
    if (_EMBEDS in given) is (_TOKENS in given):
        raise PromptError(
            "payload", f"{type(payload).__name__} with {sorted(map(str, given))}", f"{_EMBEDS} or {_TOKENS}"
        )
    if _EMBEDS in given:
        prompt = Prompt(None, _embeds(given[_EMBEDS], model_config))
    else:
        prompt = Prompt(checked_token_ids(given[_TOKENS], model_config), None)
    key, tokens = (_EMBEDS, prompt.embeds) if prompt.token_ids is None else (_TOKENS, prompt.token_ids)
    if tokens is None or not 0 < len(tokens) < model_config.max_model_len:
        count = 0 if tokens is None else len(tokens)
        raise PromptError(key, f"a prompt of {count} tokens", f"1 to {model_config.max_model_len - 1} tokens")
    return prompt


def checked_token_ids(value: Any, model_config: Any) -> list[int]:
    """Token ids, each of the model's vocabulary: an engine without a tokenizer does not look, and dies of others.

    Args:
        value: A list of ints, or a tensor of one dim.
        model_config: vLLM's.

    Raises:
        PromptError: It is something else.
    """
    vocabulary = model_config.get_vocab_size()
    listed = value.tolist() if isinstance(value, torch.Tensor) and value.dim() == 1 else value
    if not isinstance(listed, list) or not all(type(each) is int and 0 <= each < vocabulary for each in listed):
        raise PromptError(_TOKENS, _words(value), f"a list of ints from 0 to {vocabulary - 1}")
    return listed


def request_with(request: Request, prompt: Prompt) -> Request:
    """A request like this one, with another prompt. It is made anew: length and hashes of its blocks follow from the prompt.

    Args:
        request: One that vLLM has not scheduled. Not to be used after.
        prompt: Its prompt.
    """
    made = Request(
        request_id=request.request_id,
        prompt_token_ids=prompt.token_ids,
        prompt_embeds=prompt.embeds,
        sampling_params=request.sampling_params,
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        priority=request.priority,
        trace_headers=request.trace_headers,
        block_hasher=request._block_hasher,  # noqa: SLF001 - the engine's; a scheduler has no other way to it
        session_id=request.session_id,
        kv_hints=request.kv_hints,
    )
    made.structured_output_request = request.structured_output_request  # its grammar is compiled, or being so
    return made


def _embeds(value: Any, model_config: Any) -> torch.Tensor:
    if not model_config.enable_prompt_embeds:
        raise PromptError(_EMBEDS, "a prompt of embeddings", f"{_TOKENS}: the engine runs without enable_prompt_embeds")
    hidden = model_config.get_inputs_embeds_size()
    fits = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2  # noqa: PLR2004
    if not fits or value.shape[1] != hidden:
        raise PromptError(_EMBEDS, _words(value), f"a floating-point tensor [tokens, {hidden}]")
    embeds: torch.Tensor = value.to(model_config.dtype)
    return embeds


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"a value of type {type(value).__name__} and {tree_nbytes(value)} bytes"
