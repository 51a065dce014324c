"""Where a run begins, and what it comes to: told before its state is made, from what stands in its folder."""

from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from colonnade.checkpoint.load import check_model
from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.names import newest_step
from colonnade.config.compare import model_metadata
from colonnade.config.schema import Config
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.mesh import Axis
from colonnade.train import rollbacks
from colonnade.train.best import evaluations_since_best, none_better
from colonnade.train.change import Change, behind
from colonnade.train.change_requests import behind_each, foreseen, from_now_on
from colonnade.train.corpus import Corpus, curriculum_of
from colonnade.train.metadata import metadata_of
from colonnade.train.newest import find
from colonnade.train.recovery import check_metadata
from colonnade.train.run_folder import checkpoints

_STEP_AND_CHANGES = TypeAdapter(tuple[int, list[Change]])


def from_here(config: Config, ranks: Axis) -> list[Config]:
    """As `from_now_on` behind the newest checkpoint, on all ranks by what rank 0 reads. `config`: as begun."""
    text = ""
    if ranks.rank == 0:
        step = newest_step(checkpoints(Path(config.run.folder)))
        text = _STEP_AND_CHANGES.dump_json((step, foreseen(config, step))).decode()
    step, changes = _STEP_AND_CHANGES.validate_json(gather_texts(text, ranks)[0])
    return behind_each(config, changes, step)


def beginning_of(config: Config, corpus: Corpus) -> str:
    """Where a run would begin, with nothing read but manifests. CheckpointError for what `resume` refuses, but for what
    only the tensors of a checkpoint show. `config`: as begun.
    """
    run = Path(config.run.folder)
    path = find(run)
    if path is None:
        return "begin with step 1"
    manifest = read_manifest(path)
    check_model(path, manifest, model_metadata(config.model, corpus.vocab_size))
    check_metadata(config, corpus, path, manifest)
    train = from_now_on(config, manifest.step)[0].train
    if manifest.step >= train.steps:
        return f"do nothing: {path} is at step {manifest.step:,} of train.steps = {train.steps:,}"
    since = evaluations_since_best(run, until=manifest.step)
    if train.patience and since >= train.patience:
        return f"do nothing: {path} is at step {manifest.step:,}, and {none_better(since, train.patience)}"
    metadata = metadata_of(path, manifest)
    config = behind(config, metadata.changes)
    corpus = replace(corpus, curriculum=curriculum_of(config))
    rollbacks.check_left(config, corpus, metadata, rollbacks.read(run))
    return f"go on from {path} with step {manifest.step + 1:,}"
