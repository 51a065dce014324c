"""Figures of the Megatron-LM paper, to stand beside one's own.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
(arXiv 1909.08053), sections 5.2 (GPT-2, zero-shot) and 5.3 (BERT, fine-tuned; development sets, RACE: test set).
Fine-tuned figures are medians over five seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SOURCE = "Megatron-LM (arXiv 1909.08053), sections 5.2 and 5.3"


@dataclass(frozen=True)
class Published:
    """What a model of the paper reached in a task."""

    model: str
    figures: Mapping[str, float]
    """By the name and in the unit that the score has here: answers in percent, labels and choices as shares."""
    note: str = ""


def _share(percent: float) -> float:
    return round(percent / 100, 4)


def _berts(name: str, *figures: float, note: str = "") -> tuple[Published, ...]:
    sizes = ("BERT 336M", "BERT 1.3B", "BERT 3.9B")
    return tuple(Published(size, {name: _share(figure)}, note) for size, figure in zip(sizes, figures, strict=True))


def _spans(*figures: tuple[float, float], note: str) -> tuple[Published, ...]:
    sizes = ("BERT 336M", "BERT 1.3B", "BERT 3.9B")
    return tuple(
        Published(size, {"f1": f1, "exact_match": exact}, note)
        for size, (f1, exact) in zip(sizes, figures, strict=True)
    )


PUBLISHED: Mapping[str, tuple[Published, ...]] = MappingProxyType(
    {
        "mnli": (
            *_berts("accuracy", 89.7, 90.9, 91.4, note="matched"),
            *_berts("accuracy", 90.0, 91.0, 91.4, note="mismatched"),
        ),
        "qqp": _berts("accuracy", 92.3, 92.6, 92.7),
        "squad": (
            *_spans((94.2, 88.0), (94.9, 89.1), (95.5, 90.0), note="SQuAD 1.1"),
            *_spans((88.1, 84.8), (90.2, 87.1), (91.2, 88.5), note="SQuAD 2.0"),
        ),
        "race": (
            *_berts("accuracy", 83.0, 87.3, 89.5, note="test set"),
            Published("BERT 3.9B, five together", {"accuracy": 0.909}, "test set"),
        ),
        "wikitext103": (
            Published("GPT-2 355M", {"perplexity": 19.31}),
            Published("GPT-2 2.5B", {"perplexity": 12.76}),
            Published("GPT-2 8.3B", {"perplexity": 10.81}),
        ),
        "lambada": (
            Published("GPT-2 355M", {"accuracy": 0.4518}),
            Published("GPT-2 2.5B", {"accuracy": 0.6173}),
            Published("GPT-2 8.3B", {"accuracy": 0.6651}),
        ),
    }
)
"""By the name of the format that examples are read from, or of the evaluation."""
