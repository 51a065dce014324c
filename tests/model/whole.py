"""A GPT of which one rank has all units, run at once."""

from torch import Tensor

from colonnade.kernels.dropout import Masks
from colonnade.model.attention import KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs


def hidden(gpt: GPT, tokens: Tensor, masks: Masks | None = None, caches: list[KeyValueCache] | None = None) -> Tensor:
    """The whole residual stream after the last block: int64 [s, b] -> [s, b, h]; with caches, of positions after those
    cached. Under sequence parallelism: any s.
    """
    named = None if caches is None else {f"blocks.{i}": cache for i, cache in enumerate(caches)}
    first = caches[0].length if caches else 0
    inputs = Inputs(gpt.parallel.pad(tokens), masks=masks, caches=named, first_position=first)
    carry: tuple[Tensor, ...] = ()
    for unit in list(gpt.units())[:-1]:
        carry = gpt.run(unit, carry, inputs)
    return gpt.residual(carry)[: len(tokens)]


def loss_of(gpt: GPT, tokens: Tensor, labels: Tensor, loss_weights: Tensor, masks: Masks | None = None) -> Tensor:
    """tokens, labels, loss_weights [s, b] -> Σ loss_weights · cross entropy, []"""
    carry: tuple[Tensor, ...] = ()
    for unit in gpt.units():
        carry = gpt.run(unit, carry, Inputs(tokens, labels, loss_weights, masks))
    (loss,) = carry
    return loss
