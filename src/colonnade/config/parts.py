"""[parts] and [lora]: what of a model is trained, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from pydantic import Strict

from colonnade.config.section import Fraction, NotNegative, Positive, Section, Text

Patterns = Annotated[tuple[Text, ...], Strict(False)]  # a TOML list
Factors = dict[Text, NotNegative]
NOT = "!"
"""In front of a pattern of parts.frozen: what it matches is trained."""


class PartsConfig(Section):
    """Parts of the model, by patterns over the names of weights: * any text, ? a character, [0-3] one of these. Where
    several patterns of a key match a weight, the last one that is written counts. A pattern that matches nothing is an
    error.
    """

    MAY_CHANGE: ClassVar[bool] = True

    frozen: Patterns = ()
    """Weights that stay as they begin: no gradients, no optimizer state, no sums over ranks, and no backward below the
    first weight that is trained. A pattern with ! in front takes out again what those before it match."""
    learning_rate: Factors = {}
    """Factors on optim.learning_rate, by pattern; weights that match none have 1."""
    weight_decay: Factors = {}
    """Factors on optim.weight_decay, by pattern; biases and normalisations have none to multiply."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA): beside each weight W that is targeted, (alpha / rank) · B A is trained, with A
    [rank, in] and B [out, rank]; all other weights are frozen.
    """

    rank: Annotated[int, Ge(0), Le(10**9)] = 0
    """[dimensions] Inner size of the adapters. 0: there are none."""
    alpha: Positive | None = None
    """[1] Adapters are multiplied with alpha / rank. Unset: twice the rank."""
    dropout: Fraction = 0.0
    """[probability] Of what the adapters read."""
    targets: Patterns = ("blocks.*",)
    """Modules with a weight that get an adapter, by pattern: attention.qkv stands for *.attention.qkv. Linear layers of
    blocks alone can have one."""

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank if self.rank else 0.0
