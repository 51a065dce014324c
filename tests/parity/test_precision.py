"""16-bit training: it computes in 16 bits and remembers in 32, on every layout; overflow is everybody's affair.

bf16 has 8 significant bits, fp16 11. A rounding is off by half a step at most, 2⁻⁸ or 2⁻¹¹ of the number, and over
many numbers by half of that in root mean square: a *unit* below.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from colonnade.config.schema import Config
from colonnade.data.loader import Batch
from colonnade.kernels.dropout import Masks
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.distributed import run_on_ranks
from tests.model.whole import loss_of
from tests.parity.compare import Outcome, judge
from tests.parity.runs import (
    CPU,
    SERIAL,
    Case,
    LocalRanges,
    Reference,
    Run,
    Way,
    configured,
    local_ranges,
    microbatches,
    references_on_a_rank,
    train,
    whole,
)

Precision = Literal["bf16", "fp16"]
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = {"bf16": 2.0**-9, "fp16": 2.0**-12}
"""The usual relative error of one rounding; the largest is twice that."""
WAYS = {
    "serial": Way(micro_batch_size=4),
    "tp2": Way(tp=2, micro_batch_size=4),
    "tp2 sequence parallel": Way(tp=2, micro_batch_size=4, sequence_parallel=True),
    "pp2": Way(pp=2, micro_batch_size=4),
    **{f"dp2 zero{zero}": Way(dp=2, micro_batch_size=2, zero=zero) for zero in (0, 1, 2, 3)},
    "BLOOM's": Way(tp=2, pp=2, dp=2, micro_batch_size=1, zero=1),
}
CASES = {
    "bf16": Case(precision="bf16"),
    "bf16 fp32_residual": Case(precision="bf16", fp32_residual=True),
    "fp16": Case(precision="fp16"),
}
PAIRS = [
    (case, way)
    for case in CASES
    for way in WAYS
    if "residual" not in case or way in ("serial", "tp2 sequence parallel", "pp2")
]
QUICK_PAIRS = {("bf16", "serial"), ("bf16", "tp2 sequence parallel"), ("bf16", "dp2 zero2"), ("fp16", "serial")} | {
    ("bf16 fp32_residual", "pp2"),
    ("bf16 fp32_residual", "serial"),
    ("fp16", "dp2 zero3"),
}
"""Each number format, each axis, and what a layout is compared with: the others are slow."""


def marked(pairs: Sequence[tuple[str, str]]) -> list[Any]:
    return [pair if pair in QUICK_PAIRS else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


def runs_on_a_rank(rank: int, num_ranks: int, way: Way, cases: Sequence[Case]) -> list[Run]:
    mesh = build_mesh(way.layout, rank)
    return [train(case, way, mesh) for case in cases]


@cache
def trained(case: Case, way: Way) -> list[Run]:
    """Five steps, by rank."""
    ranks = run_on_ranks(runs_on_a_rank, way.layout.num_ranks, way, [case])
    return [run for (run,) in ranks]


def runs(case: str, way: str) -> list[Run]:
    return trained(CASES[case], WAYS[way])


@pytest.fixture(scope="module")
def fp32() -> Reference:
    ((found,),) = run_on_ranks(references_on_a_rank, 1, [Case(precision="fp32")])
    return found  # type: ignore[no-any-return]


def distance(ranks: list[Run], reference: Reference) -> float:
    """Of the first step's gradients, over all weights and ranks, relative: ‖g − g'‖ / ‖g'‖."""
    difference, size = 0.0, 0.0
    for run in ranks:
        for name, held in run.steps[0].gradients.items():
            exact = held.of(reference.gradients[0][name]).double()
            difference += (held.values.double() - exact).square().sum().item()
            size += exact.square().sum().item()
    return float((difference / size) ** 0.5)


def precision_of(case: str) -> Precision:
    return "bf16" if case.startswith("bf16") else "fp16"


@pytest.mark.parametrize(("case", "way"), marked(PAIRS))
def test_16_bits_stay_near_fp32(case: str, way: str, fp32: Reference) -> None:
    """A rounding is as often up as down. A gradient passes some thirty on its way through two layers and back (weight,
    norm, product, bias, mask, residual: seven a half-layer), so √30 units, in bf16 1 %; three times that is allowed.
    A loss is off by no more than its logits, of size ten: by ten units.
    """
    ranks, unit = runs(case, way), UNIT[precision_of(case)]
    assert distance(ranks, fp32) <= 3 * 30**0.5 * unit
    for run in ranks:
        for step, exact in zip(run.steps, fp32.results, strict=True):
            assert abs(step.result.loss - exact.loss) <= 10 * unit
            assert step.result.grad_norm == pytest.approx(exact.grad_norm, rel=3 * 30**0.5 * unit)
            assert not step.result.skipped


@pytest.mark.parametrize(("case", "way"), marked([(case, way) for case, way in PAIRS if way != "serial"]))
def test_a_layout_adds_little_to_16_bits_own_error(case: str, way: str, fp32: Reference) -> None:
    """A cut sum is one rounding more than a whole one, of seven."""
    own = distance(runs(case, "serial"), fp32)
    assert distance(runs(case, way), fp32) <= 1.5 * own


@pytest.mark.parametrize(("case", "way"), marked(PAIRS))
def test_parameters_are_rounded_masters_and_copies_are_equal(case: str, way: str, fp32: Reference) -> None:
    dtype, ranks = DTYPE[precision_of(case)], runs(case, way)
    for run in ranks:
        for name, master in run.kept["master"].items():
            parameter = run.parameters[name].values[master.first : master.first + len(master.values)]
            assert master.values.dtype is torch.float32 and parameter.dtype is dtype
            assert torch.equal(parameter, master.values.to(dtype)), name
    outcome = Outcome((CASES[case], WAYS[way]), [judge(run, fp32) for run in ranks], fp32)
    assert outcome.unequal_copies() == [] and outcome.miscounted() == []
    assert all(run.outside == 0.0 for run in ranks)


# --- what is remembered in 32 bits ------------------------------------------------------------------------------------

MICROBATCHES = 256
LONG = {
    "serial": Way(micro_batch_size=1),
    "dp2 zero1": Way(dp=2, micro_batch_size=1, zero=1),
    "dp2 zero2": Way(dp=2, micro_batch_size=1, zero=2),
    "dp2 zero3": Way(dp=2, micro_batch_size=1, zero=3),
    "pp2 zero_bubble": Way(pp=2, micro_batch_size=1, schedule="zero_bubble"),
    "pp2 dp2 zero2": Way(pp=2, dp=2, micro_batch_size=1, zero=2),
}
LONG_CASE = Case(precision="bf16", clipped=False, num_layers=1)


def long_config(way: Way) -> Config:
    plain = configured(LONG_CASE, way)
    return plain.model_copy(update={"train": plain.train.model_copy(update={"global_batch_size": MICROBATCHES})})


def long_batches(mesh: Mesh) -> list[Batch]:
    tokens = torch.randint(0, LONG_CASE.vocab_size, (9, MICROBATCHES), generator=torch.Generator().manual_seed(0))
    share = MICROBATCHES // mesh.dp.size
    return [
        Batch(tokens[:-1, i : i + 1], tokens[1:, i : i + 1], torch.ones(8, 1), torch.tensor([i]))
        for i in range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
    ]


def summed(rank: int, num_ranks: int, way: Way) -> LocalRanges:
    """The gradients of 256 micro-batches."""
    mesh = build_mesh(way.layout, rank)
    state = build_state(long_config(way), mesh, LONG_CASE.vocab_size, CPU)
    train_step(state, long_batches(mesh), mesh, long_config(way).train)
    return local_ranges(state, "reduced")


@pytest.fixture(scope="module")
def exact_sums() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sum of the micro-batches' own gradients in float64, and that of their sizes."""
    state = build_state(long_config(SERIAL), Mesh(), LONG_CASE.vocab_size, CPU)
    sums: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for batch in long_batches(Mesh()):
        state.ownership.begin()
        weights = batch.loss_mask.double() / (8 * MICROBATCHES)
        masks = Masks(long_config(SERIAL).train.seed, batch.samples.numpy())
        loss_of(state.model, batch.tokens, batch.labels, weights, masks).backward()
        for name, gradient in whole(local_ranges(state, "reduced")).items():
            assert gradient.dtype is torch.float32
            sums[name] = sums.get(name, 0.0) + gradient.double()
            sizes[name] = sizes.get(name, 0.0) + gradient.double().abs()
    return sums, sizes


QUICK = ("serial", "pp2 zero_bubble", "dp2 zero3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LONG]
)
def test_256_microbatches_add_up_in_fp32(way: str, exact_sums: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    """The sum is that of the micro-batches' own gradients, to fp32 rounding: 256 additions of 2⁻²⁴ each, on whatever
    rank and in whatever buffer a partial sum waits.
    """
    sums, sizes = exact_sums
    ranks = run_on_ranks(summed, LONG[way].layout.num_ranks, LONG[way])
    assert set().union(*ranks) == set(sums)
    for name, held in [each for rank in ranks for each in rank.items()]:
        exact, bound = held.of(sums[name]), 2.0**-24 * MICROBATCHES * held.of(sizes[name])
        assert ((held.values - exact).abs() <= bound).all(), name
        # the same sum in bf16 would be far outside: one rounding of the total alone
        lost = (exact[exact != 0].bfloat16() - exact[exact != 0]).abs()
        assert not len(lost) or (lost > bound[exact != 0]).double().mean() > 0.5, f"{name}: the bound tells them apart"


@pytest.mark.slow
def test_a_step_smaller_than_bf16_can_tell_moves_the_master() -> None:
    config = long_config(SERIAL)
    optim = config.optim.model_copy(update={"learning_rate": 1e-3, "warmup_steps": 0})
    state = build_state(config.model_copy(update={"optim": optim}), Mesh(), LONG_CASE.vocab_size, CPU)
    before = whole(local_ranges(state, "master"))
    few = long_batches(Mesh())[:8]  # Adam's first step is the learning rate, whatever the gradient's size
    train_step(state, few, Mesh(), config.train)
    norm = "blocks.0.mlp_norm.weight"  # ones: bf16 next to 1 has steps of 2⁻⁸
    after = whole(local_ranges(state, "master"))
    assert (after[norm] - before[norm]).abs().max() < 2.0**-9 and not torch.equal(after[norm], before[norm])


# --- gradients that cross ranks in 16 bits ----------------------------------------------------------------------------


def own_and_reduced(
    rank: int, num_ranks: int, way: Way
) -> tuple[LocalRanges, dict[str, Tensor], list[tuple[str, int]]]:
    """One micro-batch a rank: (reduced gradients, this rank's own before, (dtype, bytes) of what carried them)."""
    mesh, case = build_mesh(way.layout, rank), Case(precision="bf16", clipped=False)
    state = build_state(configured(case, way), mesh, case.vocab_size, CPU)
    own: dict[str, Tensor] = {}

    def noted(unit: str, *, last: bool) -> None:
        for bucket in state.ownership._completes[unit]:
            gradients = {param.placement.name: param.view(bucket.gradients).clone() for param in bucket.ranges}
            own.update({f"{bucket.name}.{name}": gradient for name, gradient in gradients.items()})
        ready(unit, last=last)

    ready = state.ownership.gradients_ready
    state.ownership.gradients_ready = noted  # type: ignore[method-assign]
    train_step(state, microbatches(case, way, 0, mesh), mesh, configured(case, way).train)
    sent = [(e.dtype, e.bytes) for e in mesh.ledger.entries if "buckets" in e.site and e.operation != "all_gather"]
    return local_ranges(state, "reduced"), own, sent


@pytest.mark.one_in(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_16_bit_reduction_rounds_each_share_and_the_sum(zero: Any) -> None:
    """Of two ranks' gradients a and b: |error| ≤ 2⁻⁸ (|a| + |b| + |a + b|), and half the bytes."""
    way = Way(dp=2, micro_batch_size=4, zero=zero, reduce_precision="16-bit")
    narrow = run_on_ranks(own_and_reduced, 2, way)
    wide = run_on_ranks(own_and_reduced, 2, Way(dp=2, micro_batch_size=4, zero=zero))
    unit, rounded = 2 * UNIT["bf16"] * (1 + 2.0**-8), 0
    for found, _, _ in narrow:
        for name, held in found.items():
            a, b = (held.of(own[name]).double() for _, own, _ in narrow)
            error = (held.values - (a + b)).abs()
            assert (error <= unit * (a.abs() + b.abs() + (a + b).abs())).all(), name
            rounded += int((error > 2.0**-12 * (a + b).abs()).sum())
    assert rounded > 1000, "it does round"
    assert [(dtype, 2 * size) for dtype, size in narrow[0][2]] == [("bfloat16", size) for _, size in wide[0][2]]


# --- offload ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [Way(micro_batch_size=4), Way(dp=2, micro_batch_size=2), Way(dp=2, micro_batch_size=2, zero=3)], ids=str
)
def test_offload_changes_no_bit(way: Way) -> None:
    cases = [Case(precision="bf16"), Case(precision="bf16", optimizer="lamb")]
    away = Way(**{**vars(way), "offload": True})
    for case, moved_away in zip(
        cases, zip(*run_on_ranks(runs_on_a_rank, way.layout.num_ranks, away, cases), strict=True), strict=True
    ):
        for one, other in zip(trained(case, way), moved_away, strict=True):
            assert [step.result for step in one.steps] == [step.result for step in other.steps]
            both = zip((one.parameters, *one.kept.values()), (other.parameters, *other.kept.values()), strict=True)
            for mine, moved in both:
                assert all(torch.equal(mine[name].values, moved[name].values) for name in mine)
