"""Every refusal is one of these types; each part of its message is also an attribute.

``LocalProtocolError``: this process did something the protocol forbids (a bug here).
``RemoteProtocolError``: the peer did; the stream fails, the stage stays up.
"""

from collections.abc import Sequence

_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """``repr`` of an offending value, cut so that a message stays one screen whatever the value is."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


class OmniFsmError(Exception):
    """Base of all errors that omni_fsm raises."""


class ConfigError(OmniFsmError, ValueError):
    """A setting or argument cannot be used. Raised at start or at the call, before anything changed."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field}: {shown(value)} cannot be used; accepted: {accepted}")


class SpecError(OmniFsmError, ValueError):
    """A table in specs/ is not a sound machine. Raised while it is loaded."""

    def __init__(self, machine: str, fault: str) -> None:
        self.machine, self.fault = machine, fault
        super().__init__(f"spec {machine}: {fault}")


class ProtocolError(OmniFsmError):
    """An event met a state that has neither a row nor an ignore for it. Nothing changed."""

    def __init__(  # noqa: PLR0913 - each part of the message is an attribute
        self,
        *,
        machine: str,
        stream: str,
        event: str,
        state: str,
        accepted: Sequence[str] = (),
        detail: str = "",
    ) -> None:
        self.machine, self.stream, self.event, self.state = machine, stream, event, state
        self.accepted, self.detail = tuple(accepted), detail
        text = f"{machine} {stream}: event {event} refused in state {state}"
        if detail:
            text += f" ({detail})"
        super().__init__(f"{text};\n  accepted: {', '.join(accepted) or 'nothing'}")


class LocalProtocolError(ProtocolError):
    """This process broke the protocol: a bug in the caller, never the peer's doing."""


class RemoteProtocolError(OmniFsmError):
    """What a peer sent cannot be accepted. The stream (or, for a broken header, the edge) fails."""
