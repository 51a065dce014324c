"""Every kind of model by the name that `model.kind` gives it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from colonnade.architecture.activations import Kept, Microbatch
from colonnade.architecture.gpt import KEPT, gpt
from colonnade.architecture.statement import Architecture
from colonnade.config.schema import ModelConfig


class Family(NamedTuple):
    """What is stated of one kind of model."""

    architecture: Callable[[ModelConfig, int], Architecture]
    """Given [model] and the vocabulary's size."""
    kept: Mapping[str, Callable[[Microbatch], Kept]]
    """What a micro-batch leaves in a unit of each `Unit.kind`."""


FAMILIES: Mapping[str, Family] = MappingProxyType({"gpt": Family(gpt, KEPT)})


def architecture_of(model: ModelConfig, vocab_size: int) -> Architecture:
    """The statement of the model that [model] describes."""
    return FAMILIES[model.kind].architecture(model, vocab_size)


def kept_of(batch: Microbatch) -> dict[str, Kept]:
    """What a micro-batch leaves in a unit of each kind."""
    return {kind: kept(batch) for kind, kept in FAMILIES[batch.model.kind].kept.items()}
