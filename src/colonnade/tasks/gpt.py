"""Language modelling: the next token, given all before it. Its loss is the mean over the labels that count."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.data.loader import Batch, as_batch
from colonnade.data.rows import Rows, Samples
from colonnade.evaluation.perplexity import Perplexity, evaluate
from colonnade.kernels.dropout import Masks
from colonnade.mesh.mesh import Axis
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.tasks.task import Hidden, own_generator
from colonnade.tensor_parallel.parallel import Parallel


class LanguageModeling:
    """`Task` of a GPT."""

    def build(self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None) -> GPT:
        return GPT(model, vocab_size, parallel, units=units)

    def batch(self, samples: Samples, positions: Sequence[int]) -> Batch:
        assert isinstance(samples, Rows), "samples of text"
        return as_batch(samples, positions)

    def random_batch(self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool) -> Batch:
        seq_length, draw = model.seq_length, own_generator()
        tokens = torch.randint(0, vocab_size, (seq_length, size), generator=draw)
        documents = torch.zeros_like(tokens) if separate_documents else None
        return Batch(tokens, tokens, torch.ones(tokens.shape), torch.arange(size), documents, documents)

    def counts(self, batch: Batch) -> Tensor:
        return batch.loss_mask.sum(dtype=torch.float64)[None]

    def inputs(self, batch: Batch, weights: Tensor | None, seed: int | None) -> Inputs:
        return Inputs(
            batch.tokens,
            batch.labels,
            None if weights is None else batch.loss_mask.double() * weights[0],
            None if seed is None else Masks(seed, batch.samples.numpy()),
            documents=batch.documents,
            positions=batch.positions,
        )

    def evaluate(
        self,
        model: GPT,
        batches: Iterable[Batch],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> Perplexity:
        found = evaluate(model, batches, dp=dp, pp=pp, hidden=hidden, byte_lengths=byte_lengths)
        return replace(found, tokenizer_checked=tokenizer_checked)
