"""The little of a payload that a scheduler needs, and what of a payload is worth waking a request for.

The payload itself stays with the model; `scheduling_metadata` reads these few numbers of it. Keys are named by their path, joined
with dots, as in `omni_fsm.payload.accumulate`. Pure functions; nothing is copied or written to.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

import numpy as np
import torch

from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError, shown

_ABSENT: Final = object()


class MetadataError(RemoteProtocolError, ValueError):
    """A payload says something about itself that cannot be. Its stream fails.

    Attributes:
        key: Name of the key.
        value: What stands there.
        accepted: What could stand there.
    """

    def __init__(self, key: str, value: object, accepted: str) -> None:
        self.key, self.value, self.accepted = key, value, accepted
        super().__init__(f"{key}: {shown(value)} cannot be used; accepted: {accepted}")


@dataclass(frozen=True, slots=True)
class MetadataKeys:
    """Where payloads say what. Of several keys the first that is there counts: newer payloads nest, older ones are flat.

    Attributes:
        next_prompt_len: How many tokens the next stage's prompt has.
        audio_codes: The codes, as tensor, array or list.
        left_context_size: How many of the codes' first frames are context.
        finished: Whether it is the request's last.
        content: Keys that say whether there is something to compute: if one is there, they alone decide.
        light: Keys that tell and give nothing to compute, with all below them.
    """

    next_prompt_len: tuple[str, ...] = ("meta.next_stage_prompt_len", "next_stage_prompt_len")
    audio_codes: tuple[str, ...] = ("codes.audio", "code_predictor_codes")
    left_context_size: tuple[str, ...] = ("meta.left_context_size", "left_context_size")
    finished: tuple[str, ...] = ("meta.finished", "finished")
    content: tuple[str, ...] = ("embed.decode", "codes.audio", "code_predictor_codes")
    light: tuple[str, ...] = (
        "meta",
        "next_stage_prompt_len",
        "left_context_size",
        "finished",
        "override_keys",
        "ids.output",
        "embed.decode_token_start",
        "embed.decode_token_end",
    )

    def __post_init__(self) -> None:
        """Refuse what names no key.

        Raises:
            ConfigError: Names the field and the value.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, tuple) or not all(isinstance(key, str) and key for key in value):
                raise ConfigError(f"MetadataKeys.{field.name}", value, "a tuple of str, none of them empty")


DEFAULT_KEYS: Final = MetadataKeys()


@dataclass(frozen=True, slots=True)
class SchedulingMetadata:
    """What a scheduler learns of a payload. None: the payload does not say.

    Attributes:
        next_prompt_len: Tokens of the next prompt.
        audio_codes_shape: Shape of the codes.
        left_context_size: Frames of context at their begin.
        finished: Whether the payload says that it is the last.
    """

    next_prompt_len: int | None = None
    audio_codes_shape: tuple[int, ...] | None = None
    left_context_size: int | None = None
    finished: bool = False

    @property
    def audio_codes_len(self) -> int | None:
        """How many codes there are."""
        return None if self.audio_codes_shape is None else math.prod(self.audio_codes_shape)

    @property
    def tokens(self) -> int:
        """What the payload costs of a token budget: the prompt's length if it says it, else the number of codes."""
        return self.next_prompt_len if self.next_prompt_len is not None else self.audio_codes_len or 0


class Placement(StrEnum):
    """What a scheduler does with a chunk in this cycle."""

    WHOLE = "whole"
    DEFER = "defer"
    REFUSE = "refuse"


def scheduling_metadata(payload: Any, keys: MetadataKeys = DEFAULT_KEYS) -> SchedulingMetadata:
    """Read what a scheduler needs.

    Called by: the receiving side of a stage, once a payload, before the scheduler hears of it.

    Args:
        payload: A payload tree. Of what is no dict nothing is read. A tensor of one element may stand for its number; one that is
            not on the CPU is waited for.
        keys: Where to look.

    Raises:
        MetadataError: A length is no int of 0 or more, the codes have no shape, or ``finished`` is neither true nor false.
    """
    return SchedulingMetadata(
        next_prompt_len=_count(payload, keys.next_prompt_len),
        audio_codes_shape=_shape(payload, keys.audio_codes),
        left_context_size=_count(payload, keys.left_context_size),
        finished=_flag(payload, keys.finished),
    )


def is_consumable(payload: Any, keys: MetadataKeys = DEFAULT_KEYS) -> bool:
    """Whether there is something in the payload that the model can compute with.

    A payload that only says something about the request (a longer prompt to come, a flag) is not, nor is one whose content is
    empty. A payload that is no dict is, unless it is empty.
    """
    present = [found for key in keys.content if (found := _find(payload, key)) is not _ABSENT]
    if present:
        return any(map(_has_content, present))
    return _is_heavy(payload, "", frozenset(keys.light))


def wakes(payload: Any, *, is_end: bool, keys: MetadataKeys = DEFAULT_KEYS) -> bool:
    """Whether a waiting request becomes ready by this payload: an end always wakes it, so that it can finish.

    Args:
        payload: What came; None where an end came without payload.
        is_end: Whether it came with the stream's end; a payload that says itself that it is the last counts as one.
        keys: Where to look.

    Raises:
        MetadataError: ``finished`` is neither true nor false.
    """
    return is_end or _flag(payload, keys.finished) or is_consumable(payload, keys)


def place_chunk(metadata: SchedulingMetadata, *, left_tokens: int, budget_tokens: int) -> Placement:
    """Where a chunk goes that has to be computed as a whole, since its metadata describe the whole.

    Args:
        metadata: Of the chunk.
        left_tokens: What this cycle's budget still has.
        budget_tokens: What a full budget has.

    Returns:
        ``whole``: now. ``defer``: in a later cycle, whole. ``refuse``: it is larger than any budget, and never fits.
    """
    if metadata.tokens > budget_tokens:
        return Placement.REFUSE
    return Placement.WHOLE if metadata.tokens <= left_tokens else Placement.DEFER


def _find(payload: Any, key: str) -> Any:
    """What stands under a key, nested or spelt with its dots."""
    if not isinstance(payload, Mapping):
        return _ABSENT
    if key in payload:
        return payload[key]
    head, dot, rest = key.partition(".")
    return _find(payload.get(head), rest) if dot else _ABSENT


def _first(payload: Any, keys: tuple[str, ...]) -> tuple[str, Any]:
    """The first key that is there, with its value; None says the same as its absence."""
    for key in keys:
        value = _find(payload, key)
        if value is not _ABSENT and value is not None:
            return key, value
    return "", None


def _count(payload: Any, keys: tuple[str, ...]) -> int | None:
    key, value = _first(payload, keys)
    number = _single(value)
    if number is None and value is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise MetadataError(key, value, "an int of 0 or more, or a tensor of one")
    return number


def _flag(payload: Any, keys: tuple[str, ...]) -> bool:
    key, value = _first(payload, keys)
    if value is None:
        return False
    number = _single(value)
    if not isinstance(number, int) or number not in (0, 1):
        raise MetadataError(key, value, "a bool, or a tensor of one")
    return bool(number)


def _single(value: Any) -> Any:
    """The number that a value stands for, as Python has it."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else None
    return value


def _shape(payload: Any, keys: tuple[str, ...]) -> tuple[int, ...] | None:
    key, value = _first(payload, keys)
    if value is None:
        return None
    accepted = "a tensor, an array, or a list of codes or of frames of equal length"
    if not isinstance(value, torch.Tensor | np.ndarray | list | tuple):
        raise MetadataError(key, value, accepted)
    try:
        return tuple(np.shape(value)) if isinstance(value, list | tuple) else tuple(value.shape)
    except (ValueError, TypeError) as error:  # ragged; or tensors that numpy cannot read
        raise MetadataError(key, value, accepted) from error


def _has_content(value: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() > 0
    if isinstance(value, np.ndarray):
        return value.size > 0
    return len(value) > 0 if isinstance(value, str | bytes | list | tuple | Mapping) else True


def _is_heavy(value: Any, name: str, light: frozenset[str]) -> bool:
    """Whether there is content in a value outside the light keys."""
    if name in light:
        return False
    if isinstance(value, Mapping):
        return any(_is_heavy(child, f"{name}.{key}" if name else str(key), light) for key, child in value.items())
    return _has_content(value)
