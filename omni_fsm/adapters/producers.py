"""Producers written for older runners, as producers of a stage.

An older producer is a function of ``transfer_manager``, ``request``, the step's output under one of two names, and perhaps
``is_finished``. It keeps its state on the object that it is given. Here that object is a `TransferManager` of one life of one
request: what a producer keeps on it nobody else sees, and it is gone with the request.
"""

import inspect
import threading
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.names import SenderEffect
from omni_fsm.runtime.ports import Failure, ProducerContext, Transition
from omni_fsm.state import MixedStateError, RawPayloads, StateRetiredError, StateView

OUTPUT_NAMES: Final = ("multimodal_output", "pooling_output")
BATCH_OUTPUT_NAMES: Final = ("multimodal_outputs", "pooling_outputs")
DEFAULT_REQUESTS_MAX: Final = 65_536

_COLUMNS: Final[Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {"put_req_chunk": int, "ramp_chunk_count": int, "requests_num_chunks_sent": int, "code_prompt_token_ids": list}
)
_PER_SEGMENT: Final = frozenset({"ramp_chunk_count", "requests_num_chunks_sent", "code_prompt_token_ids"})
_PROBE: Final = "omni_fsm.adapters.producers"


class BatchCountError(OmniFsmError):
    """A batched producer gave another number of payloads than it got requests: whose they are is not known.

    The caller fails each of the requests.

    Attributes:
        function: The producer.
        requests: Internal ids of all requests of the call.
        found: What it gave, in words.
    """

    def __init__(self, function: str, requests: Sequence[str], found: str) -> None:
        self.function, self.requests, self.found = function, tuple(requests), found
        super().__init__(
            f"{function} gave {found} for {len(self.requests)} requests; accepted: a list or tuple of one payload (or None) "
            f"for each of {', '.join(self.requests)}"
        )


class LegacyStep(NamedTuple):
    """What a runner submits for a producer that looks at the engine's request.

    A producer runs later, on another thread, while the engine goes on with its request: give what does not change, taken now.

    Attributes:
        output: The step's output.
        request: What the producer is given as ``request``.
    """

    output: Any
    request: Any


@dataclass(frozen=True, slots=True)
class LegacyRequest:
    """What a producer is given as ``request`` where the runner submits a bare output.

    Attributes:
        request_id: The host's internal id.
        external_req_id: The id that all stages share.
        finished: Whether this is the last call.
    """

    request_id: str
    external_req_id: str
    finished: bool = False

    def is_finished(self) -> bool:
        """Whether this is the last call."""
        return self.finished


@dataclass(frozen=True, slots=True)
class LegacyConnector:
    """What a producer reads of the edge that its payload takes. It cannot put: the stage does.

    Attributes:
        config: The edge's settings; often with a dict of the model's own under ``extra``.
        stage_id: Number of the stage.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    stage_id: int = 0


class TransferManager:
    """What an older producer is given as ``transfer_manager``: its tables, by external id, and room for attributes of its own.

    The tables show all live requests of the stage and are written for those of the call alone. A request that has no entry
    reads as 0 or an empty list, as long as it is one of the call; any other is a KeyError.

    Attributes:
        request_payload: The producers' raw state of all requests: the very object that is ``runtime.request_payload``.
        connector: What was given for it.
        put_req_chunk: How many frames the request has made: the number of the one that would be made now.
        ramp_chunk_count: How many in this segment.
        requests_num_chunks_sent: How many in this segment.
        code_prompt_token_ids: A list, empty at the begin of each segment.
    """

    put_req_chunk: "_Column"
    ramp_chunk_count: "_Column"
    requests_num_chunks_sent: "_Column"
    code_prompt_token_ids: "_Column"

    def __init__(
        self, book: "_Book", request_payload: RawPayloads, offers: "_Offers", writers: dict[str, Identity]
    ) -> None:
        self.request_payload = request_payload
        self.connector = offers.connector
        for name in _COLUMNS:
            setattr(self, name, _Column(book, name, writers))
        for name, value in offers.extras().items():
            if hasattr(self, name):
                raise ConfigError("extras", name, "names of attributes that a TransferManager does not have")
            setattr(self, name, value)


class _SharedManager(TransferManager):
    """The manager of a batched producer, whose calls serve many requests: it lives as long as the stage.

    A dict that is empty when it becomes an attribute is taken for a table by external id.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        tables: dict[str, dict[Any, Any]] = vars(self).setdefault("_tables", {})
        if isinstance(value, dict) and not value:
            tables[name] = value
        elif tables.get(name) is not value:  # `table |= more` sets it again
            tables.pop(name, None)
        super().__setattr__(name, value)

    def _leave(self, external_id: str) -> None:
        for table in list(vars(self)["_tables"].values()):
            table.pop(external_id, None)


class _Column(MutableMapping[str, Any]):
    """One table of a manager. Like a defaultdict, but only lives that may be written have a default."""

    def __init__(self, book: "_Book", name: str, writers: dict[str, Identity]) -> None:
        self._book, self._name, self._writers = book, name, writers
        self._values = book.columns[name]

    def _check(self, external_id: str) -> None:
        identity = self._writers.get(external_id)
        if identity is None or self._book.lives.get(external_id) != identity:
            raise StateRetiredError(identity or external_id, None, f"an entry of {self._name}")

    def __getitem__(self, external_id: str) -> Any:
        with self._book.lock:
            if external_id not in self._values:
                if external_id not in self._writers:
                    raise KeyError(external_id)
                self[external_id] = _COLUMNS[self._name]()
            return self._values[external_id]

    def __setitem__(self, external_id: str, value: Any) -> None:
        with self._book.lock:
            self._check(external_id)
            self._values[external_id] = value

    def __delitem__(self, external_id: str) -> None:
        with self._book.lock:
            if external_id in self._values:
                self._check(external_id)
            del self._values[external_id]

    def __contains__(self, external_id: object) -> bool:
        return external_id in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot())

    def get(self, external_id: str, default: Any = None) -> Any:
        """The entry, or the default, as a dict would: reading makes none."""
        return self._values.get(external_id, default)

    def pop(self, external_id: str, *default: Any) -> Any:
        """Take the entry out, as a dict would."""
        with self._book.lock:
            if external_id in self._values:
                self._check(external_id)
            return self._values.pop(external_id, *default)

    def values(self) -> ValuesView[Any]:
        """The entries now, whatever other producers do meanwhile."""
        return self._snapshot().values()

    def items(self) -> ItemsView[str, Any]:
        """As `values`."""
        return self._snapshot().items()

    def _snapshot(self) -> dict[str, Any]:
        with self._book.lock:
            return dict(self._values)


@dataclass(frozen=True, slots=True)
class _Offers:
    """What a manager has besides its tables."""

    connector: Any
    extras: Callable[[], Mapping[str, Any]]


@dataclass(slots=True)
class _Life:
    """What is known of one life besides the tables: its state, its manager, and where its segment began."""

    state: StateView
    manager: TransferManager | None
    segment: int
    first_seq: int


class _Book:
    """The tables of all requests of a stage, by external id; each entry belongs to the life that has it now.

    Attributes:
        lock: Guards all of it; held for look-ups only.
        lives: Whose entries they are.
        columns: The tables.
        shared: The manager of a batched producer.
    """

    def __init__(self, requests_max: int, per_segment: frozenset[str]) -> None:
        if type(requests_max) is not int or requests_max < 1:
            raise ConfigError("requests_max", requests_max, "an int of 1 or more")
        self.lock = threading.RLock()
        self.lives: dict[str, Identity] = {}
        self.columns: dict[str, dict[str, Any]] = {name: {} for name in _COLUMNS}
        self._requests_max, self._per_segment = requests_max, per_segment
        self._notes: dict[str, _Life] = {}
        self.shared: _SharedManager | None = None

    def enter(self, context: ProducerContext, make_manager: Callable[[], TransferManager] | None) -> _Life:
        """The life's entries as they have to be at the begin of a call.

        Raises:
            StateRetiredError: The generation does not own the request's state any more. Nothing of it is left here.
            ConfigError: Lives that are over are not reported here.
        """
        external_id = context.identity.external_id
        with self.lock:
            life = self._notes.get(external_id)
            known = life is not None and life.state == context.state
            if life is None or not known:
                life = self._open(context, make_manager)
            if life.segment != context.segment:
                self._reset_segment(external_id, life, context)
            self.columns["put_req_chunk"][external_id] = context.seq
            for name in ("ramp_chunk_count", "requests_num_chunks_sent"):
                self.columns[name][external_id] = context.seq - life.first_seq
        if not known and not _owns(context.state):  # released before it was entered: nobody would report that again
            self.leave(context.identity)
            raise StateRetiredError(context.identity, None, "a call of its producer")
        return life

    def _open(self, context: ProducerContext, make_manager: Callable[[], TransferManager] | None) -> _Life:
        external_id = context.identity.external_id
        if external_id in self.lives:  # its predecessor is over, or it would not be called
            self.leave(self.lives[external_id])
        if len(self.lives) >= self._requests_max:
            raise ConfigError(
                "observers", (), f"the producer, too: {len(self.lives)} lives, and none was reported as over"
            )
        manager = make_manager() if make_manager is not None else None
        self.lives[external_id] = context.identity
        life = self._notes[external_id] = _Life(context.state, manager, context.segment, context.seq)
        return life

    def _reset_segment(self, external_id: str, life: _Life, context: ProducerContext) -> None:
        life.segment, life.first_seq = context.segment, context.seq
        for name in _PER_SEGMENT:
            self.columns[name].pop(external_id, None)
        for name in self._per_segment if life.manager is not None else ():
            vars(life.manager).pop(name, None)

    def leave(self, identity: Identity) -> bool:
        """Drop all entries of a life. Idempotent; does nothing to another one's."""
        with self.lock:
            if self.lives.get(identity.external_id) != identity:
                return False
            del self.lives[identity.external_id], self._notes[identity.external_id]
            for values in self.columns.values():
                values.pop(identity.external_id, None)
            if self.shared is not None:
                self.shared._leave(identity.external_id)  # noqa: SLF001 - its one caller; not for producers
            return True


class _Adapted:
    """What both adapters share: the decided call, the tables, and how they hear that a life is over."""

    def __init__(  # noqa: PLR0913 - what an older runner had of its own
        self,
        function: Callable[..., Any],
        names: "_Names",
        *,
        connector: Any,
        extras: Callable[[], Mapping[str, Any]],
        convert: Callable[[Any], Any] | None,
        per_segment: Collection[str],
        requests_max: int,
    ) -> None:
        self._function = function
        self._output_name, self._tells_finished = _decided(function, names)
        self._names = names
        if isinstance(per_segment, str) or not all(isinstance(name, str) for name in per_segment):
            raise ConfigError("per_segment", per_segment, "a collection of names of attributes")
        for what, value in (("extras", extras), ("convert", convert)):
            if value is not None and not callable(value):
                raise ConfigError(what, value, "a callable")
        self._offers, self._convert = _Offers(connector or LegacyConnector(), extras), convert
        self._book = _Book(requests_max, frozenset(per_segment))

    @property
    def lives(self) -> int:
        """How many lives have entries here; 0 once all requests are over."""
        return len(self._book.lives)

    def on_transition(self, transition: Transition) -> None:
        """Drop what a life has here when the stage has released its state. See `Observer`."""
        if transition.machine == "sender" and SenderEffect.RELEASE in transition.effects:
            self._book.leave(transition.identity)

    def on_failure(self, failure: Failure) -> None:
        """See `Observer`: a failed life keeps its entries until it is released."""

    def forget(self, identity: Identity) -> bool:
        """Drop what a life has here, for a host without observers. Idempotent; returns whether there was anything."""
        return self._book.leave(identity)

    def _call(self, manager: TransferManager, output: Any, request: Any, finished: Any) -> Any:
        arguments = {"transfer_manager": manager, self._output_name: output, self._names.request: request}
        if self._tells_finished:
            arguments["is_finished"] = finished
        return self._function(**arguments)

    def _tree(self, payload: Any) -> Any:
        return payload if self._convert is None or payload is None else self._convert(payload)


class LegacyProducer(_Adapted):
    """An older producer of one request at a time, as a `Producer` of a stage.

    It is an `Observer`, so the stage whose producer it is tells it when a request is over. What the function raises is raised to
    the caller.

    Called by: the workers of the stage, like every producer.

    Args:
        function: Takes ``transfer_manager``, ``request``, its output as ``multimodal_output`` or ``pooling_output`` (the first,
            if it has both), and ``is_finished`` or not. Decided here, once, by its signature.
        connector: What it reads as ``transfer_manager.connector``; None: a `LegacyConnector` without settings.
        extras: Makes further attributes that it expects to find, anew for each life.
        convert: Makes a payload tree of what it returns, unless that is None.
        per_segment: Attributes of its own that go with each segment, not only with the request.
        requests_max: How many lives may have entries. There are more only if nobody tells it what is over.

    Raises:
        ConfigError: The function's signature fits none of the forms, or another argument cannot be used.
    """

    def __init__(  # noqa: PLR0913 - what an older runner had of its own
        self,
        function: Callable[..., Any],
        *,
        connector: Any = None,
        extras: Callable[[], Mapping[str, Any]] = dict,
        convert: Callable[[Any], Any] | None = None,
        per_segment: Collection[str] = (),
        requests_max: int = DEFAULT_REQUESTS_MAX,
    ) -> None:
        super().__init__(
            function,
            _ONE,
            connector=connector,
            extras=extras,
            convert=convert,
            per_segment=per_segment,
            requests_max=requests_max,
        )

    def __call__(self, context: ProducerContext) -> Any:
        """Make the payload of one submit; see `Producer`.

        Raises:
            StateRetiredError: The life is over.
            Exception: Whatever the function raises.
        """
        life = self._book.enter(context, lambda: self._manager(context))
        output, request = _step(context)
        return self._tree(self._call(_given(life.manager), output, request, context.is_finished))

    def _manager(self, context: ProducerContext) -> TransferManager:
        identity = context.identity
        return TransferManager(self._book, context.state.store.raw, self._offers, {identity.external_id: identity})


class LegacyBatchProducer(_Adapted):
    """An older producer that makes the payloads of a whole step in one call.

    Its manager serves all requests, so an attribute of the function's own is the stage's; but of a dict that was empty when it
    was set, the entry under a request's external id goes with the request.

    Called by: a runner, once a step, one call at a time. It submits what it gets, to a stage with the default producer.

    Args:
        function: Takes ``transfer_manager`` and, each a list in the same order, ``requests``, the outputs as
            ``multimodal_outputs`` or ``pooling_outputs``, and ``is_finished`` or not. Gives one payload, or None, for each.
        connector: See `LegacyProducer`; so are ``convert`` and ``requests_max``.
        extras: Makes further attributes that it expects to find, once.

    Raises:
        ConfigError: As `LegacyProducer`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        connector: Any = None,
        extras: Callable[[], Mapping[str, Any]] = dict,
        convert: Callable[[Any], Any] | None = None,
        requests_max: int = DEFAULT_REQUESTS_MAX,
    ) -> None:
        super().__init__(
            function,
            _BATCH,
            connector=connector,
            extras=extras,
            convert=convert,
            per_segment=(),
            requests_max=requests_max,
        )
        self._writers: dict[str, Identity] = {}

    def __call__(self, contexts: Sequence[ProducerContext]) -> list[Any]:
        """Make the payloads of one step.

        Args:
            contexts: One for each request that has an output or ends, each request once.

        Returns:
            In the same order, each request's payload, or None where it has nothing to send.

        Raises:
            BatchCountError: The function gave another number of payloads: the caller fails each of the requests.
            ConfigError: A request is in the step twice.
            StateRetiredError: A life of the step is over. Nothing was called.
            Exception: Whatever the function raises.
        """
        if not contexts:
            return []
        writers = {context.identity.external_id: context.identity for context in contexts}
        if len(writers) != len(contexts):
            raise ConfigError("contexts", [str(context.identity) for context in contexts], "each request once")
        for context in contexts:
            self._book.enter(context, None)
        self._writers.clear()
        self._writers.update(writers)
        outputs, requests = map(list, zip(*map(_step, contexts), strict=True))
        finished = [context.is_finished for context in contexts]
        payloads = self._call(self._manager(contexts[0].state), outputs, requests, finished)
        if not isinstance(payloads, list | tuple) or len(payloads) != len(contexts):
            found = (
                f"{len(payloads)} payloads" if isinstance(payloads, list | tuple) else f"a {type(payloads).__name__}"
            )
            raise BatchCountError(_function_name(self._function), [context.request for context in contexts], found)
        return [self._tree(payload) for payload in payloads]

    def _manager(self, state: StateView) -> TransferManager:
        if self._book.shared is None:
            self._book.shared = _SharedManager(self._book, state.store.raw, self._offers, self._writers)
        return self._book.shared


class _Owned(Exception):  # noqa: N818 - an answer, no error
    """The factory was asked: so the state is owned."""


def _owned() -> NoReturn:
    raise _Owned


def _owns(state: StateView) -> bool:
    """Whether the generation owns its request's state. Nothing is created: the factory raises."""
    try:
        state.get_or_create(_PROBE, _owned)
    except StateRetiredError:
        return False
    except (_Owned, MixedStateError):  # raw entries are looked at only for the owner
        return True
    raise AssertionError(_PROBE)


def _given(manager: TransferManager | None) -> TransferManager:
    if manager is None:
        raise AssertionError("a life without a manager")
    return manager


def _step(context: ProducerContext) -> LegacyStep:
    if isinstance(context.output, LegacyStep):
        return context.output
    request = LegacyRequest(context.request, context.identity.external_id, context.is_finished)
    return LegacyStep(context.output, request)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the arguments of one kind of producer."""

    outputs: tuple[str, ...]
    request: str


_ONE: Final = _Names(OUTPUT_NAMES, "request")
_BATCH: Final = _Names(BATCH_OUTPUT_NAMES, "requests")


def _decided(function: Callable[..., Any], names: _Names) -> tuple[str, bool]:
    """How a function is called: the name of its output argument, and whether it is told ``is_finished``.

    Raises:
        ConfigError: It cannot be called in any of the accepted ways.
    """
    accepted = (
        f"a plain function that takes by keyword transfer_manager, {names.request}, {' or '.join(names.outputs)}, and "
        "is_finished or not, and needs no more"
    )
    what = f"producer {_function_name(function)}"
    special = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(function) or any(test(function) for test in special):
        raise ConfigError(what, function, accepted)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(what, function, f"{accepted}; this one has no signature that can be read") from error
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    output = next((name for name in names.outputs if name in named), None)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    given = {"transfer_manager", names.request, "is_finished", output}
    if output is None or needed - given or not (takes_any or {"transfer_manager", names.request} <= named):
        raise ConfigError(what, str(signature), accepted)
    if any(p.kind is p.POSITIONAL_ONLY and p.name in needed for p in parameters):
        raise ConfigError(what, str(signature), accepted)
    return output, takes_any or "is_finished" in named


def _function_name(function: object) -> str:
    inner = getattr(function, "func", function)  # of a functools.partial
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return f"{getattr(inner, '__module__', None) or type(inner).__module__}.{name}"
