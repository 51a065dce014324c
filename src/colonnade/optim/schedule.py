"""The learning rate as a pure function of the step: linear warm-up, then one decay to a floor."""

import math
from collections.abc import Callable
from typing import Literal

LearningRate = Callable[[int], float]
Decay = Literal["cosine", "linear", "constant"]


def learning_rate(*, peak: float, floor: float, warmup_steps: int, decay_steps: int, decay: Decay) -> LearningRate:
    """Rate of step 1, 2, …: rises by peak/warmup_steps a step, then falls to `floor` at step `decay_steps` and stays
    there.

    Source: the GPT-2 recipe of the Megatron-LM paper (warm-up 3,000, one cosine to 1e-5).
    """

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
        if decay == "constant" or done == 0.0:
            return peak
        left = 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return floor + (peak - floor) * left

    return rate
