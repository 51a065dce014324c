"""What was published with weights, beside their numbers: which tokens begin and end a text, and how text is drawn.

A run that begins from them keeps it in the metadata of its checkpoints, and what is made of these says it again. A run
on conversations ends an answer besides with the token that its template ends one with.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colonnade.checkpoint.confined import read_plain
from colonnade.checkpoint.manifest import Manifest, check_hash, remedy
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.tokenizer_config import control_tokens
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import read_json
from colonnade.huggingface.folder import GENERATION_CONFIG, TOKEN_IDS, Published, ids_in
from colonnade.tokenizer_files import CONFIG
from colonnade.train.metadata import MOST_BYTES, PublishedMetadata, metadata_of

_END = "eos_token_id"


def published_at(path: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> PublishedMetadata | None:
    """With the weights of a checkpoint, or with those that its run began from; None of a run that began from none.
    CheckpointError where a file of it is damaged.
    """
    came = manifest.metadata.get("converted_from")
    if not isinstance(came, dict):
        return metadata_of(path, manifest).published
    generation, names = (object_of(path, manifest, name) for name in (GENERATION_CONFIG, CONFIG))
    return _published(came, generation, names, tokenizer)


def published_in(published: Published, tokenizer: Tokenizer | None) -> PublishedMetadata:
    """With a folder of Hugging Face. CheckpointError where a file of it cannot be read."""
    files = [published.folder / name for name in (GENERATION_CONFIG, CONFIG)]
    generation, names = (read_json(file) if file.is_file() else {} for file in files)
    return _published(published.facts, generation, names, tokenizer)


def _published(
    config: Mapping[str, Any], generation: Mapping[str, Any], names: Mapping[str, Any], tokenizer: Tokenizer | None
) -> PublishedMetadata:
    """Where neither configuration says what ends a text, it is the tokenizer's token of that name."""
    found = PublishedMetadata(ids={key: config[key] for key in TOKEN_IDS if key in config}, generation=dict(generation))
    name = control_tokens(names).get("eos_token")
    end = None if tokenizer is None or name is None else tokenizer.id_of(name)
    return found if ends_said(found) or end is None else found.model_copy(update={"ids": {**found.ids, _END: end}})


def ends_said(published: PublishedMetadata) -> list[int]:
    """The tokens that end a text: for transformers, what generation_config.json says goes before config.json."""
    return ids_in(published.generation.get(_END)) or ids_in(published.ids.get(_END))


def ends_of(path: Path, manifest: Manifest, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text of a checkpoint's model: those that were published. None where nobody says any, and
    of a run whose documents have an end. CheckpointError where a file of it is damaged.
    """
    published = published_at(path, manifest, tokenizer)
    if published is not None:
        return frozenset(ends_said(published))
    if tokenizer.end_of_document is not None:
        return frozenset()
    name = control_tokens(object_of(path, manifest, CONFIG)).get("eos_token")
    found = None if name is None else tokenizer.id_of(name)
    return frozenset(() if found is None else (found,))


def object_of(path: Path, manifest: Manifest, name: str) -> Mapping[str, Any]:
    """A file of JSON in a checkpoint; empty where it is not there, or holds something else. CheckpointError if it is
    damaged.
    """
    if name not in manifest.files:
        return {}
    check_hash(path, manifest, name)
    try:
        content = json.loads(read_plain(path / name, MOST_BYTES))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path / name} is damaged: it is no JSON. {remedy(path)}") from None
    return content if isinstance(content, dict) else {}
