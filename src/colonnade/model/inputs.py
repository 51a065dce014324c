"""What units read besides the carry: the sample, its dropout masks, and what its tokens may see."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from colonnade.kernels.dropout import Masks
from colonnade.kernels.mask import Pairs
from colonnade.model.attention import KeyValueCache
from colonnade.model.matching import HiddenTargets
from colonnade.tensor_parallel.distillation import SoftTargets


@dataclass(frozen=True)
class Inputs:
    """What units read besides the residual stream, of one micro-batch; None where no unit of this rank reads it."""

    tokens: Tensor | None = None
    """int64 [s, b]: the embedding's."""
    labels: Tensor | None = None
    """int64 [s, b]: the head's."""
    loss_weights: Tensor | None = None
    """[s, b]: the head's. What each token's loss counts in the result."""
    masks: Masks | None = None
    """Dropout of embedding and blocks. None: nothing is dropped."""
    documents: Tensor | None = None
    """int64 [s, b]: the document of each token, any numbers. Tokens of different ones do not see each other. None: a
    sample is one document."""
    positions: Tensor | None = None
    """int64 [s, b]: the place of each token in its document. None: 0 … s - 1, or from `first_position` on."""
    caches: Mapping[str, KeyValueCache] | None = None
    """Each block's keys and values of the positions before these tokens: generation's."""
    first_position: int = 0
    """Of these tokens, in their text."""

    soft: SoftTargets | None = None
    """The head's: what a teacher says of every token."""
    hidden: HiddenTargets | None = None
    """The blocks': what a teacher's blocks hand on."""
    types: Tensor | None = None
    """int64 [s, b]: the embedding's, of models whose tokens have types."""

    @cached_property
    def pairs(self) -> Pairs:
        """Which tokens may see each other, for all layers."""
        return Pairs(self.documents)
