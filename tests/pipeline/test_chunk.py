"""A chunk: forward and backward unit by unit give autograd's gradients, and tell the owner of each step in time."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.pipeline.chunk import Chunk
from tests.pipeline.toy import HIDDEN, LENGTH, SAMPLES, Owner, Toy, microbatches, unit_names

UNITS = unit_names(4)


def chunk_of(units: list[str], *, every: int = 0) -> tuple[Toy, Owner, Chunk]:
    toy, owner = Toy(4), Owner()
    return toy, owner, Chunk(units, toy, owner, weight_gradients=toy.later, recompute_every=every)


def close(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("every", [0, 1, 2, 3, 4])
def test_a_whole_model_in_one_chunk_has_autograds_gradients(every: int, split: bool) -> None:
    toy, _, chunk = chunk_of(UNITS, every=every)
    given_ = microbatches(3)
    loss = sum(chunk.forward(each.number, None, each).item() for each in given_)
    for each in given_:
        assert chunk.backward(each.number, None, each, last=False, split=split) is None, (
            "the embedding hands nothing on"
        )
        if split:
            chunk.weights(each.number, last=False)
    expected, gradients = toy.plain(given_)
    assert loss == pytest.approx(expected, rel=1e-13)
    close(toy.gradients(), gradients)


@pytest.mark.parametrize("every", [0, 2])
def test_a_middle_chunk_takes_and_hands_on_gradients_of_the_stream(every: int) -> None:
    """Micro-batches may come back in any order."""
    toy, _, chunk = chunk_of(["blocks.1", "blocks.2"], every=every)
    given_ = microbatches(2)
    xs = [torch.randn(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64) for _ in given_]
    grads = [torch.randn_like(x) for x in xs]
    ys = [chunk.forward(each.number, x, each) for each, x in zip(given_, xs, strict=True)]
    assert not any(y.requires_grad for y in ys), "a stage sends numbers, no graph"
    for each, x, grad in list(zip(given_, xs, grads, strict=True))[::-1]:
        leaf = x.clone().requires_grad_()
        y = leaf
        for layer in (1, 2):
            y = y + torch.tanh(toy.linears[layer](toy.norms[layer](y)))
        torch.testing.assert_close(ys[each.number], y, rtol=1e-14, atol=1e-14)
        (expected,) = torch.autograd.grad(y, leaf, grad)
        dx = chunk.backward(each.number, grad, each, last=False)
        assert dx is not None
        torch.testing.assert_close(dx, expected, rtol=1e-13, atol=1e-14)


def test_a_split_backward_leaves_linear_weights_alone() -> None:
    toy, _, chunk = chunk_of(["blocks.1", "blocks.2"])
    (each,) = microbatches(1)
    x = torch.randn(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
    chunk.forward(0, x, each)
    chunk.backward(0, torch.ones_like(x), each, last=True, split=True)
    assert not any(name.startswith("linears") for name in toy.gradients())
    chunk.weights(0, last=True)
    assert sorted(name for name in toy.gradients() if name.startswith("linears")) == [
        f"linears.{layer}.{kind}" for layer in (1, 2) for kind in ("bias", "weight")
    ]


def test_inference_keeps_nothing_and_leaves_the_head_out() -> None:
    toy, owner, chunk = chunk_of(UNITS)
    (each,) = microbatches(1)
    x = chunk.infer(None, each)
    assert x.shape == (LENGTH, SAMPLES, HIDDEN) and not x.requires_grad
    assert owner.acquired() == UNITS[:-1] and toy.kept(UNITS) == set()


def test_backward_loads_no_symbolic_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own way of starting with a gradient does: a second and 35 MB for every rank."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)  # importing it fails
    _, _, chunk = chunk_of(["blocks.0", "blocks.1"], every=1)
    (each,) = microbatches(1)
    x = torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
    chunk.forward(0, x, each)
    with pytest.raises(ImportError):
        torch.autograd.backward(x.clone().requires_grad_() * 2, x)
    assert chunk.backward(0, x, each, last=True) is not None


# --- what the owner is told -------------------------------------------------------------------------------------------


def test_backward_tells_of_each_unit_as_it_leaves_it() -> None:
    _, owner, chunk = chunk_of(["embedding", "blocks.0"])
    (each,) = microbatches(1)
    chunk.forward(0, None, each)
    assert owner.told == [
        ("acquire", "embedding"),
        ("release", "embedding"),
        ("acquire", "blocks.0"),
        ("release", "blocks.0"),
    ]
    owner.told.clear()
    chunk.backward(0, torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64), each, last=True)
    assert owner.told == [
        ("acquire to add gradients", "blocks.0"),
        ("release", "blocks.0"),
        ("left for good", "blocks.0"),
        ("acquire to add gradients", "embedding"),
        ("release", "embedding"),
        ("left for good", "embedding"),
    ]


def test_the_head_adds_to_gradients_in_forward_already() -> None:
    _, owner, chunk = chunk_of(["head"])
    (each,) = microbatches(1)
    chunk.forward(0, torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64), each)
    assert owner.told[0] == ("acquire to add gradients", "head")


def test_a_split_backward_has_left_a_unit_when_its_weight_gradients_are_there() -> None:
    _, owner, chunk = chunk_of(["blocks.0", "blocks.1"])
    for each in microbatches(2):
        x = torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
        chunk.forward(each.number, x, each)
        chunk.backward(each.number, x, each, last=True, split=True)
    assert list(owner.left_units()) == []
    owner.told.clear()
    chunk.weights(0, last=False)
    chunk.weights(1, last=True)
    assert owner.told == [
        (what, unit)
        for left in ("left", "left for good")
        for unit in ("blocks.1", "blocks.0")
        for what in ("open", left)
    ]


some_units = st.tuples(st.integers(0, 5), st.integers(0, 6)).map(lambda ends: unit_names(4)[min(ends) : max(ends)])


@given(some_units.filter(bool), st.integers(0, 5))
def test_it_says_beforehand_what_it_will_acquire(units: list[str], every: int) -> None:
    toy, owner, chunk = chunk_of(units, every=every)
    (each,) = microbatches(1)
    stream = torch.ones(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
    chunk.forward(0, None if "embedding" in units else stream, each)
    assert owner.acquired() == chunk.uses("F") == units
    owner.told.clear()
    chunk.backward(0, None if "head" in units else stream, each, last=True)
    assert owner.acquired() == chunk.uses("B")
    assert [unit for _, unit in owner.left_units()] == units[::-1], "each once, recomputed or not"
    assert toy.kept(units) == set()


# --- memory and recomputation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_recomputation_runs_each_block_twice_and_nothing_else(every: int) -> None:
    toy, _, chunk = chunk_of(UNITS, every=every)
    for each in microbatches(2):
        chunk.forward(each.number, None, each)
        chunk.backward(each.number, None, each, last=False)
    times = {unit: toy.calls.count((unit, 1)) for unit in UNITS}
    assert times == {unit: 2 if every and unit.startswith("blocks") else 1 for unit in UNITS}


def test_recomputed_groups_run_in_order_before_they_are_undone() -> None:
    toy, _, chunk = chunk_of(UNITS, every=3)
    (each,) = microbatches(1)
    chunk.forward(0, None, each)
    toy.calls.clear()
    chunk.backward(0, None, each, last=True)
    assert [unit for unit, _ in toy.calls] == ["blocks.3", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(("every", "kept"), [(0, UNITS), (1, ["embedding", "head"]), (2, ["embedding", "head"])])
def test_what_is_computed_again_is_not_kept(every: int, kept: list[str]) -> None:
    toy, _, chunk = chunk_of(UNITS, every=every)
    (each,) = microbatches(1)
    chunk.forward(0, None, each)
    assert [unit for unit in UNITS if toy.kept([unit])] == kept


@pytest.mark.parametrize(("every", "most"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_backward_frees_each_unit_as_soon_as_it_is_done(every: int, most: int) -> None:
    """Of blocks, at most a group's graphs are alive at once; after a unit was left, its own is gone."""
    toy, owner, chunk = chunk_of(UNITS, every=every)
    alive = []

    def look() -> None:
        what, unit = owner.told[-1]
        alive.append([block for block in UNITS[1:-1] if toy.kept([block])])
        if what.startswith("left"):
            assert toy.kept([unit]) == set(), f"{unit} is done and still kept"

    (each,) = microbatches(1)
    chunk.forward(0, None, each)
    owner.look = look
    chunk.backward(0, None, each, last=True)
    assert max(map(len, alive)) == most
