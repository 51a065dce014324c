"""A step that computes nothing: what is alive when, on numbers small enough to follow, and beside a real step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from colonnade.architecture.statement import Architecture, Unit, Weight
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.data_parallel.buckets import Storage, flatten
from colonnade.data_parallel.zero import Ownership
from colonnade.errors import LayoutError
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import call_site
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.mesh.transport import Pending
from colonnade.pipeline.inference import ResidentWeights
from colonnade.pipeline.partition import chunks
from colonnade.planner.counting import HoldingTransport, Peaks, _placement, enough, peaks
from colonnade.planner.kept import Deferred, Handed, Kept, unit_kept
from colonnade.planner.live import LiveTensors, Watch
from colonnade.train.state import runner_of
from tests.data_parallel.flat import weights
from tests.pipeline.toy import Pair, microbatches

CPU = torch.device("cpu")
STREAM, INSIDE, DEFERRED, LENGTH = 2, 100, 30, 16
GRADIENTS, PARAMETERS = 4 * LENGTH, 2 * LENGTH
"""[bytes] Of a bucket, under bf16."""
KEPT = {
    "first": Kept(INSIDE, (Handed(STREAM),)),
    "block": Kept(INSIDE, (Handed(STREAM),), deferred=Deferred(DEFERRED)),
    "loss": Kept(INSIDE, losses=1),
}


def stated(num_blocks: int, ends: bool = True) -> Architecture:
    """Each unit keeps 100 besides the stream, 2, and has a bucket of its own."""
    units = [Unit(f"blocks.{i}", "block", (f"blocks.{i}",), 1, recomputes=True) for i in range(num_blocks)]
    if ends:
        head = Unit("head", "loss", ("head",), 1, losses=("loss",))
        units = [Unit("embedding", "first", ("embedding",), 0), *units, head]
    return Architecture(tuple(units), {unit.name: (Weight("weight", (LENGTH,)),) for unit in units})


def peak(
    architecture: Architecture, count: int, *, stage: int = 0, kept: Mapping[str, Kept] = KEPT, **keys: Any
) -> Peaks:
    parallel = ParallelConfig.model_validate(keys)
    train = TrainConfig(steps=1, global_batch_size=count * parallel.dp, micro_batch_size=1, precision="bf16")
    return peaks(architecture, kept, parallel, train, stage=stage)


# --- activations ------------------------------------------------------------------------------------------------------


def test_one_stage_keeps_one_micro_batch() -> None:
    found = peak(stated(2), 5)
    assert (found.activations, found.buffers) == (4 * INSIDE + 3 * STREAM, 0)


def test_gpipe_keeps_all_micro_batches() -> None:
    assert peak(stated(2), 5, schedule="gpipe").activations == 5 * (4 * INSIDE + 3 * STREAM)


@pytest.mark.parametrize("stage", range(4))
def test_1f1b_keeps_as_many_as_there_are_stages_from_here(stage: int) -> None:
    live = peak(stated(2), 9, stage=stage, pp=4).activations
    assert live // INSIDE == 4 - stage


def test_recomputed_blocks_keep_their_input_and_one_group_at_a_time() -> None:
    def groups(num_blocks: int, every: int, ends: bool = True) -> int:
        architecture = stated(num_blocks, ends)
        return peak(architecture, 3, recompute="full", recompute_every=every).activations // INSIDE

    assert (groups(2, 1), groups(2, 2)) == (2, 3)  # the embedding and a block, or both; the head is done by then
    assert [groups(9, every) for every in (1, 3, 9)] == [2, 4, 10]


def test_deferred_weight_gradients_live_until_they_are_computed() -> None:
    assert peak(stated(2), 9, stage=2, pp=4, schedule="zero_bubble").activations >= INSIDE + 2 * DEFERRED
    none = {**KEPT, "block": KEPT["block"]}
    assert peak(stated(2), 9, kept=none, stage=2, pp=4).activations < 2 * INSIDE + 2 * DEFERRED


def test_what_units_share_is_there_once_a_micro_batch() -> None:
    shared = {**KEPT, "block": Kept(INSIDE, (Handed(STREAM),), shared=10**6)}
    assert peak(stated(4), 3, kept=shared).activations // 10**6 == 1
    assert peak(stated(4), 3, kept=shared, schedule="gpipe").activations // 10**6 == 3
    assert peak(stated(4), 3, kept=shared, schedule="gpipe", recompute="full").activations // 10**6 == 1


def test_what_is_handed_on_as_it_is_takes_memory_once() -> None:
    """A memory of 1000 bytes, made by the first unit; each block hands it on, and gives it a gradient."""
    on = Kept(INSIDE, (Handed(STREAM), Handed(1000, source=1), Handed(7, source=2, has_gradient=False)))
    kept = {
        "first": Kept(INSIDE, (Handed(STREAM), Handed(1000), Handed(7, has_gradient=False))),
        "block": on,
        "loss": Kept(INSIDE, losses=1, unread=(1, 2)),
    }
    live = peak(stated(4), 1, kept=kept).activations
    forward = 6 * INSIDE + 5 * STREAM + 1000 + 7
    gradients = 2 * (1000 + STREAM)  # what comes to a block, and what goes on
    assert live == forward - 3 * INSIDE - STREAM + gradients, "after the backward of the last block but one"


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_what_operators_need_comes_on_top_where_it_is_needed(what: str) -> None:
    """A million bytes in a block: with all that is there when the last block runs, or when its backward does."""
    keys = {what: 10**6}
    found = peak(stated(2), 5, kept={**KEPT, "block": replace(KEPT["block"], **keys)})
    there = 2 * INSIDE + 2 * STREAM if what == "forward" else 3 * INSIDE + 4 * STREAM
    assert 0 <= found.activations + found.operators - (10**6 + there) <= 8, "and the number that starts a backward"
    waits = Deferred(DEFERRED, **{what: 10**6}) if what == "backward" else Deferred(DEFERRED, weights=10**6)
    kept = {**KEPT, "block": replace(KEPT["block"], deferred=waits)}
    assert peak(stated(2), 9, kept=kept, stage=1, pp=2).operators < 10**6
    assert peak(stated(2), 9, kept=kept, stage=1, pp=2, schedule="zero_bubble").operators > 10**6 - 5 * INSIDE


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_zero_3_has_the_unit_that_runs_and_the_next() -> None:
    live = peak(stated(9), 3, zero=3).buffers
    assert live == 2 * PARAMETERS + 3 * GRADIENTS + 2 * GRADIENTS  # gradients: of the unit that runs, of two that are
    # being summed, and what the two sums are put in


def test_zero_2_has_parameters_anyway() -> None:
    assert peak(stated(9), 3, zero=2).buffers == 3 * GRADIENTS + 2 * GRADIENTS
    assert peak(stated(9), 3, zero=1).buffers == peak(stated(9), 3, zero=0).buffers == 0


def test_a_sum_is_held_until_it_is_waited_for() -> None:
    transport = HoldingTransport("dp", 2, paper_mesh(Layout(dp=2), 0).ledger)
    with LiveTensors() as live:
        pending: Pending = transport.all_reduce_(torch.zeros(4), "sum", call_site())
        assert live.bytes.total() == 16
        pending.wait()
        assert live.bytes.total() == 0


def test_gradients_of_a_tied_table_stay_from_the_head_to_the_embedding() -> None:
    tied = stated(3)
    units = tuple(unit._replace(buckets=("embedding",)) if unit.is_loss else unit for unit in tied.units)
    alone, shared = (peak(each, 1, zero=2).buffers for each in (tied, Architecture(units, tied.buckets)))
    assert alone == 3 * GRADIENTS + 2 * GRADIENTS
    assert shared == alone + GRADIENTS, "the table's, beside a block's and two that are being summed"


# --- as many micro-batches as tell ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        (pp, schedule) if (pp, schedule) == (3, "interleaved") else pytest.param(pp, schedule, marks=pytest.mark.slow)
        for pp in (1, 3)
        for schedule in ("naive", "1f1b", "zero_bubble", "interleaved")
    ],
)
def test_a_longer_step_keeps_no_more(pp: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"pp": pp, "schedule": schedule, "virtual_stages": 2 if schedule == "interleaved" else 1}

    def found() -> list[tuple[int, int]]:
        some = product(range(pp), [(2, "full"), (3, "none")])
        peaks = [peak(stated(7), 5 * pp, stage=at, zero=zero, recompute=again, **keys) for at, (zero, again) in some]
        return [(each.activations, each.buffers) for each in peaks]

    short = found()
    assert enough(ParallelConfig.model_validate(keys), 5 * pp) == 3 * pp
    monkeypatch.setattr("colonnade.planner.counting.enough", lambda parallel, count: count)
    assert found() == short


def test_what_cannot_be_scheduled_is_refused_though_a_shorter_step_could_be() -> None:
    with pytest.raises(LayoutError, match="interleaved"):
        peak(stated(10), 19, pp=3, schedule="interleaved", virtual_stages=2)


# --- beside a real step -----------------------------------------------------------------------------------------------


def kept_by(pair: Pair, architecture: Architecture) -> dict[str, Kept]:
    (given,) = microbatches(1)
    return {unit.kind: unit_kept(pair, unit, given, pair.later, LiveTensors()) for unit in architecture.units}


def pair_statement(pair: Pair) -> Architecture:
    """Every unit is a kind of its own."""
    units = [
        Unit(name, name, (name,), 1, recomputes="." in name, losses=("loss",) if name == "head" else ())
        for name in pair.names
    ]
    return Architecture(tuple(units), {name: (Weight("weight", (LENGTH,)),) for name in pair.names})


SHAPES: Sequence[dict[str, Any]] = [
    *({"schedule": schedule, "pp": pp} for schedule, pp in product(("gpipe", "1f1b", "zero_bubble"), (1, 2, 3))),
    {"schedule": "interleaved", "virtual_stages": 2, "pp": 2},
    {"recompute": "full", "pp": 2},
    {"recompute": "full", "recompute_every": 2, "pp": 1},
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("keys", SHAPES, ids=str)
def test_a_model_with_three_tensors_takes_what_is_predicted(keys: dict[str, Any]) -> None:
    parallel = ParallelConfig.model_validate(keys)
    pair = Pair(10)
    for weight in pair.parameters():
        weight.grad = torch.zeros_like(weight)
    architecture = pair_statement(pair)
    kept = kept_by(pair, architecture)
    count = 4 * parallel.pp
    train = TrainConfig(steps=1, global_batch_size=count, micro_batch_size=1)
    for stage in range(parallel.pp):
        predicted = peaks(architecture, kept, parallel, train, stage=stage)
        mesh = paper_mesh(Layout(pp=parallel.pp), stage)
        with LiveTensors() as live:
            watch = Watch(ResidentWeights(), [], live)
            every = chunks(architecture, parallel)
            runner_of(parallel, every, pair, watch, pair.later, mesh.pp, CPU).run(microbatches(count))
        assert 0 <= watch.activations - predicted.activations <= 8 * (count + 1), stage  # losses


def test_ownership_is_the_programs_own() -> None:
    """Buckets on the meta device come and go as those with memory do."""
    seen = []
    for device in ("cpu", "meta"):
        storage = Storage(dtype=torch.bfloat16, device=torch.device(device), zero=3)
        names = ["a", "b", "c"]
        with torch.device(device):
            buckets = flatten({name: weights({"weight": (40,)}) for name in names}, Mesh().dp, storage)
        owner = Ownership(buckets, {name: [name] for name in names}, Mesh(), zero=3)
        with LiveTensors() as live:
            watch = Watch(owner, buckets, live)
            uses = [*names, *reversed(names)]
            watch.expect(uses)
            for at, unit in enumerate(uses):
                watch.acquire(unit, gradients=at > 2)
                watch.release(unit)
                if at > 2:
                    watch.gradients_ready(unit, last=True)
        seen.append(watch.buffers)
    assert seen[0] == seen[1] > 0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_weight_has_no_gradient_on_paper_either(is_frozen: bool) -> None:
    weight = Weight("mlp.up.weight", (12, 8), cut=0, is_frozen=is_frozen)
    placed = _placement(weight, 2)
    assert placed.parameter.requires_grad is not is_frozen and placed.parameter.shape == (6, 8)
