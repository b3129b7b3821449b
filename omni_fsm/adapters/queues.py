"""A scheduler's queues as the coordinator sees them: vLLM's request queues, or plain lists and deques."""

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Protocol, TypeVar, runtime_checkable


class SchedulerRequest(Protocol):
    """A scheduler's own request. Only its name is read; it is told apart by identity, never by equality.

    Attributes:
        request_id: The stage's internal id.
    """

    @property
    def request_id(self) -> str:
        """The stage's internal id."""


R = TypeVar("R", bound=SchedulerRequest)
R_contra = TypeVar("R_contra", bound=SchedulerRequest, contravariant=True)


@runtime_checkable
class RequestQueue(Protocol[R]):
    """What is used of a queue with a policy of its own, first come or by priority; vLLM's ``RequestQueue`` has it."""

    def add_request(self, request: R) -> None:
        """Put a request where the policy wants it; at the end of a first-come queue."""

    def remove_requests(self, requests: Iterable[R]) -> None:
        """Take these requests out."""

    def __iter__(self) -> Iterator[R]:
        """In the order in which they would be popped."""

    def __len__(self) -> int:
        """How many there are."""


Waiting = RequestQueue[R] | MutableSequence[R]
"""A waiting queue: one with a policy, a list or a deque."""


def rewrite(queue: Waiting[R], wanted: list[R]) -> None:
    """Make a queue hold exactly these requests, in this order as far as its policy leaves a choice.

    What stands in its place already is not touched: in the usual cycle nothing is.
    """
    held = list(queue)
    same = 0
    while same < min(len(held), len(wanted)) and held[same] is wanted[same]:
        same += 1
    if isinstance(queue, MutableSequence) and not isinstance(queue, RequestQueue):
        for _ in held[same:]:
            queue.pop()
        queue.extend(wanted[same:])
        return
    if held[same:]:
        queue.remove_requests(held[same:])
    for request in wanted[same:]:
        queue.add_request(request)
