"""A stage in the middle and a front, driven at random against the two oracles of `machine_book`.

The real runtime with its outbox, inbox, state store and codec is stepped by hand between scripted connectors: the rules are
its host, its peers, its threads' steps and time, and one thing may happen in the middle of another.
"""

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machine_book import LIMITS, PUTS, STALL_S, WAIT_S, WINDOW, Book, Followers, Life, name_of
from scripted import DONE, ROOM, ScriptedArrival, cancelled, data, error, failed_end, front, middle, ok_end, opening

from omni_fsm.connectors.port import CreditReturned, PeerBack, PeerLost, PutOutcome, Signal, Stopped
from omni_fsm.payload import PayloadDecodeError, decode
from omni_fsm.protocol.errors import LocalProtocolError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Later, Offer, ProducerContext, Refuse, Register, Taken, TakenKind
from omni_fsm.runtime.core import UNLIMITED
from omni_fsm.state import Scope, StateRetiredError, StateView
from omni_fsm.tables import receiver_table, sender_table

RARE = 4
MOST_KNOWN, MOST_LIVES = 5, 16
Chunk = tuple[str, str]  # what its producer does, and what happens meanwhile
Trouble = tuple[list[str], list[str], str]  # what puts of chunks find, and of the end, and what happens meanwhile
KINDS = ["open", "data", "end", "failed end"]
STOPS = {"stop done": DONE, "stop error": error("they failed"), "stop cancelled": cancelled("they left")}
SIGNALS: dict[str, list[Signal]] = {
    "lost": [PeerLost("sink is gone")],
    "lost and back": [PeerLost("sink is gone"), PeerBack()],
    "room": [ROOM],
}
LEAVES = ["cancel", "release", "fail"]
TWICE = ["stop error, release", "stop done, lost", "release, cancel"]
HAPPENINGS = [*LEAVES, *STOPS, *TWICE, *SIGNALS, "next life", "credit"]
BROKEN = b"no payload"

lives = st.sampled_from([0, 0, 0, 1, 1, 2, 3, RARE, RARE + 1])
happenings = st.sampled_from([*[""] * 6, *HAPPENINGS])
plans = st.one_of(
    st.lists(st.sampled_from(["stored", "stored", *PUTS]), min_size=1, max_size=4),
    st.sampled_from(
        [["refused"], ["busy"] * 2, ["stored", "refused"], ["refused"] * 2, ["retry"] * 3, ["stored", *["raises"] * 3]]
    ),
)
chunks = st.tuples(st.sampled_from(["pass", "pass", "pass", "buffer", "raise"]), happenings)
troubles = st.tuples(plans, plans, st.sampled_from([*[""] * 6, *HAPPENINGS, *["lost", "lost and back"] * 2]))
whole_inputs = [["end"], ["data", "end"], ["data", "data", "end"], ["empty end"], ["data", "empty end"]]
inputs = st.one_of(
    st.lists(st.sampled_from(["data", "data", "again"]), min_size=1, max_size=3),
    st.sampled_from([*whole_inputs, *[["open"]] * 3]),
)
arriving = st.sampled_from(
    [*["data", "again"] * 2, "ahead", "end", "empty end", "failed", "cancelled", "done", "broken"]
)
answers = st.sampled_from(["register", "later", "later", "refuse", "raise"])
more = st.sampled_from(["register", "data", "again", "open", "failed", "broken"])


class StageMachine(RuleBasedStateMachine):
    """One stage; the rules are its host, its peers, its threads' steps and time."""

    is_front = False
    reached: ClassVar[set[tuple[str, str, str]]] = set()  # over all runs, for the floors

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(is_front=self.is_front)
        self.followers = Followers(self.reached)
        make = front if self.is_front else middle
        self.stage = make(producer=self.produce, answer=self.answer, observers=(self.followers,), **LIMITS)
        self.runtime, self.source, self.sink = self.stage.runtime, self.stage.source, self.stage.sink
        self.sink.default, self.source.stop, self.source.grant = self.put, self.note_stop, self.note_credit
        self.said: defaultdict[Identity, list[Any]] = defaultdict(list)  # to the stage before: stops and credit
        self.puts: dict[str, deque[tuple[str, str]]] = {kind: deque() for kind in KINDS}  # what the puts to come find
        self.chunks: list[Chunk] = []  # by number
        self.answers: deque[str] = deque()
        self.views: dict[Identity, StateView] = {}
        self.ready: dict[str, None] = {}
        self.created: set[Identity] = set()
        self.problems: list[BaseException] = []
        self.feedback: dict[str, dict[str, Any]] = {name: {} for name in self.book.told}
        self.paused: set[str] = set()
        self.spoiled: dict[int, Cause] = {}  # by id of an arrival
        self.sent: Counter[Identity] = Counter()
        self.generations: Counter[str] = Counter()
        self.losses = 0
        self.resting = False

    @property
    def now_ns(self) -> int:
        return self.stage.clock.ns

    def number(self, chunk: Chunk = ("", "")) -> int:
        self.chunks.append(chunk)
        return len(self.chunks) - 1

    def some(self, k: int, wanted: Callable[[Life], bool] = bool) -> Life:
        """One of the latest lives, mostly one as it is wanted: a new one if there is none."""
        if k < RARE and not any(wanted(life) for life in self.book.lives.values()):
            self.open("ab"[k % 2])
        lives = [life for life in self.book.known if wanted(life) or k >= RARE]
        lives = lives or self.book.known or list(self.book.lives.values())
        return lives[-1 - k % len(lives)]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A check inside the runtime's own call: the runtime would take it for a raise of the producer or connector."""
        try:
            yield
        except AssertionError as problem:
            self.problems.append(problem)
            raise

    # What the runtime calls

    def produce(self, context: ProducerContext) -> int | None:
        life = self.book.lives[context.identity]
        how, meanwhile = self.chunks[context.output]
        with self.noted():
            life.called(context)
            assert life.opened or life.next_seq or life.left or not (self.is_front and context.is_finished)
            self.use_state(life, context)
        if meanwhile:
            self.use_state_slowly(life, context.state, meanwhile, f"test.slow.{context.output}")
        life.producing = False
        if how == "raise":
            self.book.fail_output(life, error(f"ValueError: boom {context.output}"))
        self.book.promote()
        if how == "raise":
            raise ValueError(f"boom {context.output}")
        payload = None if how == "buffer" else context.output
        life.returned(payload)
        return payload

    def use_state(self, life: Life, context: ProducerContext) -> None:
        """What is kept is this generation's, whole, and that of a segment is gone with it."""
        view = self.views[life.identity] = context.state
        assert view.get_or_create("test.who", lambda: life.identity) == life.identity
        kept = view.get_or_create("test.kept", list)
        kept_in_segment = view.get_or_create("test.segment", list, Scope.SEGMENT)
        kept.append(context.output)
        kept_in_segment.append(context.output)
        assert kept == life.kept
        assert kept_in_segment == life.kept_in_segment

    def use_state_slowly(self, life: Life, view: StateView, meanwhile: str, namespace: str) -> None:
        """A factory that overlaps whatever happens meanwhile: what it made is kept only for a life that is not over."""

        def factory() -> Identity:
            self.happen(meanwhile, life)
            for _ in range(3):
                self.runtime.put_once()
            return life.identity

        with self.noted():
            try:
                made = view.get_or_create(namespace, factory)
            except StateRetiredError:
                assert life.over
            else:
                assert not life.over
                assert made == life.identity

    def put(self, frame: Frame) -> PutOutcome:
        life = self.book.lives[frame.identity]
        planned = self.puts["failed end" if frame.kind is FrameKind.END and frame.seq < 0 else str(frame.kind)]
        how, meanwhile = planned.popleft() if planned else ("busy" if "sink" in self.book.lost else "stored", "")
        with self.noted():
            life.check_put(frame)
            losses = self.losses
            self.happen(meanwhile, life)
            self.book.put(life, frame, how, self.now_ns, crossed=self.losses != losses)
        if how == "raises but stored":
            self.sink._store(frame)
        outcome = PUTS[how]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def answer(self, identity: Identity) -> Offer:
        self.answered = self.answers.popleft() if self.answers else "register"
        with self.noted():
            assert identity not in self.book.lives
            assert self.stage.host.offered.count(identity) == 1
        if self.answered == "raise":
            raise ValueError("no answer")
        return {"register": Register(name_of(identity)), "refuse": Refuse("not here")}.get(self.answered, Later())

    def note_stop(self, identity: Identity, cause: Cause) -> None:
        self.said[identity].append(cause)

    def note_credit(self, identity: Identity, *, frames: int, taken_frames: int, **_: int) -> None:
        self.said[identity].append((frames, taken_frames))

    # What happens, also in the middle of something else

    def happen(self, what: str, life: Life) -> None:
        """One thing on another thread."""
        for each in what.split(", ") if what and not self.resting else ():
            if each in LEAVES:
                self.leave(each, life)
            elif each == "next life":
                self.open(life.identity.external_id)
            elif each == "credit":
                self.hear(CreditReturned(life.identity))
            else:
                self.hear(*SIGNALS.get(each) or [Stopped(life.identity, STOPS[each])])

    def leave(self, how: str, life: Life) -> None:
        if life.is_forgotten:
            assert not self.runtime.register("again", life.identity).accepted
        elif how == "cancel":
            self.book.cancel(life, cancelled("why"))
        elif how == "fail":
            self.book.fail(life, error("why"))
        else:
            self.book.release(life)
        getattr(self.runtime, how)(life.name, *["why"] * (how != "release"))

    def hear(self, *signals: Signal) -> None:
        self.sink.say(*signals)
        self.runtime.sink_once()
        for signal in signals:
            self.losses += isinstance(signal, PeerLost)
            self.book.hear(signal, self.now_ns)

    @rule(external_id=st.sampled_from("ab"))
    def open(self, external_id: str) -> None:
        """The next generation, whether the one before lives or not."""
        if self.may_open():
            self.register(self.next_of(external_id))

    def may_open(self) -> bool:
        return len(self.book.known) < MOST_KNOWN and len(self.book.lives) < MOST_LIVES

    def next_of(self, external_id: str) -> Identity:
        self.generations[external_id] += 1
        return Identity(external_id, self.generations[external_id])

    def register(self, identity: Identity) -> None:
        admission = self.runtime.register(name_of(identity), identity)
        assert admission.accepted is not self.book.closing
        if admission.accepted:
            self.book.register(identity, self.now_ns)

    # Rules: the host

    @initialize(opens=st.sampled_from(["ab", "ab", "ab", "a", ""]))
    def begin(self, opens: str) -> None:
        for external_id in "ab":
            self.open(external_id)
        for external_id in opens:
            self.bring(Identity(external_id, 1), "open")

    @rule(k=lives, chunk=chunks, segment_end=st.sampled_from([False, False, True]))
    def submit(self, k: int, chunk: Chunk, *, segment_end: bool) -> None:
        life, number = self.some(k, Life.is_submitting), self.number(chunk)
        if life.is_open and life.has_ended and not self.book.closing:
            with pytest.raises(LocalProtocolError):
                self.runtime.submit_chunk(life.name, number, segment_end=segment_end)
            return
        admission = self.runtime.submit_chunk(life.name, number, segment_end=segment_end)
        may_submit = life.is_open and not self.book.closing
        if may_submit and admission.reason.startswith("backlog"):
            self.paused.add(life.name)
            return
        assert admission.accepted is may_submit, admission
        if admission.accepted:
            life.accepted.append((number, "segment" if segment_end else "chunk"))

    @rule(k=lives, hows=st.lists(st.sampled_from(["pass", "pass", "buffer"]), min_size=1, max_size=3))
    def submit_plainly(self, k: int, hows: list[str]) -> None:
        for how in hows:
            self.submit(k, (how, ""), segment_end=False)

    @rule(k=lives, before=st.integers(0, 2), chunk=chunks)
    def submit_all(self, k: int, before: int, chunk: Chunk) -> None:
        self.submit_plainly(k, ["pass"] * before)
        self.end(self.some(k, Life.is_submitting), chunk)

    def end(self, life: Life, chunk: Chunk) -> None:
        number = self.number(chunk)
        admission = self.runtime.end(life.name, number)
        assert admission.accepted is life.is_submitting(), admission
        if admission.accepted:
            self.book.end(life, number)

    @rule(k=lives)
    def take(self, k: int) -> None:
        self.take_from(self.some(k))

    def take_from(self, life: Life) -> Taken:
        expected = self.book.take(life, self.now_ns)
        assert self.runtime.take(life.name) == expected
        return expected

    @rule()
    def work(self) -> None:
        """One cycle of the host: it takes what it is told of, and releases what failed."""
        self.collect()
        ready, self.ready = self.ready, {}
        for name in ready:
            while self.take_from(self.book.named(name)).kind is TakenKind.CHUNK:
                pass
        for life in map(self.book.named, self.feedback["failed"]):
            if not life.let_go and not life.is_forgotten:
                self.leave("release", life)

    @rule()
    def collect(self) -> None:
        """What a collection gives is news, and all that there is."""
        told = self.stage.collect()
        for name, so_far in self.feedback.items():
            news = getattr(told, name)
            assert not so_far.keys() & news.keys()
            so_far.update(news)
        assert self.feedback == self.book.told
        assert told.resumed.keys() <= self.paused
        self.paused -= told.resumed.keys()
        self.ready |= told.ready

    @rule(k=st.integers(0, MOST_LIVES))
    def use_a_view_that_was_kept(self, k: int) -> None:
        if self.views:
            self.check_view(list(self.views)[k % len(self.views)])

    def check_view(self, identity: Identity) -> None:
        """A view of a life that is over reaches nothing; of one that is not, what its producer made."""
        life, view, made = self.book.lives[identity], self.views[identity], list[Identity]()

        def factory() -> Identity:
            made.append(identity)
            return identity

        if life.over:
            with pytest.raises(StateRetiredError):
                view.get_or_create("test.who", factory)
        else:
            assert view.get_or_create("test.who", factory) == identity
        assert bool(made) is (not life.over and life.calls == 0 and identity not in self.created)
        self.created |= {*made}

    @rule(k=lives, meanwhile=st.sampled_from(HAPPENINGS))
    def share_state_slowly(self, k: int, meanwhile: str) -> None:
        """The runner uses the producer's state; its factory runs while the request is ended, flushed and followed."""
        life = self.some(k)
        view = self.runtime.state(life.name)
        if view is not None and not life.over:
            self.use_state_slowly(life, view, meanwhile, f"test.slow.{self.number()}")

    # Rules: the threads

    @rule(times=st.integers(1, 4), seconds=st.sampled_from([0.1, 0.1, 5.0]))
    def turns_and_moments(self, times: int, seconds: float) -> None:
        """Retries have their time, and so has what is busy for too long."""
        for _ in range(times):
            self.settle()
            self.pass_time(seconds)

    @rule(step=st.sampled_from(["produce_once", "put_once", "get_frame"]), times=st.integers(1, 3))
    def steps_of_one_thread(self, step: str, times: int) -> None:
        for _ in range(times):
            getattr(self if step == "get_frame" else self.runtime, step)()

    @rule(seconds=st.sampled_from([0.03, 0.1, 1.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.stage.clock.advance(seconds)
        self.runtime.tick_once()
        self.book.pass_time(self.now_ns)

    @rule()
    def settle(self) -> None:
        """All steps until nothing is left to do: no life waits but for what may come."""
        steps = 0
        while any([self.runtime.produce_once(), self.runtime.put_once(), self.get_frame()]):
            steps += 1
            assert steps < 1_000
        self.nothing_went_wrong_inside()
        assert [life.name for life in self.book.lives.values() if life.owes_calls(is_front=self.is_front)] == []

    def get_frame(self) -> bool:
        if not self.source.arrivals:
            return self.runtime.source_once()
        arrival = self.source.arrivals[0]
        beyond = self.book.beyond_credit(arrival.frame)
        self.answered = ""
        assert self.runtime.source_once()
        assert arrival.discarded
        self.feed_book(arrival, beyond=beyond)
        return True

    def feed_book(self, arrival: ScriptedArrival, *, beyond: bool) -> None:
        frame, problem = arrival.frame, self.spoiled.pop(id(arrival), None)
        if beyond:
            bounds = f"{WINDOW} frames, {64 << 20} bytes"
            problem = error(f"frame_invalid: seq {frame.seq} came beyond the credit of {bounds}")
        if frame.identity in self.book.lives:
            self.book.receive(self.book.lives[frame.identity], frame, problem, self.now_ns)
        elif self.book.hold(frame, problem, self.now_ns):
            self.follow_answer(frame.identity)

    def follow_answer(self, identity: Identity) -> None:
        if self.answered in {"register", "later"} and self.book.closing:
            self.book.turn_away(identity, cancelled("shutdown"))
        elif self.answered == "register":
            self.book.told["registered"][name_of(identity)] = identity
            self.book.register(identity, self.now_ns)
        elif self.answered != "later":
            self.book.turn_away(identity, error("not here" if self.answered == "refuse" else "ValueError: no answer"))

    # Rules: the peers

    @rule(kind=st.sampled_from([*KINDS, "data", "end"]), plan=plans, meanwhile=happenings)
    def plan_puts(self, kind: str, plan: list[str], meanwhile: str) -> None:
        self.puts[kind].extend((how, "" if n else meanwhile) for n, how in enumerate(plan))

    @rule(k=lives, kinds=inputs)
    def frames_come(self, k: int, kinds: list[str]) -> None:
        life = self.some(k, Life.is_receiving)
        for kind in kinds:
            self.bring(life.identity, kind)

    @rule(k=lives, kind=arriving, faults=st.sampled_from([0, 0, 0, 0, 1, 3, 4, -1]), meanwhile=happenings)
    def a_frame_comes(self, k: int, kind: str, faults: int, meanwhile: str) -> None:
        self.bring(self.some(k, Life.is_receiving).identity, kind, faults, meanwhile)

    @rule(name=st.sampled_from("uv"), answer=answers, opens=st.booleans())
    def a_stranger_comes(self, name: str, answer: str, *, opens: bool) -> None:
        """A request that nobody has registered, sometimes with its data before its opening."""
        if self.may_open():
            identity = self.next_of(name)
            self.answers.append(answer)
            for kind in ["open"] * opens + ["data"]:
                self.bring(identity, kind)

    @precondition(lambda self: self.book.held or self.book.turned_away)
    @rule(k=lives, what=more, faults=st.integers(0, 4))
    def more_of_a_stranger(self, k: int, what: str, faults: int) -> None:
        strangers = [each for each in (*self.book.held, *self.book.turned_away) if each not in self.book.lives]
        if not strangers or self.source.arrivals:
            return
        identity = strangers[k % len(strangers)]
        if what == "register":
            self.register(identity)
        else:
            self.bring(identity, what, faults)

    def bring(self, identity: Identity, kind: str, faults: int = 0, meanwhile: str = "") -> None:
        """The sending stage puts its next frame, or one that it must not."""
        frame = self.next_frame(identity, kind)
        self.sent[identity] += kind in ("data", "end", "empty end", "broken")
        faults = faults if frame.body is not None else 0
        raised = [RemoteProtocolError("region")] if faults < 0 else [OSError("not yet")] * faults
        life = self.book.lives.get(identity)

        def during() -> None:
            if life is not None and arrival.loads == max(1, faults):
                life.getting = frame.body is not None
                self.happen(meanwhile, life)
                life.getting = False

        arrival = self.source.bring(frame, raised, during)
        if faults < 0:
            self.spoiled[id(arrival)] = error("frame_invalid: region")
        elif faults > 3:
            self.spoiled[id(arrival)] = error("get_given_up: OSError: not yet")
        elif kind == "broken":
            arrival._body = BROKEN
            self.spoiled[id(arrival)] = BROKEN_CAUSE

    def next_frame(self, identity: Identity, kind: str) -> Frame:
        seq, number = self.sent[identity], self.number()
        match kind:
            case "open":
                frame = opening(identity)
            case "again":
                frame = data(max(seq - 1, 0), number, identity)
            case "end" | "empty end":
                frame = ok_end(seq, number if kind == "end" else None, identity)
            case "failed":
                frame = failed_end("they failed", identity)
            case "cancelled":
                frame = failed_end("they left", identity, Outcome.CANCELLED)
            case "done":
                frame = replace(failed_end("done", identity), cause=DONE)
            case _:
                frame = data(seq + (kind == "ahead"), number, identity)
        return frame

    @rule(k=lives, chunk=chunks, trouble=troubles, segment_end=st.booleans(), ends=st.booleans())
    def a_chunk_meets_trouble(self, k: int, chunk: Chunk, trouble: Trouble, *, segment_end: bool, ends: bool) -> None:
        plan, end_plan, meanwhile = trouble
        self.settle()
        self.submit(k, chunk, segment_end=segment_end)
        if ends:
            self.submit_all(k, 0, chunk)
        self.plan_puts("data", plan, meanwhile)
        self.plan_puts("failed end" if len(end_plan) > 1 else "end", end_plan, meanwhile)
        self.turns_and_moments(len(plan), 5.0 if plan[0] == "busy" else 0.1)

    @rule(k=lives, what=st.sampled_from([*LEAVES, *STOPS, *TWICE, "room", "credit"]))
    def something_happens(self, k: int, what: str) -> None:
        self.happen(what, self.some(k))

    @rule(edge=st.sampled_from(["source", "sink"]), back=st.booleans())
    def a_peer_is_lost(self, edge: str, *, back: bool) -> None:
        if edge == "sink":
            self.hear(PeerLost("sink is gone"), *[PeerBack()] * back)
            return
        while self.get_frame():  # its connector says so after its last frame was got
            pass
        self.source.say(PeerLost("source is gone"), *[PeerBack()] * back)
        self.runtime.source_once()
        self.book.lose("source", self.now_ns)
        if back:
            self.book.find("source")

    @precondition(lambda self: self.book.lost)
    @rule()
    def the_peers_are_back(self) -> None:
        for edge, connector in (("source", self.source), ("sink", self.sink)):
            if edge in self.book.lost and not connector.arrivals:
                connector.say(PeerBack())
                getattr(self.runtime, f"{edge}_once")()
                self.book.find(edge)

    @precondition(lambda self: len(self.chunks) > 15 and not self.book.closing)
    @rule()
    def shut_down(self) -> None:
        self.book.close()
        self.runtime.begin_shutdown()

    # What holds at every moment

    @invariant()
    def all_is_well(self) -> None:
        self.stage.clock.ns += 1  # no two happenings of different rules fall together
        self.nothing_went_wrong_inside()
        self.the_halves_are_where_the_library_has_them()
        self.the_stage_holds_what_the_book_says()
        self.the_sender_hears_what_it_must()
        self.the_connectors_drop_what_they_must()
        self.each_failure_is_recorded_once()

    def nothing_went_wrong_inside(self) -> None:
        assert self.problems == []
        assert self.followers.problems == []

    def the_halves_are_where_the_library_has_them(self) -> None:
        requests = self.runtime._core.tables.by_identity
        known = {life.identity for life in self.book.known}
        assert requests.keys() == known
        for identity in self.book.lives:
            states = ["finalized", "finalized"]
            if identity in known:
                states = [requests[identity].sender.state, requests[identity].receiver.state]
            assert self.followers.states_of(identity) == states

    def the_stage_holds_what_the_book_says(self) -> None:
        lives, held = self.book.lives.values(), self.runtime.residue()
        assert held["requests"] == held["identities"] == len(self.book.known)
        assert held["lives"] == sum(not life.is_gone for life in lives)
        assert held["state"] == sum(life.owned and not life.over for life in lives)
        assert held["staged"] == sum(len(life.staged) for life in lives)
        assert held["unclaimed"] == len(self.book.held)
        for life in self.book.known:
            assert (self.runtime.state(life.name) is None) is not life.owned

    def the_sender_hears_what_it_must(self) -> None:
        """Its stops in order, each before the credit that waives the rest: with credit first it would end well."""
        stops = {each: [word for word in said if isinstance(word, Cause)] for each, said in self.said.items()}
        assert {identity: causes for identity, causes in stops.items() if causes} == self.book.stops
        for identity in self.book.turned_away:
            assert self.said[identity][-1][0] == UNLIMITED
        for identity, life in self.book.lives.items():
            if life.left is not None and life.left.outcome is not Outcome.OK:
                assert self.said[identity][-1][0] == UNLIMITED
            elif life.opened and life.left is None:
                assert self.said[identity][-1] == (WINDOW, life.taken)

    def the_connectors_drop_what_they_must(self) -> None:
        """What is stored for the next stage goes unread only with that stage: an end may be all that it still gets."""
        reclaims = defaultdict(list)
        for identity, unread in self.sink.reclaimed:
            reclaims[identity].append(unread)
        assert reclaims == self.book.reclaims
        buried = [life.identity for life in self.book.lives.values() if life.buried]
        assert Counter(self.source.reclaimed) == Counter((each, True) for each in (*buried, *self.book.turned_away))

    def each_failure_is_recorded_once(self) -> None:
        failures = self.stage.seen.failures
        failed = [(each.internal_id, each.cause) for each in failures if each.what == "failed"]
        lost = [each.internal_id for each in failures if each.what == "marker_lost"]
        assert sorted(failed, key=str) == sorted(self.book.reported.items(), key=str)
        assert sorted(lost) == sorted(self.book.told["marker_lost"])
        assert len(failed) + len(lost) == len(failures)

    # The end: no more faults

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # what failed already is not to be hidden by what follows from it
                self.come_to_rest()
                self.check_rest()
        finally:
            self.followers.close()

    def come_to_rest(self) -> None:
        """Peers, room and time are there; half of the requests end well, the others by their deadline."""
        self.puts = {kind: deque() for kind in KINDS}
        self.resting = True
        self.settle()
        self.the_peers_are_back()
        for _ in range(4):
            self.make_room()
            self.work()
            self.end_some()
            self.pass_time(WAIT_S + STALL_S)
        self.settle()
        self.work()
        assert [life.name for life in self.book.lives.values() if not (life.over or life.end_is_out)] == []
        for life in self.book.lives.values():
            self.leave("release", life)
        self.settle()

    def make_room(self) -> None:
        """Once there is credit or room, no frame waits for it any longer, whatever the clock says."""
        credit = [CreditReturned(life.identity) for life in self.book.lives.values()]
        self.hear(*(credit if len(self.chunks) % 2 else [ROOM]))
        self.settle()
        waiting = [life.name for life in self.book.lives.values() if life.pending and life.pending.key == life.busy[0]]
        assert waiting == []

    def end_some(self) -> None:
        """The host ends what it has all of, and every other request besides."""
        for life in list(self.book.lives.values()):
            if life.is_submitting() and life.owned and (life.identity.generation % 2 or life.left is not None):
                self.bring(life.identity, "open")
                self.end(life, ("pass", ""))

    def check_rest(self) -> None:
        self.pass_time(1_000_000.0)
        self.collect()
        assert self.stage.rest() == {}
        self.all_is_well()
        assert self.book.known == []
        for life in self.book.lives.values():
            self.check_wire(life)
        for identity in self.views:
            self.check_view(identity)

    def check_wire(self, life: Life) -> None:
        """What the next stage got, read from the wire alone: in order, no gap but one that fails, and an end."""
        wire = [frame for frame in self.sink.stored if frame.identity == life.identity]
        assert wire == life.stored
        kinds = [frame.kind for frame in wire]
        seqs = list(dict.fromkeys(frame.seq for frame in wire if frame.seq >= 0))
        assert seqs == sorted(seqs)
        assert kinds == sorted(kinds, key=[FrameKind.OPEN, FrameKind.DATA, FrameKind.END].index)
        ends = list(dict.fromkeys(str(frame.cause) for frame in wire if frame.kind is FrameKind.END))
        assert len(ends) <= 1 or (len(ends) == 2 and ends[0] == "ok" and life.burned)
        assert ends or life.lost_peer or life.name in self.book.told["marker_lost"]
        if ends == ["ok"]:
            assert seqs == list(range(len(life.made)))


class FrontMachine(StageMachine):
    """Requests begin and end here."""

    is_front = True
    reached: ClassVar[set[tuple[str, str, str]]] = set()


def refusal_of(body: bytes) -> Cause:
    """How the stream fails whose body this is."""
    with pytest.raises(PayloadDecodeError) as refused:
        decode(body)
    return error(f"frame_invalid: PayloadDecodeError: {refused.value}")


BROKEN_CAUSE = refusal_of(BROKEN)


def rows(reached: set[tuple[str, str, str]], machine: str, table: Any) -> tuple[int, list[tuple[str, str]]]:
    """How many rows of a table were taken, and which were not."""
    all_rows = {(str(state), str(event)) for (state, event), cell in table.cells.items() if not cell.ignored}
    taken = {(state, event) for each, state, event in reached if each == machine}
    return len(all_rows & taken), sorted(all_rows - taken)


SETTINGS = settings(derandomize=True, deadline=None, stateful_step_count=50, suppress_health_check=[*HealthCheck])


@pytest.mark.parametrize(
    ("machine", "examples", "of_sender", "of_receiver"),
    [(StageMachine, 420, 74, 28), (FrontMachine, 280, 70, 23)],
    ids=["middle", "front"],
)
def test_a_stage_under_everything_at_once(
    machine: type[StageMachine], examples: int, of_sender: int, of_receiver: int
) -> None:
    """Both oracles agree with the runtime; what was not reached would prove nothing."""
    machine.reached.clear()
    stateful.run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=examples))
    for name, table, floor in (("sender", sender_table(), of_sender), ("receiver", receiver_table(), of_receiver)):
        count, missing = rows(machine.reached, name, table)
        assert count >= floor, missing
