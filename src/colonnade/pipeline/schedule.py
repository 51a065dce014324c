"""Which stage computes which micro-batch when: schedules as lists of actions. Pure; no process, no tensor.

    actions("1f1b", stage, num_stages=4, num_microbatches=8) -> [F0, F1, F2, F3, B0, F4, B1, …]     for stage 0

A stage runs its list from left to right. What links the lists is data: F of a chunk needs F of the chunk before it, B
needs B of the next chunk and F of its own, all of the same micro-batch. The model is cut into num_stages ×
virtual_stages chunks; chunk c of stage s is number c · num_stages + s in the order of the model, so F always goes to
the next stage (from the last one to the first) and B to the one before.

Transfers: between two stages and in one direction, results leave in the order in which the sender's list makes them.
The receiver may post its receives in that order and never deadlocks, as long as a send does not stop the sender's list:
in 1F1B, two neighbours send to each other at the same time.

| name | source |
|---|---|
| naive | one micro-batch at a time in the whole pipeline: the baseline |
| gpipe | Huang et al., "GPipe", 2019 (arXiv 1811.06965), section 2.3 |
| 1f1b | Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (2006.09503): PipeDream-Flush |
| interleaved | Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021 (2104.04473) |
| zero_bubble | Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (2401.10241): ZB-H1 |
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from colonnade.errors import LayoutError

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One thing that a stage computes: forward (F), backward (B), or weight gradients (W).

    B is the whole backward, except in zero_bubble: there B makes the gradients of inputs and a later W of the same
    micro-batch those of weights.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    """Which of the stage's virtual stages, 0 … virtual_stages − 1."""

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


def naive(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Each micro-batch forward and backward before the next one starts: one stage works, the others wait."""
    return [Action(kind, i) for i in range(num_microbatches) for kind in ("F", "B")]


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All micro-batches forward, then all backward: the activations of all of them live at once."""
    return each("F", num_microbatches) + each("B", num_microbatches)


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """As many forwards as there are later stages, then one forward and one backward in turn.

    The bubble of gpipe, but activations of only num_stages − stage micro-batches live at once.
    """
    return in_turn(each("F", num_microbatches), each("B", num_microbatches), warm_up=num_stages - stage - 1)


def interleaved(stage: int, num_stages: int, num_microbatches: int, virtual_stages: int) -> list[Action]:
    """1F1B where each stage has `virtual_stages` chunks, num_stages micro-batches at a time in each.

    The pipeline fills with chunks instead of stages: the bubble is divided by virtual_stages, there are virtual_stages
    times as many transfers, and some more activations live. With one virtual stage it is 1F1B.
    """
    if virtual_stages == 1:
        return one_f_one_b(stage, num_stages, num_microbatches)
    rounds = [range(start, start + num_stages) for start in range(0, num_microbatches, num_stages)]
    chunks = range(virtual_stages)
    forwards = [Action("F", i, chunk) for group in rounds for chunk in chunks for i in group]
    backwards = [Action("B", i, chunk) for group in rounds for chunk in reversed(chunks) for i in group]
    return in_turn(forwards, backwards, warm_up=2 * (num_stages - stage - 1) + (virtual_stages - 1) * num_stages)


def zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """1F1B whose backward is split: B goes on to the stage before at once, W fills the time that stages would wait.

    Stage s runs its W's s backwards late, so that every stage holds num_stages micro-batches, as 1F1B's first one does.
    """
    weights = iter(each("W", num_microbatches))
    order: list[Action] = []
    for action in one_f_one_b(stage, num_stages, num_microbatches):
        order.append(action)
        if action.kind == "B" and action.microbatch >= stage:
            order.append(next(weights))
    return order + list(weights)


SCHEDULES: Mapping[str, Callable[[int, int, int], list[Action]]] = MappingProxyType(
    {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}
)
"""The schedules with one chunk a stage; interleaved is the one with several."""

NAMES = (*SCHEDULES, "interleaved")


def actions(name: str, stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> list[Action]:
    """What `stage` runs in one step, in order. Raises LayoutError for numbers that the schedule cannot work with."""
    assert 0 <= stage < num_stages, "a stage is counted from 0"
    assert num_microbatches > 0 and virtual_stages > 0, "the schema admits no less"
    if name == "interleaved":
        _refuse_partial_rounds(num_stages, num_microbatches, virtual_stages)
        return interleaved(stage, num_stages, num_microbatches, virtual_stages)
    if name not in SCHEDULES:
        raise LayoutError(f'there is no parallel.schedule "{name}". Use {", ".join(NAMES)}.')
    if virtual_stages != 1:
        raise LayoutError(
            f'parallel.virtual_stages = {virtual_stages} does not go with parallel.schedule = "{name}", which runs one '
            'chunk a stage. Use virtual_stages = 1, or schedule = "interleaved".'
        )
    return SCHEDULES[name](stage, num_stages, num_microbatches)


def all_actions(name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """The lists of all stages."""
    return [actions(name, stage, num_stages, num_microbatches, virtual_stages) for stage in range(num_stages)]


def each(kind: Kind, num_microbatches: int) -> list[Action]:
    """One action for each micro-batch in turn."""
    return [Action(kind, i) for i in range(num_microbatches)]


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> list[Action]:
    """The first `warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    first, rest = list(forwards[:warm_up]), forwards[warm_up:]
    pairs = [action for pair in zip(rest, backwards, strict=False) for action in pair]
    return first + pairs + list(backwards[len(rest) :])


def _refuse_partial_rounds(num_stages: int, num_microbatches: int, virtual_stages: int) -> None:
    if virtual_stages > 1 and num_microbatches % num_stages:
        below = num_microbatches // num_stages * num_stages
        counts = f"{below} or {below + num_stages}" if below else f"{num_stages}"
        raise LayoutError(
            f'parallel.schedule = "interleaved" runs parallel.pp = {num_stages} micro-batches at a time in each '
            f"virtual stage, and a step has {num_microbatches}, which is no multiple. Use {counts} micro-batches "
            "(train.global_batch_size ÷ (micro_batch_size × dp)), virtual_stages = 1, or a pp that divides "
            f"{num_microbatches}."
        )
