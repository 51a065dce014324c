"""Adapters beside cut layers: on any number of ranks what they are on one, with what they drop."""

import pytest
import torch
from torch import Tensor

from colonnade.architecture.statement import Adapters
from colonnade.kernels.choice import Kernel, Kernels, Products
from colonnade.kernels.dropout import Masks
from colonnade.mesh.collectives import all_gather
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import placements
from tests.distributed import run_on_ranks
from tests.emulated import Noted

S, B, INPUTS, OUTPUTS, RANK = 4, 2, 6, 8, 3
KINDS = (ColumnParallelLinear, RowParallelLinear)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shard(x: Tensor, tp: Axis, dim: int) -> Tensor:
    return x.chunk(tp.size, dim)[tp.rank].contiguous()


def added(
    kind: type[ColumnParallelLinear | RowParallelLinear],
    tp: Axis,
    *,
    sequence_parallel: bool = False,
    drops: bool = True,
) -> Tensor:
    """What an adapter of factor 2 that drops a half adds to the layer's output, whole: [s, b, o]."""
    parallel = Parallel(tp, sequence_parallel)
    layer = kind(INPUTS, OUTPUTS, parallel).double()
    layer.adapt("blocks.0.mlp.down", Adapters(rank=RANK, scale=2.0, dropout=0.5))
    layer.double()
    adapter, a, b = layer.adapter, numbers(RANK, INPUTS, seed=1), numbers(OUTPUTS, RANK, seed=2)
    assert adapter is not None
    parallel.adapter_masks.now = Masks(7, torch.tensor([3, 9]).numpy()) if drops else None
    x = numbers(S, B, INPUTS, seed=3)
    with torch.no_grad():
        if isinstance(layer, ColumnParallelLinear):
            layer.lora_a.copy_(a), layer.lora_b.copy_(shard(b, tp, 0))
            y = adapter.of_columns(shard(x, tp, 0) if sequence_parallel else x, layer.rows)
            return all_gather(y.permute(2, 0, 1).contiguous(), tp).permute(1, 2, 0)
        layer.lora_a.copy_(shard(a, tp, 1)), layer.lora_b.copy_(b)
        return parallel.gather(adapter.of_rows(shard(x, tp, 2)).contiguous())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_adds_the_scaled_product_of_both_weights(
    kind: type[ColumnParallelLinear | RowParallelLinear],
) -> None:
    expected = (
        2.0 * numbers(S, B, INPUTS, seed=3) @ numbers(RANK, INPUTS, seed=1).t() @ numbers(OUTPUTS, RANK, seed=2).t()
    )
    torch.testing.assert_close(added(kind, Axis("tp"), drops=False), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(added(kind, Axis("tp")), expected), "it drops where there are masks"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_adapters_add_and_drop_is_the_same_on_two_ranks(sequence_parallel: bool) -> None:
    def on_a_rank(rank: int, size: int) -> list[Tensor]:
        tp = build_mesh(Layout(tp=size), rank).tp
        return [added(kind, tp, sequence_parallel=sequence_parallel) for kind in KINDS]

    alone = [added(kind, Axis("tp")) for kind in KINDS]
    for found in run_on_ranks(on_a_rank, 2):
        for mine, whole in zip(found, alone, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


def test_of_groups_that_ranks_share_an_adapter_adds_the_rows_of_their_own() -> None:
    """Keys and values of fewer heads than ranks, of which each rank has the whole weight."""
    x, a, b = numbers(S, B, INPUTS, seed=3), numbers(RANK, INPUTS, seed=1), numbers(OUTPUTS, RANK, seed=2)
    weight = numbers(OUTPUTS, INPUTS, seed=4)
    expected = x @ (weight + 2.0 * b @ a).t()
    for rank in range(4):
        layer = ColumnParallelLinear(
            INPUTS, OUTPUTS, Parallel(paper_mesh(Layout(tp=4), rank).tp), bias=False, groups=2
        ).double()
        layer.adapt("blocks.0.attention.key_value", Adapters(rank=RANK, scale=2.0, dropout=0.0))
        layer.double()
        with torch.no_grad():
            for kept, drawn in ((layer.weight, weight), (layer.lora_a, a), (layer.lora_b, b)):
                kept.copy_(drawn)
            half = slice(0, OUTPUTS // 2) if rank < 2 else slice(OUTPUTS // 2, OUTPUTS)
            torch.testing.assert_close(layer(x), expected[:, :, half], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_adds_its_adapter_whether_it_has_a_bias_or_none(
    kind: type[ColumnParallelLinear | RowParallelLinear], bias: bool
) -> None:
    layer = kind(INPUTS, OUTPUTS, Parallel(Axis("tp")), bias=bias)
    layer.adapt("blocks.0.mlp.down", Adapters(rank=RANK, scale=2.0, dropout=0.0))
    layer.double()
    with torch.no_grad():
        for place, weight in enumerate(layer.parameters()):
            weight.copy_(numbers(*weight.shape, seed=place))
        x, added_bias = numbers(S, B, INPUTS, seed=9), layer.bias if layer.bias is not None else 0.0
        expected = x @ (layer.weight + 2.0 * layer.lora_b @ layer.lora_a).t() + added_bias
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_an_adapter_is_cut_where_its_layer_is() -> None:
    """A as the layer's inputs are, B as its outputs; what is not cut is on every rank."""
    parallel = Parallel(paper_mesh(Layout(tp=2), 1).tp)
    found = []
    for kind in KINDS:
        layer = kind(INPUTS, OUTPUTS, parallel)
        layer.adapt("blocks.0.mlp.down", Adapters(rank=RANK, scale=2.0, dropout=0.0))
        boxes = {place.name: (place.shape, place.dim, place.offset) for place in placements(layer, parallel.tp)}
        found.append((boxes["lora_a"], boxes["lora_b"], tuple(layer.lora_a.shape), tuple(layer.lora_b.shape)))
    a, b = (RANK, INPUTS), (OUTPUTS, RANK)
    assert found == [
        ((a, None, 0), (b, 0, OUTPUTS // 2), a, (OUTPUTS // 2, RANK)),
        ((a, 1, INPUTS // 2), (b, None, 0), (RANK, INPUTS // 2), b),
    ]


@pytest.mark.parametrize(("kernel", "expected"), [("native", torch.bfloat16), ("blas", torch.float32)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_multiplies_by_the_kernel_that_was_decided(
    kind: type[ColumnParallelLinear | RowParallelLinear], kernel: Kernel, expected: torch.dtype
) -> None:
    """In bf16 as it is, or widened, as its layer does."""
    products = Products(bf16=Kernels(forward=kernel, input_gradient=kernel))
    layer = kind(INPUTS, OUTPUTS, Parallel(Axis("tp"), products=products), bias=False)
    layer.adapt("blocks.0.mlp.down", Adapters(rank=RANK, scale=2.0, dropout=0.0))
    layer.bfloat16()
    for weight in layer.parameters():
        torch.nn.init.ones_(weight)
    with Noted() as noted, torch.no_grad():
        layer(torch.ones(S, B, INPUTS, dtype=torch.bfloat16))
    assert [dtype for _, _, dtype in noted.seen] == [expected] * 3
