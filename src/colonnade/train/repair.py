"""Copies that differ: the rank is named, and the run goes on from state that is sound.

    return    to the last checkpoint: before it was written all copies were equal. The result is that of a run
              without the fault, to the bit
    mend      ranks that stand against a majority get its state. Nothing is lost, but gradients that a wrong copy has
              computed since the last comparison stay in the sums; where no majority is alike, return

At most restarts.limit times from one checkpoint: copies that differ again are no accident.
"""

from dataclasses import replace
from pathlib import Path

from colonnade.checkpoint.copies import Verdict, verdict
from colonnade.checkpoint.names import newest_step
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, CopiesError
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.layout import ranks_in_words
from colonnade.train import recovery, undo
from colonnade.train.base import content_together
from colonnade.train.corpus import Corpus
from colonnade.train.divergence import COPIES_DIFFER, RETURNS
from colonnade.train.init_from import fill_base_
from colonnade.train.memory_copies import MemoryCopies
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import checkpoints
from colonnade.train.state import TrainState


class Repair:
    """What was repaired so far in this process."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._tries: list[int] = []
        """The steps of the checkpoints that were the newest at each repair."""

    def __call__(
        self,
        state: TrainState,
        found: CopiesError,
        config: Config,
        corpus: Corpus,
        saving: recovery.Checkpoints,
        copies: MemoryCopies,
    ) -> bool:
        """Whether the state is an earlier one now; every rank calls this. Raises `found` if it is not repaired."""
        policy = config.checkpoint.unequal_copies
        if policy == "stop":
            raise found
        saving.wait_out(state)  # else what is under way would be newer than what the run returns to
        newest = _newest(state, config)
        if self._tries.count(newest) >= config.restarts.limit:
            raise found
        judged = verdict(found.by_rank)
        step = state.step
        returned = policy == "return" or judged.undecided or not _mend(state, judged, saving)
        if returned and newest == 0:
            raise found
        self._tries.append(newest)
        try:
            if returned:
                copies.forget()  # else a restart would go on from behind it, and lines of these steps be missing
                return_with_base(state, config, corpus, self.monitor)
        except ColonnadeError:
            self._tell(step, judged, found, f"cannot return to step {newest}")
            raise
        does = f"{RETURNS} to step {state.step}" if returned else "goes on with the majority's state"
        self._tell(step, judged, found, does)
        return returned

    def _tell(self, step: int, judged: Verdict, found: CopiesError, does: str) -> None:
        who = f"{ranks_in_words(judged.suspects)} against the majority" if judged.suspects else "no majority is alike"
        differs = sorted({copy.rpartition(" of ")[0] for each in found.by_rank for copy in each})
        self.monitor.event(
            COPIES_DIFFER, step=step, ranks=list(judged.suspects), what=differs[:8], then=does, reason=who
        )
        self.monitor.say(f"{found}\nAt step {step}: {who}. The run {does}.")


def return_with_base(state: TrainState, config: Config, corpus: Corpus, monitor: Monitor) -> None:
    """As `undo.return_to_newest`, and the base of adapters, which no checkpoint has, is read again: it may be what
    differs. CheckpointError where another lies there, or none. Every rank calls this.
    """
    if state.base is not None:  # it may have changed since
        state.base = replace(state.base, files=content_together(state.base.path, state.ownership.mesh.world))
    undo.return_to_newest(state, config, corpus, monitor)
    if state.base is not None:
        fill_base_(state)


def _newest(state: TrainState, config: Config) -> int:
    """The step of the newest checkpoint, as rank 0 sees it; 0 for none."""
    world = state.ownership.mesh.world
    step = newest_step(checkpoints(Path(config.run.folder))) if world.rank == 0 else 0
    return int(broadcast_text(str(step), world))


def _mend(state: TrainState, judged: Verdict, saving: recovery.Checkpoints) -> bool:
    saving.copies(state).mend_(judged.sound)
    try:
        saving.compare(state)
    except CopiesError:
        return False
    return True
