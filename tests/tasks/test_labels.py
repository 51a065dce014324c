"""Heads with labels: whole runs on every layout, what an evaluation finds, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.errors import DataError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.initialize import initialize_
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights
from colonnade.tasks.labels import LabelBatch, Labels
from colonnade.tasks.task import Hidden
from colonnade.tensor_parallel.parallel import Parallel
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.runs import assert_near
from tests.slow import first_fast
from tests.tasks.examples import write_config, write_examples

LAYOUTS = [
    ["parallel.tp=2", "parallel.sequence_parallel=true"],
    ["parallel.tp=2"],
    ["parallel.pp=2", "train.micro_batch_size=1"],
    ["parallel.dp=2", "parallel.zero=3", "parallel.recompute=full"],
    ["parallel.dp=2", "parallel.zero=1"],
    ["parallel.dp=2", "parallel.zero=2", "parallel.recompute=selective"],
]

AT_END = "checkpoint.every=0"
"""Nothing that is compared here is in a checkpoint of an earlier step."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def alone(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for task in ("mnli", "race"):
        folder = tmp_path_factory.mktemp(task)
        answer = forked("train", write_config(examples, task, folder), AT_END)
        assert answer.status == 0, answer
        found[task] = folder / "run"
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("task", ["mnli", "race"])
@pytest.mark.parametrize("layout", first_fast(LAYOUTS), ids=str)
def test_every_layout_trains_the_same(
    alone: dict[str, Path], examples: Path, tmp_path: Path, layout: list[str], task: str
) -> None:
    """Losses, weights, and what the development set says: the same answers to every example."""
    answer = forked("train", write_config(examples, task, tmp_path), AT_END, *layout, num_ranks=2)
    assert answer.status == 0, answer
    shared = ["head.classifier.bias"] if task == "race" else []  # it is added to every choice, which changes no chance
    assert_near(tmp_path / "run", alone[task], without_effect=shared)


def test_every_sequence_of_a_choice_has_dropout_of_its_own() -> None:
    """Numbers that no other sequence of the run has, whatever the micro-batch."""
    batch = Labels().random_batch(
        ModelConfig(kind="bert", head="choice", num_labels=4, seq_length=8), 3, 30, separate_documents=False
    )
    assert batch.columns.tolist() == list(range(12)) and batch.tokens.shape == (8, 12)


@pytest.mark.parametrize(("num_labels", "targets"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0])])
def test_a_batch_for_measuring_has_labels_that_there_are(num_labels: int, targets: list[int]) -> None:
    model = ModelConfig(kind="bert", head="classification", num_labels=num_labels, seq_length=8)
    batch = Labels().random_batch(model, 4, 30, separate_documents=False)
    assert batch.targets.tolist() == targets and batch.tokens.shape == (8, 4)
    assert Labels().counts(batch).tolist() == [4.0] and bool(batch.real.all())


def test_an_evaluation_of_no_example_is_told() -> None:
    config = ModelConfig(
        kind="bert", head="classification", num_labels=3, hidden_size=8, num_heads=2, num_layers=1, seq_length=8
    )
    model = Labels().build(config, 30, Parallel(Mesh().tp), None)
    nobody: Any = None
    with pytest.raises(DataError, match="the evaluation has no example"):
        Labels().evaluate(
            model, [], dp=Mesh().dp, pp=Mesh().pp, hidden=nobody, byte_lengths=None, tokenizer_checked=True
        )


@pytest.mark.parametrize(("head", "is_binary"), [("classification", True), ("choice", False)])
def test_the_first_and_the_second_of_two_texts_are_no_yes_and_no(head: str, is_binary: bool) -> None:
    """What F1 and Matthews' correlation are of: of a choice there is accuracy alone."""
    config = ModelConfig.model_validate(
        {"kind": "bert", "head": head, "num_labels": 2, "hidden_size": 8, "num_heads": 2, "num_layers": 1}
        | {"seq_length": 8}
    )
    labels, weights = Labels(), ResidentWeights()
    model = labels.build(config, 30, Parallel(Mesh().tp), None).double()
    initialize_(model, Mesh().tp, 1)
    batch = labels.random_batch(config, 6, 30, separate_documents=False)
    batch = replace(batch, targets=torch.arange(6).double() % 2)
    hidden = Inference([Chunk(model.architecture.units, model, weights)], model, Mesh().pp, weights).hidden
    found = labels.evaluate(
        model, [batch], dp=Mesh().dp, pp=Mesh().pp, hidden=hidden, byte_lengths=None, tokenizer_checked=True
    )
    assert ("f1" in found.scores) == ("matthews" in found.scores) == is_binary, found.scores
    assert "accuracy" in found.scores


def test_a_batch_that_counts_nothing_changes_no_evaluation() -> None:
    """A rank that has run out of examples reads the first ones again while another goes on."""
    config = ModelConfig(
        kind="bert", head="classification", num_labels=3, hidden_size=8, num_heads=2, num_layers=1, seq_length=8
    )
    labels, weights = Labels(), ResidentWeights()
    batch = labels.random_batch(config, 3, 30, separate_documents=False)

    def logits(mesh: Mesh, mine: LabelBatch, stage: Hidden | None = None) -> Tensor:
        model = labels.build(config, 30, Parallel(mesh.tp), None).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        whole = Inference([Chunk(model.architecture.units, model, weights)], model, Mesh().pp, weights)
        hidden = stage or whole.hidden
        return labels.logits(model, [mine], dp=mesh.dp, pp=mesh.pp, hidden=hidden)[0]

    def on(rank: int, _: Path) -> Tensor:
        return logits(build_mesh(Layout(dp=2), rank), batch.uncounted() if rank else batch)

    alone = logits(Mesh(), batch)
    assert alone.std() > 0.1 and all(torch.equal(found, alone) for found in run_on_ranks(on, 2))
    assert not logits(Mesh(), batch, lambda inputs: None).any(), "a stage without the head adds nothing"

    def of_stage(rank: int, _: Path) -> Tensor:
        return logits(build_mesh(Layout(pp=2), rank), batch, None if rank else lambda inputs: None)

    assert all(torch.equal(found, alone) for found in run_on_ranks(of_stage, 2)), "and has what the last one found"
