"""For runners that inherit a stage instead of holding one."""

from collections.abc import Iterable
from typing import Any

from omni_fsm.adapters.runner import AcceptAll, StageRunnerAdapter
from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Observer, Offer, ProducerContext, StageConfig


class StageRunnerMixin:
    """A base class that makes a runner the host of a stage: its hooks and its producer are the runner's own methods.

    A runner that has the methods of an `Observer` is told, too. The mixin adds one attribute and no state: all that the
    runner calls is at ``self.stage``. Override what you need of the three hooks.

    Attributes:
        stage: The runner's stage, from `init_stage` on.
    """

    stage: StageRunnerAdapter
    _accepts: AcceptAll

    def init_stage(
        self,
        config: StageConfig,
        *,
        source: Connector | None = None,
        sink: Connector | None = None,
        observers: Iterable[Observer] = (),
        synchronous: bool = False,
    ) -> None:
        """Make the stage. It runs from ``self.stage.start()``, or ``with self.stage``, on.

        Called by: the runner's constructor, when the model is there: a hook may be called as soon as the stage runs.

        Args:
            config: The stage's settings.
            source: See `StageRunnerAdapter`, as the others.
            sink: See there.
            observers: See there.
            synchronous: See there.

        Raises:
            ConfigError: See `StageRuntime`.
        """
        self._accepts = AcceptAll(config.stage)
        own = [self] if isinstance(self, Observer) else []
        self.stage = StageRunnerAdapter(
            config,
            source=source,
            sink=sink,
            producer=self.produce,
            host=self,
            observers=[*observers, *own],
            synchronous=synchronous,
        )

    def produce(self, context: ProducerContext) -> Any:
        """The producer; sends what was submitted, unless overridden. See `omni_fsm.runtime.Producer` for who calls it."""
        return context.output

    def stream_offered(self, identity: Identity) -> Offer:
        """See `StageHost`; every request is accepted, unless overridden."""
        return self._accepts.stream_offered(identity)

    def feedback_ready(self) -> None:
        """See `StageHost`; nothing, unless overridden: ``self.stage.collect_feedback`` waits by itself."""
