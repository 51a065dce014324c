"""A model that reads a text from both sides, in use: words for what a text leaves open, and vectors of texts.

fill-mask    The capital of [MASK] is Paris.   ──▶ the likeliest words for each [MASK], with probabilities
embed        texts ──▶ the mean of what the last block hands on for their tokens, of length 1
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.atomic import write_whole
from colonnade.data.example_dataset import PairTokens
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.mesh.collectives import all_reduce, broadcast_
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert import BERT, BertInputs
from colonnade.model.stack import Stack
from colonnade.serving.trained import Trained

MASK = "[MASK]"


class Filling(NamedTuple):
    """A word for a gap."""

    token: str
    probability: float
    text: str
    """The whole text with the word in the gap; other gaps stay."""


def fillings(trained: Trained, mesh: Mesh, texts: Sequence[str], *, top: int) -> list[list[list[Filling]]]:
    """Of each text, for each [MASK] in it, the `top` likeliest words; every rank calls this, and gets it.

    DataError for a text without a [MASK], or one that is too long, CheckpointError for logits that are not finite.
    """
    model = trained.model
    if not isinstance(model, BERT):
        raise ConfigError(_no_use(trained, "guesses no words", 'model.kind = "bert" and model.head = "pretraining"'))
    mask = trained.tokenizer.id_of(MASK)
    if mask is None:
        raise DataError(f"the tokenizer has no {MASK}, which stands for the words to guess.")
    tokens = [_with_gaps(trained, text, mask) for text in texts]
    return [_of_text(trained, mesh, model, text, ids, mask, top) for text, ids in zip(texts, tokens, strict=True)]


def embeddings(
    trained: Trained,
    mesh: Mesh,
    texts: Sequence[str],
    *,
    batch_size: int,
    normalize: bool = True,
    control_tokens: bool = False,
) -> tuple[Tensor, int]:
    """Vectors float32 [n, h] of n texts (`normalize`: of length 1), and how many texts were too long and lost their
    end; every rank calls this, and gets it. `control_tokens`: names of these in a text are these. All-reduces the
    vectors over pp. CheckpointError for vectors that are not finite.
    """
    model = trained.model
    if trained.config.model.kind != "bert" or not isinstance(model, Stack):
        raise ConfigError(_no_use(trained, "makes no vectors of texts", 'model.kind = "bert"'))
    control, longest = PairTokens.of(trained.tokenizer), trained.config.model.seq_length
    encoded = trained.tokenizer.encode_batch(list(texts), control=control_tokens)
    rows = [[control.classify, *ids[: longest - 2], control.separate] for ids in encoded]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))  # little padding: like lengths together
    found = torch.zeros(len(rows), trained.config.model.hidden_size)
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        means = _means(trained, model, [rows[number] for number in chosen], control.pad)
        if means is not None:
            found[chosen] = means.float().cpu()
    device = next(model.parameters()).device
    found = all_reduce(found.to(device), mesh.pp).cpu()
    if not found.isfinite().all():
        raise CheckpointError.of_broken_weights("vectors of texts")
    return nn.functional.normalize(found, dim=-1) if normalize else found, sum(
        len(ids) > longest - 2 for ids in encoded
    )


def save(vectors: Tensor, path: Path) -> None:
    """Vectors [n, h] as a NumPy file, whole or not at all."""
    buffer = io.BytesIO()
    np.save(buffer, vectors.numpy())
    write_whole(path, buffer.getvalue())


def _no_use(trained: Trained, what: str, needed: str) -> str:
    model = trained.config.model
    return (
        f'the checkpoint has model.kind = "{model.kind}" and model.head = "{model.head}", and {what}: that takes '
        f"{needed}. Name another checkpoint."
    )


def _with_gaps(trained: Trained, text: str, mask: int) -> list[int]:
    """Token ids of a text between control tokens, with the id of [MASK] for each of them."""
    control, longest = PairTokens.of(trained.tokenizer), trained.config.model.seq_length
    first, *others = (trained.tokenizer.encode(part) for part in text.split(MASK))
    if not others:
        raise DataError(f'"{text}" has no {MASK}: there is nothing to guess. Write {MASK} where words are wanted.')
    ids = [control.classify, *first, *(token for part in others for token in (mask, *part)), control.separate]
    if len(ids) > longest:
        raise DataError(f'"{text}" has {len(ids):,} tokens, and the model reads {longest:,}. Give a shorter text.')
    return ids


def _inputs(trained: Trained, rows: Sequence[Sequence[int]], pad: int) -> BertInputs:
    length, device = max(map(len, rows)), next(trained.model.parameters()).device
    tokens = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows], device=device).t().contiguous()
    real = torch.arange(length, device=device)[:, None] < torch.tensor([len(row) for row in rows], device=device)
    return BertInputs(tokens, types=torch.zeros_like(tokens), real=real)


@torch.no_grad()
def _means(trained: Trained, model: Stack, rows: Sequence[Sequence[int]], pad: int) -> Tensor | None:
    """[b, h]: the mean over each row's tokens; None on stages without the last block's output."""
    inputs = _inputs(trained, rows, pad)
    carry = trained.hidden(inputs)
    if carry is None:
        return None
    x, norm = model.residual(carry), model.head.norm
    x = x if norm is None else norm(x)  # type: ignore[operator]
    assert inputs.real is not None
    weights = inputs.real[..., None].double()
    means: Tensor = (x.double() * weights).sum(0) / weights.sum(0)
    return means


@torch.no_grad()
def _of_text(
    trained: Trained, mesh: Mesh, model: BERT, text: str, ids: Sequence[int], mask: int, top: int
) -> list[list[Filling]]:
    """The likeliest words for each gap of a text. Gathers logits of the gaps over tp, and broadcasts them over pp."""
    gaps = [place for place, token in enumerate(ids) if token == mask]
    weight = next(model.parameters())
    wide = torch.promote_types(weight.dtype, torch.float32)
    logits = torch.empty(len(gaps), model.vocab_size, dtype=wide, device=weight.device)
    carry = trained.hidden(_inputs(trained, [ids], mask))
    if carry is not None:
        logits = model.head.word_logits(model.residual(carry)[gaps])
    broadcast_(logits, mesh.pp, source=mesh.pp.size - 1)
    if not logits.isfinite().all():
        raise CheckpointError.of_broken_weights("logits of words")
    names = trained.tokenizer.names
    words = torch.from_numpy(trained.tokenizer.ids)  # a table may have more rows than these
    likeliest = logits.double().cpu().softmax(-1)[:, words].topk(min(top, len(words)))
    return [
        [
            Filling(names[token], probability, _filled(text, number, names[token]))
            for token, probability in zip(words[places].tolist(), probabilities, strict=True)
        ]
        for number, (probabilities, places) in enumerate(zip(likeliest.values.tolist(), likeliest.indices, strict=True))
    ]


def _filled(text: str, number: int, word: str) -> str:
    """A text with a word in its gap of this number; a piece of a word joins the one before."""
    parts = text.split(MASK)
    before, behind = MASK.join(parts[: number + 1]), MASK.join(parts[number + 1 :])
    return before.rstrip() + word[2:] + behind if word.startswith("##") else before + word + behind
