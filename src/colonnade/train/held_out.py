"""The held-out parts of a run's data, measured while it trains and afterwards in the same way."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch

from colonnade.data.blended_dataset import BlendedDataset
from colonnade.data.datasets import Dataset
from colonnade.data.loader import evaluation_batches
from colonnade.evaluation.perplexity import NothingScored
from colonnade.evaluation.squad import SquadScores
from colonnade.mesh.mesh import Mesh
from colonnade.model.model import Transformer
from colonnade.pipeline.inference import on_one_stage
from colonnade.tasks.task import Found, Hidden
from colonnade.tasks.tasks import TASKS
from colonnade.train.corpus import Corpus


@dataclass(frozen=True)
class Evaluation:
    """What was found on a part of the data, the same on every rank."""

    found: Found
    each: Mapping[str, Found] = field(default_factory=dict)
    """On each data set of a blend alone, by its name."""
    questions: SquadScores | None = None
    """Of the answers to data.questions."""

    def numbers(self) -> dict[str, float]:
        """For metrics: `loss`, and of a blend also `loss/NAME`."""
        alone = {
            f"{number}/{name}": value for name, found in self.each.items() for number, value in found.numbers().items()
        }
        asked = {} if self.questions is None else {"exact_match": self.questions.exact, "f1": self.questions.f1}
        return self.found.numbers() | alone | asked

    def of_each(self, most: int | None = None) -> list[str]:
        """A line for each data set of a blend, of the first `most` alone where that is given, and one for questions."""
        lines = [f"{name}: {found.summary()}" for name, found in islice(self.each.items(), most)]
        scores = self.questions
        if scores is not None:
            lines.append(f"{scores.total:,} questions: exact match {scores.exact:.2f}, F1 {scores.f1:.2f}")
        return lines


def evaluate_part(
    model: Transformer,
    part: Dataset,
    corpus: Corpus,
    mesh: Mesh,
    *,
    hidden: Hidden | None,
    samples: int,
    micro_batch_size: int,
) -> Evaluation:
    """Losses on the first `samples` samples of a validation or test part, shared by the dp ranks. Of a blend, those of
    each data set are read once more by themselves, where a label of them counts.
    """
    measure = partial(_measure, model, corpus=corpus, mesh=mesh, hidden=hidden, micro_batch_size=micro_batch_size)
    num_samples = min(len(part), samples)
    found = measure(part, num_samples)
    if not isinstance(part, BlendedDataset) or not (names := corpus.set_names):
        return Evaluation(found)
    each = {}
    for one, count in zip(part.parts, part.first_of_each(num_samples), strict=True):
        with suppress(NothingScored):  # of a rare one the few samples may have no label that counts
            each[names[one.file.prefix]] = found if len(part.parts) == 1 else measure(one, count)
    return Evaluation(found, each)


def _measure(
    model: Transformer,
    part: Dataset,
    num_samples: int,
    *,
    corpus: Corpus,
    mesh: Mesh,
    hidden: Hidden | None,
    micro_batch_size: int,
) -> Found:
    batches = evaluation_batches(
        partial(corpus.load, part),
        num_samples,
        micro_batch_size=micro_batch_size,
        dp_rank=mesh.data.rank,
        dp_size=mesh.data.size,
    )
    lengths = corpus.byte_lengths
    return TASKS[corpus.kind].evaluate(
        model,
        batches,
        dp=mesh.data,
        pp=mesh.pp,
        hidden=hidden or on_one_stage(model, model.architecture.units).hidden,
        byte_lengths=None if lengths is None else torch.from_numpy(lengths),
        tokenizer_checked=not corpus.unchecked,
    )
