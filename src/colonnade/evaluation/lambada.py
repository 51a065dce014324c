"""LAMBADA: how often a model completes the last word of a passage, and how likely it finds that word.

    accuracy     share of passages of whose last word every token is the likeliest, given those before it
    perplexity   exp(mean over passages of the word's loss, summed over its tokens)

What the word's tokens are: `passages.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from colonnade.evaluation.continuations import Continuation, score
from colonnade.evaluation.passages import Example
from colonnade.evaluation.perplexity import Hidden, exp_of, perplexity_in_words
from colonnade.evaluation.progress import Progress
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT

BATCH_SIZE = 32
"""[passages] That are read at once, where nothing else is asked for."""


@dataclass(frozen=True)
class Lambada:
    """What an evaluation found, the same on every rank."""

    accuracy: float
    accuracy_error: float
    """Standard error of the accuracy over passages."""
    perplexity: float
    """Of the last word."""
    loss: float
    """[nats a word]"""
    passages: int
    correct: int
    target_tokens: int
    """That the last words have in all."""

    def summary(self) -> str:
        """One line for people."""
        return (
            f"accuracy {self.accuracy:.2%} ± {self.accuracy_error:.2%} ({self.correct:,} of {self.passages:,} "
            f"passages), perplexity of the last word {perplexity_in_words(self.perplexity)}"
        )


def evaluate_lambada(
    model: GPT,
    examples: Sequence[Example],
    *,
    mesh: Mesh,
    hidden: Hidden | None = None,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> Lambada:
    """Score the target of each example, with teacher forcing."""
    continuations = [Continuation(each.context, each.target) for each in examples]
    losses, greedy = score(model, continuations, mesh=mesh, hidden=hidden, batch_size=batch_size, progress=progress)
    correct, count = int(greedy.sum()), len(examples)
    accuracy, loss = correct / count, float(losses.sum()) / count
    return Lambada(
        accuracy=accuracy,
        accuracy_error=math.sqrt(accuracy * (1 - accuracy) / (count - 1)) if count > 1 else 0.0,
        perplexity=exp_of(loss),
        loss=loss,
        passages=count,
        correct=correct,
        target_tokens=sum(len(each.target) for each in examples),
    )
