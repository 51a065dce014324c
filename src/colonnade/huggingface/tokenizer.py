"""The tokenizer of a published folder."""

from pathlib import Path

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, DataError

_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """None where there is none. CheckpointError if it cannot be read."""
    if not any((folder / name).exists() for name in _FILES) and not any(folder.glob("[!.]*.model")):
        return None
    try:
        return Tokenizer.load(folder)
    except DataError as error:
        raise CheckpointError(
            f"The tokenizer of {folder} cannot be read: {error} Or remove its files to take the weights alone."
        ) from None
