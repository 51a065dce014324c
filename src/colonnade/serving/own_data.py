"""A checkpoint measured on the held-out parts of its own run's data, as the run itself measures them.

Only on the very files that it was trained on: of others the part may be text that the model has read.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from colonnade.checkpoint.manifest import read_manifest
from colonnade.config.schema import Config
from colonnade.data.datasets import Dataset
from colonnade.errors import CheckpointError, ConfigError
from colonnade.evaluation.perplexity import Perplexity
from colonnade.mesh.mesh import Mesh
from colonnade.serving.measure import Report, about
from colonnade.serving.measured import HELD_OUT, Measured
from colonnade.serving.trained import Trained
from colonnade.train.corpus import Corpus, open_together
from colonnade.train.data_record import other_data
from colonnade.train.held_out import evaluate_part
from colonnade.train.metadata import metadata_of
from colonnade.train.reference import attach_stored


def measure_part(
    trained: Trained,
    mesh: Mesh,
    checkpoint: Path,
    name: str,
    *,
    samples: int | None,
    batch_size: int | None,
    as_json: bool,
) -> None:
    """Print what the run's own evaluations tell, of its part `name`, "validation" or "test" (rank 0 prints).

    `checkpoint`: the folder that `trained` comes from. `samples`: at most so many, of which `batch_size` are read at
    once; None: as the run's own evaluations.
    """
    config = trained.config
    corpus = _opened(checkpoint, config, mesh)
    attach_stored(config, corpus)
    part, note = _part(corpus, config, checkpoint, name), _not_known(checkpoint, corpus)
    wanted = config.train.evaluate_samples if samples is None else samples
    at_once = config.train.micro_batch_size if batch_size is None else batch_size
    result = evaluate_part(
        trained.model, part, corpus, mesh, hidden=trained.hidden, samples=wanted, micro_batch_size=at_once
    )
    known = about(trained, mesh, checkpoint, None)
    if mesh.rank != 0:
        return
    read = min(wanted, len(part))
    notes = [f"the first {read:,} of {len(part):,} samples of the {name} part; --samples reads more"]
    notes = [*(notes if read < len(part) else []), *([note] if note else []), *corpus.other_labels]
    found = {**asdict(cast(Any, result.found)), **result.found.numbers()}  # fields too: they were there first
    found.pop("notes", None)
    numbers = {"part": name, "samples": read, "samples_of_part": len(part), **found}
    if result.each:
        numbers["data_sets"] = {which: each.numbers() for which, each in result.each.items()}
    told = "\n  ".join([result.found.summary(), *result.of_each()])
    protocol = "perplexity" if isinstance(result.found, Perplexity) else HELD_OUT
    measured = Measured(protocol, {"batch_size": at_once}, numbers, told, tuple(notes))
    Report(measured, known).show(as_json=as_json)


def own_corpus(trained: Trained, mesh: Mesh, checkpoint: Path) -> list[Path]:
    """The prefixes of the token files that a checkpoint was trained on. CheckpointError where they are not those."""
    corpus = _opened(checkpoint, trained.config, mesh)
    training = [file for key, file in corpus.files.items() if key not in ("data.validation", "data.test")]
    return [Path(file.prefix) for file in training]


def _opened(checkpoint: Path, config: Config, mesh: Mesh) -> Corpus:
    """What [data] names, with the checkpoint's own tokenizer. CheckpointError if it is not what was trained on."""
    metadata = metadata_of(checkpoint, read_manifest(checkpoint))
    if metadata.merged_from.head == "preferences":
        raise CheckpointError(
            f"{checkpoint} was merged from a run on preferences, whose data are pairs of answers: it is a model of "
            f"text. {_either('evaluate that run', *_without_parts(config))}"
        )
    tokenizer = checkpoint / "tokenizer.json"
    data = config.data.model_copy(update={"tokenizer": str(tokenizer)})
    corpus = open_together(config.model_copy(update={"data": data}), mesh.world)
    found = other_data(metadata, corpus)
    if found:
        raise CheckpointError(
            f"{checkpoint} was trained on other data than its [data] names now:\n"
            + "\n".join(f"  {line}" for line in found)
            + "\nA part of it may be text that the model has read. "
            + _either("restore the files as they were", *_without_parts(config))
        )
    return corpus


def _part(corpus: Corpus, config: Config, checkpoint: Path, name: str) -> Dataset:
    parts = {"validation": corpus.datasets.validation, "test": corpus.datasets.test}
    part = parts[name]
    if part is None:
        others = [
            f"measure the {other} part with --part {other}" for other, found in parts.items() if found is not None
        ]
        raise ConfigError(
            f"the run of {checkpoint} has no {name} part: its data.split = {config.data.split!r} leaves no sample for "
            f"it, and data.{name} is not set. {_either(*others, *_without_parts(config))}"
        )
    return part


def _without_parts(config: Config) -> list[str]:
    """What can be done with data that are not the run's."""
    if config.model.kind == "gpt":
        return ["measure a text that it has not read with --data FILE"]
    labels = config.model.head in ("classification", "choice", "spans")
    return ["predict the examples of a file with `colonnade predict`"] if labels else []


def _either(*ways: str) -> str:
    told = ", or ".join(ways) or "train with a data.split that leaves some"
    return f"{told[0].upper()}{told[1:]}."


def _not_known(checkpoint: Path, corpus: Corpus) -> str:
    if metadata_of(checkpoint, read_manifest(checkpoint)).data is not None:
        return ""
    files = ", ".join(file.prefix for file in corpus.files.values())
    return f"the checkpoint does not know its data: whether {files} are the files that it was trained on is not checked"
