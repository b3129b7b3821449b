"""The connector rules about peers that are not as they should be: of another protocol, or killed."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from omni_fsm.connectors.port import (
    Connector,
    ConnectorClosedError,
    EdgeRefused,
    Hello,
    PeerBack,
    PeerLost,
    PutStatus,
    Signal,
)
from omni_fsm.protocol.frames import Frame
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.testing.child import OpenEnd, child, frame_of, receive_all, send_all
from omni_fsm.testing.edge import MIN_TURNS, WIDE_BYTES, WIDE_FRAMES, EdgeDriver, Ends, broken, pattern

_HELLO = Hello(Edge("kit-before", "kit-after"))
_OTHERS = {"version": 2, "spec_digest": "another", "mode": "full_payload"}
_SIZES = [10, 100_000, 0, 40_000, 5]
_TURN_S = 0.005


class _OneEnd:
    """The end that stays in this process, and all that came out of it."""

    def __init__(self, end: Connector, patience_s: float) -> None:
        self.end, self._patience_s = end, patience_s
        self.bodies: dict[Identity, list[bytes]] = {}
        self.signals: list[Signal] = []

    def turn(self) -> None:
        """One round of the loop that an I/O thread repeats."""
        self.end.wait(_TURN_S)
        while not self.end.sends and (arrival := self.end.get()) is not None:
            bodies = self.bodies.setdefault(arrival.frame.identity, [])
            body = bytes(arrival.load() or b"")
            if arrival.frame.seq >= 0:
                bodies.append(body)
        self.signals += self.end.signals()

    def until(self, rule: str, words: str, condition: Callable[[], object]) -> None:
        """Turn until something holds; the rule is broken when it does not."""
        deadline_s, turns = time.monotonic() + self._patience_s, 0
        while not condition():
            turns += 1
            if time.monotonic() > deadline_s and turns > MIN_TURNS:
                broken(rule, f"{words} within {self._patience_s} s")
            self.turn()

    def has_heard(self, kind: type, times: int) -> bool:
        """Whether so many signals of a kind came."""
        return sum(isinstance(one, kind) for one in self.signals) >= times

    def stored(self, frame: Frame) -> bool:
        """Whether a put stores a frame; what it raises counts as no."""
        try:
            return self.end.put(frame).status is PutStatus.STORED
        except Exception:  # noqa: BLE001 - "anything else that it raises counts as RETRY", and a closed end stores nothing
            return False

    def store(self, rule: str, identity: Identity) -> None:
        """Put an opening and every chunk."""
        for seq, nbytes in enumerate([0, *_SIZES], -1):
            frame = frame_of(self.end, identity, seq, nbytes)
            words = f"frame {frame.kind} {seq} of {identity} was not stored"
            self.until(rule, words, partial(self.stored, frame))

    def lost(self, rule: str, losses: int, killed_s: float, loss_s: float) -> None:
        """``PeerLost`` comes, once, and soon."""
        self.until(
            rule, "no PeerLost came after the other process was killed", partial(self.has_heard, PeerLost, losses)
        )
        took_s = time.monotonic() - killed_s
        if took_s > loss_s:
            broken(rule, f"PeerLost came {took_s:.2f} s after the other process was killed, not within {loss_s} s")


class PeerRules:
    """The part of `ConnectorConformance` that is about bad and dead peers; its attributes are told there."""

    patience_s: float
    settle_s: float
    loss_s: float

    def make_edge_between(
        self,
        sender_hello: Hello,  # noqa: ARG002 - for those who override it
        receiver_hello: Hello,  # noqa: ARG002
    ) -> Ends | AbstractContextManager[Ends] | None:
        """As `make_edge`, with the hellos that the ends say; None: rule hello is skipped."""
        return None

    def make_split_edge(self) -> AbstractContextManager[tuple[OpenEnd, OpenEnd]] | None:
        """What opens the sending end and what opens the receiving end of one edge; None: the rules on death are skipped.

        One of them is called in another process, perhaps twice, since that process is killed and replaced: it must be
        picklable, as a `functools.partial` of a function is. The other is called here, once.
        """
        return None

    def test_hellos_that_differ_are_refused(self) -> None:
        """Rule hello: both ends say EdgeRefused, with both values, meet nobody and store nothing."""
        for name, value in _OTHERS.items():
            ours, theirs = _HELLO, replace(_HELLO, **{name: value})  # type: ignore[arg-type]
            made = self.make_edge_between(ours, theirs)
            if made is None:
                pytest.skip("make_edge_between() gives no ends")
            with made if isinstance(made, AbstractContextManager) else nullcontext(made) as ends:
                driver = EdgeDriver(ends, self.patience_s, self.settle_s)
                try:
                    self._check_refused(driver, name, getattr(ours, name), value)
                finally:
                    for end in ends:
                        end.close()

    def _check_refused(self, edge: EdgeDriver, name: str, ours: Any, theirs: Any) -> None:
        sides = (
            ("sending", edge.sender, edge.told, (ours, theirs)),
            ("receiving", edge.receiver, edge.heard, (theirs, ours)),
        )
        for side, end, signals, values in sides:

            def words(side: str = side, signals: list[Signal] = signals) -> str:
                return f"the {side} end said {signals}, not EdgeRefused, where the hellos differ in {name}"

            def refused(signals: list[Signal] = signals) -> list[EdgeRefused]:
                return [one for one in signals if isinstance(one, EdgeRefused)]

            edge.until("hello", words, refused)
            error = refused()[0].error
            if (error.ours, error.theirs) != values:
                broken("hello", f"the {side} end refused {error.ours!r} and {error.theirs!r}, not {values} of {name}")
            if PeerBack() in signals or end.health().connected:
                broken("hello", f"the {side} end met a peer whose hello differs in {name}")
        try:
            status = edge.put(edge.open())
        except ConnectorClosedError:
            return
        if status is PutStatus.STORED:
            broken("hello", f"a frame was stored for a peer whose hello differs in {name}")

    @contextmanager
    def _split(self, *, sends: bool) -> Iterator[tuple[_OneEnd, OpenEnd]]:
        """One end here, and what opens the other one in another process."""
        made = self.make_split_edge()
        if made is None:
            pytest.skip("make_split_edge() gives no ends")
        with made as openers:
            here, there = openers if sends else reversed(openers)
            end = here()
            try:
                yield _OneEnd(end, self.patience_s), there
            finally:
                end.close()

    def test_a_killed_sender_is_lost_after_its_frames(self) -> None:
        """Rule killed: the receiver gets all that was put, then PeerLost, once, soon. Rule restart: then it meets another."""
        with self._split(sends=False) as (receiver, open_sender):
            for life in (1, 2):
                rule, identity = ("killed", "restart")[life - 1], Identity("r1", life)
                with child(rule, send_all, open_sender, identity, _SIZES) as sender:
                    receiver.until(
                        rule, "no open came from the other process", partial(receiver.bodies.__contains__, identity)
                    )
                    receiver.end.grant(identity, frames=WIDE_FRAMES, nbytes=WIDE_BYTES, taken_frames=0, taken_bytes=0)
                    sender.said(rule, self.patience_s)
                    killed_s = time.monotonic()
                    sender.kill()
                    receiver.lost(rule, life, killed_s, self.loss_s)
                self._check_bodies(rule, receiver.bodies[identity])
            receiver.turn()
            if [type(one) for one in receiver.signals] != [PeerBack, PeerLost] * 2:
                broken("restart", f"two processes came and were killed, and the receiving end said {receiver.signals}")

    def _check_bodies(self, rule: str, bodies: list[bytes]) -> None:
        wanted = [pattern(seq, nbytes) for seq, nbytes in enumerate(_SIZES)]
        if bodies != wanted:
            broken(
                rule, f"{len(wanted)} chunks were put before the death, and {len(bodies)} came of them or other ones"
            )

    def test_a_killed_receiver_is_lost_and_replaced(self) -> None:
        """Rule killed: the sender says PeerLost, once, soon, and stores nothing. Rule restart: the next one gets frames."""
        sums = [zlib.crc32(b""), *(zlib.crc32(pattern(seq, nbytes)) for seq, nbytes in enumerate(_SIZES))]
        with self._split(sends=True) as (sender, open_receiver):
            for life in (1, 2):
                rule, identity = ("killed", "restart")[life - 1], Identity("r1", life)
                with child(rule, receive_all, open_receiver) as receiver:
                    words = "no PeerBack came, though the other process opened its end"
                    sender.until(rule, words, partial(sender.has_heard, PeerBack, life))
                    sender.store(rule, identity)
                    for seq, checksum in enumerate(sums, -1):
                        told = receiver.said(rule, self.patience_s, sender.turn)
                        if told != (life, seq, checksum):
                            broken(rule, f"frame {seq} of {identity} came as {told}")
                    killed_s = time.monotonic()
                    receiver.kill()
                    sender.lost(rule, life, killed_s, self.loss_s)
                if sender.stored(frame_of(sender.end, Identity("r2", life), -1)):
                    broken(rule, "a frame was stored for a process that was killed")
