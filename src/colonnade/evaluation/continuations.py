"""How likely a model finds given continuations of given contexts: LAMBADA's words, and the requests of lm-eval.

    context   c c c c c c              read      c c c c c c t t
    target                t t t        scored              = = =      each scored position predicts the token behind it

Sequences are read in batches of nearly equal length, the longest first (memory that is short is so at once), filled up
behind their ends, which a causal model does not notice. Only scored positions reach the output layer. Continuations
that are read as the same tokens (the one-token answers of a multiple choice) are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.errors import CheckpointError, DataError
from colonnade.evaluation.perplexity import Hidden
from colonnade.evaluation.progress import Progress
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.pipeline.inference import on_one_stage


class Continuation(NamedTuple):
    """Both have tokens."""

    context: Sequence[int]
    target: Sequence[int]


class Scores(NamedTuple):
    """What was found, the same on every rank."""

    losses: NDArray[np.float64]
    """[n] nats: the sum over a target's tokens."""
    greedy: NDArray[np.bool_]
    """[n] Whether every token of a target was the likeliest."""


@dataclass(frozen=True)
class Row:
    """Tokens that are read, and the targets at their end, by their number."""

    tokens: tuple[int, ...]
    targets: tuple[tuple[int, Sequence[int]], ...]


class Batch(NamedTuple):
    """Some rows."""

    tokens: Tensor
    """int64 [s, b]"""
    positions: Tensor
    """int64 [n]: where something is scored."""
    rows: Tensor
    """int64 [n]: in which row."""
    labels: Tensor
    """int64 [n]"""
    numbers: Tensor
    """int64 [n]: of which continuation."""


@torch.no_grad()
def score(
    model: GPT,
    continuations: Sequence[Continuation],
    *,
    mesh: Mesh,
    hidden: Hidden | None = None,
    batch_size: int,
    progress: Progress | None = None,
) -> Scores:
    """Score all continuations, `batch_size` sequences at once, shared by the dp ranks.

    `hidden`: as in `evaluate`. All-reduces two numbers a continuation over dp and pp, at the end. CheckpointError where
    some losses are no numbers.
    """
    _check_ids(continuations, model.vocab_size)
    hidden = hidden or on_one_stage(model, model.architecture.units).hidden
    device = next(model.parameters()).device
    rows = rows_of(continuations)
    shares = batches_of(rows, batch_size)[mesh.data.rank :: mesh.data.size]
    progress = progress or Progress("sequences", shown=False)
    progress.begin(sum(map(len, shares)), sum(len(row.tokens) for share in shares for row in share))
    found = torch.zeros(2, len(continuations), dtype=torch.float64, device=device)
    for share in shares:
        _add_scores_(found, model, hidden, Batch(*(part.to(device) for part in batch_of(share))))
        progress.advance(len(share), sum(len(row.tokens) for row in share))
    losses, misses = all_reduce(all_reduce(found, mesh.data), mesh.pp).cpu().numpy()
    if np.isnan(losses).any():
        raise CheckpointError.of_broken_weights("losses of what is scored")
    return Scores(losses, misses == 0)


def _check_ids(continuations: Sequence[Continuation], vocab_size: int) -> None:
    largest = max((max(*context, *target) for context, target in continuations), default=0)
    if largest >= vocab_size:
        raise DataError(
            f"the text has token id {largest:,}, but the model's vocabulary has {vocab_size:,} ids (0 to "
            f"{vocab_size - 1:,}): it was tokenized with another tokenizer. Use the checkpoint's own."
        )


def _add_scores_(found: Tensor, model: GPT, hidden: Hidden, batch: Batch) -> None:
    """To each continuation's loss and number of misses, [2, n]; nothing on stages without the head."""
    carry = hidden(Inputs(batch.tokens))
    if carry is None:
        return
    scored = model.residual(carry)[batch.positions, batch.rows]  # [s, b, h] -> [n, h]
    losses, likeliest = model.head.guesses_of(model.head.normed(scored), batch.labels)
    found[0].index_add_(0, batch.numbers, losses.double())
    found[1].index_add_(0, batch.numbers, (~likeliest).double())


def rows_of(continuations: Sequence[Continuation]) -> list[Row]:
    """What has to be read, each once: the longest first, of equal ones the first."""
    targets: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = {}
    for number, (context, target) in enumerate(continuations):
        assert context and target, "a target has tokens, and the first one follows something"
        targets.setdefault((*context, *target[:-1]), []).append((number, target))
    rows = [Row(tokens, tuple(found)) for tokens, found in targets.items()]
    return sorted(rows, key=lambda row: -len(row.tokens))


def batches_of(rows: Sequence[Row], batch_size: int) -> list[Sequence[Row]]:
    """Successive rows, so many at once."""
    return [rows[begin : begin + batch_size] for begin in range(0, len(rows), batch_size)]


def batch_of(rows: Sequence[Row]) -> Batch:
    """Rows side by side, the shorter ones filled up with token 0 behind their end."""
    tokens = np.zeros((max(len(row.tokens) for row in rows), len(rows)), np.int64)
    scored = []
    for column, row in enumerate(rows):
        length = len(row.tokens)
        tokens[:length, column] = row.tokens
        for number, target in row.targets:
            first = length - len(target)
            scored += [(first + place, column, label, number) for place, label in enumerate(target)]
    return Batch(torch.from_numpy(tokens), *torch.tensor(scored, dtype=torch.int64).unbind(1))
