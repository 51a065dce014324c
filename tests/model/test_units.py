"""A model in stages: parts of it on several ranks are the whole, in weights, losses and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.kernels.dropout import Masks
from colonnade.kernels.products import WeightGradients
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh, paper_mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.model.inputs import Inputs
from colonnade.pipeline.carry import Carry, Gradients, backward_from, leaves
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements
from tests.distributed import run_on_ranks
from tests.model.test_gpt import SAMPLES, SEED, VOCAB, configuration, inputs

STAGES = [["embedding", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "head"]]
SHAPES = {
    "tied": configuration(num_layers=4, dropout=0.1),
    "untied": configuration(num_layers=4, tie_embeddings=False),
    "no positions": configuration(num_layers=4, position="alibi", attention_dropout=0.1),
    "nothing but the table": configuration(num_layers=4, position="alibi", norm_position="post"),
    "embedding norm": configuration(num_layers=4, position="alibi", embedding_norm=True),
}


def built(config: ModelConfig, tp: Axis, units: list[str] | None = None, **how: Any) -> GPT:
    gpt = GPT(config, VOCAB, Parallel(tp, **how), units=units).double()
    initialize_(gpt, tp, 7)
    return gpt


def logical(gpt: GPT, tp: Axis, *, gradients: bool = False) -> dict[str, Tensor]:
    """This rank's weights, or their gradients, by logical name."""
    found: dict[str, Tensor] = {}
    for part, places in named_placements(gpt.bucket_modules(), tp).items():
        for place in places:
            t = place.parameter.grad if gradients else place.parameter
            assert t is not None
            found[f"{part}.{place.name}"] = t.detach()
    return found


def needs(gpt: GPT, unit: str) -> list[str]:
    """The parts that the architecture says a unit multiplies with."""
    return list(gpt.architecture.named([unit])[0].buckets)


def batch() -> Inputs:
    tokens, labels, weights = inputs()
    return Inputs(tokens, labels, weights, Masks(SEED, torch.tensor(SAMPLES).numpy()))


def through(stages: list[GPT], given: Inputs) -> Tensor:
    """Forward and backward through all stages, each with a graph of its own; returns the loss."""
    passed: list[tuple[Carry, Carry]] = []
    carry: Carry = ()
    for gpt in stages:
        entry = carry = leaves(carry)
        for unit in gpt.units():
            carry = gpt.run(unit, carry, given)
        passed.append((entry, carry))
    gradients: Gradients | None = None
    for entry, out in reversed(passed):
        backward_from(out, gradients)
        gradients = tuple(x.grad for x in entry)
    (loss,) = carry
    return loss


@pytest.mark.parametrize("what", SHAPES)
def test_stages_are_the_whole(what: str) -> None:
    config, tp = SHAPES[what], Mesh().tp
    whole, stages = built(config, tp), [built(config, tp, units=units) for units in STAGES]
    weights = logical(whole, tp)
    gradients: dict[str, Tensor | float] = {}
    for gpt in stages:
        for name, weight in logical(gpt, tp).items():
            assert torch.equal(weight, weights[name]), f"{name} begins with other numbers"
    assert {name for gpt in stages for name in logical(gpt, tp)} == set(weights)

    expected = through([whole], batch())
    torch.testing.assert_close(through(stages, batch()), expected, rtol=1e-13, atol=0)
    for gpt in stages:
        for name, gradient in logical(gpt, tp, gradients=True).items():
            gradients[name] = gradients.get(name, 0.0) + gradient  # a tied table's two copies have a part each
    for name, gradient in logical(whole, tp, gradients=True).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-11, atol=1e-13, msg=name)


def test_units_in_forward_order() -> None:
    assert list(GPT(configuration(), VOCAB, Parallel(Mesh().tp)).units()) == [
        "embedding",
        "blocks.0",
        "blocks.1",
        "head",
    ]
    chosen = ["blocks.1", "blocks.3", "head"]
    gpt = GPT(configuration(num_layers=4, tie_embeddings=False), VOCAB, Parallel(Mesh().tp), units=chosen)
    assert list(gpt.units()) == chosen
    assert {name.split(".")[1] for name, _ in gpt.blocks.named_parameters(prefix="blocks")} == {"1", "3"}


def test_parts_name_every_weight_once() -> None:
    for config in SHAPES.values():
        gpt = GPT(config, VOCAB, Parallel(Mesh().tp))
        named = logical(gpt, Mesh().tp)
        assert sum(t.numel() for t in named.values()) == sum(p.numel() for p in gpt.parameters())
        assert list(named) == [name for name, _ in gpt.named_parameters()]


@pytest.mark.parametrize(
    ("what", "units", "parts"),
    [
        ("tied", None, ["embedding.tokens", "embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),
        ("untied", ["embedding"], ["embedding.tokens", "embedding"]),
        ("untied", ["blocks.3", "head"], ["blocks.3", "head"]),
        ("tied", ["blocks.3", "head"], ["embedding.tokens", "blocks.3", "head"]),
        ("no positions", ["embedding"], ["embedding.tokens"]),
        ("embedding norm", ["embedding"], ["embedding.tokens", "embedding"]),
        ("nothing but the table", ["head"], ["embedding.tokens"]),
    ],
)
def test_parts(what: str, units: list[str] | None, parts: list[str]) -> None:
    assert list(GPT(SHAPES[what], VOCAB, Parallel(Mesh().tp), units=units).bucket_modules()) == parts


def test_needs() -> None:
    tied = GPT(SHAPES["tied"], VOCAB, Parallel(Mesh().tp))
    assert needs(tied, "embedding") == ["embedding.tokens", "embedding"]
    assert needs(tied, "blocks.3") == ["blocks.3"]
    assert needs(tied, "head") == ["embedding.tokens", "head"]
    assert needs(GPT(SHAPES["untied"], VOCAB, Parallel(Mesh().tp)), "head") == ["head"]
    bare = GPT(SHAPES["nothing but the table"], VOCAB, Parallel(Mesh().tp))
    assert needs(bare, "embedding") == needs(bare, "head") == ["embedding.tokens"]


@pytest.mark.parametrize("what", SHAPES)
def test_what_a_unit_needs_is_what_it_multiplies_with(what: str) -> None:
    """A weight that is not of a needed part may be lost while the unit runs."""
    gpt, tp = built(SHAPES[what], Mesh().tp), Mesh().tp
    given = batch()
    carries: dict[str, Carry] = {}
    carry: Carry = ()
    for unit in gpt.units():
        carries[unit] = carry
        carry = gpt.run(unit, carry, given)
    for unit in gpt.units():
        lost = built(SHAPES[what], tp)
        for part, places in named_placements(lost.bucket_modules(), tp).items():
            for place in places:
                if part not in needs(gpt, unit):
                    place.parameter.data.fill_(torch.nan)
        (out,), (expected,) = (model.run(unit, carries[unit], given) for model in (lost, gpt))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_buffers_are_like_what_the_units_hand_on(sequence_parallel: bool, fp32: bool, dtype: torch.dtype) -> None:
    parallel, given = Parallel(paper_mesh(Layout(tp=2), 1).tp, sequence_parallel), batch()
    gpt = GPT(configuration(fp32_residual=fp32), VOCAB, parallel).to(dtype)
    initialize_(gpt, parallel.tp, 7)
    last = GPT(configuration(fp32_residual=fp32), VOCAB, parallel, units=["head"])
    carry: Carry = ()
    for unit in gpt.units():
        for model in (gpt, last.to(dtype)):
            buffers = model.carry_buffers(given, into=unit)
            assert [(x.shape, x.dtype) for x in buffers] == [(x.shape, x.dtype) for x in carry], unit
        carry = gpt.run(unit, carry, given)


# --- weight gradients later ------------------------------------------------------------------------------------------


def deferred_is_at_once(rank: int, num_ranks: int, sequence_parallel: bool) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    config = configuration(dropout=0.1, attention_dropout=0.1)
    later = WeightGradients()
    now, then = (
        built(config, tp, sequence_parallel=sequence_parallel, weight_gradients=when)
        for when in (WeightGradients(), later)
    )
    for _ in range(2):  # gradients add up
        through([now], batch())
        with later.deferred() as queue:
            through([then], batch())
        queue.run()
    expected = logical(now, tp, gradients=True)
    for name, gradient in logical(then, tp, gradients=True).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_weight_gradients_may_come_later(tp_size: int, sequence_parallel: bool) -> None:
    run_on_ranks(deferred_is_at_once, tp_size, sequence_parallel)


def test_all_matrices_of_blocks_wait() -> None:
    later = WeightGradients()
    gpt, given = built(configuration(), Mesh().tp, weight_gradients=later), batch()
    carry = gpt.run("embedding", (), given)
    with later.deferred() as queue:
        (y,) = gpt.run("blocks.0", carry, given)
        y.sum().backward()
        named = logical_or_none(gpt, "blocks.0")
        assert {name for name, gradient in named.items() if gradient is None} == {
            f"{layer}.{key}" for layer in ("attention.qkv", "mlp.up") for key in ("weight", "bias")
        } | {"attention.output.weight", "mlp.down.weight"}
    queue.run()
    assert all(gradient is not None for gradient in logical_or_none(gpt, "blocks.0").values())


def logical_or_none(gpt: GPT, unit: str) -> dict[str, Tensor | None]:
    return {name: weight.grad for name, weight in gpt.units()[unit].named_parameters()}


def test_where_the_sequence_is_cut_a_later_weight_gradient_gathers_later() -> None:
    """What waits in the queue is 1/tp of the layers' inputs."""
    mesh, later = paper_mesh(Layout(tp=2), 1), WeightGradients()
    gpt, given = built(configuration(), mesh.tp, sequence_parallel=True, weight_gradients=later), batch()
    (y,) = gpt.run("blocks.0", leaves(gpt.run("embedding", (), given)), given)
    mesh.ledger.clear()
    with later.deferred() as queue:
        y.backward(torch.ones_like(y))
    assert mesh.ledger.counts == {("all_gather", "tp"): 2, ("reduce_scatter", "tp"): 2}
    mesh.ledger.clear()
    queue.run()
    assert mesh.ledger.counts == {("all_gather", "tp"): 2}
