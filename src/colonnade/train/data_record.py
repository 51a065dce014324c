"""What a checkpoint knows of its run's data, held against the data that the run would go on with."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.schema import clip
from colonnade.config.compare import moved_files
from colonnade.config.schema import Config
from colonnade.data.identity import differences, identify
from colonnade.data.remote import open_token_file
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.train.corpus import Corpus
from colonnade.train.metadata import RunMetadata, config_of, metadata_of
from colonnade.train.questions import content_of


def data_metadata(corpus: Corpus, end_before: int | None) -> dict[str, Any]:
    """What a checkpoint is to know of the data, and of the questions that are answered at evaluations. `end_before`:
    the token that ends documents for the weights that the run began from, or goes on with; None: unknown.
    """
    own = None if corpus.tokenizer is None else corpus.tokenizer.end_of_document
    known = (corpus.end_of_document, end_before, own)
    return {
        "data": {key: identity.to_json() for key, identity in corpus.identities.items()},
        "questions": None if corpus.questions is None else corpus.questions.content,
        "end_of_document": next((end for end in known if end is not None), None),
    }


def check_data(path: Path, metadata: RunMetadata, config: Config, corpus: Corpus) -> None:
    """CheckpointError if the checkpoint in `path` was trained on other data, unless the configuration allows that."""
    if metadata.data is None:
        _check_paths(path, config)
        return
    found = other_data(metadata, corpus)
    if found and not config.checkpoint.allow_other_data:
        raise CheckpointError(
            f"{path} was trained on other data than the run would go on with:\n"
            + "\n".join(f"  {line}" for line in found)
            + f"\nSample {metadata.samples:,} of it is another one, so samples would come twice or never. Restore the "
            "files as they were (where they lie is of no consequence), or start in another run.folder. "
            "checkpoint.allow_other_data = true goes on all the same."
        )


def other_data(metadata: RunMetadata, corpus: Corpus) -> list[str]:
    """A line for each token file that is not what the checkpoint was trained on; empty where that is not known."""
    saved, now = metadata.data or {}, corpus.identities
    found = []
    for key in dict.fromkeys([*saved, *now]) if saved else ():
        if key not in now or key not in saved:
            found.append(f"{clip(key)}: {'not read any more' if key in saved else 'not read before'}")
            continue
        lines = differences(saved[key].identity(), now[key])
        found += [f"{key} ({corpus.files[key].prefix}): {'; '.join(lines)}"] if lines else []
    return found


def other_files(path: Path) -> list[str]:
    """A line for each file of [data] whose content is not what the checkpoint in `path` knows, as far as it knows some
    and the file is there.
    """
    manifest = read_manifest(path)
    metadata, data = metadata_of(path, manifest), config_of(path, manifest).data
    blend = {f"data.blend, file {number}": file for number, file in enumerate(data.blend or (), 1)}
    named = {"data.train": data.train, "data.validation": data.validation, "data.test": data.test, **blend}
    saved, found = metadata.data or {}, []
    for key, prefix in named.items():
        if key in saved and prefix is not None:
            with suppress(ColonnadeError, OSError):  # told where it is read
                now = identify(open_token_file(prefix, data.cache), num_files=len(saved))
                lines = differences(saved[key].identity(), now)
                found += [f"{key} ({prefix}): {'; '.join(lines)}"] if lines else []
    if metadata.questions is not None and data.questions is not None:
        with suppress(OSError):
            if content_of(Path(data.questions)) != metadata.questions:
                found.append(f"data.questions ({data.questions}): other content")
    return found


def what_to_say(path: Path, metadata: RunMetadata, corpus: Corpus) -> tuple[str, list[str]]:
    """(a line for who resumes from the checkpoint, or nothing; what differs)."""
    if metadata.data is None:
        return (
            f"{path.name} was written before checkpoints knew their data: whether the token files are those that it "
            "was trained on cannot be checked. The next checkpoint will know.",
            [],
        )
    found = other_data(metadata, corpus)
    lines = "".join(f"\n  {line}" for line in found)
    said = [f"Going on over other data, as checkpoint.allow_other_data = true allows:{lines}"] if found else []
    asked = _other_questions(metadata, corpus)
    return "\n".join([*said, *asked]), [*found, *asked]


def _other_questions(metadata: RunMetadata, corpus: Corpus) -> list[str]:
    """A line where data.questions has other content than it had; no training depends on it."""
    if metadata.questions is None or corpus.questions is None or metadata.questions == corpus.questions.content:
        return []
    return [
        "data.questions has other content than before: exact match and F1 of evaluations up to step "
        f"{metadata.step:,} and behind it do not compare"
    ]


def _check_paths(path: Path, config: Config) -> None:
    """Of a checkpoint that does not know its data, paths are all that there is to compare."""
    try:
        moved = moved_files(config_of(path, read_manifest(path)), config)
    except (ConfigError, CheckpointError, OSError):
        return  # by a hand or a version that is not ours: the run's folder has been compared already
    if moved:
        raise CheckpointError(
            f"{path} was written before checkpoints knew their data, and the run would go on with other files:\n"
            + "\n".join(f"  {line}" for line in moved)
            + "\nWhether they hold the same is unknown. Name the old ones until the next checkpoint is saved, which "
            "will know its data, or start in another run.folder."
        )
