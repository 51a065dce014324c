"""The held-out parts of a run's data, measured while it trains and afterwards in the same way."""

from functools import partial

import torch

from colonnade.data.datasets import Dataset
from colonnade.data.loader import evaluation_batches
from colonnade.mesh.mesh import Mesh
from colonnade.model.model import Transformer
from colonnade.pipeline.inference import on_one_stage
from colonnade.tasks.task import Found, Hidden
from colonnade.tasks.tasks import TASKS
from colonnade.train.corpus import Corpus


def evaluate_part(
    model: Transformer,
    part: Dataset,
    corpus: Corpus,
    mesh: Mesh,
    *,
    hidden: Hidden | None,
    samples: int,
    micro_batch_size: int,
) -> Found:
    """Losses on the first `samples` samples of a validation or test part, shared by the dp ranks."""
    batches = evaluation_batches(
        partial(corpus.load, part),
        min(len(part), samples),
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
