"""How the samples of every kind of model are made (`model.kind` and `model.head`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from colonnade.config.schema import Config
from colonnade.data.bert_dataset import pair_samples_of
from colonnade.data.datasets import SampleKind
from colonnade.data.example_dataset import example_samples_of
from colonnade.data.gpt_dataset import TextSamples, cut_of
from colonnade.data.preference_dataset import preference_samples_of
from colonnade.data.span_dataset import span_answer_samples_of
from colonnade.data.t5_dataset import span_samples_of
from colonnade.data.tokenizer import Tokenizer

SAMPLE_KINDS: Mapping[tuple[str, str], Callable[[Config, Tokenizer | None], SampleKind]] = MappingProxyType(
    {
        ("gpt", "pretraining"): lambda config, _: TextSamples(cut_of(config.data)),
        ("gpt", "preferences"): preference_samples_of,
        ("bert", "pretraining"): pair_samples_of,
        ("bert", "classification"): example_samples_of,
        ("bert", "choice"): example_samples_of,
        ("bert", "spans"): span_answer_samples_of,
        ("bert", "none"): example_samples_of,
        ("t5", "pretraining"): span_samples_of,
    }
)


def samples_of(config: Config, tokenizer: Tokenizer | None) -> SampleKind:
    """How a run's samples are made. DataError where its tokenizer lacks what they need."""
    return SAMPLE_KINDS[config.model.kind_and_head](config, tokenizer)
