"""A text that grows: what units read for its next token, and what is kept of the tokens before.

left to right          the prompt, then each new token               caches: keys and values of both
encoder and decoder    the prompt and a start, then each new token   caches: of the new tokens, and of the memory
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.model.t5 import T5, T5Inputs


class Text(Protocol):
    """One prompt and what was added to it."""

    @property
    def before(self) -> int:
        """Tokens before the first new one, in its own numbering of positions."""
        ...

    def first(self) -> Inputs:
        """What units read for the first new token."""
        ...

    def following(self, token: int, position: int) -> Inputs:
        """What they read for the next one, given the newest, which stands at `position`."""
        ...


@dataclass
class Continued:
    """Of a model that reads from left to right."""

    model: GPT
    prompt: Sequence[int]
    capacity: int
    """[tokens] That are cached at most."""

    def __post_init__(self) -> None:
        self.caches = self.model.empty_caches(self.capacity)

    @property
    def before(self) -> int:
        return len(self.prompt)

    def first(self) -> Inputs:
        return self._inputs(self.prompt, 0)

    def following(self, token: int, position: int) -> Inputs:
        return self._inputs([token], position)

    def _inputs(self, tokens: Sequence[int], first: int) -> Inputs:
        return Inputs(column(self.model, tokens), caches=self.caches, first_position=first)


@dataclass
class Answered:
    """Of a model that reads the prompt with its encoder, and writes with its decoder. The encoder runs once."""

    model: T5
    prompt: Sequence[int]
    capacity: int
    """[tokens] That are cached at most."""
    start: int
    """Id before the first new token."""
    before: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.caches = self.model.empty_caches(self.capacity)

    def first(self) -> Inputs:
        return T5Inputs(
            column(self.model, self.prompt),
            decoder_tokens=column(self.model, [self.start]),
            decoder_caches=self.caches,
        )

    def following(self, token: int, position: int) -> Inputs:
        return T5Inputs(decoder_tokens=column(self.model, [token]), decoder_caches=self.caches, first_position=position)


def column(model: GPT | T5, tokens: Sequence[int]) -> Tensor:
    """One text as a micro-batch: int64 [s, 1], where the model is."""
    return torch.tensor(tokens, device=next(model.parameters()).device)[:, None]
