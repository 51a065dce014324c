"""What a training step sends, by the ledger: how often, how much, for which layer, in which order.

A layer all-reduces twice forward (g, after the attention's and the MLP's row-parallel layer) and twice backward (f,
before their column-parallel ones); under sequence parallelism each all-reduce is a reduce-scatter and an all-gather, and
two all-gathers more in backward bring back what the column-parallel layers multiplied with. Beside the layers: one
all-reduce of the embedding forward, one of the head backward, and two numbers a token for the loss. On paper and between
real ranks it is the same list.
"""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest

from colonnade.config.schema import Config
from colonnade.mesh.ledger import Entry
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step
from tests.distributed import run_on_ranks
from tests.parity.runs import CPU, Case, Way, configured, microbatches

LAYERS, HIDDEN, VOCAB = 3, 32, 37
CASE = Case(num_layers=LAYERS, vocab_size=VOCAB)
TOKENS, BYTES = 8 * 2, 8  # of a micro-batch; of a float64
STREAM = TOKENS * HIDDEN * BYTES
TP8 = Way(tp=8, micro_batch_size=2)
FOUR = 4  # micro-batches of a step where dp is 1


def config(way: Way) -> Config:
    """Wider than the parity tests' model, so that eight ranks can cut it."""
    plain = configured(CASE, way)
    return plain.model_copy(update={"model": plain.model.model_copy(update={"num_heads": 8, "hidden_size": HIDDEN})})


def built(way: Way, mesh: Mesh) -> TrainState:
    return build_state(config(way), mesh, VOCAB, CPU)


def one_step(way: Way, mesh: Mesh) -> list[Entry]:
    """What one training step sends."""
    state = built(way, mesh)
    train_step(state, microbatches(CASE, way, 0, mesh), mesh, config(way).train)
    return list(mesh.ledger.entries)


def on_paper(way: Way, rank: int) -> list[Entry]:
    return one_step(way, paper_mesh(way.layout, rank))


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return on_paper(TP8, 3)


def over_tp(entries: list[Entry]) -> list[Entry]:
    """One micro-batch of the four, all of which send the same."""
    mine = [entry for entry in entries if entry.axis == "tp"]
    assert len(mine) % FOUR == 0
    each = [mine[i : i + len(mine) // FOUR] for i in range(0, len(mine), len(mine) // FOUR)]
    assert all(
        [(e.operation, e.shape, e.layer) for e in one] == [(e.operation, e.shape, e.layer) for e in each[0]]
        for one in each
    )
    return each[0]


def layers(names: list[int] | range) -> list[str]:
    return [f"blocks.{layer}.{part}" for layer in names for part in ("attention", "mlp")]


def test_two_all_reduces_forward_and_two_backward_a_layer(entries: list[Entry]) -> None:
    counts = Counter((e.operation, e.layer.startswith("blocks"), e.backward) for e in over_tp(entries))
    assert counts == {
        ("all_reduce", True, False): 2 * LAYERS,
        ("all_reduce", True, True): 2 * LAYERS,
        ("all_reduce", False, False): 1,
        ("all_reduce", False, True): 1,
        ("all_gather", False, False): 1,
    }


def test_each_of_them_is_one_residual_stream(entries: list[Entry]) -> None:
    for entry in over_tp(entries):
        if entry.operation == "all_reduce":
            assert entry.shape == (8, 2, HIDDEN) and entry.bytes == STREAM


def test_the_loss_sends_two_numbers_a_token(entries: list[Entry]) -> None:
    (gathered,) = [entry for entry in over_tp(entries) if entry.operation == "all_gather"]
    assert gathered.bytes == 2 * TOKENS * BYTES


def test_forward_goes_up_and_backward_down(entries: list[Entry]) -> None:
    up = layers(range(LAYERS))
    assert [(e.backward, e.layer) for e in over_tp(entries)] == [
        *[(False, layer) for layer in ["embedding", *up, "head"]],
        *[(True, layer) for layer in ["head", *up[::-1]]],
    ]


def test_beside_microbatches_one_number_for_the_norm(entries: list[Entry]) -> None:
    assert [(e.operation, e.axis, e.bytes) for e in entries if e.axis != "tp"] == [("all_reduce", "model", 8)]


def test_sequence_parallelism_halves_each_all_reduce_and_gathers_inputs_again() -> None:
    sent = on_paper(replace(TP8, sequence_parallel=True), 3)
    gradients_of_replicated = sent.pop([e.axis for e in sent].index("tp", len(sent) - 2))  # after all micro-batches
    assert gradients_of_replicated.operation == "all_reduce"
    counts = Counter((e.operation, e.layer.startswith("blocks"), e.backward) for e in over_tp(sent))
    assert counts == {
        ("all_gather", True, False): 2 * LAYERS,
        ("reduce_scatter", True, False): 2 * LAYERS,
        ("all_gather", True, True): 2 * LAYERS,
        ("reduce_scatter", True, True): 2 * LAYERS,
        ("reduce_scatter", False, False): 1,  # embedding
        ("all_gather", False, True): 1,
        ("all_gather", False, False): 2,  # head: the stream, and the loss
        ("reduce_scatter", False, True): 1,
    } | Counter({("all_gather", True, False): 2 * LAYERS})
