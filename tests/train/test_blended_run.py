"""A blended run with a curriculum: stopped, resumed on another layout, it computes what one rank computes in one go."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from colonnade.config.load import load
from colonnade.mesh.mesh import Mesh
from colonnade.train.change import Change
from colonnade.train.corpus import open_corpus
from colonnade.train.in_force import InForce
from tests import tiny
from tests.commands import forked
from tests.runs import metrics
from tests.tiny import TinyCorpus

CURRICULUM = (
    "curriculum.tokens=[0, 100, 300]",
    "curriculum.seq_length=[4, 8, 16]",
    "curriculum.global_batch_size=[4, 8, 4]",
    "optim.decay_steps=14",
    "train.evaluate_every=0",
    "checkpoint.every=0",
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, corpus: TinyCorpus) -> TinyCorpus:
    """More text, in the first corpus's tokens."""
    made = tiny.make(tmp_path_factory.mktemp("other"), num_documents=40, seed=1)
    answer = forked(
        "data", "tokenize", made.text, "--output", made.prefix, "--tokenizer", corpus.tokenizer, "--overwrite"
    )
    assert answer.status == 0, answer
    return made


@pytest.fixture
def blended(config: Path, corpus: TinyCorpus, other: TinyCorpus) -> Path:
    """The configuration of the first corpus, with both blended in its place."""
    table = f'blend = {{"{corpus.prefix}" = 0.4, "{other.prefix}" = 0.6}}'
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"', table))
    return config


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


def test_a_blend_that_is_changed_back_goes_on_behind_the_last_sample_of_each_file(blended: Path) -> None:
    """As one that is changed to any other."""
    began = load(blended)
    assert began.data.blend is not None
    first, second = began.data.blend, dict(zip(began.data.blend, (0.9, 0.1), strict=True))
    changes = [
        Change(at=step, values={"data.blend": blend}, was={"data.blend": first}, line=str(step), position=4 * step)
        for step, blend in ((3, second), (6, first))
    ]
    follow = InForce(began, open_corpus(began), Mesh(), cast(Any, None))
    read: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(pairwise((0, 12, 24, 36))):
        training = cast(Any, follow._at(changes[:number])[1].training)
        found = training.dataset.blend.locate(np.arange(start, stop))
        read += zip(found.sets.tolist(), found.indices.tolist(), strict=True)
    for each in (0, 1):
        own = [sample for part, sample in read if part == each]
        assert own == list(range(len(own))) and own


@pytest.mark.slow
def test_stopped_and_resumed_on_another_layout(blended: Path, tmp_path: Path) -> None:
    run = [blended, "train.precision=fp64", *CURRICULUM]
    assert forked("train", *run, "train.steps=14", f"run.folder={tmp_path / 'serial'}").status == 0
    tokens = [line["tokens"] for line in metrics(tmp_path / "serial")]
    assert [b - a for a, b in pairwise([0, *tokens])] == [4 * 4] * 8 + [8 * 8] * 4 + [4 * 16] * 2

    for steps, layout in ((5, "tp"), (10, "dp"), (14, "pp")):
        arguments = [*run, f"train.steps={steps}", f"parallel.{layout}=2", f"run.folder={tmp_path / 'elsewhere'}"]
        answer = forked("train", *arguments, num_ranks=2)
        assert answer.status == 0, answer
    assert losses(tmp_path / "elsewhere") == pytest.approx(losses(tmp_path / "serial"), rel=1e-10)


def test_epochs_of_each_end_the_run(blended: Path, tmp_path: Path) -> None:
    answer = forked("train", blended, "data.blend_by=epochs", "train.steps=1000")
    assert answer.status == 2
    assert "the epochs of data.blend" in answer.err


LAYOUTS = (
    ["parallel.tp=2", "parallel.sequence_parallel=true"],
    ["parallel.pp=2"],
    ["parallel.dp=2", "parallel.zero=3", "train.micro_batch_size=1"],  # of 3 samples to evaluate, one rank has 1
)


@pytest.mark.slow
def test_packed_documents_train_alike_on_every_layout(config: Path, tmp_path: Path) -> None:
    run = [config, "train.precision=fp64", "train.steps=3", "train.evaluate_samples=3", "checkpoint.every=0"]
    packed = [*run, "data.documents=separate", "data.packing=best_fit"]
    assert forked("train", *run, f"run.folder={tmp_path / 'joined'}").status == 0
    assert forked("train", *packed, f"run.folder={tmp_path / 'serial'}").status == 0
    expected = metrics(tmp_path / "serial")
    assert "validation_loss" in expected[-1]
    for name in ("loss", "validation_loss"):
        assert abs(expected[-1][name] - metrics(tmp_path / "joined")[-1][name]) > 1e-4, "documents are kept apart"
    for layout in LAYOUTS:
        folder = tmp_path / "".join(filter(str.isalnum, layout[0]))
        answer = forked("train", *packed, *layout, f"run.folder={folder}", num_ranks=2)
        assert answer.status == 0, answer
        for ours, theirs in zip(metrics(folder), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.slow
def test_each_data_set_is_validated_by_itself_too(
    blended: Path, corpus: TinyCorpus, other: TinyCorpus, tmp_path: Path
) -> None:
    """On the samples that the blend has of it, so that its losses add up to the blend's."""
    run = [blended, "train.precision=fp64", "train.steps=2", "train.evaluate_every=2", "train.evaluate_samples=10"]
    serial, cut = (f"run.folder={tmp_path / name}" for name in ("serial", "cut"))
    answer = forked("train", *run, serial)
    assert answer.status == 0, answer
    found = {key: value for key, value in metrics(tmp_path / "serial")[-1].items() if key.startswith("validation_")}
    names = [Path(made.prefix).name for made in (corpus, other)]
    names = list(map(str, (corpus.prefix, other.prefix))) if len(set(names)) == 1 else names
    parts = [found[f"validation_loss/{name}"] for name in names]
    assert found["validation_loss"] == pytest.approx(0.4 * parts[0] + 0.6 * parts[1], rel=1e-12)
    assert parts[0] != parts[1] and all(f"    {name}: " in answer.out for name in names), answer.out
    assert forked("train", *run, cut, "parallel.dp=2", num_ranks=2).status == 0
    assert {key: metrics(tmp_path / "cut")[-1][key] for key in found} == pytest.approx(found, rel=1e-10)

    measured = forked("evaluate", tmp_path / "cut", "--part", "validation", "--json")
    told = json.loads(measured.out)
    assert told["loss"] == pytest.approx(found["validation_loss"], rel=1e-10)
    assert [told["data_sets"][name]["loss"] for name in names] == pytest.approx(parts, rel=1e-10)
