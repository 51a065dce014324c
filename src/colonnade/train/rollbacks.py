"""The rollbacks of a run: rollbacks.json in its folder, and what they do to a state.

A checkpoint knows the rollbacks that came before it. Those behind it that return to it are in the file: they are
applied to what is read from it, in this process or in the next. So a run that is killed in the middle of a rollback
goes on with it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pydantic import TypeAdapter

from colonnade.checkpoint.folders import discard_after
from colonnade.checkpoint.manifest import Manifest, looked_at, read_manifest, remedy, verify
from colonnade.checkpoint.names import checkpoints_in, folder_name
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.errors import CheckpointError, ColonnadeError
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.mesh import Axis
from colonnade.pace import say_aside
from colonnade.train.change import Change, Expected, ahead, as_it_began, behind
from colonnade.train.change_requests import Decided, began_with, decided_and_asked, read_decided, to_come
from colonnade.train.corpus import Corpus, curriculum_of, open_corpus, position_at
from colonnade.train.divergence import BY_HAND, ROLLED_BACK
from colonnade.train.lines import objects_in
from colonnade.train.metadata import RunMetadata, metadata_of
from colonnade.train.monitor import EVENTS, Monitor, set_aside, write_event
from colonnade.train.not_removed import by_line
from colonnade.train.rollback import LIST, Rollback, in_force, read, write
from colonnade.train.rollback_options import RollbackOptions
from colonnade.train.run_folder import COPIES, ROLLBACKS, checkpoints
from colonnade.train.state import TrainState, learning_rate_of

_CHANGES = TypeAdapter(list[Change])


def ids_told(run: Path) -> set[str]:
    """The ids of all rollbacks that a run's events tell of: rollbacks.json forgets those that a later one undoes."""
    told = (event.get("id") for event in objects_in(run / EVENTS) if event.get("event") == ROLLED_BACK)
    return {each for each in told if isinstance(each, str) and each}


def tell_untold(state: TrainState, run: Path, monitor: Monitor) -> None:
    """On rank 0: make events of those rollbacks behind which a state is that the run was killed too early to tell."""
    if state.rollbacks and state.ownership.mesh.rank == 0:
        told = ids_told(run)
        for each in state.rollbacks:
            if each.id and each.id not in told:
                monitor.event(ROLLED_BACK, **each.model_dump())


def read_together(run: Path, ranks: Axis) -> list[Rollback]:
    """As `read`, on all ranks what rank 0 reads."""
    text = LIST.dump_json(read(run)).decode() if ranks.rank == 0 else ""
    return LIST.validate_json(broadcast_text(text, ranks))


def forget_behind(run: Path, step: int) -> None:
    """Of a run that goes on from a step: forget the rollbacks to later ones, whose checkpoints were damaged, or are
    gone. Else what is saved from here on, which knows nothing of them, would look as if it were to be taken away.
    """
    recorded = read(run)
    if recorded and recorded[-1].to > step:  # else those to later steps are not in force
        write(run, [each for each in recorded if each.to <= step])


class Unfinished(NamedTuple):
    """A rollback that was killed before it had taken away all checkpoints behind its step."""

    to: int
    """Its step."""
    checkpoint: Path
    """Which it returns to."""
    later: tuple[int, ...]
    """The steps of these checkpoints."""


def unfinished(run: Path) -> Unfinished | None:
    """What there is to do of a rollback that was killed; None for nothing. Where the checkpoint that it returned to is
    not there, the run has gone on since, perhaps from an older one. Where none behind it can be read, they stay for
    whoever sets aside what is damaged.

    CheckpointError where events tell that the rollback was done: somebody has put such a checkpoint there since.
    """
    recorded = read(run)
    saved = checkpoints_in(checkpoints(run)) if recorded else {}
    if not saved or recorded[-1].to not in saved:
        return None
    last, later = recorded[-1], tuple(step for step in saved if step > recorded[-1].to)
    newest = _newest_readable(saved[step] for step in later)
    if newest is None or last in newest.rollbacks:
        return None
    if last.id in ids_told(run):
        raise CheckpointError(
            f"{saved[newest.step]} is of the course that the run has left by its rollback to step {last.to}, and came "
            f"there since. To go on from it, remove the last entry of {run / ROLLBACKS}; to go on behind the rollback, "
            f"move it out of {checkpoints(run)}."
        )
    return Unfinished(last.to, saved[last.to], later)


def finish(run: Path, *, dry_run: bool = False) -> None:
    """Do the rest of a rollback that was killed. CheckpointError where the checkpoint that it returns to is damaged:
    nothing is changed then. `dry_run`: only say what that would be, and read no tensor.
    """
    found = unfinished(run)
    if found is None:
        return
    try:
        _sound(checkpoints_in(checkpoints(run)), found.to, looked_at if dry_run else _verified)
    except CheckpointError as error:
        raise CheckpointError(
            f"The run was killed in its rollback to step {found.to}, which cannot be finished: {error} To return to "
            f"one of them: `colonnade rollback {run} STEP`."
        ) from None
    gone = ", ".join(map(str, found.later))
    if dry_run:
        text = "would be finished first: the checkpoints of steps {} would be deleted. What follows is as behind that."
    else:
        discard_after(checkpoints(run), found.to, by_line(run))
        text = "is finished: the checkpoints of steps {} are deleted."
    print(f"The rollback to step {found.to} {text.format(gone)}", flush=True)


def _newest_readable(saved: Iterable[Path]) -> RunMetadata | None:
    """The metadata of the last of these checkpoints whose manifest can be read."""
    for path in reversed(list(saved)):
        with suppress(ColonnadeError, OSError):
            return metadata_of(path, read_manifest(path))
    return None


def by_hand(run: Path, step: int, asked: RollbackOptions) -> tuple[Rollback, list[int]]:
    """Return to the checkpoint of a step; also the steps of the checkpoints that were deleted. CheckpointError where
    it is not there or damaged, ConfigError where the data would end before the run: nothing is changed then.

    Whoever calls this holds the run's folder. Earlier rollbacks that the checkpoint is not behind are undone with it:
    those to its step or a later one, and where it is of a course that they had left.
    """
    saved = checkpoints_in(checkpoints(run))
    if step not in saved:
        there = ", ".join(str(each) for each in saved) or "none"
        raise CheckpointError(
            f"{checkpoints(run)} has no {folder_name(step)}: a run returns to a step that it has saved. There are "
            f"checkpoints of these steps: {there}."
        )
    known = _sound(saved, step, _verified).rollbacks
    rollback = Rollback(
        to=step,
        skip=asked.skip,
        rate_factor=asked.rate_factor,
        rate_until=step + asked.rate_steps if asked.rate_steps else 0,
        rewarm_steps=asked.rewarm,
        reason=BY_HAND,
        id=uuid4().hex,
    )
    past = read(run)
    before = [each for each in past if each.to < step and each in known]
    if rollback.skip:
        rollback = _measured_by_hand(rollback, run, saved, before, past)
        _check_data_left(run, saved[step], [*before, rollback])
    (run / COPIES).unlink(missing_ok=True)
    write(run, [*before, rollback])
    discard_after(checkpoints(run), step, by_line(run))
    set_aside(run, step)
    write_event(run, ROLLED_BACK, **rollback.model_dump())
    return rollback, [each for each in saved if each > step]


def _sound(saved: Mapping[int, Path], step: int, check: Callable[[Path], Manifest]) -> RunMetadata:
    """The metadata of the checkpoint of a step, to which a run is to return. CheckpointError where `check` finds it
    damaged.
    """
    path, others = saved[step], ", ".join(str(each) for each in saved if each != step) or "none"
    try:
        return metadata_of(path, check(path))
    except CheckpointError as error:
        reason = str(error).removesuffix(remedy(path)).rstrip()
        raise CheckpointError(
            f"{reason} The run does not return to it, and is as it was. Other checkpoints are of these steps: {others}."
        ) from None


def _verified(path: Path) -> Manifest:
    """Every byte of it is the one that was written. It takes a while, which is said."""
    say_aside(f"Checking every byte of {path} …")
    return verify(path)


def _measured_by_hand(
    rollback: Rollback, run: Path, saved: Mapping[int, Path], recorded: Sequence[Rollback], past: Sequence[Rollback]
) -> Rollback:
    """By the newest checkpoint that can be read, and what was decided behind it."""
    decided = read_decided(run)
    began, to = began_with(run, decided), metadata_of(saved[rollback.to], read_manifest(saved[rollback.to]))
    newest = _newest_readable(saved.values()) or to
    returns = _to_do(past, newest.step, newest.rollbacks)
    at = Expected(behind(began, newest.changes), newest.step, newest.samples, returns)
    left = ahead(at, to_come(decided, newest.changes, newest.step))
    return measured(rollback, curriculum_of(left.config), to, recorded, past)


def measured(
    rollback: Rollback,
    curriculum: Curriculum,
    metadata: RunMetadata,
    recorded: Sequence[Rollback],
    past: Sequence[Rollback],
) -> Rollback:
    """With the batches that it passes over. `curriculum`: of the course that it leaves, with all changes of it;
    `metadata`: of the checkpoint that it returns to; `past`: the rollbacks before it, of which `recorded` stay. Batches
    that others have passed over behind its step on that course count, with the sizes that those had.
    """
    start, step, sizes = _position(curriculum, metadata, recorded), rollback.to, list[int]()
    others = (each for each in in_force(past) if each.to >= rollback.to)
    for each in (other for other in others if other.to > rollback.to or other not in recorded):
        sizes += curriculum.sizes(each.to - step, start + sum(sizes))
        sizes += each.sizes(start + sum(sizes), curriculum)
        step = each.to
    sizes += curriculum.sizes(rollback.skip - len(sizes), start + sum(sizes))
    taken = sizes[: rollback.skip]
    batches = [[len(list(alike)), size] for size, alike in groupby(taken)]
    return rollback.model_copy(update={"passed": sum(taken), "batches": batches})


def _position(curriculum: Curriculum, metadata: RunMetadata, recorded: Sequence[Rollback]) -> int:
    """Where a run goes on in the data behind a checkpoint, with the rollbacks that return to it."""
    position = metadata.samples
    for each in _to_do(recorded, metadata.step, metadata.rollbacks):
        position = each.behind(position, curriculum)
    return position


def _check_data_left(run: Path, checkpoint: Path, recorded: Sequence[Rollback]) -> None:
    """ConfigError where data that end would do so before the run; nothing where they cannot be read from here."""
    began = began_with(run, read_decided(run))
    if began.data.order == "all_epochs" or began.data.blend_by == "epochs":
        try:
            corpus = open_corpus(began, lasts=False)
        except ColonnadeError:
            return
        check_left(began, corpus, metadata_of(checkpoint, read_manifest(checkpoint)), recorded, run)


def check_left(
    began: Config, corpus: Corpus, metadata: RunMetadata, recorded: Sequence[Rollback], run: Path | None = None
) -> None:
    """ConfigError where too little data is left behind a checkpoint, with the rollbacks that return to it and the
    changes that come behind it, or where these cannot be read. `began`: as the run began. `run`: its folder, if not
    where that says.
    """
    config = behind(began, metadata.changes)
    position = _position(curriculum_of(config), metadata, recorded)
    coming = _to_come(began, metadata.step, metadata.changes, run)
    Expected(config, metadata.step, position).check_lasts(corpus.training, coming)


def _to_come(began: Config, step: int, done: Sequence[Change], run: Path | None = None) -> list[Change]:
    """The changes behind a step, as the run's folder tells. ConfigError where it does not."""
    return to_come(Decided(changes=tuple(decided_and_asked(began, step, run))), done, step)


def _to_do(recorded: Sequence[Rollback], step: int, done: Sequence[Rollback]) -> list[Rollback]:
    """What returns to the checkpoint of a step, and is not behind it yet."""
    return [each for each in in_force(recorded) if each.to == step and each not in done]


def apply(
    state: TrainState, config: Config, corpus: Corpus, recorded: Sequence[Rollback], done: Sequence[Rollback]
) -> None:
    """What rollbacks change in a state that was read from a checkpoint: the place in the data, and the learning rate.

    `done`: those that the checkpoint knows. ConfigError where too little data is left, or the changes to come cannot
    be read. Every rank calls this.
    """
    to_do = _to_do(recorded, state.step, done)
    for each in to_do:
        state.samples = each.behind(state.samples, corpus.curriculum)
    state.rollbacks = [*done, *to_do]
    state.passed_over = position_at(corpus.curriculum, state.step, state.rollbacks)[1]
    state.learning_rate = learning_rate_of(config, state.rollbacks)
    coming = _to_come_together(as_it_began(config, state.changes), state)
    Expected(config, state.step, state.samples).check_lasts(corpus.training, coming)


def _to_come_together(began: Config, state: TrainState) -> list[Change]:
    """As `_to_come`, on all ranks what rank 0 reads. DiskError on all where that is not to be had for a while."""
    world = state.ownership.mesh.world
    coming = on_all_ranks(lambda: [] if world.rank else _to_come(began, state.step, state.changes), world)
    return _CHANGES.validate_json(broadcast_text(_CHANGES.dump_json(coming).decode(), world))
