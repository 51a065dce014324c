"""The residual stream cut along the sequence: what is sent, what is kept, and that whole streams come out of it."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.model.attention import KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.pipeline.carry import leaves
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.model.kept import Kept
from tests.model.test_gpt import VOCAB, B, S, configuration, inputs
from tests.model.test_units import batch, built
from tests.model.whole import hidden
from tests.tensor_parallel.shards import drawn

H, LAYERS = 16, 3


def sent(sequence_parallel: bool) -> tuple[Counter[str], int]:
    """(collectives, bytes) of one block over tp, forward and backward."""
    mesh = paper_mesh(Layout(tp=4), 2)
    gpt, given = built(configuration(), mesh.tp, sequence_parallel=sequence_parallel), batch()
    carry = leaves(gpt.run("embedding", (), given))
    mesh.ledger.clear()
    (y,) = gpt.run("blocks.0", carry, given)
    y.backward(torch.ones_like(y))
    assert y.shape == ((S // 4 if sequence_parallel else S), B, H)
    return Counter(entry.operation for entry in mesh.ledger.entries), sum(e.bytes for e in mesh.ledger.entries)


def test_a_block_sends_the_halves_of_its_all_reduces() -> None:
    """Four all-reduces become four of each half; the columns' inputs are gathered once more for their gradients."""
    stream = S * B * H * 8
    assert sent(False) == ({"all_reduce": 4}, 4 * stream)
    # an entry's bytes are of what a rank puts in: a reduce-scatter's are the stream, an all-gather's its part
    assert sent(True) == ({"all_gather": 4 + 2, "reduce_scatter": 4}, 4 * stream + 6 * stream // 4)


def test_what_lies_between_cut_layers_is_kept_once() -> None:
    kept: dict[bool, int] = {}
    for cut in (False, True):
        tp = paper_mesh(Layout(tp=4), 2).tp
        gpt, given = built(configuration(dropout=0.1), tp, sequence_parallel=cut), batch()
        carry = leaves(gpt.run("embedding", (), given))
        with Kept() as made:
            (y,) = gpt.run("blocks.0", carry, given)
        kept[cut] = made.bytes
        assert y.grad_fn is not None
    streams = 4 * 8 + 2  # bytes: both norms' results and both sums in fp64, and two masks
    statistics = 2 * 2 * 8  # bytes: mean and deviation, twice
    assert kept[False] - kept[True] == (streams * S * B * H + statistics * S * B) * 3 // 4


def whole_streams(rank: int, num_ranks: int) -> None:
    """Any length, on a model that is built for training."""
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    config, (tokens, labels, _) = configuration(embedding_norm=True), inputs()
    serial, cut = built(config, Mesh().tp), built(config, tp, sequence_parallel=True)
    with torch.no_grad():
        for length in (S, S - 1, 3, 1):
            expected, x = hidden(serial, tokens[:length]), hidden(cut, tokens[:length])
            torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
            scored = slice(length // 2, length)  # evaluation scores a part of a window
            losses = cut.head.token_losses(x[scored], labels[scored])
            torch.testing.assert_close(losses, serial.head.token_losses(expected[scored], labels[scored]))
            logits, rows = serial.head.logits(expected), cut.head.output.weight.shape[0]
            mine = logits[..., rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(cut.head.logits(x), mine, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_evaluation_sees_the_whole_stream(tp_size: int) -> None:
    run_on_ranks(whole_streams, tp_size)


def test_no_cache_on_a_cut_stream() -> None:
    tp = paper_mesh(Layout(tp=2), 0).tp
    gpt = GPT(configuration(), VOCAB, Parallel(tp, sequence_parallel=True))
    cache = KeyValueCache(torch.zeros(B, 2, 9, 4), torch.zeros(B, 2, 9, 4))
    with pytest.raises(AssertionError, match="a cache has whole sequences"):
        hidden(gpt, inputs()[0], caches=[cache, cache])


def test_initial_weights_do_not_depend_on_it() -> None:
    config, tp = configuration(num_layers=LAYERS), paper_mesh(Layout(tp=2), 1).tp
    one, other = GPT(config, VOCAB, Parallel(tp)), GPT(config, VOCAB, Parallel(tp, sequence_parallel=True))
    for gpt in (one, other):
        initialize_(gpt, tp, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def parts_of_a_stream(rank: int, num_ranks: int) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    x = drawn(8, 2, 4, seed=1)

    def mine(t: Tensor) -> Tensor:
        return t.chunk(tp.size)[tp.rank]

    whole, cut = Parallel(tp), Parallel(tp, sequence_parallel=True)
    assert torch.equal(whole.enter(x), x) and torch.equal(cut.enter(mine(x)), x)
    assert torch.equal(whole.gather(x), x) and torch.equal(cut.gather(mine(x)), x)
    torch.testing.assert_close(whole.leave(x), tp.size * x)
    torch.testing.assert_close(cut.leave(x), tp.size * mine(x))
    assert whole.first_position(2) == 0 and cut.first_position(2) == 2 * tp.rank
    tokens = torch.ones(5, 2, dtype=torch.int64)
    assert torch.equal(whole.pad(tokens), tokens) and torch.equal(cut.pad(tokens)[:5], tokens)
    assert len(cut.pad(tokens)) % tp.size == 0 and not cut.pad(tokens)[5:].any()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_streams(tp_size: int) -> None:
    run_on_ranks(parts_of_a_stream, tp_size)
