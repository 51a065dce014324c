"""The tokenizer of weights that others wrote, and the files that belong to it, such as its chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from colonnade.data.chat_template import folder_of
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, DataError
from colonnade.huggingface.tokenizer import tokenizer_in
from colonnade.storage import as_given
from colonnade.tokenizer_files import CONFIG, NAMES, templates_in

OF_TOKENIZER = (CONFIG, NAMES)
"""Files of theirs that are of the tokenizer, beside chat templates in files of their own."""


class TheirTokenizer(NamedTuple):
    """A tokenizer, found."""

    tokenizer: Tokenizer | str
    """Or in words why there is none."""
    folder: Path | None = None
    """Where it lies; None: in no folder."""
    beside: tuple[Path, ...] = ()
    """Files that belong to it; where there is none, those that lie in the folder all the same."""
    left: tuple[Path | str, ...] = ()
    """Files that lie in the folders of the weights and belong to another tokenizer; or in words what else does."""
    config: Mapping[str, Any] = MappingProxyType({})
    """What a tokenizer that lies in no folder has in the place of a tokenizer_config.json."""


def find_tokenizer(named: Path | None, folders: Sequence[Path]) -> TheirTokenizer:
    """The tokenizer that is named, or that of the first folder that has one. Files beside it belong to it; where it
    lies alone, those beside the same tokenizer in the first other folder that has it. CheckpointError if it cannot be
    read.
    """
    if named is not None:
        known, at = _named(named), folder_of(named)
    else:
        found = ((tokenizer, folder) for folder in folders if (tokenizer := tokenizer_in(folder)) is not None)
        first = next(found, None)
        if first is None:
            return TheirTokenizer("none in the folder", beside=_files_in(folders[-1]))
        known, at = first
    others = [folder for folder in folders if folder.resolve() != at.resolve() and _files_in(folder)]
    same = [folder for folder in others if _has(folder, known)]
    beside = next((files for folder in (at, *same) if (files := _files_in(folder))), ())
    left = [path for folder in others if folder not in same for path in _files_in(folder)]
    return TheirTokenizer(known, at, beside, tuple(left))


def _named(path: Path) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except DataError as error:
        raise CheckpointError(f"--tokenizer {as_given(path)}: {error}") from None


def _files_in(folder: Path) -> tuple[Path, ...]:
    return (*(path for name in OF_TOKENIZER if (path := folder / name).is_file()), *templates_in(folder))


def _has(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether a folder's own tokenizer is this one. One that cannot be read is another."""
    try:
        own = tokenizer_in(folder)
    except CheckpointError:
        return False
    return own is not None and own.sha256 == tokenizer.sha256
