"""What others write: which kind a path is, and how it is opened."""

from pathlib import Path

from colonnade.checkpoint.manifest import MANIFEST
from colonnade.convert.to_checkpoint import tokenizer_at
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.huggingface.folder import Published, is_published, open_published
from colonnade.megatron.ranks import is_megatron
from colonnade.megatron.source import open_megatron, true_vocabulary


def is_foreign(source: Path) -> bool:
    """Whether a path is of a kind that others write."""
    return source.is_dir() and not (source / MANIFEST).exists() and (is_published(source) or is_megatron(source))


def what_it_is(source: Path) -> str:
    """In words."""
    return "a folder of Hugging Face" if is_published(source) else "a checkpoint of Megatron-LM"


def open_foreign(source: Path, tokenizer: Path | None, vocab_size: int | None) -> tuple[Published, Tokenizer | None]:
    """Weights and tokenizer. `tokenizer`: in the place of the folder's own; `vocab_size`: rows that are tokens, where a
    table is padded. A ColonnadeError says what is wrong.
    """
    if is_published(source):
        if vocab_size is not None:
            raise ConfigError(
                f"--vocab-size is of padded tables, and the config.json of {source} says it. Leave it out."
            )
        published = open_published(source)
        return published, _tokenizer(source, tokenizer)
    known = _tokenizer(source, tokenizer)
    size = None if known is None else known.vocab_size
    return open_megatron(source, lambda found: true_vocabulary(found, given=vocab_size, tokenizer=size)), known


def _tokenizer(source: Path, named: Path | None) -> Tokenizer | None:
    if named is None:
        return tokenizer_at(source)
    try:
        return Tokenizer.load(named)
    except DataError as error:
        raise CheckpointError(f"--tokenizer {named}: {error}") from None
