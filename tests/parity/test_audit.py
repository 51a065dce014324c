"""What a training step sends, by the ledger: how often, how much, from where, in which order.

A layer all-reduces twice forward (g, after the attention's and the MLP's row-parallel layer) and twice backward (f,
before their column-parallel ones). Beside the layers: one all-reduce of the embedding forward, one of the head
backward, and two numbers a token for the loss. On paper and between real ranks it is the same list.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from colonnade.config.schema import Config, ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Entry
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.distributed import run_on_ranks
from tests.parity.runs import CPU, Case, microbatches

LAYERS, HIDDEN, VOCAB = 3, 32, 37
CASE = Case(2, vocab_size=VOCAB)
TOKENS, BYTES = 8 * 2, 8  # of a micro-batch; of a float64


def config(layout: Layout) -> Config:
    return Config(
        model=ModelConfig(num_layers=LAYERS, hidden_size=HIDDEN, num_heads=8, seq_length=8),
        parallel=ParallelConfig(tp=layout.tp, dp=layout.dp),
        train=TrainConfig(steps=1, global_batch_size=8, micro_batch_size=2, precision="fp64"),
        optim=OptimConfig(learning_rate=1e-3),
        run=RunConfig(folder="unused"),
    )


def one_step(mesh: Mesh) -> list[Entry]:
    """What one training step sends."""
    settings = config(mesh.layout)
    state = build_state(settings, mesh, VOCAB, CPU)
    train_step(state, microbatches(CASE, 0, mesh), mesh, settings.train)
    return list(mesh.ledger.entries)


def file_of(entry: Entry) -> str:
    return entry.site.split(":")[0].removesuffix(".py")


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    """tp = 8, four micro-batches."""
    return one_step(paper_mesh(Layout(tp=8), 3))


def over_tp(entries: list[Entry]) -> list[Entry]:
    """One micro-batch of the four."""
    mine = [entry for entry in entries if entry.axis == "tp"]
    assert len(mine) % 4 == 0
    each = [mine[i : i + len(mine) // 4] for i in range(0, len(mine), len(mine) // 4)]
    assert all(
        [(e.operation, e.shape, e.site) for e in one] == [(e.operation, e.shape, e.site) for e in each[0]]
        for one in each
    )
    return each[0]


def test_two_all_reduces_forward_and_two_backward_a_layer(entries: list[Entry]) -> None:
    counts = Counter((e.operation, file_of(e), e.backward) for e in over_tp(entries))
    assert counts == {
        ("all_reduce", "tensor_parallel/linear", False): 2 * LAYERS,
        ("all_reduce", "tensor_parallel/linear", True): 2 * LAYERS,
        ("all_reduce", "tensor_parallel/embedding", False): 1,
        ("all_reduce", "tensor_parallel/cross_entropy", True): 1,
        ("all_gather", "tensor_parallel/cross_entropy", False): 1,
    }


def test_each_of_them_is_one_residual_stream(entries: list[Entry]) -> None:
    for entry in over_tp(entries):
        if entry.operation == "all_reduce":
            assert entry.shape == (8, 2, HIDDEN) and entry.bytes == TOKENS * HIDDEN * BYTES


def test_the_loss_sends_two_numbers_a_token(entries: list[Entry]) -> None:
    (gathered,) = [entry for entry in over_tp(entries) if entry.operation == "all_gather"]
    assert gathered.bytes == 2 * TOKENS * BYTES


def test_forward_goes_up_and_backward_down(entries: list[Entry]) -> None:
    order = [(e.backward, file_of(e)) for e in over_tp(entries)]
    linear, loss = "tensor_parallel/linear", "tensor_parallel/cross_entropy"
    assert order == [
        (False, "tensor_parallel/embedding"),
        *[(False, linear)] * (2 * LAYERS),
        (False, loss),
        (True, loss),
        *[(True, linear)] * (2 * LAYERS),
    ]


def test_beside_microbatches_one_number_for_the_norm(entries: list[Entry]) -> None:
    assert [(e.operation, e.axis, e.bytes) for e in entries if e.axis != "tp"] == [("all_reduce", "model", 8)]


def test_dp_sends_each_gradient_once_and_two_numbers() -> None:
    mesh = paper_mesh(Layout(dp=4), 2)
    entries = one_step(mesh)
    state = build_state(config(Layout(dp=4)), mesh, VOCAB, CPU)
    numbers = [e.bytes for e in entries if e.bytes == 8]
    gradients = [e.bytes for e in entries if e.bytes != 8]
    assert len(numbers) == 2, "the number of loss tokens, and the loss"
    assert sorted(gradients) == sorted(8 * len(unit.gradients) for unit in state.units)
    assert {(e.operation, e.axis) for e in entries} == {("all_reduce", "dp")}


def comparable(entries: list[Entry]) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(entry).items() if k not in ("started", "seconds")} for entry in entries]


@pytest.mark.parametrize("layout", [Layout(tp=8), Layout(tp=2, dp=2)], ids=str)
def test_paper_sends_what_real_ranks_send(layout: Layout) -> None:
    def on_a_rank(rank: int, num_ranks: int) -> list[dict[str, Any]]:
        return comparable(one_step(build_mesh(layout, rank)))

    for rank, real in enumerate(run_on_ranks(on_a_rank, layout.num_ranks)):
        assert comparable(one_step(paper_mesh(layout, rank))) == real


def test_the_serial_run_sends_nothing() -> None:
    assert one_step(Mesh()) == []


def test_512_ranks_on_paper() -> None:
    """Any rank of the paper's largest run can be walked through in this process."""
    mesh = paper_mesh(Layout(tp=8, dp=4, pp=16), 511)
    one_step(mesh)
    assert mesh.ledger.counts["all_reduce", "tp"] == 4 * LAYERS + 2
