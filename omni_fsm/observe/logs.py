"""Structured logs: every transition at debug, every failure once at error."""

import logging
from typing import Any

import structlog

from omni_fsm.protocol.frames import Outcome
from omni_fsm.runtime.ports import Failure, Transition

LOGGER = "omni_fsm"


def stage_logger(stage: str) -> Any:
    """A structlog logger over the standard logger ``omni_fsm``, so that the application's logging settings rule it."""
    return structlog.wrap_logger(
        logging.getLogger(LOGGER),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event", "edge", "external_id", "generation", "seq"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        stage=stage,
    )


class LogObserver:
    """Writes what happens in one stage.

    Args:
        stage: Name of the stage, bound to every line.
        logger: A structlog logger; None: `stage_logger`.
    """

    def __init__(self, stage: str, logger: Any = None) -> None:
        self._log = stage_logger(stage) if logger is None else logger.bind(stage=stage)
        self._level = logging.getLogger(LOGGER) if logger is None else None

    def wants_transitions(self) -> bool:
        """Whether debug is on. A logger of the application's own decides by itself."""
        return self._level is None or self._level.isEnabledFor(logging.DEBUG)

    def on_transition(self, transition: Transition) -> None:
        """One line at debug."""
        self._log.debug(
            f"{transition.machine}.{transition.event}",
            edge=str(transition.edge),
            external_id=transition.identity.external_id,
            generation=transition.identity.generation,
            seq=transition.seq,
            internal_id=transition.internal_id,
            before=str(transition.before),
            after=str(transition.after),
            effects=[str(effect) for effect in transition.effects],
            ignored=transition.ignored,
            cause=str(transition.cause) if transition.cause is not None else None,
        )

    def on_failure(self, failure: Failure) -> None:
        """One line at error; at info when somebody cancelled or had enough: that is no fault."""
        is_error = failure.cause.outcome is Outcome.ERROR
        (self._log.error if is_error else self._log.info)(
            f"{failure.machine}.{failure.what}",
            edge=str(failure.edge) if failure.edge else None,
            external_id=failure.identity.external_id if failure.identity else None,
            generation=failure.identity.generation if failure.identity else None,
            seq=failure.seq,
            internal_id=failure.internal_id,
            outcome=str(failure.cause.outcome),
            reason=failure.cause.reason,
        )
        if failure.exception is not None:
            self._log.debug(f"{failure.machine}.{failure.what}.traceback", exc_info=failure.exception)
