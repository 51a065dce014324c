"""What the reference model thinks of all answers, computed once by the run's own model before its first step.

At its first step a run on preferences is its reference: both are the weights of train.init_from. So a first pass over
all pairs, on the run's own layout and without dropout, writes their log-probabilities to a file, and no second model
takes memory. The file names the weights and the data that it is of, and what weights were drawn by that train.init_from
lacks; a run with others refuses it.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
import torch

from colonnade.architecture.families import architecture_of
from colonnade.atomic import written
from colonnade.config.compare import model_metadata
from colonnade.config.schema import Config
from colonnade.data.loader import evaluation_batches
from colonnade.data.preference_dataset import Floats, PreferenceDataset
from colonnade.data.sampler import InOrder
from colonnade.errors import ConfigError, DataError, raise_passing
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.tasks.preferences import PreferenceBatch, Preferences
from colonnade.train.base import content_together, of_same_files
from colonnade.train.corpus import Corpus
from colonnade.train.init_from import origin_together
from colonnade.train.monitor import Monitor
from colonnade.train.state import TrainState

FILE = "reference.npz"
OF = "of"
DRAWN = "drawn weights"
LATER = ("model", "precision", DRAWN)  # what files of earlier versions do not say
_INSTEAD = (
    "Put the run's own file back, or name it in preferences.reference. Before a run's first step it can be removed: it "
    "is made anew."
)


def attach(state: TrainState, config: Config, corpus: Corpus, mesh: Mesh, monitor: Monitor) -> None:
    """Give every pair of `corpus` what the reference thinks of it; every rank calls this before the first step.

    Reads the file, or makes it where the run begins; raises what `stored` does.
    """
    if config.model.head != "preferences":
        return
    path, parts = path_of(config), _parts(corpus)
    found = stored(config, corpus, mesh, step=state.step)
    if found is None:
        known = _known(config, corpus, mesh)
        monitor.say(f"Reading {sum(map(len, parts.values())):,} pairs with the weights of the reference, once.")
        made = {name: _computed(state, corpus, part, config, mesh) for name, part in parts.items()}
        state.inference.close()
        on_all_ranks(lambda: _write(path, known, made) if mesh.rank == 0 else None, mesh.world)
        found = made
    for name, part in parts.items():
        part.reference = found[name]


def stored(config: Config, corpus: Corpus, mesh: Mesh, *, step: int) -> dict[str, Floats] | None:
    """The log-probabilities in the file of a run on preferences, by part; None: there is no file yet, and nothing is
    read. Every rank calls this. DataError if the file is of other weights or data, ConfigError where it is gone, as a
    run that has done `step` steps needs it.
    """
    path = path_of(config)
    if all_reduce(torch.tensor(int(path.is_file())), mesh.world, "max"):
        known = _known(config, corpus, mesh)
        return on_all_ranks(lambda: read(path, known, _parts(corpus)), mesh.world)
    if step > 0:
        raise ConfigError(
            f"{path} is gone: it has what the reference model thinks of the answers, which the weights of step "
            f"{step:,} cannot tell any more. Restore it, or begin anew in another run.folder."
        )
    return None


def path_of(config: Config) -> Path:
    """Where the reference's log-probabilities are."""
    return Path(config.preferences.reference or Path(config.run.folder) / FILE)


def attach_stored(config: Config, corpus: Corpus) -> None:
    """Give the pairs of `corpus` what the run's file says. DataError if it is of other data, or not there."""
    if config.model.head != "preferences":
        return
    path, parts = path_of(config), _parts(corpus)
    if not path.is_file():
        raise DataError(
            f"{path} is not there: what the reference model thinks of the answers is not known, beside which they are "
            "measured. Restore the run's folder, or name the file in preferences.reference."
        )
    found = read(path, {"data": _data(corpus)}, parts)
    for name, part in parts.items():
        part.reference = found[name]


def read(path: Path, known: dict[str, Any], parts: dict[str, PreferenceDataset]) -> dict[str, Floats]:
    """The log-probabilities [samples, 2] of every part. DataError if they are not those of `known`, DiskError where
    the file cannot be read for a while.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays[OF]))
            found = {name: arrays[name] for name in parts if name in arrays}
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise_passing(path, error)
        raise DataError(f"{path} has no log-probabilities of a reference model ({error}). {_INSTEAD}") from error
    if "weights" in known and isinstance(about.get("weights"), dict):
        about["weights"] = of_same_files(about["weights"], known["weights"])
    for what in known:
        if about.get(what, known[what] if what in LATER else None) != known[what]:
            raise DataError(
                f"{path} has log-probabilities of other {what} than the run's:\n  {_line(about.get(what))}\n  "
                f"{_line(known[what])} (the run's)\n{_INSTEAD}"
            )
    for name, part in parts.items():
        if name not in found or found[name].shape != (len(part), 2) or not np.isfinite(found[name]).all():
            raise DataError(f"{path} has no log-probabilities of all {len(part):,} pairs of {name}. {_INSTEAD}")
    return found


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _known(config: Config, corpus: Corpus, mesh: Mesh) -> dict[str, Any]:
    """What log-probabilities depend on."""
    source = config.train.init_from
    assert source is not None, "the config check asks for it"
    model = model_metadata(config.model, corpus.vocab_size)
    about: dict[str, Any] = {
        "data": _data(corpus),
        "seq_length": config.model.seq_length,
        "model": json.loads(json.dumps(model)),
        "precision": config.train.precision,
    }
    if all_reduce(torch.tensor(int(Path(source).is_dir())), mesh.world, "min"):  # a run that goes on can do without
        origin = origin_together(Path(source), mesh.world)
        about["weights"] = content_together(origin.path, mesh.world)
        stated = architecture_of(config.model, corpus.vocab_size)  # without adapters: new ones change nothing yet
        if origin.leaves_drawn(stated.weights()):
            about[DRAWN] = {"train.seed": config.train.seed, "model.init_std": config.model.init_std}
    return about


def _data(corpus: Corpus) -> dict[str, str]:
    return {key: str(identity) for key, identity in corpus.identities.items()}


def _parts(corpus: Corpus) -> dict[str, PreferenceDataset]:
    """Every run of documents that the run reads, by name."""
    datasets = corpus.datasets
    named = {"train": datasets.train, "validation": datasets.validation, "test": datasets.test}
    return {
        f"{name}.{number}": cast(PreferenceDataset, part)
        for name, dataset in named.items()
        if dataset is not None
        for number, part in enumerate(dataset.parts)
    }


@torch.no_grad()
def _computed(state: TrainState, corpus: Corpus, part: PreferenceDataset, config: Config, mesh: Mesh) -> Floats:
    """Log-probabilities [samples, 2] of all pairs, the same on every rank: shared by the dp ranks, and summed over dp
    and pp.
    """
    task, model = state.task, cast(Any, state.model)
    assert isinstance(task, Preferences), "pairs of answers"
    order, part.order = part.order, InOrder(len(part))
    device = next(state.model.parameters()).device
    table = torch.zeros(len(part), 2, dtype=torch.float64)
    batches = evaluation_batches(
        partial(corpus.load, part),
        len(part),
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=mesh.data.rank,
        dp_size=mesh.data.size,
    )
    for batch in batches:
        assert isinstance(batch, PreferenceBatch), "pairs of answers"
        found = task.log_probs(model, batch.to(device), state.inference.hidden)
        counted = batch.pair_mask > 0
        if found is not None:
            table[batch.samples[counted]] = found[0].cpu()[counted]
    part.order = order
    return np.asarray(all_reduce(all_reduce(table.to(device), mesh.data), mesh.pp).cpu().numpy())


def _write(path: Path, known: dict[str, Any], found: dict[str, Floats]) -> None:
    with written(path) as stream:
        np.savez(stream, **{OF: np.array(_line(known)), **found})  # type: ignore[arg-type]
