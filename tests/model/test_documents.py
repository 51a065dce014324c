"""Documents packed into one sample do not see each other: they are computed as if each were alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.data.loader import Batch
from colonnade.kernels.attention import attend, attend_with_dropout
from colonnade.kernels.dropout import Masks
from colonnade.kernels.mask import Mask, Pairs
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.attention import KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.model.position import Positions
from colonnade.pipeline.carry import Carry
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.state import build_state
from colonnade.train.step import StepResult, train_step
from tests.distributed import run_on_ranks
from tests.kernels.by_mask import by_mask
from tests.model.kept import Kept
from tests.model.test_gpt import SAMPLES, SEED, VOCAB, configuration, inputs, serial
from tests.model.test_units import through
from tests.parity.runs import (
    CPU,
    SEQ_LENGTH,
    SERIAL,
    Case,
    LocalRanges,
    Way,
    configured,
    global_batch,
    local_ranges,
    whole,
)
from tests.tensor_parallel.shards import assert_gradients, drawn

PACKED = [[3, 5], [8], [1, 2, 5]]
"""Lengths of the documents of each sample."""
SLOPES = [0.5, 0.25]


def numbered(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Each token's document, counted within its sample: int64 [s, b]."""
    return torch.tensor([[i for i, length in enumerate(row) for _ in range(length)] for row in lengths]).t()


def placed(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Each token's place in its document: int64 [s, b]."""
    return torch.tensor([[at for length in row for at in range(length)] for row in lengths]).t()


def packed(lengths: Sequence[Sequence[int]], *, dropped: bool = False) -> Inputs:
    masks = Masks(SEED, torch.tensor(SAMPLES).numpy()) if dropped else None
    return Inputs(*inputs(), masks, documents=numbered(lengths), positions=placed(lengths))


def separate(lengths: Sequence[Sequence[int]]) -> Iterator[Inputs]:
    """Every document in a micro-batch of its own."""
    for sample, row in enumerate(lengths):
        for stop, length in zip(accumulate(row), row, strict=True):
            yield Inputs(*(part[stop - length : stop, sample : sample + 1] for part in inputs()))


def loss_and_gradients(gpt: GPT, given: Sequence[Inputs]) -> tuple[Tensor, dict[str, Tensor]]:
    """Their sums over micro-batches."""
    gpt.zero_grad()
    loss = torch.stack([through([gpt], one).detach() for one in given]).sum()
    return loss, {name: w.grad.clone() for name, w in gpt.named_parameters() if w.grad is not None}


# --- the whole model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["learned", "alibi"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_documents_are_documents_computed_alone(position: str, norm_position: str, recompute: bool) -> None:
    gpt = serial(configuration(position=position, norm_position=norm_position))
    expected, gradients = loss_and_gradients(gpt, list(separate(PACKED)))
    # a chance that rounds to nothing: nothing is dropped, by the products that are spelled out
    config = configuration(position=position, norm_position=norm_position, attention_dropout=1e-9)
    spelled_out = GPT(config, VOCAB, Parallel(Mesh().tp, recompute_attention=recompute)).double()
    spelled_out.load_state_dict(gpt.state_dict())
    for model, dropped in ((gpt, False), (spelled_out, True)):
        loss, _ = loss_and_gradients(model, [packed(PACKED, dropped=dropped)])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert_gradients(model, Mesh().tp, gradients, 1e-10)


@pytest.mark.parametrize("position", ["learned", "alibi"])
def test_every_tokens_loss_is_that_of_its_document_alone(position: str) -> None:
    gpt, (_, labels, _) = serial(configuration(position=position)), inputs()
    x = hidden(gpt, packed(PACKED))
    alone = [hidden(gpt, one) for one in separate(PACKED)]
    rows = [torch.cat(alone[start:stop]) for start, stop in ((0, 2), (2, 3), (3, 6))]
    expected = gpt.head.token_losses(torch.cat(rows, 1), labels)
    torch.testing.assert_close(gpt.head.token_losses(x, labels), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def hidden(gpt: GPT, given: Inputs) -> Tensor:
    carry: Carry = ()
    for unit in list(gpt.units())[:-1]:
        carry = gpt.run(unit, carry, given)
    (x,) = carry
    return x


@pytest.mark.parametrize("position", ["learned", "alibi"])
@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_one_document_is_no_documents(position: str, drop: float) -> None:
    gpt = serial(configuration(position=position, dropout=drop, attention_dropout=drop))
    one = packed([[8], [8], [8]], dropped=True)
    loss, gradients = loss_and_gradients(gpt, [replace(one, documents=None, positions=None)])
    again, _ = loss_and_gradients(gpt, [one])
    torch.testing.assert_close(again, loss, rtol=1e-13, atol=0)
    assert_gradients(gpt, Mesh().tp, gradients)


@pytest.mark.parametrize("position", ["learned", "alibi"])
def test_a_boundary_elsewhere_is_another_result(position: str) -> None:
    gpt = serial(configuration(position=position))
    losses = [
        loss_and_gradients(gpt, [packed([first, [8], [1, 2, 5]])])[0] for first in ([3, 5], [4, 4], [8], [3, 4, 1])
    ]
    assert all(abs(a - b) > 1e-6 for i, a in enumerate(losses) for b in losses[:i])


def test_documents_and_positions_work_each_alone() -> None:
    """Positions place tokens, documents hide them; neither does the other's work."""
    gpt, both = serial(configuration()), packed(PACKED)
    given = [both, replace(both, documents=None), replace(both, positions=None)]
    losses = [loss_and_gradients(gpt, [one])[0] for one in given]
    assert all(abs(a - b) > 1e-6 for i, a in enumerate(losses) for b in losses[:i])


def test_rotary_documents_are_documents_computed_alone_and_turn_by_their_own_positions() -> None:
    """Within a document distances alone count: where nothing is hidden, positions show."""
    gpt, both = serial(configuration(position="rotary")), packed(PACKED)
    expected, gradients = loss_and_gradients(gpt, list(separate(PACKED)))
    loss, _ = loss_and_gradients(gpt, [both])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_gradients(gpt, Mesh().tp, gradients, 1e-10)
    given = [replace(both, documents=None), replace(both, documents=None, positions=None)]
    placed_alone, joined = (loss_and_gradients(gpt, [one])[0] for one in given)
    assert abs(placed_alone - joined) > 1e-6
    assert min(abs(placed_alone - loss), abs(joined - loss)) > 1e-6


def test_a_generated_text_is_one_document() -> None:
    gpt, given = serial(configuration()), packed(PACKED)
    caches = {"blocks.0": KeyValueCache(torch.zeros(3, 4, 9, 4), torch.zeros(3, 4, 9, 4))}
    with pytest.raises(AssertionError, match="one document"):
        gpt.run("blocks.0", (torch.zeros(8, 3, 16).double(),), replace(given, caches=caches))


# --- what tokens see, made once for a micro-batch ---------------------------------------------------------------------


def test_what_tokens_see_is_made_once_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = Pairs._make

    def counted(pairs: Pairs) -> Tensor:
        made.append(make(pairs))
        return made[-1]

    monkeypatch.setattr(Pairs, "_make", counted)
    gpt = serial(configuration(num_layers=4, attention_dropout=0.1))
    through([gpt], packed(PACKED, dropped=True))
    assert len(made) == 1
    through([gpt], packed(PACKED, dropped=True))
    assert len(made) == 2


def test_what_nobody_keeps_is_made_again() -> None:
    pairs = Pairs(numbered(PACKED))
    first = pairs.tensor()
    assert first is not None and pairs.tensor() is first
    kept = first.clone()
    del first
    assert not [made for made in pairs._made if made() is not None], "nothing holds it"
    again = pairs.tensor()
    assert again is not None and torch.equal(again, kept)


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_backward_sees_what_its_forward_saw(drop: float) -> None:
    """Another micro-batch may run between forward and backward: pipelines do so."""
    gpt = serial(configuration(attention_dropout=drop))
    some, others = (packed(lengths, dropped=True) for lengths in (PACKED, [[8], [2, 6], [4, 4]]))
    _, expected = loss_and_gradients(gpt, [some, others])
    gpt.zero_grad()
    losses = []
    for microbatch in (some, others):
        carry: Carry = ()
        for unit in gpt.units():
            carry = gpt.run(unit, carry, microbatch)
        losses += carry
    for loss in losses:
        loss.backward()
    assert_gradients(gpt, Mesh().tp, expected)


# --- the core of attention --------------------------------------------------------------------------------------------


def heads(length: int = 8) -> list[Tensor]:
    """q, k, v [3, 2, s, 4]"""
    return [drawn(3, 2, length, 4, seed=i).requires_grad_() for i in range(3)]


def expression(q: Tensor, k: Tensor, v: Tensor, slopes: list[float] | None, keep: Tensor, drop: float) -> Tensor:
    """Attention within documents, one query after the other."""
    documents = numbered(PACKED).t()
    y = torch.zeros_like(q)
    for sample, row in enumerate(documents):
        for query in range(len(row)):
            keys = [key for key in range(query + 1) if row[key] == row[query]]
            scores = (k[sample, :, keys] @ q[sample, :, query, :, None])[..., 0] / q.shape[-1] ** 0.5  # [n, keys]
            if slopes is not None:
                scores = scores - torch.tensor(slopes)[:, None] * (query - torch.tensor(keys))
            kept = scores.softmax(-1) * keep[sample, :, query, keys] / (1 - drop)
            y[sample, :, query] = (kept[:, None] @ v[sample, :, keys])[:, 0]
    return y


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_attention_within_documents_is_the_plain_expression(slopes: list[float] | None, recompute: bool) -> None:
    pairs, everything = Pairs(numbered(PACKED)).tensor(), torch.ones(3, 2, 8, 8, dtype=torch.bool)
    keep = torch.rand(3, 2, 8, 8, generator=torch.Generator().manual_seed(0)) >= 0.25
    assert_same(
        lambda *qkv: attend(*qkv, Mask(slopes=slopes, pairs=pairs)),
        lambda *qkv: expression(*qkv, slopes, keep=everything, drop=0.0),
    )
    assert_same(
        lambda *qkv: attend_with_dropout(
            *qkv, by_mask(keep, 0.25), mask=Mask(slopes=slopes, pairs=pairs), recompute=recompute
        ),
        lambda *qkv: expression(*qkv, slopes, keep=keep, drop=0.25),
    )


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> None:
    mine, twins, grad = heads(), heads(), drawn(3, 2, 8, 4, seed=9)
    y, expected = ours(*mine), theirs(*twins)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for got, reference in zip(
        torch.autograd.grad(y, mine, grad), torch.autograd.grad(expected, twins, grad), strict=True
    ):
        torch.testing.assert_close(got, reference, rtol=1e-11, atol=1e-12)


def test_no_layer_keeps_a_matrix_of_its_own() -> None:
    """Where probabilities are computed again, what tokens see is all there is of queries × keys, and shared."""
    length = 128
    pairs = Pairs(torch.zeros(length, 3, dtype=torch.int64)).tensor()
    keep = torch.ones(3, 2, length, length, dtype=torch.bool)
    cores: dict[str, Callable[..., Tensor]] = {
        "fused": lambda *qkv: attend(*qkv, Mask(pairs=pairs)),
        "slopes": lambda *qkv: attend(*qkv, Mask(slopes=SLOPES, pairs=pairs)),
        "dropout": lambda *qkv: attend_with_dropout(*qkv, by_mask(keep, 0.125), mask=Mask(pairs=pairs), recompute=True),
    }
    for name, core in cores.items():
        with Kept() as kept:
            y = core(*heads(length))
        assert kept.largest < length * length * 3, name
        assert y.grad_fn is not None


# --- learned positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_positions_are_looked_up(dtype: torch.dtype) -> None:
    """Many tokens of one place: their gradients are added up in fp32 also where the weight has 16 bits."""
    positions = Positions(9, 4).to(dtype)
    with torch.no_grad():
        positions.weight.copy_(drawn(9, 4, seed=0))
    at = torch.randint(0, 9, (500, 3), generator=torch.Generator().manual_seed(0))
    x, grad = drawn(500, 3, 4, seed=1).to(dtype).requires_grad_(), drawn(500, 3, 4, seed=2).to(dtype)
    y = positions(x, at)
    assert torch.equal(y, x + positions.weight[at])
    y.backward(grad)
    assert torch.equal(x.grad, grad)  # type: ignore[arg-type]
    expected = torch.zeros(9, 4, dtype=torch.float64).index_put_((at,), grad.double(), accumulate=True)
    gradient = positions.weight.grad
    assert gradient is not None and gradient.dtype is torch.promote_types(dtype, torch.float32)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_place_for_each_token() -> None:
    with pytest.raises(AssertionError, match=r"positions \(4, 2\) of a stream \(3, 2, 4\)"):
        Positions(6, 4)(torch.zeros(3, 2, 4), torch.zeros(4, 2, dtype=torch.int64))


# --- layouts ----------------------------------------------------------------------------------------------------------

CASES = {position: Case(position=position, tied=False) for position in ("learned", "alibi")}
WAYS = {
    "tp": Way(tp=2, micro_batch_size=4),
    "sequence parallel": Way(tp=2, sequence_parallel=True, recompute="selective"),
    "pp": Way(pp=2, micro_batch_size=2),
    "zero bubble, recomputed": Way(pp=2, micro_batch_size=2, schedule="zero_bubble", recompute="full"),
}


def batches(case: Case, size: int) -> list[Batch]:
    """A global batch of packed samples, every one with other boundaries, in micro-batches."""
    batch = global_batch(case, 0)
    lengths = [[1 + i % 3, 2, SEQ_LENGTH - 3 - i % 3] for i in range(len(batch.samples))]
    batch = replace(batch, documents=numbered(lengths), positions=placed(lengths))
    names = ("tokens", "labels", "loss_mask", "documents", "positions")
    return [
        Batch(samples=samples, **{name: getattr(batch, name)[:, samples] for name in names})
        for samples in batch.samples.split(size)
    ]


def step(case: Case, way: Way, mesh: Mesh) -> tuple[StepResult, LocalRanges]:
    """One step, and this rank's part of its gradients."""
    config = configured(case, way)
    state = build_state(config, mesh, case.vocab_size, CPU)
    result = train_step(state, batches(case, way.micro_batch_size), mesh, config.train)
    return result, local_ranges(state, "reduced")


def layout_is_serial(rank: int, num_ranks: int, way: Way) -> None:
    for position, case in CASES.items():
        expected, gradients = step(case, SERIAL, Mesh())
        result, mine = step(case, way, build_mesh(way.layout, rank))
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10)
        logical = whole(gradients)
        for name, held in mine.items():
            difference = (held.values - held.of(logical[name])).abs().max() / expected.grad_norm
            assert difference <= 1e-10, f"{position}: {name} {difference:.1e}"


@pytest.mark.parametrize("what", WAYS)
def test_any_layout_keeps_documents_apart(what: str) -> None:
    run_on_ranks(layout_is_serial, WAYS[what].layout.num_ranks, WAYS[what])


def test_a_step_keeps_documents_apart() -> None:
    def loss(**changes: Any) -> float:
        config = configured(CASES["learned"], SERIAL)
        state = build_state(config, Mesh(), 37, CPU)
        (batch,) = batches(CASES["learned"], 8)
        return train_step(state, [replace(batch, **changes)], Mesh(), config.train).loss

    losses = [loss(), loss(documents=None), loss(positions=None), loss(documents=None, positions=None)]
    assert all(abs(a - b) > 1e-6 for i, a in enumerate(losses) for b in losses[:i])


def test_a_batch_takes_its_documents_to_the_device() -> None:
    (batch,) = batches(CASES["learned"], 8)
    moved, joined = batch.to(torch.device("meta")), replace(batch, documents=None, positions=None)
    assert moved.documents is not None and moved.positions is not None
    assert moved.documents.is_meta and moved.positions.is_meta and moved.loss_mask.is_meta
    assert joined.to(torch.device("meta")).documents is None
