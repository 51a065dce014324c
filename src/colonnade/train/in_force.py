"""The configuration that is in force, while a run goes on: changes are read by rank 0 and made by all at one step.

    rank 0     a look at changes.jsonl after each step (one stat)
    all        its answer travels with what ranks ask each other then anyway: has anybody pressed Ctrl-C?
    all        only where it is new: what rank 0 has decided, as text
    all        behind a change's step: the same configuration, data and learning rate, made anew

Nothing is sent at the step of a change itself: every rank has known it since it was decided.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from colonnade.config.compare import difference
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, DiskError
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.train.change import Change, Expected, earlier_blends, in_force
from colonnade.train.change_requests import (
    Decided,
    Line,
    is_request,
    lines_of,
    read_decided,
    to_come,
    write_decided,
)
from colonnade.train.changes import other_curve
from colonnade.train.corpus import Corpus, open_together
from colonnade.train.counted_labels import check_scored, is_scored
from colonnade.train.monitor import Monitor
from colonnade.train.reference import attach_stored
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import CHANGES
from colonnade.train.state import TrainState, learning_rate_of, optimizer_of

CHANGED, REFUSED = "changed", "change refused"
"""Events."""
MOST_SHOWN = 500
"""Characters of a line."""


class InForce:
    """Which configuration a run follows; every rank has one, and they are alike."""

    def __init__(self, config: Config, corpus: Corpus, mesh: Mesh, monitor: Monitor) -> None:
        """`config` and `corpus`: as the run began."""
        self._began, self._corpus, self._mesh, self._monitor = config, corpus, mesh, monitor
        self._run = Path(config.run.folder)
        self._decided = read_decided(self._run) if mesh.rank == 0 else Decided()
        self._followed: list[Change] = []
        self._last_look: tuple[int, int, int] | None = None
        self._torn, self._waiting = "", False

    def has_news(self) -> bool:
        """On rank 0: whether changes.jsonl is another than at the last look. It stays so until `read` has looked."""
        return self._mesh.rank == 0 and self._signature() != self._last_look

    def read(self, step: int, returns: Sequence[Rollback]) -> None:
        """Decide what is new in changes.jsonl, at a run that has done `step` steps, with these rollbacks; every rank
        calls this.
        """
        if self._mesh.rank == 0:
            self._look(step, returns)
        text = self._decided.model_dump_json() if self._mesh.rank == 0 else ""
        self._decided = Decided.model_validate_json(broadcast_text(text, self._mesh.world))

    def is_over(self, state: TrainState) -> bool:
        """Whether another configuration is in force than `follow` gave last: at a change's step, or behind a return to
        a checkpoint from before one.
        """
        return state.changes != self._followed or any(each.at == state.step for each in self._to_come(state))

    def prolongs(self, state: TrainState) -> bool:
        """Whether a change behind the step that `state` has done makes the run longer than that."""
        return any(each.at == state.step < each.values.get("train.steps", 0) for each in self._to_come(state))

    def follow(self, state: TrainState) -> tuple[Config, Corpus]:
        """What is in force from the next step on, with all changes of the last one made; every rank calls this.
        ConfigError where it would evaluate what nothing counts in, DiskError where data cannot be read for a while.
        """
        config, corpus = self._at(state.changes)
        coming = self._to_come(state)
        for number, change in enumerate(coming, 1):
            if change.at != state.step:
                break
            made = change.model_copy(update={"position": state.samples})
            try:
                found = self._at([*state.changes, made])
                before, then = (Expected(each, state.step, state.samples) for each in (config, found[0]))
                before.check_leads_to(then, coming[number:], corpus.training, found[1].training)
                if is_scored(config, corpus, self._mesh.world, step=state.step):  # else a change to come may mend it
                    check_scored(*found, self._mesh.world, step=state.step)
            except DiskError:
                raise
            except ColonnadeError as error:
                self._refuse(change, str(error))
                continue
            self._say(made, config, found[0], state.rollbacks)
            config, corpus = found
            state.changes = [*state.changes, made]
        check_scored(config, corpus, self._mesh.world, step=state.step)
        state.learning_rate = learning_rate_of(config, state.rollbacks)
        state.optimizer = optimizer_of(config)
        train, patient = config.train, config.checkpoint.retry_for > 0
        self._monitor.follow(steps=train.steps, log_every=train.log_every, patient=patient)
        self._followed = list(state.changes)
        return config, corpus

    def _at(self, changes: Sequence[Change]) -> tuple[Config, Corpus]:
        config, corpus = opened_in_force(self._began, self._corpus, changes, self._mesh.world)
        if corpus is not self._corpus:
            on_all_ranks(lambda: attach_stored(config, corpus), self._mesh.world)
        return config, corpus

    def _to_come(self, state: TrainState) -> list[Change]:
        return to_come(self._decided, state.changes, state.step)

    def _signature(self) -> tuple[int, int, int]:
        try:
            found = (self._run / CHANGES).stat()
        except OSError:
            return 0, 0, 0
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _look(self, step: int, returns: Sequence[Rollback]) -> None:
        """Rank 0: what is decided stands on the disk before anybody follows it. Else it is decided at a later look."""
        before, self._last_look = self._decided, self._signature()
        decided = before
        try:
            for line in lines_of(self._run):
                if line.known_as not in decided.known and not self._may_grow(line):
                    decided = decided.with_line(line, self._began, step, returns)
            if decided != before:
                write_decided(self._run, decided)
        except OSError as error:
            self._last_look = None
            waiting, self._waiting = self._waiting, True
            self._monitor.say("" if waiting else f"Changes of the run wait: {error}.")
            return
        self._decided, self._waiting = decided, False
        for each in decided.changes[len(before.changes) :]:
            self._monitor.say(f"Behind step {each.at:,} changes: {each}{each.asked}.")
        for refusal in decided.refused[len(before.refused) :]:
            self._report_refused(refusal.text, refusal.reason, step)

    def _may_grow(self, line: Line) -> bool:
        """Whether a line without an end that is no request is seen for the first time: somebody may be writing it."""
        if line.is_whole or line.text == self._torn or is_request(line.text):
            return False
        self._torn, self._last_look = line.text, None
        return True

    def _refuse(self, change: Change, reason: str) -> None:
        """Every rank: a change whose step has come cannot be made."""
        self._decided = self._decided.refuse(change, reason)
        if self._mesh.rank == 0:
            with suppress(OSError):  # it will be refused again for the same reason
                write_decided(self._run, self._decided)
        self._report_refused(str(change), reason, change.at)

    def _report_refused(self, text: str, reason: str, step: int) -> None:
        self._monitor.event(REFUSED, step=step, asked=text[:MOST_SHOWN], reason=reason)
        self._monitor.say(f"{CHANGES}: {text[:MOST_SHOWN]} is refused, and the run goes on as it is: {reason}")

    def _say(self, change: Change, before: Config, now: Config, rollbacks: Sequence[Rollback]) -> None:
        lines = difference(before, now)
        about = {"by": change.by, "reason": change.reason}
        self._monitor.event(
            CHANGED, step=change.at, changed=lines, **{name: each for name, each in about.items() if each}
        )
        self._monitor.say(f"Changed behind step {change.at:,}{change.asked}: {'; '.join(lines) or 'nothing'}.")
        for said in other_curve(before, now, change.at, rollbacks):
            self._monitor.say(said)


def opened_in_force(began: Config, corpus: Corpus, changes: Sequence[Change], ranks: Axis) -> tuple[Config, Corpus]:
    """What is in force behind these changes, with their positions, and what is read then: opened anew where it is not
    `corpus`, that of the run as it began. Every rank calls this.
    """
    config, earlier = in_force(began, changes), earlier_blends(began, changes)
    if not earlier and _reads(config) == _reads(began):
        return config, corpus
    return config, open_together(config, ranks, earlier)


def _reads(config: Config) -> tuple[object, ...]:
    """What of a configuration decides what is opened, and in which order it is read."""
    return config.data, config.curriculum, config.train.global_batch_size, bool(config.train.evaluate_every)
