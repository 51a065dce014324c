"""A chunk: forward and backward unit by unit give autograd's gradients, and tell the owner of each step in time."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.pipeline.carry import Carry
from colonnade.pipeline.chunk import Chunk
from tests.pipeline.toy import (
    HIDDEN,
    LENGTH,
    SAMPLES,
    TARGETS,
    WIDTH,
    Given,
    Owner,
    Pair,
    Toy,
    Watched,
    microbatches,
    unit_names,
    units,
)

UNITS = unit_names(4)


def chunk_of(names: list[str], *, every: int = 0) -> tuple[Toy, Owner, Chunk]:
    toy, owner = Toy(4), Owner()
    return toy, owner, Chunk(units(names), toy, owner, weight_gradients=toy.later, recompute_every=every)


def close(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("every", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Toy, Pair])
def test_a_whole_model_in_one_chunk_has_autograds_gradients(kind: type[Watched], every: int, split: bool) -> None:
    model = kind(6)
    chunk = Chunk(units(model.names), model, Owner(), weight_gradients=model.later, recompute_every=every)
    given_ = microbatches(3)
    loss = sum(x.item() for each in given_ for x in chunk.forward(each.number, (), each))
    for each in given_:
        assert chunk.backward(each.number, None, each, last=False, split=split) == (), "the first unit took nothing"
        if split:
            chunk.weights(each.number, last=False)
    expected, gradients = model.plain(given_)
    assert loss == pytest.approx(expected, rel=1e-13)
    close(model.gradients(), gradients)


@pytest.mark.parametrize("every", [0, 2])
def test_a_middle_chunk_takes_and_hands_on_gradients_of_the_stream(every: int) -> None:
    """Micro-batches may come back in any order."""
    toy, _, chunk = chunk_of(["blocks.1", "blocks.2"], every=every)
    given_ = microbatches(2)
    xs = [torch.randn(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64) for _ in given_]
    grads = [torch.randn_like(x) for x in xs]
    ys = [y for each, x in zip(given_, xs, strict=True) for y in chunk.forward(each.number, (x,), each)]
    assert not any(y.requires_grad for y in ys), "a stage sends numbers, no graph"
    for each, x, grad in list(zip(given_, xs, grads, strict=True))[::-1]:
        leaf = x.clone().requires_grad_()
        y = leaf
        for layer in (1, 2):
            y = y + torch.tanh(toy.linears[layer](toy.norms[layer](y)))
        torch.testing.assert_close(ys[each.number], y, rtol=1e-14, atol=1e-14)
        (expected,) = torch.autograd.grad(y, leaf, grad)
        (dx,) = chunk.backward(each.number, (grad,), each, last=False)
        assert dx is not None
        torch.testing.assert_close(dx, expected, rtol=1e-13, atol=1e-14)


CARRY = (
    torch.arange(16, dtype=torch.float64).view(TARGETS, SAMPLES, WIDTH) / 16,
    torch.arange(36, dtype=torch.float64).view(LENGTH, SAMPLES, HIDDEN).cos(),
    torch.tensor([2, 3]),
)


def chunk_of_pair(names: list[str], *, every: int = 0) -> tuple[Pair, Chunk]:
    pair = Pair(8)
    return pair, Chunk(units(names), pair, Owner(), weight_gradients=pair.later, recompute_every=every)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_what_units_hand_on_unchanged_is_not_copied(every: int) -> None:
    _, chunk = chunk_of_pair(["decode.0", "decode.1", "decode.2"], every=every)
    (each,) = microbatches(1)
    _, memory, lengths = chunk.forward(0, CARRY, each)
    assert (memory.data_ptr(), lengths.data_ptr()) == (CARRY[1].data_ptr(), CARRY[2].data_ptr())
    assert not memory.requires_grad and torch.equal(lengths, CARRY[2])


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_tensor_that_is_handed_on_has_the_gradients_of_all_its_readers(every: int) -> None:
    """decode.0 and decode.2 read the memory, decode.1 only hands it on, and more comes from behind the chunk."""
    names = ["decode.0", "decode.1", "decode.2"]
    pair, chunk = chunk_of_pair(names, every=every)
    (each,) = microbatches(1)
    dy, dmemory = torch.ones_like(CARRY[0]), torch.full_like(CARRY[1], 0.5)
    chunk.forward(0, CARRY, each)
    got = chunk.backward(0, (dy, dmemory, None), each, last=True)
    carry = y, memory, _ = CARRY[0].clone().requires_grad_(), CARRY[1].clone().requires_grad_(), CARRY[2]
    for name in names:
        carry = pair.make(name, carry, each)
    expected = torch.autograd.grad(carry[:2], (y, memory), (dy, dmemory))
    assert got[2] is None, "integers have no gradient"
    for gradient, other in zip(got[:2], expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-13, atol=1e-14)


def test_what_nobody_reads_has_a_gradient_of_zeros() -> None:
    """The stage before expects one for each floating-point tensor."""
    _, chunk = chunk_of_pair(["decode.1", "head"])
    (each,) = microbatches(1)
    chunk.forward(0, CARRY, each)
    dy, dmemory, dlengths = chunk.backward(0, None, each, last=True)
    assert dy is not None and dy.any() and dmemory is not None and dlengths is None
    assert torch.equal(dmemory, torch.zeros_like(CARRY[1]))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("every", [0, 1, 2, 4])
def test_below_what_is_trained_nothing_is_kept_and_backward_ends(every: int, split: bool) -> None:
    """Embedding and first block are frozen; the second block computes gradients of its weights alone."""
    toy, owner, below = Toy(4), Owner(), UNITS[:2]
    for frozen in (toy.embedding, toy.norms[0], toy.linears[0]):
        frozen.requires_grad_(False)
    stated = [
        unit._replace(has_backward=unit.name not in below, sends_back=unit.name not in UNITS[:3])
        for unit in units(UNITS)
    ]
    given_, watched = microbatches(2), dict[str, bool]()
    chunk = Chunk(stated, toy, owner, weight_gradients=toy.later, recompute_every=every)
    make = toy.make

    def watching(unit: str, carry: Carry, inputs: Given) -> Carry:
        if torch.is_grad_enabled():
            watched[unit] = any(x.requires_grad for x in carry)
        return make(unit, carry, inputs)

    toy.make = watching  # type: ignore[method-assign]
    loss = sum(x.item() for each in given_ for x in chunk.forward(each.number, (), each))
    assert toy.kept(below) == set() and owner.acquired() == chunk.uses("F") * 2 == UNITS * 2
    for each in given_:
        owner.told.clear()
        chunk.backward(each.number, None, each, last=True, split=split)
        chunk.weights(each.number, last=True)
        assert owner.acquired() == chunk.uses("B") and not {*below} & {*owner.acquired()}
        assert [unit for _, unit in owner.ready()] == UNITS[:1:-1]
    assert watched == dict(zip(UNITS[2:], (False, True, True, True), strict=True)), "whether gradients go on"
    total = torch.stack([toy.plain_loss(each) for each in given_]).sum()
    trained = {name: weight for name, weight in toy.named_parameters() if weight.requires_grad}
    assert loss == pytest.approx(total.item(), rel=1e-13)
    close(toy.gradients(), dict(zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True)))


def test_a_split_backward_leaves_linear_weights_alone() -> None:
    toy, _, chunk = chunk_of(["blocks.1", "blocks.2"])
    (each,) = microbatches(1)
    x = torch.randn(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
    chunk.forward(0, (x,), each)
    chunk.backward(0, (torch.ones_like(x),), each, last=True, split=True)
    assert not any(name.startswith("linears") for name in toy.gradients())
    chunk.weights(0, last=True)
    assert sorted(name for name in toy.gradients() if name.startswith("linears")) == [
        f"linears.{layer}.{kind}" for layer in (1, 2) for kind in ("bias", "weight")
    ]


def test_inference_keeps_nothing_and_leaves_the_loss_out() -> None:
    toy, owner, chunk = chunk_of(UNITS)
    (each,) = microbatches(1)
    (x,) = chunk.infer((), each)
    assert x.shape == (LENGTH, SAMPLES, HIDDEN) and not x.requires_grad
    assert owner.acquired() == UNITS[:-1] and toy.kept(UNITS) == set()


def test_backward_loads_no_symbolic_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own way of starting with a gradient does: a second and 35 MB for every rank."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)  # importing it fails
    _, _, chunk = chunk_of(["blocks.0", "blocks.1"], every=1)
    (each,) = microbatches(1)
    x = torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
    chunk.forward(0, (x,), each)
    with pytest.raises(ImportError):
        torch.autograd.backward(x.clone().requires_grad_() * 2, x)
    assert chunk.backward(0, (x,), each, last=True)


# --- what the owner is told -------------------------------------------------------------------------------------------


def test_backward_tells_of_each_unit_whose_gradients_are_ready() -> None:
    _, owner, chunk = chunk_of(["embedding", "blocks.0"])
    (each,) = microbatches(1)
    chunk.forward(0, (), each)
    assert owner.told == [
        ("acquire", "embedding"),
        ("release", "embedding"),
        ("acquire", "blocks.0"),
        ("release", "blocks.0"),
    ]
    owner.told.clear()
    chunk.backward(0, (torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64),), each, last=True)
    assert owner.told == [
        ("acquire to add gradients", "blocks.0"),
        ("release", "blocks.0"),
        ("last ready", "blocks.0"),
        ("acquire to add gradients", "embedding"),
        ("release", "embedding"),
        ("last ready", "embedding"),
    ]


def test_the_loss_adds_to_gradients_in_forward_already() -> None:
    _, owner, chunk = chunk_of(["head"])
    (each,) = microbatches(1)
    chunk.forward(0, (torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64),), each)
    assert owner.told[0] == ("acquire to add gradients", "head")


def test_after_a_split_backward_gradients_are_ready_when_the_deferred_ones_are() -> None:
    """In each step those of its own micro-batches."""
    _, owner, chunk = chunk_of(["blocks.0", "blocks.1"])
    for _ in range(2):
        owner.told.clear()
        for each in microbatches(2):
            x = torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
            chunk.forward(each.number, (x,), each)
            chunk.backward(each.number, (x,), each, last=True, split=True)
        assert list(owner.ready()) == []
        owner.told.clear()
        chunk.weights(0, last=False)
        chunk.weights(1, last=True)
        assert owner.told == [
            (what, unit)
            for ready in ("ready", "last ready")
            for unit in ("blocks.1", "blocks.0")
            for what in ("open", ready)
        ]


def test_a_step_begins_with_nothing_of_one_that_was_broken_off() -> None:
    """Neither activations of micro-batches without a backward, nor weight gradients that were deferred."""
    toy, owner, chunk = chunk_of(UNITS)
    for each in microbatches(2):
        chunk.forward(each.number, (), each)
    chunk.backward(0, None, microbatches(2)[0], last=False, split=True)
    assert toy.kept(UNITS) == {0, 1}
    chunk.begin()
    owner.told.clear()
    chunk.weights(0, last=True)
    assert toy.kept(UNITS) == set() and owner.told == []


some_units = st.tuples(st.integers(0, 5), st.integers(0, 6)).map(lambda ends: unit_names(4)[min(ends) : max(ends)])


@pytest.mark.slow
@given(some_units.filter(bool), st.integers(0, 5))
def test_it_says_beforehand_what_it_will_acquire(names: list[str], every: int) -> None:
    toy, owner, chunk = chunk_of(names, every=every)
    (each,) = microbatches(1)
    x = torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
    chunk.forward(0, () if "embedding" in names else (x,), each)
    assert owner.acquired() == chunk.uses("F") == names
    owner.told.clear()
    chunk.backward(0, None if "head" in names else (x,), each, last=True)
    assert owner.acquired() == chunk.uses("B")
    assert [unit for _, unit in owner.ready()] == names[::-1], "each once, recomputed or not"
    assert toy.kept(names) == set()


# --- memory and recomputation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_recomputation_runs_each_block_twice_and_nothing_else(every: int) -> None:
    toy, _, chunk = chunk_of(UNITS, every=every)
    for each in microbatches(2):
        chunk.forward(each.number, (), each)
        chunk.backward(each.number, None, each, last=False)
    times = {unit: toy.calls.count((unit, 1)) for unit in UNITS}
    assert times == {unit: 2 if every and unit.startswith("blocks") else 1 for unit in UNITS}


def test_recomputed_groups_run_in_order_before_they_are_undone() -> None:
    toy, _, chunk = chunk_of(UNITS, every=3)
    (each,) = microbatches(1)
    chunk.forward(0, (), each)
    toy.calls.clear()
    chunk.backward(0, None, each, last=True)
    assert [unit for unit, _ in toy.calls] == ["blocks.3", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(("every", "kept"), [(0, UNITS), (1, ["embedding", "head"]), (2, ["embedding", "head"])])
def test_what_is_computed_again_is_not_kept(every: int, kept: list[str]) -> None:
    toy, _, chunk = chunk_of(UNITS, every=every)
    (each,) = microbatches(1)
    chunk.forward(0, (), each)
    assert [unit for unit in UNITS if toy.kept([unit])] == kept


@pytest.mark.parametrize(("every", "most"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_backward_frees_each_unit_as_soon_as_it_is_done(every: int, most: int) -> None:
    """Of blocks, at most a group's graphs are alive at once; after a unit was left, its own is gone."""
    toy, owner, chunk = chunk_of(UNITS, every=every)
    alive = []

    def look() -> None:
        what, unit = owner.told[-1]
        alive.append([block for block in UNITS[1:-1] if toy.kept([block])])
        if what.endswith("ready"):
            assert toy.kept([unit]) == set(), f"{unit} is done and still kept"

    (each,) = microbatches(1)
    chunk.forward(0, (), each)
    owner.look = look
    chunk.backward(0, None, each, last=True)
    assert max(map(len, alive)) == most


@pytest.mark.parametrize("names", [UNITS, UNITS[1:3], UNITS[2:]])
def test_inference_releases_each_unit_before_it_acquires_the_next(names: list[str]) -> None:
    """Of ZeRO 3 one unit's weights are whole at a time."""
    _, owner, chunk = chunk_of(names)
    (each,) = microbatches(1)
    chunk.infer(() if names[0] == UNITS[0] else (torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64),), each)
    run = [name for name in names if name != UNITS[-1]]
    assert owner.told == [(what, name) for name in run for what in ("acquire", "release")]
