"""The learning rate as a pure function of the step: linear warm-up, a stable stretch if wanted, one decay to a floor.

warm-up                     ╱‾‾╲_         decay from the end of the warm-up
warm-up, stable, decay      ╱‾‾‾‾‾‾‾╲     decay from `decay_start` on (WSD; Hu et al., "MiniCPM", 2024)
re-warming                  ╱‾╲_╱‾╲_      behind `rewarm_at` once more from the floor to the peak
"""

import math
from collections.abc import Callable
from typing import Literal

LearningRate = Callable[[int], float]
Decay = Literal["cosine", "linear", "constant"]


def learning_rate(
    *, peak: float, floor: float, warmup_steps: int, decay_steps: int, decay: Decay, decay_start: int = 0
) -> LearningRate:
    """Rate of step 1, 2, …: rises by peak/warmup_steps a step, then falls to `floor` at step `decay_steps` and stays
    there. The fall begins with the end of the warm-up, or at `decay_start` if that is later.

    Source: the GPT-2 recipe of the Megatron-LM paper (warm-up 3,000, one cosine to 1e-5).
    """

    begin = max(warmup_steps, decay_start)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        done = min(1.0, max(0, step - begin) / max(1, decay_steps - begin))
        if decay == "constant" or done == 0.0:
            return peak
        left = 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return floor + (peak - floor) * left

    return rate


def rewarmed(
    before: LearningRate, *, at: int, steps: int, floor: float, peak: float, behind: LearningRate
) -> LearningRate:
    """`before` up to step `at`; then in `steps` steps in a straight line from `floor` to `peak`; then `behind`."""

    def rate(step: int) -> float:
        if step <= at:
            return before(step)
        if step < at + steps:
            return floor + (peak - floor) * (step - at) / steps
        return behind(step)

    return rate
