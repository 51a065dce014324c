"""Collectives against their definition, and conjugate operators against what conjugate means."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.mesh import collectives, shared_memory
from colonnade.mesh.collectives import Operator, copy_to, gather_sequence, reduce_from, scatter_sequence
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from tests.distributed import run_on_ranks

NUM_RANKS = 4
OPERATORS = [copy_to, reduce_from, gather_sequence, scatter_sequence]
CARRIERS = ["shared memory", "gloo"]
NAMES = ["copy_to", "reduce_from", "gather_sequence", "scatter_sequence"]


def drawn(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """A rank's own numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def on_tp(program: Callable[[int, Axis], Any], carrier: str = CARRIERS[0]) -> list[Any]:
    """`program(rank, tp axis)` on every rank."""

    def on_a_rank(rank: int, num_ranks: int) -> Any:
        if carrier == "gloo":
            shared_memory.is_possible = lambda: False  # this process ends with the program
        return program(rank, build_mesh(Layout(tp=num_ranks), rank).tp)

    return run_on_ranks(on_a_rank, NUM_RANKS)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_plain_collectives_are_their_definition(carrier: str) -> None:
    def program(rank: int, tp: Axis) -> dict[str, Tensor]:
        x = drawn(rank, 8, 3)
        kept = x.clone()
        in_place = x.clone()
        collectives.all_reduce_(in_place, tp).wait()
        largest, smallest = x.clone(), x.clone()
        pending = [collectives.all_reduce_(largest, tp, "max"), collectives.all_reduce_(smallest, tp, "min")]
        for each in pending:
            each.wait()
        flat, part = torch.empty(24 * NUM_RANKS, dtype=x.dtype), torch.empty(6, dtype=x.dtype)
        pending = [collectives.all_gather_into_(flat, x.view(-1), tp)]
        pending.append(collectives.reduce_scatter_into_(part, x.view(-1), tp))
        for both in pending:
            both.wait()
            both.wait()  # once more does no harm
        results = {
            "sum": collectives.all_reduce(x, tp),
            "max": collectives.all_reduce(x, tp, "max"),
            "min": collectives.all_reduce(x, tp, "min"),
            "in place": in_place,
            "max in place": largest,
            "min in place": smallest,
            "all_gather": collectives.all_gather(x, tp),
            "reduce_scatter": collectives.reduce_scatter(x, tp),
            "all_gather_into_": flat,
            "reduce_scatter_into_": part,
            "broadcast": collectives.broadcast_(x.clone(), tp, source=2),
        }
        assert torch.equal(x, kept), "the input is left alone"
        return results

    every = torch.stack([drawn(rank, 8, 3) for rank in range(NUM_RANKS)])
    for rank, results in enumerate(on_tp(program, carrier)):
        torch.testing.assert_close(results["sum"], every.sum(0), rtol=0, atol=1e-14)
        torch.testing.assert_close(results["in place"], results["sum"], rtol=0, atol=0)
        for where in ("", " in place"):
            assert torch.equal(results[f"max{where}"], every.amax(0))
            assert torch.equal(results[f"min{where}"], every.amin(0))
        assert torch.equal(results["all_gather"], every.flatten(0, 1))
        torch.testing.assert_close(results["reduce_scatter"], every.sum(0)[2 * rank : 2 * rank + 2], rtol=0, atol=1e-14)
        assert torch.equal(results["all_gather_into_"], every.flatten())
        torch.testing.assert_close(results["reduce_scatter_into_"], every.sum(0)[2 * rank : 2 * rank + 2].flatten())
        assert torch.equal(results["broadcast"], every[2])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_gathering_and_scattering_within_one_buffer(carrier: str) -> None:
    def program(rank: int, tp: Axis) -> tuple[Tensor, Tensor]:
        reduced, gathered = drawn(rank, 4 * NUM_RANKS), torch.zeros(4 * NUM_RANKS, dtype=torch.float64)
        mine = slice(4 * rank, 4 * rank + 4)
        collectives.reduce_scatter_into_(reduced[mine], reduced, tp).wait()
        gathered[mine] = reduced[mine]
        collectives.all_gather_into_(gathered, gathered[mine], tp).wait()
        return gathered, collectives.all_reduce(drawn(rank, 4 * NUM_RANKS), tp)

    for gathered, total in on_tp(program, carrier):
        torch.testing.assert_close(gathered, total, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gloo_rounds_a_16_bit_sum_at_most_once_an_addition(dtype: torch.dtype) -> None:
    def program(rank: int, tp: Axis) -> tuple[Tensor, Tensor]:
        x = drawn(rank, 64).to(dtype)
        return collectives.all_reduce(x, tp), collectives.reduce_scatter(x, tp)

    every = torch.stack([drawn(rank, 64).to(dtype).double() for rank in range(NUM_RANKS)])
    bound = 1.01 * (NUM_RANKS - 1) * torch.finfo(dtype).eps / 2 * float(every.abs().sum(0).max())
    for rank, (total, part) in enumerate(on_tp(program, "gloo")):
        torch.testing.assert_close(total.double(), every.sum(0), rtol=0, atol=bound)
        torch.testing.assert_close(part.double(), every.sum(0)[16 * rank : 16 * rank + 16], rtol=0, atol=bound)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_inputs_that_are_not_contiguous(carrier: str) -> None:
    def program(rank: int, tp: Axis) -> list[Tensor]:
        x = drawn(rank, 4, 8).t()
        return [collectives.all_reduce(x, tp), collectives.all_gather(x, tp), collectives.reduce_scatter(x, tp)]

    every = torch.stack([drawn(rank, 4, 8).t() for rank in range(NUM_RANKS)])
    for rank, (total, gathered, scattered) in enumerate(on_tp(program, carrier)):
        torch.testing.assert_close(total, every.sum(0), rtol=0, atol=1e-14)
        assert torch.equal(gathered, every.flatten(0, 1))
        torch.testing.assert_close(scattered, every.sum(0)[2 * rank : 2 * rank + 2], rtol=0, atol=1e-14)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_reduction_gives_every_rank_the_same_bits(carrier: str) -> None:
    results = on_tp(lambda rank, tp: collectives.all_reduce(drawn(rank, 1000).float(), tp), carrier)
    assert all(torch.equal(result, results[0]) for result in results)


def applied(operator: Operator, rank: int, tp: Axis, size_in: int, size_out: int) -> tuple[Tensor, Tensor]:
    """(A x, the gradient of <y, A x> with respect to x) with this rank's x and y."""
    x = drawn(rank, size_in, 3, seed=1).requires_grad_()
    out = operator(x, tp)
    assert out.shape == (size_out, 3)
    out.backward(drawn(rank, size_out, 3, seed=2))
    assert x.grad is not None
    return out.detach(), x.grad


SIZES = {"copy_to": (8, 8), "reduce_from": (8, 8), "gather_sequence": (2, 8), "scatter_sequence": (8, 2)}


@pytest.fixture(scope="module", params=CARRIERS)
def results(request: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """(A x, Aᵀ y) of every operator, on every rank."""

    def program(rank: int, tp: Axis) -> list[tuple[Tensor, Tensor]]:
        return [applied(op, rank, tp, *SIZES[name]) for op, name in zip(OPERATORS, NAMES, strict=True)]

    ranks = on_tp(program, request.param)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(NAMES)}


def inputs(name: str) -> tuple[Tensor, Tensor]:
    """Every rank's x, every rank's y."""
    size_in, size_out = SIZES[name]
    ranks = range(NUM_RANKS)
    return (
        torch.stack([drawn(rank, size_in, 3, seed=1) for rank in ranks]),
        torch.stack([drawn(rank, size_out, 3, seed=2) for rank in ranks]),
    )


@pytest.mark.parametrize("name", NAMES)
def test_operators_forward_and_backward_as_the_table_says(name: str, results: dict[str, Any]) -> None:
    def all_reduced(t: Tensor) -> Tensor:
        return t.sum(0, keepdim=True).expand_as(t)

    def gathered(t: Tensor) -> Tensor:
        return t.flatten(0, 1).expand(NUM_RANKS, -1, -1)

    def scattered(t: Tensor) -> Tensor:
        return t.sum(0).view(NUM_RANKS, -1, t.shape[-1])

    def same(t: Tensor) -> Tensor:
        return t

    forward, backward = {
        "copy_to": (same, all_reduced),
        "reduce_from": (all_reduced, same),
        "gather_sequence": (gathered, scattered),
        "scatter_sequence": (scattered, gathered),
    }[name]
    x, y = inputs(name)
    torch.testing.assert_close(torch.stack([out for out, _ in results[name]]), forward(x), rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.stack([grad for _, grad in results[name]]), backward(y), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["gather_sequence", "scatter_sequence"])
def test_cut_operators_are_adjoint(name: str, results: dict[str, Any]) -> None:
    """<y, A x> = <Aᵀ y, x>, both products over all ranks: each rank's x and y are numbers of its own."""
    x, y = inputs(name)
    ax, aty = (torch.stack(both) for both in zip(*results[name], strict=True))
    assert abs((y * ax).sum() - (aty * x).sum()) < 1e-12 * (y * ax).abs().sum()


def test_f_is_adjoint_on_what_all_ranks_share() -> None:
    """f takes the one x that all ranks share to a copy each: <y, f x> over all ranks = <fᵀ y, x> counted once."""

    def program(rank: int, tp: Axis) -> tuple[Tensor, Tensor]:
        x = drawn(0, 8, seed=3).requires_grad_()
        out = copy_to(x, tp)
        y = drawn(rank, 8, seed=4)
        out.backward(y)
        assert x.grad is not None
        return (y * out.detach()).sum(), (x.grad * x.detach()).sum()

    products = on_tp(program)
    over_ranks = sum(product for product, _ in products)
    for _, once in products:
        torch.testing.assert_close(once, over_ranks, rtol=1e-13, atol=0)


def test_g_is_adjoint_into_what_all_ranks_share() -> None:
    """g takes each rank's x to the one sum that all share: <y, g x> counted once = <gᵀ y, x> over all ranks."""

    def program(rank: int, tp: Axis) -> tuple[Tensor, Tensor]:
        x = drawn(rank, 8, seed=5).requires_grad_()
        out = reduce_from(x, tp)
        y = drawn(0, 8, seed=6)
        out.backward(y)
        assert x.grad is not None
        return (y * out.detach()).sum(), (x.grad * x.detach()).sum()

    products = on_tp(program)
    over_ranks = sum(product for _, product in products)
    for once, _ in products:
        torch.testing.assert_close(once, over_ranks, rtol=1e-13, atol=0)


def test_no_gradient_is_asked_for_where_none_is_needed() -> None:
    tp = paper_mesh(Layout(tp=2), 0).tp
    assert not copy_to(torch.ones(2), tp).requires_grad


@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_an_axis_of_one_rank_gives_back_the_very_tensor(operator: Operator) -> None:
    x = torch.ones(4, requires_grad=True)
    assert operator(x, Axis("tp")) is x


def test_plain_collectives_over_one_rank_are_the_identity() -> None:
    x, alone = torch.ones(4), Axis("tp")
    for collective in (
        collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter, collectives.broadcast_
    ):  # fmt: skip
        assert collective(x, alone) is x
    collectives.all_reduce_(x, alone).wait()
    assert torch.equal(x, torch.ones(4))
    for into in (collectives.all_gather_into_, collectives.reduce_scatter_into_):
        out = torch.zeros(4)
        into(out, x, alone).wait()
        into(out, out, alone).wait()
        assert torch.equal(out, x)


def test_a_dim_that_cannot_be_cut_is_refused() -> None:
    tp = paper_mesh(Layout(tp=4), 0).tp
    with pytest.raises(AssertionError, match=r"dim 0 of \(6, 2\) cannot be cut into 4 equal parts"):
        collectives.reduce_scatter(torch.ones(6, 2), tp)
    with pytest.raises(AssertionError, match="6 numbers are not 4 parts of 2"):
        collectives.reduce_scatter_into_(torch.ones(2), torch.ones(6), tp)
    with pytest.raises(AssertionError, match="2 numbers of 4 ranks do not make 6"):
        collectives.all_gather_into_(torch.ones(6), torch.ones(2), tp)


def test_what_does_not_lie_in_one_piece_is_sent_as_what_it_is() -> None:
    """Columns of a matrix, say; and the result lies in one piece."""

    def program(rank: int, num_ranks: int) -> list[bool]:
        found = []
        for possible in (shared_memory.is_possible, lambda: False):
            shared_memory.is_possible = possible  # this process ends with the program
            tp = build_mesh(Layout(tp=num_ranks), rank).tp
            x, every = drawn(rank, 3, 8).t(), torch.stack([drawn(other, 3, 8).t() for other in range(num_ranks)])
            for collective, expected in (
                (collectives.all_reduce, every.sum(0)),
                (collectives.all_gather, every.flatten(0, 1)),
                (collectives.reduce_scatter, every.sum(0)[4 * rank : 4 * rank + 4]),
            ):
                out = collective(x, tp)
                found += [torch.equal(out, expected), out.is_contiguous()]
            assert torch.equal(x, every[rank])
        return found

    assert run_on_ranks(program, 2) == [[True] * 12] * 2


def test_what_crosses_nothing_is_not_rounded() -> None:
    x = torch.tensor([1.0 + 2**-20])
    assert collectives.on_the_wire(x, Axis("dp"), torch.bfloat16) is x
    sent = collectives.on_the_wire(x, paper_mesh(Layout(dp=2), 0).dp, torch.bfloat16)
    assert sent.dtype == torch.bfloat16 and collectives.on_the_wire(x, paper_mesh(Layout(dp=2), 0).dp, None) is x
