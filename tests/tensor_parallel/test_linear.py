"""Linear layers cut by columns and rows against torch.nn.Linear, forward and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.errors import LayoutError
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.products import WeightGradients
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh, paper_mesh
from colonnade.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, shard_size
from colonnade.tensor_parallel.parallel import Parallel
from tests.data_parallel.late import LateTransport
from tests.distributed import run_on_ranks
from tests.emulated import Noted
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_, sum_replicated_

S, B, IN, OUT = 4, 2, 8, 12
TP_SIZES = [1, 2, 4]


def twin() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """(torch's layer with gradients, x with gradient, y, the gradient of y)"""
    linear = nn.Linear(IN, OUT).double()
    with torch.no_grad():
        linear.weight.copy_(drawn(OUT, IN, seed=1))
        linear.bias.copy_(drawn(OUT, seed=2))
    x = drawn(S, B, IN, seed=3).requires_grad_()
    y = linear(x)
    grad = drawn(S, B, OUT, seed=4)
    y.backward(grad)
    return linear, x, y.detach(), grad


def wholes(linear: nn.Linear) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights = dict(linear.named_parameters())
    return {name: p.detach() for name, p in weights.items()}, {
        n: p.grad for n, p in weights.items() if p.grad is not None
    }


def cut(t: Tensor, tp: Axis, dim: int = -1) -> Tensor:
    return t.chunk(tp.size, dim)[tp.rank]


def column(rank: int, num_ranks: int) -> Any:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    linear, x, y, grad = twin()
    weights, gradients = wholes(linear)
    layer = ColumnParallelLinear(IN, OUT, Parallel(tp)).double()
    load_shards_(layer, tp, weights)
    mine = x.detach().clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, cut(y, tp), rtol=1e-13, atol=1e-13)
    out.backward(cut(grad, tp))
    torch.testing.assert_close(mine.grad, x.grad, rtol=1e-12, atol=1e-12)
    assert_gradients(layer, tp, gradients)


def row(rank: int, num_ranks: int) -> Any:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    linear, x, y, grad = twin()
    weights, gradients = wholes(linear)
    layer = RowParallelLinear(IN, OUT, Parallel(tp)).double()
    load_shards_(layer, tp, weights)
    mine = cut(x.detach(), tp).clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, y, rtol=1e-13, atol=1e-13)
    out.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, cut(x.grad, tp), rtol=1e-12, atol=1e-12)
    assert_gradients(layer, tp, gradients)


def column_of_a_cut_stream(rank: int, num_ranks: int) -> Any:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    linear, x, y, grad = twin()
    weights, gradients = wholes(linear)
    layer = ColumnParallelLinear(IN, OUT, Parallel(tp, sequence_parallel=True)).double()
    load_shards_(layer, tp, weights)
    mine = cut(x.detach(), tp, 0).clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, cut(y, tp), rtol=1e-13, atol=1e-13)
    out.backward(cut(grad, tp))
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, cut(x.grad, tp, 0), rtol=1e-12, atol=1e-12)
    assert_gradients(layer, tp, gradients)


def row_into_a_cut_stream(rank: int, num_ranks: int) -> Any:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    linear, x, y, grad = twin()
    weights, gradients = wholes(linear)
    layer = RowParallelLinear(IN, OUT, Parallel(tp, sequence_parallel=True)).double()
    load_shards_(layer, tp, weights)
    mine = cut(x.detach(), tp).clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, cut(y, tp, 0), rtol=1e-13, atol=1e-13)
    out.backward(cut(grad, tp, 0))
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, cut(x.grad, tp), rtol=1e-12, atol=1e-12)
    sum_replicated_(layer, tp)  # the bias
    assert_gradients(layer, tp, gradients)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("function", [column_of_a_cut_stream, row_into_a_cut_stream])
def test_a_stream_that_is_cut_along_the_sequence(tp_size: int, function: Any) -> None:
    run_on_ranks(function, tp_size)


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_column_parallel_is_linear(tp_size: int) -> None:
    run_on_ranks(column, tp_size)


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_row_parallel_is_linear(tp_size: int) -> None:
    run_on_ranks(row, tp_size)


def test_what_each_layer_sends() -> None:
    """Column: one all-reduce of the input's size, backward. Row: one of the output's size, forward."""
    mesh = paper_mesh(Layout(tp=4), 1)
    x = torch.ones(S, B, IN, requires_grad=True)
    y = ColumnParallelLinear(IN, OUT, Parallel(mesh.tp))(x)
    assert not mesh.ledger.entries and y.shape == (S, B, OUT // 4)
    z = RowParallelLinear(OUT, 20, Parallel(mesh.tp))(y)
    z.sum().backward()
    sent = [(entry.operation, entry.shape, entry.backward) for entry in mesh.ledger.entries]
    assert sent == [("all_reduce", (S, B, 20), False), ("all_reduce", (S, B, IN), True)]


def test_what_each_layer_sends_where_the_sequence_is_cut() -> None:
    """The two halves of each all-reduce, and once more the gathering of what Column has kept a part of, which comes
    while the gradient of its input is computed.
    """
    mesh = paper_mesh(Layout(tp=4), 1)
    x = torch.ones(S // 4, B, IN, requires_grad=True)
    y = ColumnParallelLinear(IN, OUT, Parallel(mesh.tp, sequence_parallel=True))(x)
    assert y.shape == (S, B, OUT // 4)
    z = RowParallelLinear(OUT, 20, Parallel(mesh.tp, sequence_parallel=True))(y)
    assert z.shape == (S // 4, B, 20)
    forward = len(mesh.ledger.entries)
    z.sum().backward()
    sent = [(entry.operation, entry.shape) for entry in mesh.ledger.entries]
    assert sent[:forward] == [("all_gather", (S // 4, B, IN)), ("reduce_scatter", (S, B, 20))]
    again = ("all_gather", (S // 4, B, IN))
    assert sent[forward:] == [("all_gather", (S // 4, B, 20)), again, ("reduce_scatter", (S, B, IN))]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_inputs_gradient_is_on_its_way_while_the_weights_is_computed(sequence_parallel: bool) -> None:
    """And so is the input, where a rank keeps its part of it."""
    mesh = paper_mesh(Layout(tp=2), 0)
    transport = LateTransport("tp", 2, 0, mesh.ledger)
    tp = Axis("tp", 2, 0, (0, 1), transport)
    under_way: list[int] = []

    class Watched(WeightGradients):
        def add(self, compute: Callable[[], None]) -> None:
            under_way.append(len(transport.under_way))
            super().add(compute)

    layer = ColumnParallelLinear(IN, OUT, Parallel(tp, sequence_parallel, weight_gradients=Watched()))
    torch.nn.init.ones_(layer.weight)  # what memory happened to hold could be NaN, which equals nothing
    layer(torch.ones(S, B, IN, requires_grad=True)).sum().backward()
    assert under_way == [1 + sequence_parallel] and transport.under_way == []


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_inputs_gradient_has_arrived_where_the_layer_is_frozen(sequence_parallel: bool) -> None:
    """Nothing else of backward is left to do meanwhile."""
    mesh = paper_mesh(Layout(tp=2), 0)
    transport = LateTransport("tp", 2, 0, mesh.ledger)
    layer = ColumnParallelLinear(IN, OUT, Parallel(Axis("tp", 2, 0, (0, 1), transport), sequence_parallel))
    torch.nn.init.ones_(layer.weight)
    layer.requires_grad_(False)
    x = torch.ones(S, B, IN, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, OUT)), "OUT / 2 of each of two ranks"


def test_column_keeps_its_own_part_of_a_cut_stream() -> None:
    tp = paper_mesh(Layout(tp=4), 1).tp
    x = torch.ones(S // 4, B, IN, requires_grad=True)
    layer = ColumnParallelLinear(IN, OUT, Parallel(tp, sequence_parallel=True))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda _: torch.empty(0)):
        layer(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
def test_weight_gradients_wait_where_they_are_deferred(kind: Any) -> None:
    parallel = Parallel(Mesh().tp)
    layer = kind(IN, OUT, parallel).double()
    linear, x, _, grad = twin()
    load_shards_(layer, parallel.tp, wholes(linear)[0])
    with parallel.weight_gradients.deferred() as queue:
        layer(x.detach().requires_grad_()).backward(grad)
    assert layer.weight.grad is None or not layer.weight.grad.any()
    queue.run()
    torch.testing.assert_close(layer.weight.grad, wholes(linear)[1]["weight"], rtol=1e-12, atol=1e-12)


def test_what_deferred_weight_gradients_read_is_gathered_when_they_are_computed() -> None:
    mesh = paper_mesh(Layout(tp=2), 0)
    layer = ColumnParallelLinear(IN, OUT, Parallel(mesh.tp, sequence_parallel=True))
    y = layer(torch.ones(S, B, IN, requires_grad=True))

    def gathered() -> int:
        return sum(entry.operation == "all_gather" for entry in mesh.ledger.entries)

    with layer.parallel.weight_gradients.deferred() as queue:
        y.sum().backward()
    assert gathered() == 1, "that of forward"
    queue.run()
    assert gathered() == 2


def test_neighbours_share_a_group_of_outputs() -> None:
    linear, x, y, _ = twin()
    for rank in range(4):
        layer = ColumnParallelLinear(IN, OUT, Parallel(paper_mesh(Layout(tp=4), rank).tp), groups=2).double()
        layer.load_state_dict(linear.state_dict())
        torch.testing.assert_close(layer(x), y.chunk(2, -1)[rank // 2], rtol=1e-13, atol=1e-13)


def test_gradients_add_up_over_backwards() -> None:
    tp = Mesh().tp
    layer = RowParallelLinear(IN, OUT, Parallel(tp)).double()
    linear, _, _, _ = twin()
    weights, _ = wholes(linear)
    load_shards_(layer, tp, weights)
    linear.zero_grad()
    for seed in (5, 6):
        x = drawn(S, B, IN, seed=seed)
        for either in (linear, layer):
            (either(x) * drawn(S, B, OUT, seed=7)).sum().backward()
    assert_gradients(layer, tp, wholes(linear)[1])


@pytest.mark.parametrize(
    ("build", "what"), [(ColumnParallelLinear, "output size = 10"), (RowParallelLinear, "input size = 10")]
)
def test_a_size_that_tp_does_not_divide_is_refused(build: Any, what: str) -> None:
    tp = paper_mesh(Layout(tp=4), 0).tp
    with pytest.raises(LayoutError, match=f"parallel.tp = 4 does not divide the layer's {what}"):
        build(10, 10, Parallel(tp))


def test_shard_sizes() -> None:
    tp = paper_mesh(Layout(tp=4), 3).tp
    assert shard_size(16, tp, "model.num_heads") == 4
    with pytest.raises(LayoutError, match=r"model\.num_heads = 6\. Use a divisor of 6"):
        shard_size(6, tp, "model.num_heads")


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
@pytest.mark.parametrize(
    ("decided", "expected"),
    [
        (Kernels("native", "native", "blas"), ["bfloat16", "bfloat16", "float32"]),
        (Kernels("blas", "native", "blas"), ["float32", "bfloat16", "float32"]),
        (Kernels("native", "blas", "blas"), ["bfloat16", "float32", "float32"]),
    ],
)
def test_every_kind_of_layer_multiplies_by_the_kernels_that_were_decided(
    kind: Any, decided: Kernels, expected: list[str]
) -> None:
    """By the types of the operands of the product forward and of both backward."""
    layer = kind(IN, OUT, Parallel(Mesh().tp, products=Products(bf16=decided)), bias=False).bfloat16()
    torch.nn.init.ones_(layer.weight)
    with Noted() as products:
        layer(drawn(S, B, IN, seed=3).bfloat16().requires_grad_()).sum().backward()
    assert [str(dtype).removeprefix("torch.") for _, _, dtype in products.seen] == expected
