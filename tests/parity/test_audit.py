"""What a training step sends, by the ledger: how often, how much, for which layer, in which order.

A layer all-reduces twice forward (g, after the attention's and the MLP's row-parallel layer) and twice backward (f,
before their column-parallel ones); under sequence parallelism each all-reduce is a reduce-scatter and an all-gather,
and two all-gathers more in backward bring back what the column-parallel layers multiplied with. Beside the layers: one
all-reduce of the embedding forward, one of the head backward, and two numbers a token for the loss. On paper and
between real ranks it is the same list.
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


# --- sequence parallelism ---------------------------------------------------------------------------------------------


def test_under_sequence_parallelism_each_all_reduce_is_two_halves() -> None:
    """And backward gathers the inputs of the column-parallel layers again, which are kept cut."""
    sent = [entry for entry in on_paper(replace(TP8, sequence_parallel=True), 3) if entry.operation != "all_reduce"]
    counts = Counter((e.operation, e.layer.startswith("blocks"), e.backward) for e in over_tp(sent))
    again = 2 * LAYERS  # asked for in backward, by the products themselves: no operator's conjugate
    assert counts == {
        ("all_gather", True, False): 2 * LAYERS + again,
        ("reduce_scatter", True, False): 2 * LAYERS,
        ("all_gather", True, True): 2 * LAYERS,
        ("reduce_scatter", True, True): 2 * LAYERS,
        ("reduce_scatter", False, False): 1,  # behind the embedding
        ("all_gather", False, True): 1,
        ("all_gather", False, False): 2,  # before the head; the loss
        ("reduce_scatter", False, True): 1,
    }


def test_the_halves_move_what_an_all_reduce_does() -> None:
    sent = [entry for entry in on_paper(replace(TP8, sequence_parallel=True), 3) if entry.operation != "all_reduce"]
    for entry in over_tp(sent):
        if entry.operation == "reduce_scatter":
            assert entry.bytes == STREAM
        elif "cross_entropy" not in entry.site:
            assert entry.bytes == STREAM // 8


def test_gradients_of_replicated_weights_are_summed_once_a_step() -> None:
    state = built(TP8, paper_mesh(TP8.layout, 3))
    replicated = sum(s.stop - s.start for bucket in state.buckets for s in bucket.groups if not s.cut)
    sent = on_paper(replace(TP8, sequence_parallel=True), 3)
    assert [(e.axis, e.bytes) for e in sent if e.operation == "all_reduce"] == [
        ("tp", BYTES * replicated),
        ("model", BYTES),
    ]


# --- dp ---------------------------------------------------------------------------------------------------------------


def over_dp(zero: Any) -> tuple[dict[str, int], list[Entry]]:
    """(bytes of each bucket, what a step of two micro-batches sends over dp but single numbers)"""
    way = Way(dp=2, micro_batch_size=2, zero=zero)
    sizes = {bucket.name: BYTES * bucket.size for bucket in built(way, paper_mesh(way.layout, 1)).buckets}
    entries = on_paper(way, 1)
    norm = ["world"] if zero else []  # over slices; else over pp and tp, which are one rank here
    numbers = [e.axis for e in entries if e.bytes == BYTES]
    assert numbers == ["dp", *norm, "dp"], "loss tokens, norm, loss"
    return sizes, [e for e in entries if e.bytes != BYTES]


def test_zero_0_sends_each_gradient_once() -> None:
    sizes, sent = over_dp(0)
    assert {(e.operation, e.axis) for e in sent} == {("all_reduce", "dp")}
    assert sorted(e.bytes for e in sent) == sorted(sizes.values())


def test_zero_1_sends_the_same_in_two_halves() -> None:
    sizes, sent = over_dp(1)
    assert sorted(e.bytes for e in sent if e.operation == "reduce_scatter") == sorted(sizes.values())
    assert [e.bytes for e in sent if e.operation == "all_gather"] == [size // 2 for size in sizes.values()]
    assert len(sent) == 2 * len(sizes)


def test_zero_2_reduces_after_every_microbatch() -> None:
    sizes, sent = over_dp(2)
    assert sorted(e.bytes for e in sent if e.operation == "reduce_scatter") == sorted(2 * list(sizes.values()))
    assert [e.bytes for e in sent if e.operation == "all_gather"] == [size // 2 for size in sizes.values()]


def test_zero_3_gathers_forward_and_backward() -> None:
    """Twice a micro-batch; what backward needs first is what forward needed last, and what the next micro-batch needs
    first is what backward needed last: these are kept.
    """
    sizes, sent = over_dp(3)
    assert sorted(e.bytes for e in sent if e.operation == "reduce_scatter") == sorted(2 * list(sizes.values()))
    gathered = Counter(e.bytes for e in sent if e.operation == "all_gather")
    assert gathered[sizes["blocks.1"] // 2] == 2 * 2 * LAYERS, "all blocks are equally large"
    assert gathered[sizes["head"] // 2] == 2
    assert gathered[sizes["embedding"] // 2] == 2 * 2 - 1


# --- pp ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_microbatch_crosses_each_cut_once_up_and_once_down(stage: int) -> None:
    way = Way(pp=3, micro_batch_size=2)
    entries = on_paper(way, stage)
    moved = Counter((e.operation, e.peer) for e in entries if e.axis == "pp" and e.peer is not None)
    neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < 3]
    assert moved == {(operation, other): FOUR for other in neighbours for operation in ("send", "receive")}
    assert {e.bytes for e in entries if e.peer is not None} == {STREAM}
    rest = [(e.operation, e.axis) for e in entries if e.peer is None]
    table = [("all_reduce", "ends")] * (stage != 1)
    assert rest == [*table, ("all_reduce", "model"), ("all_reduce", "pp")], "tied gradients, norm, loss"


# --- paper ------------------------------------------------------------------------------------------------------------


def comparable(entries: list[Entry]) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(entry).items() if k not in ("started", "seconds")} for entry in entries]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(TP8, marks=pytest.mark.slow),
        Way(tp=2, dp=2, micro_batch_size=2, sequence_parallel=True, zero=3),
        Way(pp=2, dp=2, micro_batch_size=2, zero=2),
    ],
    ids=str,
)
def test_paper_sends_what_real_ranks_send(way: Way) -> None:
    def on_a_rank(rank: int, num_ranks: int) -> list[dict[str, Any]]:
        return comparable(one_step(way, build_mesh(way.layout, rank)))

    for rank, real in enumerate(run_on_ranks(on_a_rank, way.layout.num_ranks)):
        assert comparable(on_paper(way, rank)) == real


def test_the_serial_run_sends_nothing() -> None:
    assert one_step(Way(micro_batch_size=2), Mesh()) == []


def test_512_ranks_on_paper() -> None:
    """Any rank of a large run can be walked through in this process: here the last stage, without the embedding."""
    way = Way(tp=8, dp=4, pp=16, micro_batch_size=2)
    deep = CASE.model.model_copy(update={"num_layers": 30, "num_heads": 8, "hidden_size": HIDDEN})
    plain = configured(CASE, way).model_copy(update={"model": deep})
    mesh = paper_mesh(way.layout, 511)
    train_step(build_state(plain, mesh, VOCAB, CPU), microbatches(CASE, way, 0, mesh), mesh, plain.train)
    assert mesh.ledger.counts["all_reduce", "tp"] == 4 + 1, "one block and the head, one micro-batch"
    assert mesh.ledger.counts["receive", "pp"] == mesh.ledger.counts["send", "pp"] == 1
