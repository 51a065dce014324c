"""Logits to a token: greedy, or drawn after temperature, top-k and top-p. Pure functions of float64 numbers on the CPU.

    logits ── ÷ temperature, softmax ──▶ top_k likeliest ──▶ nucleus of top_p ──▶ u in (0, 1) picks one

u is a function of (seed, prompt, position) alone, so every rank that has the same logits chooses the same token, and
nothing is sent. Source of top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020.
"""

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import CheckpointError
from colonnade.generation.sampling import Sampling
from colonnade.randomness import Purpose, stream_keys, uniform


def choose(logits: NDArray[np.float64], sampling: Sampling, *, prompt: int, position: int) -> int:
    """The token at `position` of the text that continues prompt number `prompt`, given its logits [v]."""
    if not np.isfinite(logits).all():
        raise CheckpointError.of_broken_weights(f"logits at position {position:,}")
    if sampling.temperature == 0.0:
        return int(logits.argmax())  # the lowest id of equals
    keys = stream_keys(sampling.seed, Purpose.SAMPLING, last=[prompt])
    return draw(probabilities(logits, sampling), float(uniform(keys, position, 1)))


def probabilities(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """The chance of each token, [v] -> [v]: sums to one, 0 for what top_k and top_p rule out."""
    with np.errstate(over="ignore", under="ignore"):  # tiny temperatures: −inf, whose exponential is 0
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_k or sampling.top_p < 1.0:
        kept = likeliest(logits, sampling.top_k or len(logits))
        kept = kept[: nucleus_size(weights[kept], sampling.top_p)]
        filtered = np.zeros_like(weights)
        filtered[kept] = weights[kept]
        weights = filtered
    chances: NDArray[np.float64] = weights / weights.sum()
    return chances


def likeliest(logits: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest logits (or all), falling; of equals the lower ids first. Sorts only what it must."""
    count = min(count, len(logits))
    smallest = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= smallest)  # more than `count` where the smallest has equals
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def nucleus_size(weights: NDArray[np.float64], top_p: float) -> int:
    """How many of the falling `weights` it takes to have the share top_p of their sum: at least one."""
    if top_p == 1.0:
        return len(weights)  # not by the sum, whose rounding could cut off the least likely
    shares = np.cumsum(weights)
    return int(np.searchsorted(shares, top_p * shares[-1])) + 1


def draw(chances: NDArray[np.float64], u: float) -> int:
    """The token where the running sum of `chances` [v] passes u, in (0, 1). Never one without a chance."""
    passed = int(np.searchsorted(np.cumsum(chances), u, side="right"))
    return min(passed, int(np.flatnonzero(chances)[-1]))  # the sum may end a rounding below u
