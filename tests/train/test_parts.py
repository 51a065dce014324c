"""Frozen parts and factors against plain torch; what frozen weights do not have; runs that go on with other parts."""

from dataclasses import replace
from math import cos, pi
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.parts import PartsConfig
from colonnade.config.schema import Config
from colonnade.kernels import products
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.tensor_parallel import cross_entropy
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step
from tests.commands import after_banner, here
from tests.model.plain import Drops, leaves, plain_logits, plain_loss
from tests.parity.compare import relative
from tests.parity.runs import (
    CPU,
    PARTS,
    SERIAL,
    STEPS,
    Case,
    Way,
    configured,
    global_batch,
    local_ranges,
    microbatches,
    whole,
)
from tests.runs import events, tensors

RATES = {"embedding.tokens": 0.5, "blocks.1": 3.0}
PARTS_OF_TORCH = PartsConfig(
    frozen=("blocks.0.*", "embedding.positions.*"),
    learning_rate={"embedding.tokens*": 0.5, "blocks.1.*": 3.0},
    weight_decay={"*": 2.0, "blocks.1.mlp.*": 0.0},
)
"""A frozen block below trained ones, above a trained table."""


def with_torch(config: Config, weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Five steps with torch's optimizer and its parameter groups on the plain model, frozen as torch freezes."""
    optim, groups = config.optim, []
    for name, weight in weights.items():
        weight.requires_grad_(not name.startswith(("blocks.0.", "embedding.positions.")))
        decay = 0.0 if weight.ndim == 1 or name.startswith("blocks.1.mlp.") else 2.0 * optim.weight_decay
        factor = next((rate for start, rate in RATES.items() if name.startswith(start)), 1.0)
        if weight.requires_grad:
            groups.append({"params": [weight], "weight_decay": decay, "factor": factor})
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.epsilon, foreach=False)
    rates = [0.5, 1.0, *(0.1 + 0.9 * (1 + cos(pi * k / 3)) / 2 for k in (1, 2, 3))]
    for number in range(STEPS):
        batch = global_batch(Case(), number)
        logits = plain_logits(config.model, weights, batch.tokens.t(), Drops(config.train.seed, batch.samples.tolist()))
        loss = plain_loss(logits, batch.labels.t(), batch.loss_mask.t().double(), batch.loss_mask.sum().item())
        optimizer.zero_grad()
        loss.backward()
        gradients = [w.grad for w in weights.values() if w.grad is not None and w.requires_grad]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((0.05 / norm).clamp(max=1.0))  # torch's own clipping adds 1e-6 to the norm
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate * rates[number] * group["factor"]
        optimizer.step()
    return {name: w.detach() for name, w in weights.items()}


def test_five_steps_are_those_of_torch_with_parameter_groups() -> None:
    case = Case()
    config = configured(case, SERIAL).model_copy(update={"parts": PARTS_OF_TORCH})
    state = build_state(config, Mesh(), case.vocab_size, CPU)
    weights = leaves(whole(local_ranges(state, "master")))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for number in range(STEPS):
        train_step(state, microbatches(case, replace(SERIAL, micro_batch_size=2), number, Mesh()), Mesh(), config.train)
    found, expected = whole(local_ranges(state, "master")), with_torch(config, weights)
    for name, theirs in expected.items():
        assert relative((found[name] - theirs).abs().max().item(), theirs.abs().max().item()) <= 1e-10, name
        moved = not torch.equal(found[name], before[name])
        assert moved != name.startswith(("blocks.0.", "embedding.positions.")), name


def built(case: Case, way: Way, rank: int = 0) -> tuple[Config, TrainState, Mesh]:
    mesh, config = paper_mesh(way.layout, rank), configured(case, way)
    return config, build_state(config, mesh, case.vocab_size, CPU), mesh


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_weights_have_parameters_alone(zero: int, precision: str) -> None:
    _, state, _ = built(Case(parts="upper", precision=precision), Way(dp=2, zero=zero, micro_batch_size=2))
    frozen = [bucket for bucket in state.buckets if bucket.is_frozen]
    assert {bucket.name for bucket in frozen} == {"embedding.tokens", "embedding", "blocks.0"}
    for bucket, kept in zip(state.buckets, state.optimizer_state, strict=True):
        if bucket.is_frozen:
            assert bucket.gradients.numel() == bucket.reduced.numel() == 0 and not kept
            assert bucket.master.data_ptr() == bucket.shard.data_ptr()
            assert bucket.master.dtype == bucket.parameters.dtype
            assert len(bucket.shard) == bucket.size // (2 if zero == 3 else 1)
            assert all(param.placement.parameter.grad is None for param in bucket.ranges)


def test_nothing_of_frozen_parts_crosses_dp() -> None:
    """Buckets that are summed: block 1 and the head. Under ZeRO 3 all that is used is gathered."""
    for zero, operation in ((0, "all_reduce"), (1, "reduce_scatter"), (3, "reduce_scatter")):
        config, state, mesh = built(Case(parts="upper"), Way(dp=2, zero=zero, micro_batch_size=4))
        train_step(state, microbatches(Case(), Way(dp=2, micro_batch_size=4), 0, mesh), mesh, config.train)
        sent = [entry for entry in mesh.ledger.entries if "buckets.py" in entry.site]
        assert {entry.unit for entry in sent if entry.operation == operation} == {"blocks.1", "head"}, zero
        gathered = {entry.unit for entry in sent if entry.operation == "all_gather"}
        assert len(gathered) == {0: 0, 1: 2, 3: 4}[zero]


def counted_products(case: Case) -> tuple[int, int]:
    """(weight gradients of linear layers, of the output layer) that a step of one micro-batch computes."""
    config, state, mesh = built(case, SERIAL)
    with (
        patch.object(products, "add_product_", wraps=products.add_product_) as linear,
        patch.object(cross_entropy, "add_products_", wraps=cross_entropy.add_products_) as output,
    ):
        train_step(state, microbatches(case, SERIAL, 0, mesh), mesh, config.train)
    # one block is added as a linear layer adds its gradient
    return linear.call_count - output.call_count, output.call_count


def test_products_of_frozen_weights_are_not_computed() -> None:
    assert counted_products(Case()) == (8, 1)
    assert counted_products(Case(parts="upper")) == (4, 0), "of a block of two, and not of the tied table"
    assert counted_products(Case(parts="table")) == (4, 0), "qkv and up in both blocks"
    assert counted_products(Case(parts="upper", tied=False)) == (4, 1)


def test_what_only_frozen_weights_would_read_is_not_kept() -> None:
    """Nor is anything below the first trained block."""

    def kept(case: Case) -> int:
        state, size = built(case, SERIAL)[1], 0

        def count(x: Tensor) -> Tensor:
            nonlocal size
            size += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            inputs = state.task.inputs(microbatches(case, SERIAL, 0, Mesh())[0], torch.ones(1), 1)
            carry, chunk = (), state.runner.chunks[0]
            chunk.owner.expect(chunk.uses("F"))
            chunk.forward(0, carry, inputs)
        return size

    assert kept(Case(parts="upper", num_layers=3)) < 0.75 * kept(Case(num_layers=3))


def test_stages_below_the_first_trained_one_get_no_gradients() -> None:
    way = Way(pp=2, micro_batch_size=2)
    for rank, (sent, received) in ((0, (4, 0)), (1, (0, 4))):
        config, state, mesh = built(Case(parts="upper"), way, rank)
        assert state.runner.first_trained == 1
        train_step(state, microbatches(Case(), way, 0, mesh), mesh, config.train)
        counts = [sum(entry.operation == kind for entry in mesh.ledger.entries) for kind in ("send", "receive")]
        assert counts == [sent, received]


# --- runs that go on --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_other_parts_and_is_told(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    frozen = 'parts.frozen=["embedding*", "blocks.0.*"]'
    first = here("train", config, f"run.folder={run}", "train.steps=2", frozen)
    assert first.status == 0 and "trained" in first.out, first
    before = tensors(run)
    assert not any(name.startswith("optimizer.") and ".blocks.0." in name for name in before)
    second = here("train", config, f"run.folder={run}", "train.steps=4", "parts.frozen=[]")
    assert second.status == 0, second
    assert "parts.frozen" in second.out and "Their moments begin at zero" in after_banner(second.out)
    after = tensors(run)
    assert not torch.equal(before["blocks.0.mlp.up.weight"], after["blocks.0.mlp.up.weight"])
    assert "optimizer.exp_avg.blocks.0.mlp.up.weight" in after
    third = here("train", config, f"run.folder={run}", "train.steps=6", frozen)
    assert third.status == 0 and "optimizer.exp_avg.blocks.0.mlp.up.weight" not in tensors(run), third
    assert [event["event"] for event in events(run)].count("resumed") == 2


def test_patterns_are_checked_before_ranks_start(config: Path, tmp_path: Path) -> None:
    answer = here("train", config, f"run.folder={tmp_path / 'run'}", 'parts.frozen=["blocks.9.*"]', "parallel.tp=2")
    assert answer.status == 2 and "matches no weight" in answer.err and "on rank" not in answer.err, answer
    assert not (tmp_path / "run").exists()


def test_parts_in_every_parity_case_freeze_something() -> None:
    assert [name for name, parts in PARTS.items() if "frozen" in parts] == ["upper", "lower", "table"]
