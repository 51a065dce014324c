"""A family as Hugging Face publishes it: one map of modules, read in both directions.

    theirs   transformer.h.3.attn.c_attn.weight  [h, 3h]   columns q|k|v, each by heads
    ours     blocks.3.attention.qkv.weight       [3h, h]   rows [head, (q, k, v), d]

A family states which of their modules each of our modules is (`Place`), and how config.json says what [model] says.
Which weights a model has is not stated again: it is the architecture's statement, so that a map has no entry for what
the model lacks, and shapes of theirs follow from ours.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from colonnade.architecture.families import architecture_of
from colonnade.architecture.huggingface.keys import Keys
from colonnade.architecture.statement import Weight
from colonnade.config.model import ModelConfig

_BLOCK = re.compile(r"\bblocks\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """Their modules that one of our modules is made of. More than one, or `fused` > 1: they are joined by heads."""

    names: tuple[str, ...]
    """With {i} for the number of the block."""
    conv: bool = False
    """Their matrix is [in, out] (GPT-2's Conv1D): the transpose of ours."""
    fused: int = 1
    """Their rows are [part, head, d] of so many parts; ours are [head, part, d]."""


def at(*names: str, conv: bool = False, fused: int = 1) -> Place:
    """A `Place`, written shortly."""
    return Place(names, conv, fused)


class Source(NamedTuple):
    """One of our weights, and their tensors that it is made of."""

    ours: str
    weight: Weight
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each of theirs."""
    transposed: bool
    fused: int

    @property
    def parts(self) -> int:
        """What its rows are joined of: each head has a row block of each part."""
        return len(self.theirs) * self.fused


class Second(NamedTuple):
    """A second name of a weight in their files."""

    name: str
    ours: str
    is_equal: bool
    """Whether it must be the same numbers; else nothing reads it."""
    is_written: bool
    """Whether their model wants it in its files."""


@dataclass(frozen=True)
class Family:
    """How one kind of published model is one of ours."""

    model_type: str
    """As config.json says it."""
    title: str
    architecture: str
    """The class of `transformers` that has all of the model."""
    others: tuple[str, ...]
    """Other classes that have the same tensors, or lack a tied output layer only."""
    base: str
    """Before the names of what their class without a head has; files may lack it."""
    places: Mapping[str, Place]
    """By our module, with {i} for the number of the block."""
    read: Callable[[Keys], dict[str, Any]]
    """config.json to [model]."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """[model] to config.json, as far as that can say it."""
    seconds: Callable[[ModelConfig], tuple[Second, ...]]
    constants: re.Pattern[str] = re.compile(r"(?!)")
    """Names of tensors that are no weights: masks and angles that older files hold."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys in config.json, by those that `read` takes."""
    untied_places: Mapping[str, Place] = field(default_factory=dict)
    """Places that are others where the output layer is not the token table."""

    gated_places: Mapping[str, Place] = field(default_factory=dict)
    """Places that are others where one layer of the MLP gates another."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Their classes of models with another `model.head` than that of pre-training."""
    has_decoder: bool = False
    """Whether it has an encoder and a decoder."""

    def with_head(self, head: str) -> "Family":
        """The same, whose class is the one of a head."""
        architecture = self.heads.get(head, self.architecture)
        return self if architecture == self.architecture else replace(self, architecture=architecture)

    def sources(self, model: ModelConfig, vocab_size: int) -> Iterator[Source]:
        """Every weight of ours, in the order of the model. KeyError for one that the family has no place for."""
        untied, gated = {} if model.tie_embeddings else self.untied_places, self.gated_places if model.is_gated else {}
        places = {**self.places, **untied, **gated}
        for name, weight in architecture_of(model, vocab_size).weights().items():
            source = _source(places, name, weight)
            bare = tuple(each.removeprefix(self.base) for each in source.theirs)
            yield source._replace(theirs=bare) if model.head == "none" else source

    def as_published(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """The model whose tensors these are: an encoder is without a head where its files have none, whichever class
        its config.json names.
        """
        if model.kind != "bert" or model.head not in ("pretraining", "none"):
            return model
        has_head = any(name.startswith("cls.") for name in names)
        return model.model_copy(update={"head": "pretraining" if has_head else "none"})


def _source(places: Mapping[str, Place], name: str, weight: Weight) -> Source:
    module, _, kind = name.rpartition(".")
    block = _BLOCK.search(module)
    place = places[_BLOCK.sub("blocks.{i}.", module)]
    number = block[1] if block else ""
    theirs = tuple(f"{each.replace('{i}', number)}.{kind}" for each in place.names)
    transposed = place.conv and len(weight.shape) == 2
    rows, *rest = weight.shape
    shape = (rows // len(theirs), *rest)
    return Source(name, weight, theirs, shape[::-1] if transposed else shape, transposed, place.fused)


def tied_output(model: ModelConfig, name: str = "lm_head.weight") -> tuple[Second, ...]:
    """The output layer of a language model that is its token table: files may hold it a second time."""
    return (Second(name, "embedding.tokens.weight", True, False),) if model.tie_embeddings else ()
