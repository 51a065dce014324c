"""Text from a trained model, one token after the other, on any tensor- and pipeline-parallel layout.

    prompt ── hidden, filling the caches ──▶ last position ── logits ──▶ all-gather [v/tp] -> [v] ──▶ choose ─┐
                       ▲                                                                                     │
                       └──────────────── the one new token; keys and values of all others are cached ◀───────┘

A T5 reads the prompt with its encoder, once, and continues the start of another text (`texts.py`).
Every rank runs this and chooses the same token from the same logits, which the last stage tells the others. Prompts
are continued one after the other: no padding, no mask, and each text is by construction what its prompt would have
given alone. What is lost is the throughput of a batch; what is gained is that a reader sees one text grow.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.errors import ConfigError, DataError
from colonnade.generation.choose import choose
from colonnade.generation.sampling import Sampling
from colonnade.generation.texts import Answered, Continued, Text, column
from colonnade.mesh.collectives import broadcast_
from colonnade.mesh.mesh import Axis
from colonnade.model.attention import KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.model.t5 import T5
from colonnade.pipeline.carry import Carry
from colonnade.pipeline.inference import on_one_stage

Hidden = Callable[[Inputs], Carry | None]
"""Computes what goes into the loss; None on pipeline stages that do not have it."""

_ONE_STAGE = Axis("pp")

End = Literal["stop", "length", "full"]
"""Why a text ends: a stop token came, as many tokens as asked for, or the model has no further position."""


@dataclass(frozen=True)
class Generated:
    """One new token."""

    prompt: int
    """Which of the prompts it continues, from 0."""
    token: int
    end: End | None
    """None where more tokens of this prompt follow."""


@dataclass(frozen=True)
class Stages:
    """A model on the ranks that hold one copy of it, tp × pp."""

    model: GPT | T5
    """This rank's part."""
    tp: Axis
    pp: Axis = _ONE_STAGE
    hidden: Hidden | None = None
    """How the stages compute what goes into the loss; None: this rank has all units."""
    start: int = 0
    """Id before the first token that a decoder writes. A model that reads from left to right has none."""

    def text(self, prompt: Sequence[int], max_new_tokens: int, limit: int | None) -> Text:
        """A prompt to be continued, or answered by what the decoder writes."""
        if isinstance(self.model, T5):
            return Answered(self.model, prompt, max_new_tokens, self.start)
        last = len(prompt) + max_new_tokens - 1
        return Continued(self.model, prompt, last if limit is None else min(last, limit))


def generate(
    stages: Stages,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    stop: Collection[int] = (),
    seq_length: int | None = None,
) -> Iterator[Generated]:
    """Continue each prompt by up to `max_new_tokens`, yielding each token as it comes; prompt after prompt.

    Any token of `stop` (end of document) ends its text, and is yielded too. `seq_length`: use fewer positions than the
    model has. A text that fills them ends with "full": the token behind the last position is still predicted, and
    cannot be read. The sampling arguments are those of `Sampling`. Sends v/tp logits a token, and what the layers send.
    Raises ConfigError and DataError when called, not when iterated.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens} asks for no text. Use 1 or more.")
    limit = _positions(stages.model, seq_length)
    for number, prompt in enumerate(prompts, 1):
        _check_prompt(prompt, number, limit, stages.model.vocab_size)
    return (
        generated
        for number, prompt in enumerate(prompts)
        for generated in _continue(stages, prompt, number, max_new_tokens, limit, sampling, stop)
    )


def next_logits(
    stages: Stages, tokens: Sequence[int], caches: Mapping[str, KeyValueCache] | None = None, first_position: int = 0
) -> NDArray[np.float64]:
    """Logits [v] of the token behind `tokens`, which stand at `first_position` and follow what is cached, of a model
    that reads from left to right.
    """
    inputs = Inputs(column(stages.model, tokens), caches=caches, first_position=first_position)
    return logits_behind(stages, inputs)


def logits_behind(stages: Stages, inputs: Inputs) -> NDArray[np.float64]:
    """Logits [v] of the token behind those that units read.

    Every rank gets the same bits. Gathers [v/tp] over tp, and broadcasts [v] from the last stage.
    """
    model = stages.model
    weight = next(model.parameters())
    with torch.no_grad():
        carry = _hidden(stages)(inputs)
        wide = torch.promote_types(weight.dtype, torch.float32)
        logits = torch.empty(model.vocab_size, dtype=wide, device=weight.device)
        if carry is not None:
            logits = _logits(stages, model.residual(carry))
        broadcast_(logits, stages.pp, source=stages.pp.size - 1)
        return logits.double().cpu().numpy()  # on the CPU: sums over a vocabulary have no fixed order on a GPU


def _logits(stages: Stages, x: Tensor) -> Tensor:
    """Of the last position, whole: [s, 1, h] -> [v]."""
    head = stages.model.head
    return head.gathered(head.logits(x[-1:])[0, 0])


def _hidden(stages: Stages) -> Hidden:
    model = stages.model
    if stages.hidden is not None:
        return stages.hidden
    return on_one_stage(model, model.architecture.units).hidden


def _continue(
    stages: Stages,
    prompt: Sequence[int],
    number: int,
    max_new_tokens: int,
    limit: int | None,
    sampling: Sampling,
    stop: Collection[int],
) -> Iterator[Generated]:
    text = stages.text(prompt, max_new_tokens, limit)
    last = text.before + max_new_tokens - 1  # position of the last token that can come
    last = last if limit is None else min(last, limit)
    inputs = text.first()
    for position in range(text.before, last + 1):
        token = choose(logits_behind(stages, inputs), sampling, prompt=number, position=position)
        end: End | None = None
        if token in stop:
            end = "stop"
        elif position == last:
            end = "length" if position - text.before + 1 == max_new_tokens else "full"
        yield Generated(number, token, end)
        if end is not None:
            return
        inputs = text.following(token, position)


def _positions(model: GPT | T5, seq_length: int | None) -> int | None:
    """The longest text that the model reads; None: any."""
    if seq_length is None:
        return model.longest
    if seq_length < 1 or (model.longest is not None and seq_length > model.longest):
        most = "1 or more" if model.longest is None else f"1 to {model.longest:,}"
        raise ConfigError(
            f"seq_length = {seq_length:,}, but the model has learned {model.seq_length:,} positions. Use {most}."
        )
    return seq_length


def _check_prompt(prompt: Sequence[int], number: int, limit: int | None, vocab_size: int) -> None:
    """DataError for what cannot be gone on from; `number`: from 1, as people count what they give."""
    if not prompt:
        raise DataError(
            f"prompt {number} has no tokens, and the first new token has to follow something. Give it some text, or "
            "the end-of-document token to start a document."
        )
    if limit is not None and len(prompt) > limit:
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
