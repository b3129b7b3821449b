"""A stage's settings, checked at start."""

import math
import os
import warnings
from dataclasses import dataclass, fields

from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import MAX_STAGE_NAME_BYTES, checked_text

INPUT_WAIT_VARIABLE = "OMNI_FSM_INPUT_WAIT_TIMEOUT_S"
DEFAULT_INPUT_WAIT_S = 600.0
BACKLOG_POLICIES = ("refuse", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Settings of one stage's runtime. Every wait, queue, retry and table has its bound here.

    Attributes:
        stage: Name of the stage, as its edges name it.
        front: Whether requests begin and end here: the stage that talks to the clients, at both ends of the pipeline. Its
            ``end`` ends the prompt and goes on receiving (any other stage's ``end`` releases its input), and waits until every
            stage knows the request; and what its sender loses fails its receiver instead of cancelling it.
        input_wait_s: Stall time in seconds after which a waiting receiver fails. None: the environment variable
            ``OMNI_FSM_INPUT_WAIT_TIMEOUT_S``, or 600. 0 turns it off, with a warning.
        full_payload_wait_s: As ``input_wait_s``, for an input edge in the mode ``full_payload``: all of the stage before passes
            until its one frame comes. None: as ``input_wait_s``.
        replace_keys: On an output edge in the mode ``full_payload``: keys of which each payload gives all there is so far, though
            their tensors look like rows.
        send_stall_s: Seconds that a frame may find the connector busy before it is given up. None: as ``input_wait_s``.
        reconnect_s: Seconds after which a half that opens or waits on a lost edge fails with ``peer_lost``.
        unclaimed_s: Seconds that frames of a request nobody has registered are held.
        unclaimed_max: How many such requests are held at most; further ones are turned away.
        requests_max: How many requests are registered at most; further ones are refused.
        tombstone_s: Seconds that an ended registration is remembered.
        tombstones_max: How many are remembered at most; the oldest go first.
        window_frames: Credit of a registered stream in frames.
        window_bytes: Credit of a registered stream in bytes.
        retries: How often a put that failed for now is tried again.
        retry_wait_ms: Milliseconds before the first retry; doubled for each further one.
        backlog_bytes: How many bytes of accepted chunks may wait in the stage.
        backlog_policy: What happens to a chunk beyond: ``refuse`` it (the host pauses the request) or ``fail`` the request.
        workers: How many producers may run at once.
        shutdown_grace_s: Seconds that a shutdown waits for ends to go out.
    """

    stage: str
    front: bool = False
    input_wait_s: float | None = None
    full_payload_wait_s: float | None = None
    replace_keys: tuple[str, ...] = ()
    send_stall_s: float | None = None
    reconnect_s: float = 1.0
    unclaimed_s: float = 30.0
    unclaimed_max: int = 4_096
    requests_max: int = 65_536
    tombstone_s: float = 60.0
    tombstones_max: int = 65_536
    window_frames: int = 8
    window_bytes: int = 64 << 20
    retries: int = 3
    retry_wait_ms: float = 20.0
    backlog_bytes: int = 1 << 30
    backlog_policy: str = "refuse"
    workers: int = 32
    shutdown_grace_s: float = 5.0

    def __post_init__(self) -> None:
        """Resolve the defaults and refuse what cannot be used.

        Raises:
            ConfigError: Names the field, the value and what is accepted.
        """
        checked_text("stage", self.stage, MAX_STAGE_NAME_BYTES)
        wait = self._resolved_input_wait()
        object.__setattr__(self, "input_wait_s", wait)
        for name in ("send_stall_s", "full_payload_wait_s"):
            object.__setattr__(self, name, wait if getattr(self, name) is None else getattr(self, name))
        if not isinstance(self.front, bool):
            raise ConfigError("front", self.front, "a bool")
        for setting in fields(self):
            self._check(setting.name, getattr(self, setting.name))
        if wait == 0:
            warnings.warn(
                f"input_wait_s is 0 in stage {self.stage}: a receiver whose sender hangs waits for ever", stacklevel=3
            )

    def _resolved_input_wait(self) -> float:
        if self.input_wait_s is not None:
            return self.input_wait_s
        text = os.environ.get(INPUT_WAIT_VARIABLE)
        if text is None:
            return DEFAULT_INPUT_WAIT_S
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not _is_duration(value):
            raise ConfigError(INPUT_WAIT_VARIABLE, text, "a finite number of seconds, 0 (off) or more")
        return value

    def _check(self, name: str, value: object) -> None:
        if name.endswith(("_s", "_ms")) and not _is_duration(value):
            raise ConfigError(name, value, "a finite number, 0 or more")
        if name in {
            "unclaimed_max",
            "requests_max",
            "tombstones_max",
            "window_frames",
            "window_bytes",
            "backlog_bytes",
            "workers",
        } and not (type(value) is int and value > 0):
            raise ConfigError(name, value, "an int of 1 or more")
        if name == "retries" and not (type(value) is int and value >= 0):
            raise ConfigError(name, value, "an int of 0 or more")
        if name == "replace_keys" and not (isinstance(value, tuple) and all(isinstance(key, str) for key in value)):
            raise ConfigError(name, value, "a tuple of str")
        if name == "backlog_policy" and value not in BACKLOG_POLICIES:
            raise ConfigError(name, value, " or ".join(BACKLOG_POLICIES))


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
