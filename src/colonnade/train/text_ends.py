"""Which tokens end what a model writes: those that were published with its weights, or with the weights that its run
began from. A run on conversations ends an answer besides with the token that its template ends one with.
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
from colonnade.huggingface.folder import GENERATION_CONFIG, Published, ids_in
from colonnade.tokenizer_files import CONFIG
from colonnade.train.metadata import MOST_BYTES, metadata_of

_END = "eos_token_id"  # in what describes a published model


def ends_of(path: Path, manifest: Manifest, tokenizer: Tokenizer) -> frozenset[int]:
    """Of a checkpoint: what a published model says in its generation_config.json, else in its config.json, as for
    transformers, else by its tokenizer's name for one. Of a run what its metadata kept of that. None where nothing
    says it, and of a run whose documents have an end. CheckpointError where a file of it is damaged.
    """
    if kept := metadata_of(path, manifest).ends:
        return frozenset(kept)
    came = manifest.metadata.get("converted_from")
    generation, names = (object_of(path, manifest, name) for name in (GENERATION_CONFIG, CONFIG))
    return _said(generation, came if isinstance(came, dict) else None, names, tokenizer)


def ends_in(published: Published, tokenizer: Tokenizer) -> frozenset[int]:
    """Of a folder of Hugging Face. CheckpointError where a file of it cannot be read."""
    files = [published.folder / name for name in (GENERATION_CONFIG, CONFIG)]
    generation, names = (read_json(file) if file.is_file() else {} for file in files)
    return _said(generation, published.facts, names, tokenizer)


def _said(
    generation: Mapping[str, Any], published: Mapping[str, Any] | None, names: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    """`published`: what config.json said; None of a run's own model."""
    for content in (generation, published or {}):
        if ids := ids_in(content.get(_END)):
            return frozenset(ids)
    if published is None and tokenizer.end_of_document is not None:
        return frozenset()
    name = control_tokens(names).get("eos_token")
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
