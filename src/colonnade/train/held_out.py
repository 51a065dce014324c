"""The held-out parts of a run's data, measured while it trains and afterwards in the same way."""

from dataclasses import replace

import torch

from colonnade.data.gpt_dataset import Dataset
from colonnade.data.loader import evaluation_batches
from colonnade.evaluation.perplexity import Hidden, Perplexity, evaluate
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.train.corpus import Corpus


def evaluate_part(
    model: GPT,
    part: Dataset,
    corpus: Corpus,
    mesh: Mesh,
    *,
    hidden: Hidden | None,
    samples: int,
    micro_batch_size: int,
) -> Perplexity:
    """Mean loss on the first `samples` samples of a validation or test part, shared by the dp ranks."""
    batches = evaluation_batches(
        part,
        min(len(part), samples),
        micro_batch_size=micro_batch_size,
        dp_rank=mesh.data.rank,
        dp_size=mesh.data.size,
    )
    lengths = corpus.byte_lengths
    result = evaluate(
        model,
        batches,
        dp=mesh.data,
        pp=mesh.pp,
        hidden=hidden,
        byte_lengths=None if lengths is None else torch.from_numpy(lengths),
    )
    return replace(result, tokenizer_checked=not corpus.unchecked)
