"""Producers for engines as stages: what one engine computed, as the prompt of the next one.

Each is given ``{"token_ids": [...], "hidden": tensor}`` for one or some steps of its request: the tokens that they sampled, and
the states ``[tokens, hidden]`` of those that they computed for the first time.
"""

from typing import Any

from omni_fsm.runtime import ProducerContext

_NAMESPACE = "omni_fsm.vllm.token_ids"


def states_as_prompt(context: ProducerContext) -> Any:
    """The states of prompt and output, but of the last token, which nobody computes: the next engine's prompt embeddings.

    For edges of both modes. See `omni_fsm.runtime.Producer` for who calls it.
    """
    return None if context.output is None else {"prompt_embeds": context.output["hidden"]}


def tokens_as_prompt(context: ProducerContext) -> Any:
    """The sampled tokens: the next engine's prompt, all with the end.

    For edges of both modes. See `omni_fsm.runtime.Producer` for who calls it.
    """
    held: list[int] = context.state.get_or_create(_NAMESPACE, list)
    if context.output is not None:
        held += context.output["token_ids"]
    return {"prompt_token_ids": list(held)} if context.is_finished else None
