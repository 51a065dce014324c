"""What was published with weights, beside their numbers: which tokens begin and end a text, and how text is sampled.

A run that begins from them keeps it in the metadata of its checkpoints, and what is made of these says it again.
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
from colonnade.huggingface.folder import GENERATION_CONFIG, START, TOKEN_IDS, Published, ids_in
from colonnade.tokenizer_files import CONFIG
from colonnade.train.metadata import MOST_BYTES, PublishedMetadata, metadata_of

SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "num_beams",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
)
"""Keys of generation_config.json that are kept, where they are numbers or true or false."""
_LARGEST = 2**53  # of a number that every reader of JSON has alike


def published_at(
    path: Path, manifest: Manifest, tokenizer: Tokenizer | None, vocab_size: int
) -> PublishedMetadata | None:
    """With the weights of a checkpoint, or with those that its run began from; None where nothing is known of that.
    `vocab_size`: ids beyond are left out. CheckpointError where a file of it is damaged.
    """
    came = manifest.metadata.get("converted_from")
    if not isinstance(came, dict):
        return _within(metadata_of(path, manifest).published, vocab_size)
    generation, names = (object_of(path, manifest, name) for name in (GENERATION_CONFIG, CONFIG))
    return _within(_published(came, generation, named_end(names, tokenizer)), vocab_size)


def published_in(published: Published, tokenizer: Tokenizer | None, vocab_size: int) -> PublishedMetadata | None:
    """Likewise with a folder of Hugging Face. CheckpointError where a file of it cannot be read."""
    files = [published.folder / name for name in (GENERATION_CONFIG, CONFIG)]
    generation, names = (read_json(file) if file.is_file() else {} for file in files)
    return _within(_published(published.facts, generation, named_end(names, tokenizer)), vocab_size)


def _published(config: Mapping[str, Any], generation: Mapping[str, Any], named: list[int]) -> PublishedMetadata:
    """For transformers, what generation_config.json says goes before config.json. `named`: what ends a text where
    neither says it. A stranger's files may say anything: what cannot mean what it should is left out.
    """
    said = [next((ids for each in (generation, config) if (ids := _tokens(each.get(key)))), ()) for key in TOKEN_IDS]
    sampling = {key: generation[key] for key in SAMPLING if _is_number(generation.get(key))}
    begin, ends, pad = said
    return PublishedMetadata(
        begin=next(iter(begin), None), ends=ends or tuple(named), pad=next(iter(pad), None), sampling=sampling
    )


def _tokens(value: object) -> tuple[int, ...]:
    return tuple(dict.fromkeys(each for each in ids_in(value) if 0 <= each < _LARGEST))


def _within(published: PublishedMetadata | None, vocab_size: int) -> PublishedMetadata | None:
    """What of it means something to a vocabulary; None where that is nothing."""
    if published is None:
        return None
    begin, pad = (each if each is not None and each < vocab_size else None for each in (published.begin, published.pad))
    ends = tuple(each for each in published.ends if each < vocab_size)
    found = published.model_copy(update={"begin": begin, "ends": ends, "pad": pad})
    return None if found == PublishedMetadata() else found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST  # no NaN is


def ends_of(path: Path, manifest: Manifest, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text of a checkpoint's model: those that were published, and of a run the one that ended
    its documents. None where nothing was published and documents have an end. CheckpointError where a file of it is
    damaged.
    """
    vocab_size = metadata_of(path, manifest).model.vocab_size
    published, own = published_at(path, manifest, tokenizer, vocab_size), tokenizer.end_of_document
    if published is not None and published.ends:
        is_run = "converted_from" not in manifest.metadata
        return frozenset({*published.ends, *([own] if is_run and own is not None else [])})
    if own is not None:
        return frozenset()
    return frozenset(named_end(object_of(path, manifest, CONFIG), tokenizer))


def with_end_of(tokenizer: Tokenizer, path: Path, manifest: Manifest) -> Tokenizer:
    """A checkpoint's tokenizer, with the token behind each document that its run was trained on. A run that does not
    say it was one of an earlier version, and has the one of that; a converted model has the one that its folder names.
    """
    said = metadata_of(path, manifest).end_of_document
    if said is None and tokenizer.own_end != tokenizer.earlier_end:
        said = tokenizer.earlier_end
        if "converted_from" in manifest.metadata:
            said = _named_alone(tokenizer, published_at(path, manifest, tokenizer, tokenizer.vocab_size))
    return tokenizer if said is None or said >= tokenizer.vocab_size else tokenizer.ending(said)


def end_behind(path: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> int | None:
    """The token that ends documents for the weights of a checkpoint; None where nothing tells."""
    if tokenizer is None:
        return metadata_of(path, manifest).end_of_document
    return with_end_of(tokenizer, path, manifest).end_of_document


def end_in(published: Published, tokenizer: Tokenizer | None) -> int | None:
    """Likewise for a folder of Hugging Face."""
    if tokenizer is None:
        return None
    return _named_alone(tokenizer, published_in(published, tokenizer, tokenizer.vocab_size))


def _named_alone(tokenizer: Tokenizer, published: PublishedMetadata | None) -> int | None:
    """The end that earlier versions took, where weights were published with it, and not with the one taken now."""
    ends = () if published is None else published.ends
    return tokenizer.earlier_end if tokenizer.earlier_end in ends and tokenizer.own_end not in ends else None


def unsaid_end(tokenizer: Tokenizer, path: Path, manifest: Manifest) -> str | None:
    """What to say of a checkpoint that leaves open which of two tokens that was; its tokenizer is `with_end_of`."""
    taken, other = tokenizer.end_of_document, tokenizer.own_end
    is_said = "converted_from" in manifest.metadata or metadata_of(path, manifest).end_of_document is not None
    if taken is None or other is None or taken == other or is_said:
        return None
    return (
        f"Note: {path} does not say which token ended the documents of its run: {tokenizer.names[taken]} is taken, as "
        f"by versions that did not write it down, and not {tokenizer.names[other]}."
    )


def start_of(manifest: Manifest, vocab_size: int) -> int | None:
    """The token that the decoder of a converted model begins with, beside its encoder; None where nothing is said, and
    for a run, which begins with that of its own tokenizer.
    """
    came = manifest.metadata.get("converted_from")
    said = _tokens(came.get(START)) if isinstance(came, dict) else ()
    return next((each for each in said if each < vocab_size), None)


def named_end(names: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    """The eos_token of a tokenizer_config.json, where the tokenizer has it."""
    name = control_tokens(names).get("eos_token")
    found = None if tokenizer is None or name is None else tokenizer.id_of(name)
    return [] if found is None else [found]


def text_of(path: Path, manifest: Manifest, name: str) -> str:
    """A file of text in a checkpoint. CheckpointError if it is damaged."""
    check_hash(path, manifest, name)
    try:
        return read_plain(path / name, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path / name} is damaged: it is not text ({error.reason}). {remedy(path)}") from None


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
