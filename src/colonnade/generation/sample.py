"""Text from a trained model, one token after the other, on any tensor-parallel layout.

    prompt ── hidden, filling the caches ──▶ last position ── logits ──▶ all-gather [v/tp] -> [v] ──▶ choose ─┐
                       ▲                                                                                     │
                       └──────────────── the one new token; keys and values of all others are cached ◀───────┘

Every rank of the axis runs this and chooses the same token from the same gathered logits. Prompts are continued one
after the other: no padding, no mask, and each text is by construction what its prompt would have given alone. What is
lost is the throughput of a batch; what is gained is that a reader sees one text grow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from colonnade.errors import ConfigError, DataError
from colonnade.generation.choose import Sampling, choose
from colonnade.mesh.collectives import all_gather
from colonnade.mesh.mesh import Axis
from colonnade.model.attention import KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.transformer import Block

End = Literal["stop", "length", "full"]
"""Why a text ends: the stop token came, as many tokens as asked for, or the model has no further position."""


@dataclass(frozen=True)
class Generated:
    """One new token."""

    prompt: int
    """Which of the prompts it continues, from 0."""
    token: int
    end: End | None
    """None where more tokens of this prompt follow."""


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    tp: Axis,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    stop: int | None = None,
    seq_length: int | None = None,
) -> Iterator[Generated]:
    """Continue each prompt by up to `max_new_tokens`, yielding each token as it comes; prompt after prompt.

    `stop` (end of document) is yielded too, as the last. `seq_length`: use fewer positions than the model has. A text
    that fills them ends with "full": the token behind the last position is still predicted, and cannot be read. The
    sampling arguments are those of `Sampling`. Sends v/tp logits a token, and what the layers send. Raises ConfigError
    and DataError when called, not when iterated.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens} asks for no text. Use 1 or more.")
    limit = _positions(model, seq_length)
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, number, limit, model.vocab_size)
    return (
        generated
        for number, prompt in enumerate(prompts)
        for generated in _continue(model, prompt, tp, number, max_new_tokens, limit, sampling, stop)
    )


def next_logits(
    model: GPT, tokens: Sequence[int], tp: Axis, caches: list[KeyValueCache] | None = None
) -> NDArray[np.float64]:
    """Logits [v] of the token behind `tokens`, which follow what is cached. Every rank gets the same bits.

    Gathers [v/tp] over tp.
    """
    with torch.no_grad():
        weight = model.head.output.weight
        x = model.hidden(torch.tensor(tokens, device=weight.device)[:, None], caches=caches)
        local = model.head.logits(x[-1:])[0, 0]
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        padding = weight.shape[0] - len(local)  # only the last ranks have some, so real rows stay side by side
        logits = all_gather(nn.functional.pad(local, (0, padding), value=float("-inf")), tp)[: model.vocab_size]
        return logits.double().cpu().numpy()  # on the CPU: sums over a vocabulary have no fixed order on a GPU


def empty_caches(model: GPT, capacity: int) -> list[KeyValueCache]:
    """A cache a layer for one text of at most `capacity` tokens: 2 · capacity · h/tp numbers each."""
    weight = model.embedding.tokens.weight
    caches = []
    for block in model.blocks:
        assert isinstance(block, Block), "a GPT is made of blocks"
        shape = (1, len(block.attention.heads), capacity, block.attention.head_dim)
        caches.append(KeyValueCache(weight.new_empty(shape), weight.new_empty(shape)))
    return caches


def _continue(
    model: GPT,
    prompt: Sequence[int],
    tp: Axis,
    number: int,
    max_new_tokens: int,
    limit: int,
    sampling: Sampling,
    stop: int | None,
) -> Iterator[Generated]:
    last = min(len(prompt) + max_new_tokens - 1, limit)  # position of the last token that can come
    caches = empty_caches(model, last)
    unread = prompt
    for position in range(len(prompt), last + 1):
        token = choose(next_logits(model, unread, tp, caches), sampling, prompt=number, position=position)
        end: End | None = None
        if token == stop:
            end = "stop"
        elif position == last:
            end = "length" if position - len(prompt) + 1 == max_new_tokens else "full"
        yield Generated(number, token, end)
        if end is not None:
            return
        unread = [token]


def _positions(model: GPT, seq_length: int | None) -> int:
    available = model.embedding.positions.weight.shape[0]
    if seq_length is None:
        return available
    if not 1 <= seq_length <= available:
        raise ConfigError(
            f"seq_length = {seq_length:,}, but the model has learned {available:,} positions. Use 1 to {available:,}."
        )
    return seq_length


def _check_prompt(prompt: Sequence[int], number: int, limit: int, vocab_size: int) -> None:
    if not prompt:
        raise DataError(
            f"prompt {number} has no tokens, and the first new token has to follow something. Give it some text, or "
            "the end-of-document token to start a document."
        )
    if len(prompt) > limit:
        raise DataError(
            f"prompt {number} has {len(prompt):,} tokens, but the model reads at most {limit:,} positions. Shorten it "
            f"by {len(prompt) - limit:,} tokens or more, or train a model with a larger model.seq_length."
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        unknown = next(token for token in prompt if not 0 <= token < vocab_size)
        raise DataError(
            f"prompt {number} has token id {unknown:,}, but the model's vocabulary has {vocab_size:,} ids (0 to "
            f"{vocab_size - 1:,}): it was made with another tokenizer. Use the checkpoint's own."
        )
