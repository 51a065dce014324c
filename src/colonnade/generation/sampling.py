"""How a token is chosen, as a user asks for it: values and what is wrong with them. Takes no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from colonnade.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen among all."""

    temperature: float = 1.0
    """Logits are divided by it: below 1 likely tokens become likelier. 0: always the likeliest (greedy)."""
    top_k: int = 0
    """[tokens] Only the k likeliest can be chosen; of equals, the lower ids. 0: off."""
    top_p: float = 1.0
    """[probability] Only the fewest likeliest tokens that have this probability together can be chosen, at least one.
    1: off."""
    seed: int = 1234
    """The source of all draws."""

    def __post_init__(self) -> None:
        problems = list(sampling_problems(self.temperature, self.top_k, self.top_p, self.seed))
        if problems:
            raise ConfigError("\n".join(problems))


def sampling_problems(temperature: float, top_k: int, top_p: float, seed: int) -> Iterator[str]:
    """What is wrong with the values of a `Sampling`, in words."""
    if not 0.0 <= temperature < math.inf:
        yield (
            f"temperature = {temperature} cannot divide logits. Use 0 for the likeliest token each time, 1 for the "
            "model's own probabilities, or a number around 0.7 for tamer text."
        )
    if top_k < 0:
        yield f"top_k = {top_k} leaves no token to choose. Use 1 or more, or 0 for no limit."
    if not 0.0 < top_p <= 1.0:
        yield f"top_p = {top_p} is no probability to keep. Use a number above 0 and up to 1; 1 is no limit."
    if seed < 0:
        yield f"seed = {seed} is negative. Use 0 or more."
    if seed >= 1 << 64:
        yield f"seed = {seed} has more than 64 bits, and draws would be those of a smaller one. Use 2^64 − 1 or less."
