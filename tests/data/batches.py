"""Samples of text as a run takes them."""

from collections.abc import Sequence

from colonnade.data.datasets import Dataset
from colonnade.data.loader import Batch
from colonnade.tasks.gpt import LanguageModeling


def load_batch(dataset: Dataset, positions: Sequence[int]) -> Batch:
    """The samples at positions [b] of a run."""
    return LanguageModeling().batch(dataset.rows(positions), positions)
