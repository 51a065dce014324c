"""bf16 computes, fp32 remembers: master weights and gradient sums lose nothing to the 8 bits of bf16."""

import pytest
import torch
from torch import Tensor

from colonnade.config.schema import Config, ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from colonnade.data.loader import Batch
from colonnade.data_parallel.buckets import named_slots
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh
from colonnade.model.dropout import Masks
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step
from tests.distributed import run_on_ranks
from tests.parity.runs import CPU, Case, Run, boxes, train_on_ranks

MICROBATCHES = 256
UNIT = 2.0**-9
"""The largest relative error of one rounding to bf16 (8 bits of significand)."""


def state_of(precision: str) -> tuple[Config, TrainState]:
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, dropout=0.1, attention_dropout=0.1),
        parallel=ParallelConfig(),
        train=TrainConfig.model_validate(
            {
                "steps": 1,
                "global_batch_size": MICROBATCHES,
                "micro_batch_size": 1,
                "precision": precision,
                "gradient_clip": 0.0,
            }
        ),
        optim=OptimConfig(learning_rate=1e-3, decay="constant"),
        run=RunConfig(folder="unused"),
    )
    return config, build_state(config, Mesh(), 37, CPU)


def batches() -> list[Batch]:
    tokens = torch.randint(0, 37, (9, MICROBATCHES), generator=torch.Generator().manual_seed(0))
    return [
        Batch(tokens[:-1, i : i + 1], tokens[1:, i : i + 1], torch.ones(8, 1), torch.tensor([i]))
        for i in range(MICROBATCHES)
    ]


def test_256_microbatches_add_up_in_fp32() -> None:
    """The sum is that of the micro-batches' own gradients, to fp32 rounding: 256 additions of 2⁻²⁴ each."""
    config, state = state_of("bf16")
    exact = {name: torch.zeros_like(box, dtype=torch.float64) for name, (_, box) in boxes(state, "gradients").items()}
    sizes = {name: torch.zeros_like(total) for name, total in exact.items()}
    for batch in batches():
        for unit in state.units:
            unit.gradients.zero_()
        weights = batch.loss_mask.double() / (8 * MICROBATCHES)
        state.model(batch.tokens, batch.labels, weights, Masks(config.train.seed, batch.samples.numpy())).backward()
        for name, (_, box) in boxes(state, "gradients").items():
            assert box.dtype is torch.float32
            exact[name] += box
            sizes[name] += box.abs()
    train_step(state, batches(), Mesh(), config.train)
    for name, (_, total) in boxes(state, "gradients").items():
        bound = 2.0**-24 * MICROBATCHES * sizes[name]
        assert ((total - exact[name]).abs() <= bound).all(), name
        # the same sum in bf16 would be far outside: one rounding of the total alone
        lost = (exact[name].bfloat16() - exact[name]).abs()
        assert (lost > bound).double().mean() > 0.5, f"{name}: the bound tells fp32 from bf16"


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Run]]:
    """Five steps with dropout and clipping: serial in fp32 and bf16, tp = 2 and dp = 2 in bf16."""
    case = Case(4, drop=0.1, precision="bf16")
    reference = Case(8, drop=0.1, precision="fp32")
    serial = run_on_ranks(train_on_ranks, 1, Layout(), [reference, case])[0]
    cut = run_on_ranks(train_on_ranks, 2, Layout(tp=2), [case])
    copies = run_on_ranks(train_on_ranks, 2, Layout(dp=2), [case])
    return {
        "fp32": [serial[0]],
        "serial": [serial[1]],
        "tp2": [run[0] for run in cut],
        "dp2": [run[0] for run in copies],
    }


def distance(run: Run, reference: Run) -> float:
    """Of the first step's gradients, over all weights, relative: ‖g − g'‖ / ‖g'‖."""
    mine, whole = run.steps[0].gradients, reference.steps[0].gradients

    def window(name: str, offsets: tuple[int, ...], box: Tensor) -> Tensor:
        return whole[name][1][tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))]

    pairs = [(box, window(name, offsets, box)) for name, (offsets, box) in mine.items()]
    difference = sum((box - other).double().square().sum().item() for box, other in pairs)
    return float((difference / sum(other.double().square().sum().item() for _, other in pairs)) ** 0.5)


@pytest.mark.parametrize("layout", ["serial", "tp2", "dp2"])
def test_bf16_stays_near_fp32(layout: str, runs: dict[str, list[Run]]) -> None:
    """A rounding is at most 2⁻⁹ and as often up as down. A gradient passes some thirty on its way through two layers
    and back (weight, norm, product, bias, mask, residual: seven a half-layer), so √30 · 2⁻⁹ ≈ 1 %; three times that is
    allowed. A loss is off by no more than its logits, of size ten: ten times 2⁻⁹.
    """
    (reference,) = runs["fp32"]
    for run in runs[layout]:
        assert distance(run, reference) <= 3 * 30**0.5 * UNIT
        for mine, exact in zip(run.steps, reference.steps, strict=True):
            assert abs(mine.loss - exact.loss) <= 10 * UNIT
            assert mine.grad_norm == pytest.approx(exact.grad_norm, rel=3 * 30**0.5 * UNIT)


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_a_layout_adds_little_to_bf16s_own_error(layout: str, runs: dict[str, list[Run]]) -> None:
    """A cut sum is one rounding more than a whole one, of seven."""
    own = distance(runs["serial"][0], runs["fp32"][0])
    assert all(distance(run, runs["fp32"][0]) <= 1.5 * own for run in runs[layout])


@pytest.mark.parametrize("layout", ["serial", "tp2", "dp2"])
def test_parameters_are_rounded_masters_and_copies_are_equal(layout: str, runs: dict[str, list[Run]]) -> None:
    first = runs[layout][0]
    for run in runs[layout]:
        for name, (_, master) in run.weights.items():
            parameter = run.parameters[name]
            real = parameter[tuple(slice(0, size) for size in master.shape)]
            assert master.dtype is torch.float32 and parameter.dtype is torch.bfloat16
            assert torch.equal(real, master.bfloat16()), name
            if layout == "dp2" or name in run.replicated:
                assert torch.equal(master, first.weights[name][1]), f"{name} differs between ranks"
        assert run.padding == 0.0


def test_a_step_smaller_than_bf16_can_tell_moves_the_master() -> None:
    config, state = state_of("bf16")
    before = {name: slot.view(unit.master).clone() for name, unit, slot in named_slots(state.units)}
    train_step(state, batches(), Mesh(), config.train)
    norm = "blocks.0.mlp_norm.weight"  # ones: bf16 next to 1 has steps of 2⁻⁸
    after = {name: slot.view(unit.master) for name, unit, slot in named_slots(state.units)}
    assert (after[norm] - before[norm]).abs().max() < 2.0**-9 and not torch.equal(after[norm], before[norm])
