"""What the papers of `schedule.py` promise, as formulas: the bubble, and the activations that live at once. Pure.

For p equal stages, m micro-batches, v virtual stages, F, B and W the durations of forward, input gradients and weight
gradients, and transfers that take no time:

    ideal time          m · (F + B + W)
    time of the bubble  naive         (p − 1) · m · (F + B + W)
                        gpipe, 1f1b   (p − 1) · (F + B + W)
                        interleaved   (p − 1) · (F + B + W) / v
                        zero_bubble   (p − 1) · (F + B − min(F, B, W))      for m ≥ p; the paper's F + B − W where W
                                                                            is the shortest
    bubble              its time / (its time + ideal time)                  1f1b: (p − 1) / (m + p − 1)
"""

from colonnade.pipeline.simulate import EQUAL, Durations


def bubble(
    name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1, durations: Durations = EQUAL
) -> float:
    """The share of all stages' time in which they wait, 0 … 1."""
    ideal = num_microbatches * durations.microbatch
    idle = bubble_time(name, num_stages, num_microbatches, virtual_stages, durations)
    return idle / (idle + ideal)


def bubble_time(
    name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1, durations: Durations = EQUAL
) -> float:
    """How long each stage waits in one step."""
    forward, inputs, weights = durations.forward, durations.input_gradients, durations.weight_gradients
    waits = num_stages - 1
    if name == "naive":
        return waits * num_microbatches * durations.microbatch
    if name == "zero_bubble":
        filled = min(num_microbatches - 1, waits) * min(forward, inputs, weights)
        return waits * (forward + inputs) - filled
    return waits * durations.microbatch / virtual_stages


def peak(name: str, stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> int:
    """The most micro-batch chunks whose activations live at once on a stage. One is 1 / virtual_stages of a stage's."""
    following = num_stages - 1 - stage
    if name == "interleaved" and virtual_stages > 1:
        warm_up = 2 * following + (virtual_stages - 1) * num_stages
        return min(warm_up + 1, num_microbatches * virtual_stages)
    most = {"naive": 1, "gpipe": num_microbatches, "zero_bubble": num_stages}.get(name, following + 1)
    return min(most, num_microbatches)
