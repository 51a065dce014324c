"""How the samples of every kind of model are made (`model.kind`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from colonnade.config.schema import Config
from colonnade.data.bert_dataset import pair_samples_of
from colonnade.data.datasets import SampleKind
from colonnade.data.gpt_dataset import TextSamples, cut_of
from colonnade.data.t5_dataset import span_samples_of
from colonnade.data.tokenizer import Tokenizer

SAMPLE_KINDS: Mapping[str, Callable[[Config, Tokenizer | None], SampleKind]] = MappingProxyType(
    {"gpt": lambda config, _: TextSamples(cut_of(config.data)), "bert": pair_samples_of, "t5": span_samples_of}
)


def samples_of(config: Config, tokenizer: Tokenizer | None) -> SampleKind:
    """How a run's samples are made. DataError where its tokenizer lacks what they need."""
    return SAMPLE_KINDS[config.model.kind](config, tokenizer)
