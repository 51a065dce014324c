"""Every task by the kind of model that it trains (`model.kind`)."""

from collections.abc import Mapping
from types import MappingProxyType

from colonnade.tasks.bert import MaskedPairs
from colonnade.tasks.gpt import LanguageModeling
from colonnade.tasks.t5 import SpanCorruption
from colonnade.tasks.task import Task

TASKS: Mapping[str, Task] = MappingProxyType({"gpt": LanguageModeling(), "bert": MaskedPairs(), "t5": SpanCorruption()})
