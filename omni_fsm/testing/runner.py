"""What every runner must do: the rules of a stage between two others, each a test that names what is broken."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest

from omni_fsm.connectors import Connector
from omni_fsm.payload import encode
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.testing.edge import IDS, broken
from omni_fsm.testing.neighbours import cause
from omni_fsm.testing.stage import Life, Made, StageDriver

_MAX_BURST = 4
_CYCLES_AFTER_A_STOP = 3


class RunnerConformance:
    """Base class of a pytest class: give it a stage, its cycle and its inputs, and each rule is a test.

    The kit is the stage before and the stage after, over real memory edges, and calls the cycle.

    Attributes:
        stage: Name of the stage, as its config says it.
        patience_s: How long something may take that must happen.
        interleavings: How many orders of the inputs of three requests are tried; the same ones in every run.
        bad_words: Words that the end of a request with `make_bad_inputs` must carry: those of the exception.
    """

    stage: str = ""
    patience_s: float = 10.0
    interleavings: int = 5
    bad_words: str = ""
    _alone: ClassVar[dict[int, bytes]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._alone = {}  # what each request gave alone: computed once a class

    # -- what the author gives -------------------------------------------------------------------------------------

    def make_runner(self, source: Connector, sink: Connector) -> Made:
        """A new stage on these ends, and what runs one cycle of its loop; the kit starts it and shuts it down.

        Called by: each test, once or more.

        Args:
            source: Receiving end of its input edge, from a stage of the kit.
            sink: Sending end of its output edge, to a stage of the kit.

        Returns:
            The stage's `StageRunnerAdapter`, or its `Lifecycle` where it is built on a `StageRuntime`; and the cycle. A
            cycle that finds nothing to do may wait, for a fraction of a second.
        """
        raise NotImplementedError

    def make_inputs(self, number: int) -> list[Any]:
        """The payloads of request ``number`` (0, 1 or 2): different ones for each number, the same each time."""
        raise NotImplementedError

    def make_bad_inputs(self) -> list[Any] | None:
        """The payloads of a request with which the model, or the producer, raises; None: rule raise is skipped."""
        return None

    def content(self, payload: Any) -> bytes:
        """What one payload of the output contributes to the request's output; its encoding, unless overridden.

        Override it where payloads name the life that they belong to, or where their number depends on the time.
        """
        return b"".join(encode(payload).parts)

    def computed(self) -> int | None:
        """How many steps the runner's model has computed so far; None: the kit counts the chunks it submits."""
        return None

    def held(self) -> Mapping[str, int]:
        """What the runner keeps of requests in tables of its own, by name; all zero when no request is left."""
        return {}

    # -- helpers ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, loop_rule: str = "cycle") -> Iterator[StageDriver]:
        driver = StageDriver(self.stage, self.patience_s)
        driver.loop_rule = loop_rule
        with driver.running(self.make_runner(driver.before.stage_end, driver.after.stage_end)):
            yield driver
            driver.check_ends()

    def _begin(self, stage: StageDriver, number: int = 0, name: str = "", generation: int = 1) -> Life:
        return Life(stage.before, Identity(name or f"r{number}", generation), number, self.make_inputs(number))

    def _given(self, stage: StageDriver, life: Life) -> bytes:
        return b"".join(map(self.content, stage.output(life).payloads))

    def _reference(self, number: int) -> bytes:
        """What a request gives that is alone in a stage of its own and whose input is there from the start."""
        if number not in self._alone:
            with self._stage() as stage:
                life = self._begin(stage, number)
                life.feed()
                stage.arrived()
                stage.until_ended("one-end", life)
                end = stage.output(life).ends[0]
                if end.outcome is not Outcome.OK:
                    broken("one-end", f"{life.identity} was alone and ended with {end}")
                self._alone[number] = self._given(stage, life)
        return self._alone[number]

    def _references(self, count: int) -> None:
        """What the first requests give alone, before another stage runs."""
        for number in range(count):
            self._reference(number)

    def _check_whole(self, rule: str, stage: StageDriver, lives: Sequence[Life], how: str) -> None:
        """Each life ends ok, with what it gives alone."""
        stage.until_ended(rule, *lives)
        for life in lives:
            end, given, alone = stage.output(life).ends[0], self._given(stage, life), self._reference(life.number)
            if end.outcome is not Outcome.OK:
                broken(rule, f"{life.identity} ended with {end} {how}")
            if given != alone:
                other = ", other ones" if len(given) == len(alone) else ""
                broken(rule, f"{life.identity} gave {len(alone)} bytes alone and {len(given)} {how}{other}")

    def _half_done(self, stage: StageDriver, *numbers: int, name: str = "", generation: int = 1) -> list[Life]:
        """Requests in mid-stream: the runner has seen the first half of their input, the next stage knows them."""
        lives = [self._begin(stage, number, name, generation) for number in numbers]
        for life in lives:
            life.feed_half()
        stage.arrived()
        stage.cycle()
        stage.until_announced(*lives)
        return lives

    def _check_ended(self, rule: str, stage: StageDriver, life: Life, why: Cause, *, words: str = "") -> None:
        """A life ends with a cause, unless its end(ok) was out before."""
        stage.until_ended(rule, life)
        end = stage.output(life).ends[0]
        if end.outcome is Outcome.OK and self._given(stage, life) == self._reference(life.number):
            return
        if end != why:
            broken(rule, f"{life.identity} ended with {end}, not {why}{words}")

    # -- a request -------------------------------------------------------------------------------------------------

    def test_a_request_ends_once(self) -> None:
        """Rule one-end: a request that is alone ends ok, once, and nothing follows.

        Rule peers: the stage uses the ends that it was given, and announces its requests. Rule cycle: no cycle raises or hangs.
        """
        self._reference(0)
        with self._stage() as stage:
            life = self._begin(stage)
            life.feed()
            stage.until_ended("one-end", life)
            stage.cycle(2)
            stage.turn()

    def test_an_input_without_a_chunk_ends(self) -> None:
        """Rule empty: a request whose input ends before its first chunk ends too, in whatever way."""
        with self._stage() as stage:
            life = self._begin(stage)
            life.finish()
            stage.until_ended("empty", life)

    def test_ok_means_all(self) -> None:
        """Rule complete: ok means all that the request gives alone, in whatever bursts its input comes, to a slow stage too."""
        self._reference(0)
        with self._stage() as stage:
            for window_frames in (1 << 20, 1):
                stage.after.window_frames = window_frames
                (life,) = self._half_done(stage, 0, name=f"w{window_frames}")
                stage.catch_up()
                for _ in range(len(life.left) + 1):
                    life.feed_one()
                    stage.arrived()
                    stage.cycle()
                self._check_whole("complete", stage, [life], "when its input came one by one, after a pause")

    def test_requests_do_not_disturb_each_other(self) -> None:
        """Rule interleaving: in whatever order and bursts their inputs come, requests give what each gives alone."""
        self._references(3)
        with self._stage() as stage:
            for order in range(self.interleavings):
                chance = random.Random(order)  # noqa: S311 - the same walk in every run
                lives = [self._begin(stage, number, f"r{number}-{order}") for number in range(3)]
                turns = [life for life in lives for _ in range(len(life.left) + 1)]
                chance.shuffle(turns)
                while turns:
                    for life in turns[: chance.randint(1, _MAX_BURST)]:
                        turns.remove(life)
                        life.feed_one()
                    stage.arrived()
                    stage.cycle()
                self._check_whole("interleaving", stage, lives, f"among three, in order {order}")

    def test_any_id_is_served(self) -> None:
        """Rule ids: an id is any text, a generation any unsigned 64-bit number."""
        self._reference(0)
        with self._stage() as stage:
            lives = [self._begin(stage, 0, identity.external_id, identity.generation) for identity in IDS]
            for life in lives:
                life.feed()
            self._check_whole("ids", stage, lives, "under this id")

    # -- how it ends early -----------------------------------------------------------------------------------------

    def test_an_input_failure_goes_on(self) -> None:
        """Rule failure: it reaches the next stage with outcome and first reason. Rule unharmed: others end as if alone."""
        self._references(2)
        for why in (cause(Outcome.ERROR, "the stage before is out of memory"), cause(Outcome.CANCELLED, "client left")):
            with self._stage() as stage:
                bad, good = self._half_done(stage, 0, 1)
                stage.before.fail(bad.identity, why)
                self._check_ended("failure", stage, bad, why)
                good.feed()
                self._check_whole("unharmed", stage, [good], f"beside one whose input ended with {why}")

    def test_a_stop_goes_on_and_ends_the_work(self) -> None:
        """Rule stop: a stop reaches the stage before with its cause. Rule computing: nothing more is computed then."""
        self._references(2)
        why = cause(Outcome.CANCELLED, "the listener left")
        with self._stage() as stage:
            (life,) = self._half_done(stage, 0)
            stage.after.stop(life.identity, why)
            stage.until(
                "stop", f"no stop of {life.identity} came", partial(stage.before.stops.__contains__, life.identity)
            )
            told = stage.before.stops[life.identity]
            if told != why and not (stage.output(life).ended_ok or told.outcome is Outcome.DONE):
                broken("stop", f"{life.identity} was stopped with {why}, and the stage before was told {told}")
            stage.until_ended("stop", life)
            stage.cycle(2)  # it hears of the stop
            before = self._steps(stage)
            stage.cycle(_CYCLES_AFTER_A_STOP)
            more = self._steps(stage) - before
            if more:
                broken("computing", f"{life.identity} was stopped, and the runner computed {more} steps more")
            other = self._begin(stage, 1)
            other.feed()
            self._check_whole("unharmed", stage, [other], "after one that was stopped")

    def _steps(self, stage: StageDriver) -> int:
        """How much was computed so far."""
        computed = self.computed()
        return stage.submits if computed is None else computed

    def test_a_raise_ends_its_request_alone(self) -> None:
        """Rule raise: it ends the request with the exception's words, up and down the pipeline, and no other one."""
        inputs = self.make_bad_inputs()
        if inputs is None:
            pytest.skip("make_bad_inputs() gives nothing to raise with")
        self._references(2)
        with self._stage(loop_rule="raise") as stage:
            (good,) = self._half_done(stage, 1)
            bad = Life(stage.before, Identity("bad", 1), 0, inputs)
            bad.feed(len(inputs))
            stage.until_ended("raise", bad)
            end = stage.output(bad).ends[0]
            if end.outcome is not Outcome.ERROR or self.bad_words not in end.reason:
                broken("raise", f"{bad.identity} ended with {end}, not with error and the words {self.bad_words!r}")
            stage.until(
                "raise", f"no stop of {bad.identity} came", partial(stage.before.stops.__contains__, bad.identity)
            )
            told = stage.before.stops[bad.identity]
            if told != end and told.outcome is not Outcome.DONE:  # it had ended its output before its producer raised
                broken("raise", f"{bad.identity} ended with {end}, and the stage before was told {told}")
            good.feed()
            again = self._begin(stage, 0, "bad", 2)
            again.feed()
            self._check_whole("unharmed", stage, [good, again], "beside one that raised")

    # -- what is left ----------------------------------------------------------------------------------------------

    def test_an_id_that_is_used_again_is_new(self) -> None:
        """Rule reuse: an id that is used again at once, however its last life ended, sees nothing of that life."""
        self._references(2)
        with self._stage() as stage:
            for generation, leave in enumerate(("cancelled", "failed", "stopped", "complete")):
                (old,) = self._half_done(stage, 0, name="r", generation=2 * generation)
                self._leave(stage, old, leave)
                new = self._begin(stage, 1, "r", 2 * generation + 1)
                new.feed()
                self._check_whole("reuse", stage, [new], f"after a life that was {leave}")
                stage.until_ended("reuse", old)

    def _leave(self, stage: StageDriver, life: Life, how: str) -> None:
        match how:
            case "cancelled":
                stage.before.fail(life.identity, cause(Outcome.CANCELLED, "client left"))
            case "failed":
                stage.before.fail(life.identity, cause(Outcome.ERROR, "boom"))
            case "stopped":
                stage.after.stop(life.identity, cause(Outcome.CANCELLED, "the listener left"))
            case _:
                life.feed()

    def test_nothing_is_left_of_requests_that_are_over(self) -> None:
        """Rule residue: once requests are over, however they ended, stage and runner hold nothing of them."""
        with self._stage() as stage:
            lives = self._half_done(stage, 0, 1, 2)
            self._leave(stage, lives[0], "failed")
            self._leave(stage, lives[1], "stopped")
            lives[2].feed()
            stage.until_ended("residue", *lives)

            def held() -> dict[str, int]:
                own = {f"held.{name}": count for name, count in self.held().items() if count}
                return stage.residue() | own

            stage.until("residue", lambda: f"{held()} did not go", lambda: not held())

    # -- deaths ----------------------------------------------------------------------------------------------------

    def test_the_death_of_the_stage_before_ends_what_is_open(self) -> None:
        """Rule peer-lost: what was open ends with error(peer_lost). Rule serves: the stage serves whoever comes after."""
        self._references(3)
        lost = Cause(Outcome.ERROR, "peer_lost")
        with self._stage() as stage:
            lives = self._half_done(stage, 0, 1)
            stage.before.die()
            for life in lives:
                self._check_ended("peer-lost", stage, life, lost, words=", though the stage before died")
            stage.before.return_as_new()
            self._serves(stage, "before")

    def test_the_death_of_the_stage_after_ends_what_is_open(self) -> None:
        """Rule peer-lost: the stage before is told so, and the runner stops. Rule serves: and goes on with the next."""
        self._references(3)
        with self._stage() as stage:
            lives = self._half_done(stage, 0, 1)
            stage.after.die()
            for identity in [life.identity for life in lives if not stage.ended(life)]:
                words = f"no stop of {identity} came, though the stage after died"
                stage.until("peer-lost", words, partial(stage.before.stops.__contains__, identity))
                told = stage.before.stops[identity]
                if told.reason != "peer_lost" and told.outcome is not Outcome.DONE:
                    broken("peer-lost", f"the stage after died, and the stage before was told {told} of {identity}")
            stage.after.return_as_new()
            self._serves(stage, "after")

    def _serves(self, stage: StageDriver, which: str) -> None:
        side = stage.before if which == "before" else stage.after
        stage.until("serves", f"the new stage {which} was not met", lambda: side.is_met)
        life = self._begin(stage, 2)
        life.feed()
        self._check_whole("serves", stage, [life], f"after the stage {which} had died and come back")

    def test_a_shutdown_ends_everything(self) -> None:
        """Rule shutdown: what is open ends with cancelled(shutdown), up and down the pipeline, within the grace."""
        self._references(2)
        why = Cause(Outcome.CANCELLED, "shutdown")
        with self._stage(loop_rule="shutdown") as stage:
            lives = self._half_done(stage, 0, 1)
            if not stage.shutdown("shutdown"):
                broken(
                    "shutdown", f"the ends of {' and '.join(str(life.identity) for life in lives)} were not out in time"
                )
            for life in lives:
                self._check_ended("shutdown", stage, life, why)
                if not stage.output(life).ended_ok:
                    words = f"the stage before was not told that {life.identity} is over"
                    stage.until("shutdown", words, partial(stage.before.stops.__contains__, life.identity))
            stage.cycle(2)
