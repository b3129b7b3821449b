"""The world of several stages: real runtimes, the edges between them, and an adversary with a budget.

A failure anywhere must reach every other stage, and the front, with its first reason; and whatever happens every stage
settles with nothing left, by itself and without a deadline.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from omni_fsm.connectors.ledger import UNCLAIMED_FRAMES
from omni_fsm.protocol.identity import Identity
from omni_fsm.verify import stages
from omni_fsm.verify.ends import CellName, Granted, Notice, Reclaimed, Role, Sent
from omni_fsm.verify.explore import Action, Step, Violation
from omni_fsm.verify.stages import Happening, Local, Stages

EVERY_WRONG = frozenset({"cancel", "fail", "release", "raise", "refuse", "load", "kill", "deadline", "shutdown"})
"""All that the adversary of a `PipelineScope` may do."""

DEAD = -1
"""In place of a local state: the process is gone."""

_LOAD_REASONS = {"invalid": "frame_invalid", "lost": "get_given_up"}


@dataclass(frozen=True)
class PipelineScope:
    """How large a world of stages is, and what may go wrong in it.

    Attributes:
        roles: The stages, in the order of the frames. The last one's output goes to the first where both say so.
        lives: How many lives of one external id may be opened, the next at any moment.
        wrongs: What the adversary may do: ``cancel``, ``fail``, ``release`` (a host lets go early), ``raise`` (a producer),
            ``refuse`` (a put), ``load`` (a body that cannot be decoded or fetched), ``kill``, ``deadline`` (too early),
            ``shutdown``; and ``lose`` (a frame vanishes, and a later one of its stream comes), which no edge of ours does.
        budget: How many of these in one path.
        hiccups: How many puts in one path may be busy, fail for now, or be stored though they report failure.
        meanwhile: Whether a host may leave, or an edge be lost, while a producer, its factory or a put is under way.
        eager: Whether a stage that has begun to work does all of it before another one moves. What may happen to it
            meanwhile happens all the same: its hosts, its timers, and what is already under way to it.
        cells: Filled with the cells of both tables that were used: rows and ignores.
    """

    roles: tuple[Role, ...]
    lives: int = 1
    wrongs: frozenset[str] = frozenset()
    budget: int = 0
    hiccups: int = 0
    meanwhile: bool = False
    eager: bool = False
    cells: set[CellName] = field(default_factory=set)

    def world(self) -> "PipelineWorld":
        """The world at its beginning."""
        return PipelineWorld(self)


@dataclass(frozen=True, slots=True)
class Edges:
    """What is under way: for each stage the frames that it sent, and the notices that go back to it."""

    frames: tuple[tuple[Sent, ...], ...]
    notices: tuple[tuple[Notice, ...], ...]


class PipelineWorld:
    """Stages, and what is under way between them. A value: a change makes another."""

    __slots__ = ("edges", "hiccups", "locals", "opened", "scope", "stages", "wrongs")

    def __init__(self, scope: PipelineScope) -> None:
        self.scope = scope
        self.stages = tuple(Stages(role, scope.cells) for role in scope.roles)
        self.locals = tuple(stage.start for stage in self.stages)
        empty = ((),) * len(scope.roles)
        self.edges = Edges(empty, empty)
        self.opened = 0
        self.wrongs: tuple[str, ...] = ()
        self.hiccups = 0

    def key(self) -> Hashable:
        """See `omni_fsm.verify.World`."""
        return (self.locals, self.edges, self.opened, self.wrongs, self.hiccups)

    @property
    def debts(self) -> tuple[str, ...]:
        """See `omni_fsm.verify.World`."""
        return ("what goes wrong anywhere leads to an answer at the front",)

    def owes(self) -> int:
        """See `omni_fsm.verify.World`."""
        return int(bool(self.wrongs) and bool(self._unanswered()))

    def _unheard(self) -> list[str]:
        """Lives that a stage turned away, of which the stage before never heard; it cannot have put all of them before."""
        unheard = []
        for at, local in self._alive():
            before = self.locals[self._before(at)]
            told = dict(self.stages[self._before(at)].locals[before].told) if before != DEAD else {}
            if before != DEAD and self.stages[at].role.chunks > UNCLAIMED_FRAMES:
                unheard += [
                    f"the sender of life {name} never heard that nobody took it"
                    for name in local.refused
                    if name not in told
                ]
        return unheard

    def left(self) -> str:
        """See `omni_fsm.verify.World`."""
        left = [f"{self.stages[at].role.name} holds {local.held}" for at, local in self._alive() if local.held]
        left += self._unanswered() + self._unheard()
        left += ["a frame is under way" for frames in self.edges.frames if frames]
        left += ["a notice is under way" for notices in self.edges.notices if notices]
        return "; ".join(left)

    def _unanswered(self) -> list[str]:
        """Lives that were opened at the first stage, whose host does not know how they ended."""
        if self.locals[0] == DEAD:
            return []
        stage = self.stages[0]
        told = dict(stage.locals[self.locals[0]].told)
        lives = range(1, self.opened + 1) if stage.role.front else ()
        return [f"the front was never told how life {life} ended" for life in lives if str(life) not in told]

    def actions(self) -> Iterator[Action]:
        """See `omni_fsm.verify.World`."""
        if self.opened < self.scope.lives and self.locals[0] != DEAD:
            life = Identity("r", self.opened + 1)
            yield self._act(0, f"open life {life.generation}", ("open", life), fair=False, opens=1)
        for at, local in self._turns():
            for happening in local.fair:
                yield self._act(at, _words(happening), happening, fair=True)
            yield from self._edge_actions(at, local)
            yield from self._deadlines(at, local)
            for name in local.offered:
                yield self._act(at, f"register {name}", ("register", name), fair=False)
            if len(self.wrongs) < self.scope.budget and self.opened:
                yield from self._wrongs(at, local)
            if self.hiccups < self.scope.hiccups and ("put", "stored", None) in local.fair:
                for planned in ("busy", "failed", "lied"):
                    yield self._act(at, f"put: {planned}", ("put", planned, None), fair=False, hiccups=1)

    def _turns(self) -> list[tuple[int, Local]]:
        """Whose turn it is: a stage with work of its own goes before all others, or every stage."""
        alive = self._alive()
        busy = [(at, local) for at, local in alive if local.fair]
        return busy[:1] if busy and self.scope.eager else alive

    def _alive(self) -> list[tuple[int, Local]]:
        return [
            (at, stage.locals[number])
            for at, (stage, number) in enumerate(zip(self.stages, self.locals, strict=True))
            if number != DEAD
        ]

    def _before(self, at: int) -> int:
        return (at - 1) % len(self.stages)

    def _after(self, at: int) -> int:
        return (at + 1) % len(self.stages)

    def _edge_actions(self, at: int, local: Local) -> Iterator[Action]:
        role = self.stages[at].role
        if role.source:
            before = self._before(at)
            frames = self.edges.frames[before]
            if frames:
                yield self._act(at, f"get {_frame_words(frames[0])}", ("get", frames[0], "sound", None), fair=True)
            elif self.locals[before] == DEAD and "source" not in local.lost:
                yield self._act(at, "the stage before is lost", ("lost", "source"), fair=True)
        if role.sink:
            notices = self.edges.notices[at]
            if notices:
                yield self._act(at, f"hear {_notice_words(notices[0])}", ("hear", notices[0]), fair=True)
            elif self.locals[self._after(at)] == DEAD and "sink" not in local.lost:
                yield self._act(at, "the stage after is lost", ("lost", "sink"), fair=True)
                if ("produce", None) in local.fair and self.scope.meanwhile:
                    words = "a producer runs; meanwhile the stage after is lost"
                    yield self._act(at, words, ("produce", ("lost", "sink")), fair=False)

    def _deadlines(self, at: int, local: Local) -> Iterator[Action]:
        """A deadline is needed only where the marker was lost; anywhere else it comes too early."""
        if not local.waits:
            return
        number = self.locals[self._before(at)]
        unmarked = self.stages[self._before(at)].locals[number].unmarked if number != DEAD else frozenset()
        for name in local.waits:
            happening = ("timer", ("deadline", Identity("r", int(name))))
            if name in unmarked:
                yield self._act(at, "the deadline passes", happening, fair=True, wrong="deadline_passed")
            elif "deadline" in self.scope.wrongs and len(self.wrongs) < self.scope.budget:
                yield self._act(at, "the deadline passes", happening, fair=False, wrong="deadline_passed")

    def _wrongs(self, at: int, local: Local) -> Iterator[Action]:
        wrongs, name = self.scope.wrongs, self.stages[at].role.name
        leaves = [
            (("leave", how, request, _reason(how, name)), f"the host's {how} of {request}", _reason(how, name))
            for request in local.live
            for how in ("cancel", "fail", "release")
            if how in wrongs
        ]
        for happening, words, reason in leaves:
            yield self._act(at, words, happening, fair=False, wrong=reason)
        if ("produce", None) in local.fair:
            if "raise" in wrongs:
                yield self._act(at, "a producer raises", ("raise", None), fair=False, wrong=f"raised at {name}")
            yield from self._meanwhiles(at, "a producer runs", "produce", leaves)
        if ("put", "stored", None) in local.fair:
            if "refuse" in wrongs:
                yield self._act(at, "put: refused", ("put", "refused", None), fair=False, wrong=f"refused at {name}")
            yield from self._meanwhiles(at, "put: stored", "put", leaves)
        if "load" in wrongs:
            yield from self._bad_loads(at)
        if "lose" in wrongs and self._has_two_in_order(at):
            lose = partial(self._lost, self._before(at))
            yield Action(Step(f"{name}: a frame to it is lost", name, name), lose, fair=False)
        if "shutdown" in wrongs:
            yield self._act(at, "shut down", ("shutdown", local.live), fair=False, wrong="shutdown")
        if "kill" in wrongs:
            yield Action(Step(f"{name}: killed", name, name), partial(self._killed, at), fair=False)

    def _meanwhiles(self, at: int, words: str, kind: str, leaves: list[tuple[Happening, str, str]]) -> Iterator[Action]:
        if not self.scope.meanwhile:
            return
        for leave, meanwhile, reason in leaves:
            happening = ("produce", leave) if kind == "produce" else ("put", "stored", leave)
            yield self._act(at, f"{words}; meanwhile {meanwhile}", happening, fair=False, wrong=reason)

    def _bad_loads(self, at: int) -> Iterator[Action]:
        frames = self.edges.frames[self._before(at)] if self.stages[at].role.source else ()
        if frames and frames[0].body is not None:
            for load, reason in _LOAD_REASONS.items():
                words = f"get {_frame_words(frames[0])}: {load}"
                yield self._act(at, words, ("get", frames[0], load, None), fair=False, wrong=reason)

    def _has_two_in_order(self, at: int) -> bool:
        """Whether a frame with a seq is under way, and the next one of its stream behind it."""
        frames = self.edges.frames[self._before(at)] if self.stages[at].role.source else ()
        return len(frames) > 1 and frames[0].frame.uses_credit and frames[1].frame.uses_credit

    # What happens

    def _act(  # noqa: PLR0913 - one action
        self,
        at: int,
        words: str,
        happening: Happening,
        *,
        fair: bool,
        wrong: str = "",
        hiccups: int = 0,
        opens: int = 0,
    ) -> Action:
        name = self.stages[at].role.name
        source = {"get": self._before(at), "hear": self._after(at)}.get(happening[0], at)
        step = Step(f"{name}: {words}", self.stages[source].role.name, name)
        return Action(step, partial(self._acted, at, happening, wrong, hiccups, opens), fair)

    def _acted(self, at: int, happening: Happening, wrong: str, hiccups: int, opens: int) -> "PipelineWorld":
        step = self.stages[at].step(self.locals[at], happening)
        if step.problem:
            raise Violation(step.problem)
        twin = self._copy()
        twin.locals = (*self.locals[:at], step.after, *self.locals[at + 1 :])
        twin.opened += opens
        twin.hiccups += hiccups
        if wrong:
            twin.wrongs = (*self.wrongs, wrong)
        if happening[0] == "get":
            twin.edges = _without_frame(twin.edges, self._before(at))
        elif happening[0] == "hear":
            twin.edges = _without_notice(twin.edges, at)
        twin._carry(at, step)
        twin._judge(at, step)
        return twin

    def _copy(self) -> "PipelineWorld":
        twin = PipelineWorld.__new__(PipelineWorld)
        for name in PipelineWorld.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def _carry(self, at: int, step: stages.Step) -> None:
        """What the stage sent is under way."""
        for letter in step.out:
            if isinstance(letter, Sent):
                if self.locals[self._after(at)] != DEAD:
                    self.edges = _with_frame(self.edges, at, letter)
            elif isinstance(letter, Reclaimed):
                self.edges = _reclaimed(self.edges, at, letter)
            elif self.locals[self._before(at)] != DEAD:
                self.edges = _with_notice(self.edges, self._before(at), letter)

    def _judge(self, at: int, step: stages.Step) -> None:
        """What a host was told is the reason of something that went wrong."""
        for name, reason in self.stages[at].locals[step.after].told:
            if reason not in ("ok", "done", *_made_by_itself(self.scope)) and not any(
                wrong in reason for wrong in self.wrongs
            ):
                where = self.stages[at].role.name
                went = ", ".join(self.wrongs) or "nothing"
                raise Violation(
                    f"{where} is told that request {name} ended with {reason!r}; what went wrong is: {went}"
                )

    def _lost(self, sender: int) -> "PipelineWorld":
        twin = self._copy()
        twin.edges = _without_frame(self.edges, sender)
        twin.wrongs = (*self.wrongs, "frame_ahead")
        return twin

    def _killed(self, at: int) -> "PipelineWorld":
        twin = self._copy()
        twin.locals = (*self.locals[:at], DEAD, *self.locals[at + 1 :])
        twin.wrongs = (*self.wrongs, "peer_lost")
        before = self._before(at)
        frames = tuple(() if n == before else each for n, each in enumerate(self.edges.frames))
        notices = tuple(() if n == at else each for n, each in enumerate(self.edges.notices))
        twin.edges = Edges(frames, notices)
        return twin


def _made_by_itself(scope: PipelineScope) -> tuple[str, ...]:
    """Reasons that arise without the adversary: an offer that nobody took, a life that makes room for its successor."""
    later = any(role.answer == "later" for role in scope.roles)
    return (*(("unclaimed",) if later else ()), *(("released for a successor",) if scope.lives > 1 else ()))


def _reason(how: str, stage: str) -> str:
    return "released" if how == "release" else f"{how} at {stage}"


def _with_frame(edges: Edges, at: int, sent: Sent) -> Edges:
    frames = tuple((*each, sent) if n == at else each for n, each in enumerate(edges.frames))
    return replace(edges, frames=frames)


def _without_frame(edges: Edges, at: int) -> Edges:
    return replace(edges, frames=tuple(each[1:] if n == at else each for n, each in enumerate(edges.frames)))


def _with_notice(edges: Edges, to: int, letter: Notice) -> Edges:
    """A grant is absolute: it replaces an earlier one of its stream that is still under way."""
    kept = edges.notices[to]
    if isinstance(letter, Granted):
        kept = tuple(each for each in kept if not (isinstance(each, Granted) and each.identity == letter.identity))
    return replace(edges, notices=tuple((*kept, letter) if n == to else each for n, each in enumerate(edges.notices)))


def _without_notice(edges: Edges, to: int) -> Edges:
    return replace(edges, notices=tuple(each[1:] if n == to else each for n, each in enumerate(edges.notices)))


def _reclaimed(edges: Edges, at: int, letter: Reclaimed) -> Edges:
    kept = tuple(sent for sent in edges.frames[at] if sent.frame.identity != letter.identity)
    return replace(edges, frames=tuple(kept if n == at else each for n, each in enumerate(edges.frames)))


_WORDS = {
    "produce": "a producer runs",
    "put": "put: stored",
    "cycle": "the host collects its feedback",
    "room": "there is room again",
}


def _words(happening: Happening) -> str:
    """What a stage does by itself."""
    kind = happening[0]
    if kind == "timer":
        return f"the timer {happening[1][0]} goes off"
    return _WORDS.get(kind) or f"the host's {kind} of {happening[1]}"


def _frame_words(sent: Sent) -> str:
    frame = sent.frame
    life = f"of life {frame.identity.generation}"
    if frame.cause is not None:
        return f"end({frame.cause.outcome}) {life}"
    return f"data {frame.seq} {life}" if frame.seq >= 0 else f"{frame.kind} {life}"


def _notice_words(letter: Notice) -> str:
    return f"{'credit' if isinstance(letter, Granted) else 'the stop'} of life {letter.identity.generation}"


def ring(*stages: str, **settings: object) -> tuple[Role, ...]:
    """Stages in a ring, by default three; requests begin and end at the first."""
    names = stages or ("front", "thinker", "talker")
    return tuple(
        Role(name, names[n - 1], names[(n + 1) % len(names)], front=n == 0, **settings)  # type: ignore[arg-type]
        for n, name in enumerate(names)
    )


def line(**settings: object) -> tuple[Role, Role]:
    """A stage that only sends, and one that only receives and registers when it likes, frame by frame."""
    first = Role("thinker", "", "talker", **settings)  # type: ignore[arg-type]
    last = replace(first, name="talker", source="thinker", sink="", answer="later", step_wise=True)
    return first, last
