"""Named timers on a heap. Setting one again moves it; nothing is left of one that was cancelled."""

import heapq
from collections.abc import Hashable

_GARBAGE_MIN = 64


class Timers:
    """Timers by key. Not thread-safe: the runtime uses it under its lock."""

    def __init__(self) -> None:
        self._due_ns: dict[Hashable, int] = {}
        self._heap: list[tuple[int, int, Hashable]] = []
        self._count = 0

    def __len__(self) -> int:
        """How many timers are set."""
        return len(self._due_ns)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._due_ns

    def set(self, key: Hashable, due_ns: int) -> None:
        """Set or move a timer."""
        before = self._due_ns.get(key)
        self._due_ns[key] = due_ns
        if before is None or due_ns < before:
            self._push(key, due_ns)

    def cancel(self, key: Hashable) -> None:
        """Forget a timer. Idempotent."""
        if self._due_ns.pop(key, None) is not None and len(self._heap) > 2 * len(self._due_ns) + _GARBAGE_MIN:
            self._heap = [(due_ns, n, key) for n, (key, due_ns) in enumerate(self._due_ns.items(), self._count)]
            self._count += len(self._heap)
            heapq.heapify(self._heap)

    def next_due_ns(self) -> int | None:
        """When the earliest timer is due; None when none is set."""
        while self._heap:
            due_ns, _, key = self._heap[0]
            real_ns = self._due_ns.get(key)
            if real_ns == due_ns:
                return due_ns
            heapq.heappop(self._heap)
            if real_ns is not None and real_ns > due_ns:
                self._push(key, real_ns)
        return None

    def pop_due(self, now_ns: int) -> Hashable | None:
        """Take one timer that is due, earliest first; None when none is."""
        due_ns = self.next_due_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due_ns[key]
        return key

    def _push(self, key: Hashable, due_ns: int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due_ns, self._count, key))
