"""Names of things that cross stages: edge, stream, generation, frame key.

An identity is compared for equality only: nothing is derived from its text, and no part of it ever becomes a path.
"""

import hashlib
from dataclasses import dataclass

from omni_fsm.protocol.errors import ConfigError

MAX_EXTERNAL_ID_BYTES = 16_384
MAX_STAGE_NAME_BYTES = 255
SHOWN_ID_CHARS = 40
MAX_GENERATION = 2**64 - 1


def checked_text(field: str, value: object, limit: int) -> bytes:
    """A name or id as UTF-8.

    Raises:
        ConfigError: It is no text, empty, too long, or holds lone surrogates.
    """
    accepted = f"a str of 1 to {limit} UTF-8 bytes"
    if not isinstance(value, str) or not value:
        raise ConfigError(field, value, accepted)
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise ConfigError(field, value, f"{accepted}, without lone surrogates") from None
    if len(encoded) > limit:
        raise ConfigError(field, value, accepted)
    return encoded


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed pair of stages."""

    from_stage: str
    to_stage: str

    def __post_init__(self) -> None:
        checked_text("edge.from_stage", self.from_stage, MAX_STAGE_NAME_BYTES)
        checked_text("edge.to_stage", self.to_stage, MAX_STAGE_NAME_BYTES)

    def __str__(self) -> str:
        return f"{self.from_stage}->{self.to_stage}"


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of a request, the same in all stages.

    Attributes:
        external_id: Any text of 1 to 16,384 UTF-8 bytes; slashes, dots, NUL included.
        generation: Unsigned 64-bit number given by whoever submits the request to the pipeline, never used twice
            for an id. Compared for equality, never for order.
    """

    external_id: str
    generation: int

    def __post_init__(self) -> None:
        checked_text("external_id", self.external_id, MAX_EXTERNAL_ID_BYTES)
        if type(self.generation) is not int or not 0 <= self.generation <= MAX_GENERATION:
            raise ConfigError("generation", self.generation, "an int from 0 to 2**64 - 1")

    def __str__(self) -> str:
        text = self.external_id
        if len(text) > SHOWN_ID_CHARS:
            text = f"{text[:SHOWN_ID_CHARS]}..."
        return f"{text.encode('unicode_escape').decode()}#{self.generation}"


@dataclass(frozen=True, slots=True)
class FrameKey:
    """What a keyed connector stores a frame under: unique for ever, the same function on both sides.

    Attributes:
        edge: The edge that the frame crosses.
        identity: The stream and its generation.
        slot: The seq of data and of ``end(ok)``; ``open`` and ``end`` for the frames that carry no seq.
    """

    edge: Edge
    identity: Identity
    slot: int | str

    @property
    def text(self) -> str:
        """64 hexadecimal characters, whatever the ids contain: fit for a store's key, never a path."""
        digest = hashlib.sha256()
        for part in (self.edge.from_stage, self.edge.to_stage, self.identity.external_id):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(f"{self.identity.generation}:{self.slot}".encode())
        return digest.hexdigest()
