"""Where a run begins, and what it comes to: told before its state is made, from what stands in its folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from colonnade.checkpoint.load import check_model
from colonnade.checkpoint.manifest import Manifest, read_manifest
from colonnade.checkpoint.names import folder_name, newest_step
from colonnade.config.compare import model_metadata
from colonnade.config.schema import Config
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.train import reference, rollbacks, taught
from colonnade.train.base import check_base, content_together
from colonnade.train.best import evaluations_since_best, none_better
from colonnade.train.change import Change, Expected, ahead, by_step
from colonnade.train.change_requests import foreseen, returns_of
from colonnade.train.corpus import Corpus
from colonnade.train.counted_labels import check_scored
from colonnade.train.in_force import opened_in_force
from colonnade.train.init_from import Origin
from colonnade.train.metadata import metadata_of
from colonnade.train.newest import find
from colonnade.train.recovery import check_metadata
from colonnade.train.rollback import Rollback, read
from colonnade.train.run_folder import checkpoints

_FOUND = TypeAdapter(tuple[int, list[Change], tuple[Rollback, ...]])


class Course(NamedTuple):
    """What a run is to be, from where it goes on."""

    now: Config
    """In force in its next step."""
    whole: Config
    """Behind all changes to come that can be made."""
    returns: tuple[Rollback, ...]
    """The rollbacks that it is made of."""
    refused: tuple[str, ...]
    """Changes to come that it will refuse, each with its step and the reason."""
    made: tuple[Change, ...] = ()
    """The changes that lead to `now`, with their positions."""


def course_of(config: Config, corpus: Corpus, ranks: Axis, seen: Manifest | None = None) -> Course:
    """Behind the newest checkpoint, on all ranks by what rank 0 reads: a sentence for each change that will be refused,
    of those that are too long for their data too. ConfigError where the data of a run that begins end before it does;
    one that goes on is checked from its checkpoint (`rollbacks.apply`). `config`, `corpus`: as begun. `seen`: what rank
    0 has read of the checkpoint that the run goes on from; without it the newest counts.
    """
    text = ""
    if ranks.rank == 0:
        run = Path(config.run.folder)
        step = newest_step(checkpoints(run)) if seen is None else seen.step
        text = _FOUND.dump_json((step, foreseen(config, step), tuple(returns_of(run)))).decode()
    step, changes, returns = _FOUND.validate_json(broadcast_text(text, ranks))
    start = Expected(config, rollbacks=returns)
    if not step:
        start.check_lasts(corpus.training, changes)

    def check(at: Expected, then: Expected, coming: Sequence[Change]) -> None:
        if then.step >= step:
            at.check_leads_to(then, coming, corpus.training, corpus.training)

    stages, refused = ahead(start, changes, check)
    lines = {each.line for each, _ in refused}
    can_be = zip((each for each in by_step(changes) if each.line not in lines), stages[1:], strict=True)
    made = [each.model_copy(update={"position": at.position}) for each, at in can_be if at.step <= step]
    told = (f"Behind step {each.at:,} it would refuse {each}: {why}" for each, why in refused)
    return Course(stages[len(made)].config, stages[-1].config, returns, tuple(told), tuple(made))


def beginning_of(
    config: Config, corpus: Corpus, course: Course, mesh: Mesh, origin: Origin | None, seen: Manifest | None = None
) -> str:
    """Where a run would begin, as rank 0 finds its folder; every rank calls this. Reads manifests and, where something
    is stored to hold them against, all of a published model beside it. Raises what the run's start does, but for what
    only the tensors of a checkpoint show. `config`, `corpus`: as begun. `origin`: the weights that it begins from, or
    that are beside its adapters. `seen`: as in `course_of`.
    """
    run = Path(config.run.folder)

    def found() -> str:
        if mesh.rank:
            return ""
        return str(find(run) or "") if seen is None else str(checkpoints(run) / folder_name(seen.step))

    newest = broadcast_text(on_all_ranks(found, mesh.world), mesh.world)
    path = Path(newest) if newest else None
    manifest = None if path is None else read_manifest(path)
    taught.check(config, corpus, mesh)
    if config.model.head == "preferences":
        reference.stored(config, corpus, mesh, step=0 if manifest is None else manifest.step)
    if path is None or manifest is None:
        return "begin with step 1" + ("" if origin is None else f", from the weights of {origin.path}")
    check_model(path, manifest, model_metadata(config.model, corpus.vocab_size))
    check_metadata(config, corpus, path, manifest)
    metadata = metadata_of(path, manifest)
    if metadata.base is not None and origin is not None:
        check_base(path, metadata.base, origin.path, content_together(origin.path, mesh.world))
    check_scored(*opened_in_force(config, corpus, course.made, mesh.world), mesh.world, step=manifest.step)
    train = course.now.train
    if manifest.step >= train.steps:
        return f"do nothing: {path} is at step {manifest.step:,} of train.steps = {train.steps:,}"
    since = evaluations_since_best(run, until=manifest.step)
    if train.patience and since >= train.patience:
        return f"do nothing: {path} is at step {manifest.step:,}, and {none_better(since, train.patience)}"
    rollbacks.check_left(config, corpus, metadata, read(run))
    return f"go on from {path} with step {manifest.step + 1:,}"


def seen_behind_rollback(config: Config, world: Axis) -> Manifest | None:
    """What rank 0 reads of the checkpoint that the rest of a rollback that was killed would leave as the newest, if
    there is one; every rank calls this. `rollbacks.finish` has told of the rest, and has looked whether that checkpoint
    can be whole: in the process that holds the folder, which may be another.
    """
    run = Path(config.run.folder)

    def look() -> Manifest | None:
        killed = None if world.rank else rollbacks.unfinished(run)
        return None if killed is None else read_manifest(killed.checkpoint)

    return on_all_ranks(look, world)
