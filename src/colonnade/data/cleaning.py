"""A cleaning run with tokenizers: what `corpus`, which knows text only, asks of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from colonnade.corpus import run
from colonnade.corpus.recipe import Recipe
from colonnade.corpus.stages import CleaningStage
from colonnade.corpus.step import MakeCounter, Setting
from colonnade.data.token_stages import token_stages, unchanged
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.word_cache import DocumentEncoder

_DTYPE = np.dtype("<u4")


def clean(recipe: Recipe, *, progress: bool = True) -> str:
    """Runs a recipe, or what is left of it. Gives some lines for people.

    Raises DataError for inputs and named files that cannot be read, and where the folder holds another run; LockError
    where another run is at work in it.
    """
    return run.clean(recipe, Tokenizers(), progress=progress)


class Tokenizers:
    """The tokenizers that a recipe names, in use."""

    def check(self, tokenizer: str) -> None:
        """Raises DataError where a tokenizer cannot be read."""
        Tokenizer.load(tokenizer)

    def other_than_alone(self, tokenizer: str) -> str | None:
        """A tokenizer's fingerprint, where what lies beside its files makes it another than they are alone."""
        sha256 = Tokenizer.load(tokenizer).sha256
        return None if sha256 == Tokenizer.load(tokenizer, alone=True).sha256 else sha256

    def counter(self, tokenizer: str) -> MakeCounter:
        """What makes a counter of tokens; it is sent to the tasks."""
        return partial(token_counter, tokenizer, Tokenizer.load(tokenizer).sha256)

    def stages(self, recipe: Recipe, num_tasks: int, setting: Setting) -> list[CleaningStage]:
        """The stages that make token files, if the recipe has them."""
        return token_stages(recipe, num_tasks, setting)


@lru_cache(maxsize=1)
def token_counter(path: str, sha256: str) -> Callable[[str], int]:
    """Counts the tokens of a text by the tokenizer at `path`. Raises DataError where that has changed since.

    The tasks of a process share it: to load one takes half a second, and `tokenizers` gives some 2 MB of each one that
    was used never back.
    """
    encoder = DocumentEncoder(unchanged(path, sha256), _DTYPE)
    return lambda text: len(encoder.encode(text)) // _DTYPE.itemsize
