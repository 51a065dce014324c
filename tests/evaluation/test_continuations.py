"""Continuations: against one sequence at a time, in batches of any size, on every layout, and only what is scored."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from colonnade.errors import CheckpointError, DataError
from colonnade.evaluation.continuations import Continuation, Scores, batch_of, batches_of, rows_of, score
from colonnade.evaluation.perplexity import evaluate_tokens
from colonnade.evaluation.progress import Progress
from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.model.gpt import GPT
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights
from tests.distributed import run_on_ranks
from tests.emulated import emulated_amx
from tests.generation.tiny import tiny_gpt
from tests.model.whole import hidden

RANDOM = np.random.default_rng(3)
LENGTHS = [(1, 1), (4, 3), (2, 1), (8, 4), (7, 1), (1, 5), (4, 3)]
CONTINUATIONS = [
    Continuation(RANDOM.integers(0, 21, before).tolist(), RANDOM.integers(0, 21, after).tolist())
    for before, after in LENGTHS
]
SAME_CONTEXT = [Continuation(CONTINUATIONS[1].context, [token]) for token in range(21)]
UNITS = (["embedding", "blocks.0"], ["blocks.1", "head"])


def one_by_one(model: GPT, continuations: list[Continuation]) -> tuple[list[float], list[bool]]:
    """By torch's own log-softmax of the whole logits of each sequence."""
    losses, greedy = [], []
    for context, target in continuations:
        tokens = torch.tensor([*context, *target[:-1]])[:, None]
        with torch.no_grad():
            logits = model.head.norm(hidden(model, tokens)) @ model.head.output.weight[: model.vocab_size].T
        chances = logits.log_softmax(-1)[len(context) - 1 :, 0]
        losses.append(-float(chances[range(len(target)), target].sum()))
        greedy.append(chances.argmax(-1).tolist() == list(target))
    return losses, greedy


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_it_is_log_softmax_one_by_one(batch_size: int) -> None:
    model, wanted = tiny_gpt(Axis("tp")), [*CONTINUATIONS, *SAME_CONTEXT]
    losses, greedy = one_by_one(model, wanted)
    found = score(model, wanted, mesh=Mesh(), batch_size=batch_size)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-12)
    assert found.greedy.tolist() == greedy and sum(greedy[len(CONTINUATIONS) :]) == 1, "one of 21 is the likeliest"


def test_how_far_it_is_is_told_in_sequences() -> None:
    said, times = list[str](), iter([0.0, 0.0, 6.0, 12.0, 18.0])
    progress = Progress("sequences", clock=lambda: next(times), say=said.append)
    score(tiny_gpt(Axis("tp")), CONTINUATIONS, mesh=Mesh(), batch_size=3, progress=progress)
    assert [line.partition(",")[0] for line in said] == [f"  {done} of 7 sequences" for done in (3, 6, 7)]
    assert said[-1].endswith(" 0:00:00 left")


def test_the_output_layer_multiplies_by_the_kernel_that_was_decided() -> None:
    """As wherever else the model is used: here one that rounds its operands to bf16."""
    decided, rounded = Products(fp32=Kernels(output="onednn")), list[Scores]()
    for products in (decided, Products()):
        model = tiny_gpt(Axis("tp"), products=products).float()
        with emulated_amx():
            rounded.append(score(model, CONTINUATIONS, mesh=Mesh(), batch_size=3))
    off = np.abs(rounded[0].losses - rounded[1].losses)
    assert 1e-4 < off.max() < 0.1
    np.testing.assert_allclose(rounded[1].losses, one_by_one(model, CONTINUATIONS)[0], rtol=1e-5)


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = tiny_gpt(Axis("tp"))
    next(model.parameters()).data.fill_(math.nan)
    with pytest.raises(CheckpointError, match="the model's losses of what is scored are not finite: its weights are"):
        score(model, CONTINUATIONS, mesh=Mesh(), batch_size=3)


def test_so_are_weights_with_which_the_loss_of_a_single_text_is_no_number() -> None:
    """Here those of a position that the longest of them alone has."""
    model = tiny_gpt(Axis("tp"))
    longest = max(len(each.context) + len(each.target) for each in CONTINUATIONS)
    assert model.embedding.positions is not None
    model.embedding.positions.weight.data[longest - 2] = math.nan
    shorter = [each for each in CONTINUATIONS if len(each.context) + len(each.target) < longest]
    assert len(shorter) == len(CONTINUATIONS) - 1 and len(score(model, shorter, mesh=Mesh(), batch_size=3).losses) == 6
    with pytest.raises(CheckpointError, match="the model's losses of what is scored are not finite: its weights are"):
        score(model, CONTINUATIONS, mesh=Mesh(), batch_size=3)


def test_every_token_of_a_target_has_to_be_the_likeliest() -> None:
    """With the right tokens before it, a likeliest last token alone is not enough, nor a likeliest first one."""
    model, context = tiny_gpt(Axis("tp")), list(CONTINUATIONS[1].context)

    def likeliest_after(*tokens: int) -> int:
        found = [
            score(model, [Continuation([*context, *tokens], [token])], mesh=Mesh(), batch_size=1).greedy[0]
            for token in range(21)
        ]
        return found.index(True)

    first = likeliest_after()
    other = (first + 1) % 21
    targets = [
        [first, likeliest_after(first)],
        [other, likeliest_after(other)],
        [first, (likeliest_after(first) + 1) % 21],
    ]
    found = score(model, [Continuation(context, target) for target in targets], mesh=Mesh(), batch_size=2)
    assert found.greedy.tolist() == [True, False, False]


def test_what_is_read_as_the_same_tokens_is_read_once_and_the_longest_first() -> None:
    rows = rows_of([*CONTINUATIONS, *SAME_CONTEXT])
    read = [before + after - 1 for before, after in LENGTHS]
    assert [len(row.tokens) for row in rows] == sorted([*read, 4], reverse=True)
    assert [len(row.targets) for row in rows if len(row.tokens) == 4] == [21]
    assert [len(share) for share in batches_of(rows, 3)] == [3, 3, 2]
    batch = batch_of(rows[:3])
    assert batch.tokens.shape == (len(rows[0].tokens), 3)
    assert len(batch.labels) == sum(len(target) for row in rows[:3] for _, target in row.targets)


@pytest.mark.parametrize("what", ["continuations", "windows"])
def test_only_scored_positions_reach_the_output_layer(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt(Axis("tp"))
    multiplied: list[int] = []
    normed = model.head.normed

    def watched(x: torch.Tensor) -> torch.Tensor:
        multiplied.append(x[..., 0].numel())
        return normed(x)

    monkeypatch.setattr(model.head, "normed", watched)
    if what == "continuations":
        score(model, CONTINUATIONS, mesh=Mesh(), batch_size=2)
        assert sum(multiplied) == sum(after for _, after in LENGTHS)
    else:
        tokens = RANDOM.integers(0, 21, 41)
        evaluate_tokens(model, tokens, dp=Axis("dp"), seq_length=12, stride=2, batch_size=1)
        assert sum(multiplied) == 40, "each token once, though windows overlap"


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
def test_every_layout_finds_what_one_rank_does(layout: Layout) -> None:
    wanted = [*CONTINUATIONS, *SAME_CONTEXT[:3]]

    def on(mesh: Mesh) -> Any:
        units = UNITS[mesh.pp.rank] if mesh.pp.ranks[1:] else None
        model = tiny_gpt(mesh.tp, units=units)
        found = score(model, wanted, mesh=mesh, hidden=stage(model, mesh, units), batch_size=2)
        return found.losses, found.greedy

    serial = on(Mesh())
    for losses, greedy in run_on_ranks(lambda rank, _: on(build_mesh(layout, rank)), layout.num_ranks):
        np.testing.assert_allclose(losses, serial[0], rtol=1e-12)
        assert greedy.tolist() == serial[1].tolist()


def stage(model: GPT, mesh: Mesh, units: list[str] | None) -> Any:
    if units is None:
        return None
    own = [unit for unit in model.architecture.units if unit.name in units]
    return Inference([Chunk(own, model, ResidentWeights())], model, mesh.pp, ResidentWeights()).hidden


def test_a_token_that_the_model_does_not_have() -> None:
    with pytest.raises(DataError, match="token id 21, but the model's vocabulary has 21 ids"):
        score(tiny_gpt(Axis("tp")), [Continuation([1], [21])], mesh=Mesh(), batch_size=1)
    with pytest.raises(DataError, match="token id 30, but the model's vocabulary has 21 ids"):
        score(tiny_gpt(Axis("tp")), [Continuation([30, 1], [2])], mesh=Mesh(), batch_size=1)
