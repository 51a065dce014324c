"""What others write: which kind a path is, and how it is opened."""

from functools import partial
from pathlib import Path

from colonnade.checkpoint.names import MANIFEST
from colonnade.convert.their_base import base_written, check_their_base, named_otherwise
from colonnade.convert.their_tokenizer import TheirTokenizer, find_tokenizer
from colonnade.convert.to_checkpoint import Foreign
from colonnade.errors import ConfigError
from colonnade.gguf.header import Header, is_gguf
from colonnade.gguf.source import open_gguf
from colonnade.gguf.tokenizer import config_in, has_its_tokens, tokenizer_in
from colonnade.huggingface.folder import is_published, open_published
from colonnade.huggingface.peft import is_peft, open_peft
from colonnade.megatron.ranks import is_megatron
from colonnade.megatron.source import open_megatron, true_vocabulary


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


def open_foreign(source: Path, tokenizer: Path | None, vocab_size: int | None, base: Path | None) -> Foreign:
    """Weights, and the tokenizer with what belongs to it. `tokenizer`: in the place of the source's own; `vocab_size`:
    rows that are tokens, where a table is padded; `base`: of adapters. A ColonnadeError says what is wrong.
    """
    if base is not None and not is_peft(source):
        raise ConfigError(f"--base is of adapters, and {source} is {what_it_is(source)}. Leave it out.")
    if vocab_size is not None and (source.is_file() or is_peft(source) or is_published(source)):
        raise ConfigError(
            f"--vocab-size is of the padded tables of Megatron-LM, and {source} is {what_it_is(source)}. Leave it out."
        )
    if source.is_file():
        published, header = open_gguf(source)
        return Foreign(published, _with_gguf(header, tokenizer), ())
    if is_peft(source):
        published = open_peft(source, base)
        folders = (source, published.folder)
        wanted = base_written(source)
        note = named_otherwise(source, published.folder) if wanted is None else None
        check = None if wanted is None else partial(check_their_base, source, wanted, published.folder)
        return Foreign(published, find_tokenizer(tokenizer, folders), folders, check_base=check, note=note)
    known = find_tokenizer(tokenizer, (source,))
    if is_published(source):
        return Foreign(open_published(source), known, (source,))
    size = None if isinstance(known.tokenizer, str) else known.tokenizer.vocab_size
    published = open_megatron(source, lambda found: true_vocabulary(found, given=vocab_size, tokenizer=size))
    return Foreign(published, known, (source,))


def _with_gguf(header: Header, named: Path | None) -> TheirTokenizer:
    """The tokenizer of a GGUF file, or the one that is named. The file's chat template comes with its own, and with
    one that has its tokens and lies alone; else it is left.
    """
    known = TheirTokenizer(tokenizer_in(header)) if named is None else find_tokenizer(named, ())
    config = config_in(header)
    its = known.tokenizer
    if not isinstance(its, str) and (named is None or (not known.beside and has_its_tokens(header, its))):
        return known._replace(config=config)
    return known._replace(left=(f"the chat template in {header.path}",) if config else ())
