"""The command: which way a conversion goes, and what its options mean."""

import re
from decimal import Decimal
from pathlib import Path

import torch

from colonnade.convert.adapted import has_adapters
from colonnade.convert.foreign import is_foreign, open_foreign, what_it_is
from colonnade.convert.freed import give_back_freed_memory
from colonnade.convert.to_checkpoint import check_new, to_checkpoint
from colonnade.convert.to_huggingface import to_huggingface
from colonnade.convert.to_peft import to_peft
from colonnade.errors import CheckpointError, ConfigError
from colonnade.huggingface.folder import HUB_ID
from colonnade.model.precision import DTYPES
from colonnade.serving.options import chosen
from colonnade.serving.trained import find
from colonnade.storage import as_given, not_here

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SMALLEST = 10**3
LARGEST_FILE = "5GB"
"""Of a folder of Hugging Face, where nothing else is asked for."""


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str | None,
    max_shard_size: str | None,
    dry_run: bool,
    best: bool,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    base: Path | None = None,
) -> None:
    """Convert `source` and print what was done. A ColonnadeError says what cannot be."""
    give_back_freed_memory()
    kind, most_bytes = _dtype(dtype), _size(max_shard_size or LARGEST_FILE)
    if is_foreign(source):
        if best:
            raise ConfigError(f"--best is of a run's checkpoints, and {source} is {what_it_is(source)}. Leave it out.")
        _check_not_cut(max_shard_size, f"{source} becomes a checkpoint")
        check_new(target)
        lines = to_checkpoint(open_foreign(source, tokenizer, vocab_size, base), target, dtype=kind, dry_run=dry_run)
    else:
        _check_source(source)
        for option, value in (("--tokenizer", tokenizer), ("--vocab-size", vocab_size), ("--base", base)):
            if value is not None:
                raise ConfigError(
                    f"{option} is of weights that others wrote, and {source} is a checkpoint. Leave it out."
                )
        checkpoint = find(chosen(source, best))
        if has_adapters(checkpoint):
            _check_not_cut(max_shard_size, f"{source} has adapters, which become a single file")
            lines = to_peft(checkpoint, target, dtype=kind, dry_run=dry_run)
        else:
            lines = to_huggingface(checkpoint, target, dtype=kind, most_bytes=most_bytes, dry_run=dry_run)
    print("\n".join(lines), flush=True)


def _check_not_cut(max_shard_size: str | None, what_becomes: str) -> None:
    if max_shard_size is not None:
        raise ConfigError(
            f"--max-shard-size is of a folder of Hugging Face that is written, and {what_becomes}. Leave it out."
        )


def _check_source(source: Path) -> None:
    if source.is_file():
        raise CheckpointError(
            f"{source} is a file, and no GGUF. Name the folder that holds it: of Hugging Face with its config.json, or "
            "a checkpoint."
        )
    if not source.exists():
        hub = HUB_ID.fullmatch(str(source))
        fetch = (
            f" If it is a model of the hub, fetch it first, for nothing is downloaded here: `hf download {source} "
            f"--local-dir {source.name}`, and then convert {source.name}."
            if hub
            else ""
        )
        raise CheckpointError(
            f"{as_given(source)} does not exist: there is no such folder.{fetch}{not_here(source)} Name a folder "
            "of Hugging Face, a checkpoint or a run."
        )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ConfigError(f"--dtype {name!r}: there is no such number format. Use {', '.join(DTYPES)}.")
    return None if name is None else DTYPES[name]


def _size(text: str) -> int:
    """'5GB' -> 5,000,000,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    size = Decimal(match[1]) * UNITS.get(match[2].upper(), 0) if match else 0
    if size < SMALLEST:
        raise ConfigError(f"--max-shard-size {text!r} is no size of at least 1KB. Write it as 5GB, 500MB or 2GiB.")
    return int(size)
