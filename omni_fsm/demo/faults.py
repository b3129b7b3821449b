"""What the demo breaks on purpose, and when."""

from typing import Final

import msgspec

from omni_fsm.protocol.errors import ConfigError

RAISE_AT_CHUNK: Final = 5
CANCEL_AFTER_CHUNKS: Final = {"thinker": 8, "talker": 3, "code2wav": 2}
"""How many chunks a stage has sent of a request when it cancels it: in mid-stream."""
CANCEL_AFTER_SOUNDS: Final = 2
"""How many pieces of sound the front has got of a request when it cancels it."""


class At(msgspec.Struct, frozen=True):
    """One request at one stage."""

    stage: str
    request: int


class Faults(msgspec.Struct, frozen=True):
    """Faults of one run, by the request's index from 0."""

    cancel: int | None = None
    cancel_at: At | None = None
    raise_at: At | None = None
    kill: str | None = None


def parse_at(field: str, text: str | None, stages: list[str], requests: int) -> At | None:
    """Read ``stage:index``.

    Raises:
        ConfigError: It is something else, or names a stage or request that is not there.
    """
    if text is None:
        return None
    stage, _, index = text.partition(":")
    if stage not in stages or not index.isdecimal() or int(index) >= requests:
        raise ConfigError(field, text, f"STAGE:INDEX, a stage of {', '.join(stages)} and an index below {requests}")
    return At(stage, int(index))
