"""What a rank of a compared run writes down: all of its numbers, each as it was at its time."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.config.load import load
from colonnade.mesh.mesh import Mesh
from colonnade.optim.param_slice import ParamSlice
from colonnade.train.corpus import open_corpus
from colonnade.verify import trace
from colonnade.verify.compare import of_serial_run
from colonnade.verify.trace import SeenGradients
from tests.data_parallel.flat import flat_model
from tests.parity.runs import CPU


def test_a_run_is_written_down_from_its_first_weights_to_its_last_parameters(config: Path) -> None:
    base = load(config)
    found = of_serial_run(trace._run(base, open_corpus(base), Mesh(), CPU, 2))
    steps, names = defaultdict[str, set[int]](set), defaultdict[tuple[str, int], set[str]](set)
    for number in found:
        steps[number.what].add(number.step)
        names[number.what, number.step].add(number.name)
    last = ("optimizer exp_avg", "optimizer exp_avg_sq", "parameter")
    each = ("loss", "overflow", "gradient", "gradient norm")
    assert steps == {"weight": {0, 2}} | {what: {2} for what in last} | {what: {1, 2} for what in each}
    every = names["weight", 0]
    assert len(every) > 20 and all(found in (every, {""}) for found in names.values()), "of every weight"
    values = {(number.what, number.step, number.name): x for number, x in found.items()}
    for name in every:
        assert not torch.equal(values["weight", 0, name], values["weight", 2, name]), "what it was then"
        assert torch.equal(values["weight", 2, name], values["parameter", 2, name])
        assert not torch.equal(values["gradient", 1, name], values["gradient", 2, name])
        assert bool((values["optimizer exp_avg_sq", 2, name] >= 0).all())


def test_of_frozen_weights_there_are_no_gradients_and_no_moments(config: Path) -> None:
    """They stand first: the moments of the others are the others'."""
    base = load(config, ['parts.frozen=["embedding*"]'])
    names = defaultdict[str, set[str]](set)
    for shard in trace._run(base, open_corpus(base), Mesh(), CPU, 1):
        names[shard.number.what].add(shard.number.name)
    frozen = names["weight"] - names["gradient"]
    assert frozen and all(name.startswith("embedding.") for name in frozen)
    assert names["parameter"] == names["weight"]
    assert names["optimizer exp_avg"] == names["optimizer exp_avg_sq"] == names["gradient"]


class Scaling:
    """An optimizer that uses up the gradients."""

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        return {}

    def update_(self, slices: Sequence[ParamSlice], **settings: Any) -> None:
        for bucket in self.buckets:
            bucket.optimizer_gradients.mul_(0.25)

    def __init__(self, buckets: Sequence[Any]) -> None:
        self.buckets = buckets


def test_gradients_are_those_before_the_update_and_of_a_skipped_step_there_are_none() -> None:
    """Nor those of the step before it once more."""
    _, buckets = flat_model()
    for bucket in buckets:
        bucket.optimizer_gradients.fill_(3.0)
    seen = SeenGradients(Scaling(buckets), buckets)
    assert not list(seen.taken(1, 1.0))
    seen.update_([], step=2, learning_rate=0.1, factor=torch.ones(()), num_weights=1, total=lambda x: x)
    taken = list(seen.taken(2, 1.0))
    assert taken and all(bool((shard.values == 3.0).all()) for shard in taken)
    assert not list(seen.taken(3, 1.0))
