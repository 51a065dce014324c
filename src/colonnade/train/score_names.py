"""The names of what a run's evaluations find, known before it starts: the score of a sweep is one of them.

Takes no torch. `tests/train/test_score_names.py` holds the names against what the tasks' evaluations find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from colonnade.config.check import Problem
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError

BYTES = "bits_per_byte"
_OF_TASKS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("gpt", "pretraining"): ("loss", "perplexity", BYTES),
        ("gpt", "preferences"): ("loss", "reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"),
        ("bert", "pretraining"): (
            *("loss", "masked_loss", "masked_accuracy"),
            *("sentence_order_loss", "sentence_order_accuracy"),
        ),
        ("bert", "choice"): ("loss", "accuracy"),
        ("bert", "spans"): ("loss", "start_accuracy", "end_accuracy", "span_accuracy"),
        ("t5", "pretraining"): ("loss", "perplexity", "accuracy"),
    }
)
"""By `model.kind` and `model.head`; of labels it depends on how many there are."""
_KEYS = frozenset(
    {
        *("model.kind", "model.head", "model.num_labels", "data.tokenizer", "data.split", "data.validation"),
        *("data.blend", "data.questions", "train.evaluate_every"),
    }
)


def score_names(config: Config) -> list[str]:
    """As metrics.jsonl has them, less `validation_`, but for `of_each`; none where nothing is evaluated."""
    data = config.data
    if config.train.evaluate_every == 0 or not (data.validation or data.shares[1]):
        return []
    names = _of_task(config.model)
    if BYTES in names and not _tells_bytes(data.tokenizer):
        names.remove(BYTES)
    return [*names, *(("exact_match", "f1") if data.questions is not None else ())]


def of_each(config: Config) -> list[str]:
    """What stands behind a score's name and a `/` where it is of one data set of a blend."""
    files = list(config.data.blend or ())
    return data_set_names(files) if config.data.validation is None and len(files) > 1 else []


def data_set_names(prefixes: Sequence[str]) -> list[str]:
    """Of token files: the last part of each prefix, or the whole of those that share it."""
    times = Counter(Path(prefix).name for prefix in prefixes)
    return [Path(prefix).name if times[Path(prefix).name] == 1 else prefix for prefix in prefixes]


def score_problems(score: str, config: Config, uncertain: Collection[str]) -> list[Problem]:
    """Whether a sweep's score is none that the run will have, as far as keys that are not `uncertain` tell."""
    if _KEYS & set(uncertain):
        return []
    names, sets = score_names(config), of_each(config)
    if score in names or score in (f"{name}/{each}" for name in names for each in sets):
        return []
    if not names:
        message = (
            f'sweep.score = "{score}", and the runs are not evaluated. Set train.evaluate_every to 1 or more, with '
            "data.validation or a second part in data.split."
        )
    else:
        message = no_such_score(score, [*names, *(f"{names[0]}/{each}" for each in sets)])
    return [Problem(message, ("train.evaluate_every",))]


def no_such_score(score: str, there: Collection[str]) -> str:
    """What to say of a sweep's score that there is not."""
    return f'sweep.score = "{score}" is none of the scores: {", ".join(there)}. Name one of them.'


def _of_task(model: ModelConfig) -> list[str]:
    if model.kind_and_head != ("bert", "classification"):
        return list(_OF_TASKS.get(model.kind_and_head, ()))
    if model.num_labels == 1:
        return ["loss", "pearson", "spearman"]
    return ["loss", "accuracy", *(("f1", "matthews") if model.num_labels == 2 else ())]


def _tells_bytes(tokenizer: str | None) -> bool:
    """Whether a tokenizer's tokens stand for certain bytes, for all that is known of one that cannot be read."""
    from colonnade.data.tokenizer import Tokenizer

    try:
        return tokenizer is not None and Tokenizer.load(tokenizer).is_byte_level
    except ColonnadeError:
        return True
