"""What others write: which kind a path is, and how it is opened."""

from pathlib import Path

from colonnade.checkpoint.names import MANIFEST
from colonnade.convert.to_checkpoint import tokenizer_at
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.gguf.header import is_gguf
from colonnade.gguf.source import open_gguf
from colonnade.gguf.tokenizer import tokenizer_in
from colonnade.huggingface.folder import Published, is_published, open_published
from colonnade.huggingface.peft import is_peft, open_peft
from colonnade.megatron.ranks import is_megatron
from colonnade.megatron.source import open_megatron, true_vocabulary

NONE = "none in the folder"
"""Why there is no tokenizer."""


def is_foreign(source: Path) -> bool:
    """Whether a path is of a kind that others write."""
    if source.is_file():
        return is_gguf(source)
    known = is_peft(source) or is_published(source) or is_megatron(source)
    return source.is_dir() and not (source / MANIFEST).exists() and known


def what_it_is(source: Path) -> str:
    """In words."""
    if source.is_file():
        return "a GGUF file"
    if is_peft(source):
        return "a folder of adapters"
    return "a folder of Hugging Face" if is_published(source) else "a checkpoint of Megatron-LM"


def open_foreign(
    source: Path, tokenizer: Path | None, vocab_size: int | None, base: Path | None
) -> tuple[Published, Tokenizer | str]:
    """Weights, and the tokenizer or in words why there is none. `tokenizer`: in the place of the source's own;
    `vocab_size`: rows that are tokens, where a table is padded; `base`: of adapters. A ColonnadeError says what is
    wrong.
    """
    if base is not None and not is_peft(source):
        raise ConfigError(f"--base is of adapters, and {source} is {what_it_is(source)}. Leave it out.")
    if vocab_size is not None and (source.is_file() or is_peft(source) or is_published(source)):
        raise ConfigError(
            f"--vocab-size is of the padded tables of Megatron-LM, and {source} is {what_it_is(source)}. Leave it out."
        )
    if source.is_file():
        published, header = open_gguf(source)
        return published, tokenizer_in(header) if tokenizer is None else _named(tokenizer)
    if is_peft(source):
        merged = open_peft(source, base)
        own = tokenizer_at(source) or tokenizer_at(merged.folder)
        return merged, own or NONE if tokenizer is None else _named(tokenizer)
    known = tokenizer_at(source) if tokenizer is None else _named(tokenizer)
    if is_published(source):
        return open_published(source), known or NONE
    size = None if known is None else known.vocab_size
    published = open_megatron(source, lambda found: true_vocabulary(found, given=vocab_size, tokenizer=size))
    return published, known or NONE


def _named(path: Path) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except DataError as error:
        raise CheckpointError(f"--tokenizer {path}: {error}") from None
