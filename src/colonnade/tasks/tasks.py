"""Every task by the model that it trains: `model.kind` and `model.head`."""

from collections.abc import Mapping
from types import MappingProxyType

from colonnade.tasks.bert import MaskedPairs
from colonnade.tasks.gpt import LanguageModeling
from colonnade.tasks.labels import Labels
from colonnade.tasks.preferences import Preferences
from colonnade.tasks.spans import Spans
from colonnade.tasks.t5 import SpanCorruption
from colonnade.tasks.task import Task

TASKS: Mapping[tuple[str, str], Task] = MappingProxyType(
    {
        ("gpt", "pretraining"): LanguageModeling(),
        ("gpt", "preferences"): Preferences(),
        ("bert", "pretraining"): MaskedPairs(),
        ("bert", "classification"): Labels(),
        ("bert", "choice"): Labels(),
        ("bert", "spans"): Spans(),
        ("bert", "none"): Labels(),
        ("t5", "pretraining"): SpanCorruption(),
    }
)
