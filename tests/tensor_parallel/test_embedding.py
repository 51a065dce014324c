"""The vocabulary-parallel embedding against torch.nn.Embedding, with vocabularies that fit badly."""

import pytest
import torch
from torch import Tensor, nn

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_

HIDDEN = 6


def look_up(rank: int, num_ranks: int) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    for vocab_size in (37, 40, 3):
        for sequence_parallel in (False, True):
            look_up_beside_torch(vocab_size, tp, sequence_parallel)


def look_up_beside_torch(vocab_size: int, tp: Axis, sequence_parallel: bool) -> None:
    tokens = torch.randint(0, vocab_size, (8, 4), generator=torch.Generator().manual_seed(0))
    twin = nn.Embedding(vocab_size, HIDDEN).double()
    whole = drawn(vocab_size, HIDDEN, seed=1)
    with torch.no_grad():
        twin.weight.copy_(whole)
    layer = VocabParallelEmbedding(vocab_size, HIDDEN, Parallel(tp, sequence_parallel=sequence_parallel)).double()
    load_shards_(layer, tp, {"weight": whole}, padding=1e9)  # padding must not be seen
    grad = drawn(8, 4, HIDDEN, seed=2)

    def mine(stream: Tensor) -> Tensor:
        return stream.chunk(tp.size)[tp.rank] if sequence_parallel else stream

    for _ in range(2):  # gradients add up
        out, expected = layer(tokens), twin(tokens)
        assert torch.equal(out, mine(expected))
        out.backward(mine(grad))
        expected.backward(grad)
    assert twin.weight.grad is not None
    assert_gradients(layer, tp, {"weight": twin.weight.grad})


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_lookup_is_torchs(tp_size: int) -> None:
    run_on_ranks(look_up, tp_size)


def test_what_it_sends() -> None:
    mesh = paper_mesh(Layout(tp=2), 1)
    layer = VocabParallelEmbedding(10, HIDDEN, Parallel(mesh.tp))
    layer(torch.zeros(5, 3, dtype=torch.int64)).sum().backward()
    assert [(e.operation, e.shape, e.backward) for e in mesh.ledger.entries] == [("all_reduce", (5, 3, HIDDEN), False)]


def test_what_it_sends_where_the_sequence_is_cut() -> None:
    mesh = paper_mesh(Layout(tp=2), 1)
    layer = VocabParallelEmbedding(10, HIDDEN, Parallel(mesh.tp, sequence_parallel=True))
    layer(torch.zeros(6, 3, dtype=torch.int64)).sum().backward()
    sent = [(e.operation, e.shape, e.backward) for e in mesh.ledger.entries]
    assert sent == [("reduce_scatter", (6, 3, HIDDEN), False), ("all_gather", (3, 3, HIDDEN), True)]
