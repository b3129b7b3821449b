"""One container per request, keyed by external id, owned by one generation at a time."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from omni_fsm.protocol.errors import ConfigError, OmniFsmError, shown
from omni_fsm.protocol.identity import Identity

T = TypeVar("T")


class StateError(OmniFsmError):
    """Producer state cannot be reached in this way. Nothing was created or overwritten."""


class StateRetiredError(StateError):
    """The generation does not own the request's state: never opened here, released, or replaced by a successor."""

    def __init__(self, request: Identity | str, owner: "Owner | None", what: str) -> None:
        self.request, self.owner = request, owner
        name = request if isinstance(request, Identity) else shown(request)
        holder = f"generation {owner.identity.generation} owns it" if owner else "no generation owns it"
        super().__init__(f"state of {name}: {what} refused: {holder}")


class MixedStateError(StateError):
    """One request uses both raw entries and namespaces."""

    def __init__(self, external_id: str, held: str, asked: str) -> None:
        self.external_id, self.held, self.asked = external_id, held, asked
        super().__init__(f"state of {shown(external_id)}: holds {held}, {asked} refused; use one kind for a request")


class Scope(StrEnum):
    """How long a namespace lives: until the request is released, or until its segment has ended."""

    REQUEST = "request"
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who asks: both names of a request. The internal id is this stage's, the identity is shared by all stages."""

    internal_id: str
    identity: Identity


@dataclass(slots=True)
class _Namespace:
    value: Any
    scope: Scope


class _Namespaces(dict[str, _Namespace]):
    """The container of a request whose producers use namespaces."""


class StateStore:
    """Producer state of all requests of a stage.

    The runtime calls ``own`` when a generation opens, ``release`` when it is over, ``reset_segment`` between segments.
    Producers reach it through a `StateView`; legacy producers through ``raw``.

    Args:
        lock: The runtime's lock; re-entrant. Held for table look-ups only, never while a factory runs.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._owners: dict[str, Owner] = {}
        self._entries: dict[str, Any] = {}  # by external id: _Namespaces, or whatever a legacy producer stored
        self.raw = RawPayloads(self)

    def __len__(self) -> int:
        """How many requests own or hold state."""
        with self._lock:
            return len(self._owners.keys() | self._entries.keys())

    def own(self, owner: Owner) -> "StateView":
        """Make a generation the owner of its external id's state.

        Raises:
            StateError: Another generation still owns it.
        """
        with self._lock:
            held = self._owners.setdefault(owner.identity.external_id, owner)
            if held != owner:
                raise StateError(f"state of {owner.identity}: {held.identity} owns it, as {shown(held.internal_id)}")
            return StateView(self, owner)

    def release(self, identity: Identity) -> bool:
        """Drop every namespace and raw entry of a generation. Idempotent; does nothing for one that is not the owner."""
        with self._lock:
            owner = self._owners.get(identity.external_id)
            if owner is None or owner.identity != identity:
                return False
            del self._owners[identity.external_id]
            self._entries.pop(identity.external_id, None)
            return True

    def reset_segment(self, identity: Identity) -> None:
        """Drop the namespaces that were declared segment-scoped, and only these."""
        with self._lock:
            owner = self._owners.get(identity.external_id)
            entry = self._entries.get(identity.external_id)
            if owner is not None and owner.identity == identity and isinstance(entry, _Namespaces):
                for name in [name for name, held in entry.items() if held.scope is Scope.SEGMENT]:
                    del entry[name]

    def get_or_create(self, owner: Owner, namespace: str, factory: Callable[[], T], scope: Scope = Scope.REQUEST) -> T:
        """The value of a namespace, made by ``factory`` the first time.

        Called by: a producer through its view, on any thread.

        Args:
            owner: The request, with both its ids.
            namespace: Not empty; by habit ``package.purpose``.
            factory: Makes the value. Runs outside every lock; if it raises, nothing is left behind. When two calls meet,
                the first value is kept and given to both.
            scope: Used when the value is made.

        Returns:
            The value, owned by the store until the request (or its segment) is over.

        Raises:
            ConfigError: The namespace is empty or not a str.
            StateRetiredError: The generation does not own the state, or lost it while the factory ran.
            MixedStateError: A legacy producer stores raw entries for this request.
        """
        if not isinstance(namespace, str) or not namespace:
            raise ConfigError("namespace", namespace, "a str that is not empty")
        with self._lock:
            held = self._namespaces(owner, namespace).get(namespace)
            if held is not None:
                return held.value  # type: ignore[no-any-return]
        made = factory()
        with self._lock:
            namespaces = self._namespaces(owner, namespace)
            self._entries[owner.identity.external_id] = namespaces
            return namespaces.setdefault(namespace, _Namespace(made, scope)).value  # type: ignore[no-any-return]

    def _namespaces(self, owner: Owner, namespace: str) -> _Namespaces:
        """The container of the request if ``owner`` may use it; a fresh one, not yet stored, if there is none."""
        current = self._owners.get(owner.identity.external_id)
        if current is not None and current.identity == owner.identity and current != owner:
            raise StateError(
                f"state of {owner.identity}: internal id {shown(owner.internal_id)} is wrong, "
                f"it is {shown(current.internal_id)} here"
            )
        if current != owner:
            raise StateRetiredError(owner.identity, current, f"namespace {namespace!r}")
        entry = self._entries.get(owner.identity.external_id)
        if entry is None:
            return _Namespaces()
        if not isinstance(entry, _Namespaces):
            raise MixedStateError(owner.identity.external_id, "a raw entry", f"namespace {namespace!r}")
        return entry


@dataclass(frozen=True, slots=True)
class StateView:
    """A producer's access to the state of one generation. Kept past cleanup it reaches nothing and creates nothing."""

    store: StateStore
    owner: Owner

    def get_or_create(self, namespace: str, factory: Callable[[], T], scope: Scope = Scope.REQUEST) -> T:
        """See `StateStore.get_or_create`."""
        return self.store.get_or_create(self.owner, namespace, factory, scope)


class RawPayloads(MutableMapping[str, Any]):
    """The same container as older producers use it: ``raw[external_id] = anything``.

    Raises:
        StateRetiredError: A write for an id that no open generation owns.
        MixedStateError: The request uses namespaces.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getitem__(self, external_id: str) -> Any:
        with self._store._lock:  # noqa: SLF001 - two faces of one container
            entry = self._store._entries[external_id]  # noqa: SLF001
            if isinstance(entry, _Namespaces):
                raise MixedStateError(external_id, "namespaces", "a raw entry")
            return entry

    def __setitem__(self, external_id: str, value: Any) -> None:
        store = self._store
        with store._lock:  # noqa: SLF001
            if external_id not in store._owners:  # noqa: SLF001
                raise StateRetiredError(external_id, None, "a raw entry")
            if isinstance(store._entries.get(external_id), _Namespaces):  # noqa: SLF001
                raise MixedStateError(external_id, "namespaces", "a raw entry")
            store._entries[external_id] = value  # noqa: SLF001

    def __delitem__(self, external_id: str) -> None:
        with self._store._lock:  # noqa: SLF001
            self[external_id]  # a request's namespaces are not deleted by a raw caller
            del self._store._entries[external_id]  # noqa: SLF001

    def __iter__(self) -> Iterator[str]:
        with self._store._lock:  # noqa: SLF001
            entries = self._store._entries.items()  # noqa: SLF001
            return iter([name for name, entry in entries if not isinstance(entry, _Namespaces)])

    def __len__(self) -> int:
        return sum(1 for _ in self)
