"""Questions about texts: whole runs on every layout, what an evaluation finds, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from colonnade.config.load import load
from colonnade.config.model import ModelConfig
from colonnade.data.example_dataset import PairTokens
from colonnade.data.question_windows import Windows
from colonnade.errors import DataError
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.questions import Logits, Prepared, logits_of
from colonnade.examples.squad import Question
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.model.bert_spans import SpanBERT, span_losses
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights, on_one_stage
from colonnade.tasks.spans import FoundSpans, SpanBatch, Spans
from colonnade.tasks.task import Hidden
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.corpus import open_corpus
from tests.commands import forked, here
from tests.distributed import run_on_ranks
from tests.runs import assert_near, metrics
from tests.slow import first_fast
from tests.tasks.examples import write_examples
from tests.tasks.questions import write_config, write_questions
from tests.tasks.test_labels import AT_END, LAYOUTS

ALSO = [["parallel.pp=2", "parallel.recompute=full"]]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    answer = forked("train", write_config(questions, folder), AT_END)
    assert answer.status == 0, answer
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("layout", first_fast([*LAYOUTS, *ALSO]), ids=str)
def test_every_layout_trains_the_same(alone: Path, questions: Path, tmp_path: Path, layout: list[str]) -> None:
    """Losses, weights, and which answers of the development set are right."""
    answer = forked("train", write_config(questions, tmp_path), AT_END, *layout, num_ranks=2)
    assert answer.status == 0, answer
    assert_near(tmp_path / "run", alone)


@pytest.fixture(scope="module")
def asked(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 1 rank whose questions are answered at each evaluation, with weights wide enough to answer them."""
    folder = tmp_path_factory.mktemp("asked")
    answer = forked("train", write_config(questions, folder), *asking(questions))
    assert answer.status == 0, answer
    assert "11 questions: exact match" in answer.out
    return folder / "run"


def asking(questions: Path) -> tuple[str, ...]:
    return (f"data.questions={questions / 'dev.json'}", "model.init_std=0.5", "optim.learning_rate=3e-2", AT_END)


@pytest.mark.slow
def test_questions_are_scored_as_evaluate_scores_them(questions: Path, asked: Path, tmp_path: Path) -> None:
    measured = forked(
        "evaluate", asked, "squad", "--data", questions / "dev.json", "--stride", 5, "--max-query-length", 3, "--json"
    )
    assert measured.status == 0, measured
    found, last = json.loads(measured.out), metrics(asked)[-1]
    assert last["validation_exact_match"] == found["exact"] and last["validation_f1"] == found["f1"] > 0.0
    assert "validation_f1" not in metrics(asked)[0], "of steps that are evaluated alone"


UNEQUAL = ["parallel.dp=2", "parallel.zero=3", "train.micro_batch_size=1"]
"""27 windows for two ranks: one of them has a batch more."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, UNEQUAL], ids=str)
def test_questions_are_scored_alike_on_every_layout(
    asked: Path, questions: Path, tmp_path: Path, layout: list[str]
) -> None:
    answer = forked("train", write_config(questions, tmp_path), *asking(questions), *layout, num_ranks=2)
    assert answer.status == 0, answer
    scores = ("validation_exact_match", "validation_f1")
    for mine, theirs in zip(metrics(tmp_path / "run"), metrics(asked), strict=True):
        assert [mine.get(name) for name in scores] == [theirs.get(name) for name in scores]


@pytest.mark.slow
def test_validation_tells_how_many_spans_are_right(alone: Path) -> None:
    last = metrics(alone)[-1]
    assert {"validation_loss", "validation_span_accuracy", "validation_start_accuracy"} <= last.keys()
    assert 0 <= last["validation_span_accuracy"] <= last["validation_start_accuracy"] <= 1


def test_a_sample_s_loss_is_the_mean_of_both_ends() -> None:
    """Of 4 positions: -log of 1/2 and of 1/4 for the first sample; the second's are sure."""
    logits = torch.zeros(4, 2, 2, dtype=torch.float64)
    logits[:, 0, 0] = torch.tensor([3.0, 1.0, 1.0, 1.0]).log()  # the beginning is at 0 with 3 / 6
    logits[2, 1, :] = 1e4
    losses = span_losses(logits, torch.tensor([[0, 2], [1, 2]]))
    torch.testing.assert_close(losses[0], (torch.tensor(2.0).log() + torch.tensor(4.0).log()).double() / 2)
    assert losses[1] == 0


def test_questions_without_an_answer_are_scored_too(questions: Path, tmp_path: Path) -> None:
    """Those of 2.0 whose right answer is none; and what does not say what is right is refused."""
    config, dev = write_config(questions, tmp_path), json.loads((questions / "dev.json").read_text())
    asked = open_corpus(load(config, [f"data.questions={questions / 'dev.json'}"])).questions
    assert asked is not None and asked.may_be_none
    assert [each.answers == () for each in asked.questions] == [index % 3 == 2 for index in range(len(asked.questions))]
    for key in ("answers", "is_impossible"):
        del dev["data"][0]["paragraphs"][3]["qas"][0][key]
    (tmp_path / "asked.json").write_text(json.dumps(dev))
    with pytest.raises(DataError, match='question "q3" does not say what is right'):
        open_corpus(load(config, [f"data.questions={tmp_path / 'asked.json'}"]))


def test_what_is_refused(questions: Path, tmp_path: Path) -> None:
    config = write_config(questions, tmp_path)
    for more, message in (
        (["model.num_labels=2"], 'model.num_labels = 2 has no effect with model.head = "spans"'),
        (["model.head=classification", "model.num_labels=3"], 'examples of squad, for model.head = "spans"'),
        (["model.seq_length=5"], "leaves no room for text"),
        (["model.kind=gpt"], "model.head"),
        (["data.questions=nowhere.json"], "data.questions = 'nowhere.json' is no file"),
        ([f"data.questions={questions / 'tokenizer.json'}"], "tokenizer.json"),
        (
            [f"data.questions={questions / 'dev.json'}", "train.evaluate_every=0"],
            "has no effect with train.evaluate_every = 0",
        ),
    ):
        answer = here("train", config, *more)
        assert answer.status == 2 and message in answer.err, (more, answer)
    other = write_examples(tmp_path / "other", ("mnli",), 3, "cloud")
    answer = here("train", config, *(f"data.{part}={other / 'mnli'}" for part in ("train", "validation")))
    assert answer.status == 2 and "was made with another tokenizer than data.tokenizer" in answer.err, answer


MODEL = ModelConfig(kind="bert", head="spans", num_layers=1, hidden_size=8, num_heads=2, seq_length=8)


def drawn_model() -> SpanBERT:
    built = Spans().build(MODEL, 12, Parallel(Axis("tp")), None).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return built


def test_a_batch_that_counts_nothing_changes_no_evaluation() -> None:
    """A rank that has run out of windows reads the first ones again while another goes on."""
    built, weights = drawn_model(), ResidentWeights()
    first, second = (Spans().random_batch(MODEL, size, 12, separate_documents=False) for size in (3, 2))

    def evaluated(*batches: SpanBatch, stage: Hidden | None = None) -> FoundSpans:
        stages = Inference([Chunk(built.architecture.units, built, weights)], built, Axis("pp"), weights)
        hidden = stage or stages.hidden
        return Spans().evaluate(
            built, batches, dp=Axis("dp"), pp=Axis("pp"), hidden=hidden, byte_lengths=None, tokenizer_checked=True
        )

    found = evaluated(first, second)
    assert found.samples == 5 and found.loss > 0.1
    assert evaluated(first, second, first.uncounted()) == found
    with pytest.raises(DataError, match="has no question"):  # a stage without the head counts nothing
        evaluated(first, second, stage=lambda inputs: None)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_two_ranks_read_every_window_however_many_batches_there_are(batch_size: int) -> None:
    """Five windows of one question: 5, 3 and 2 batches."""
    model, text = drawn_model(), np.arange(3, 11)
    question = Question(Path("dev.json"), 1, "q", "", "", None)
    places = np.stack([np.arange(8), np.arange(1, 9)], axis=1)
    asked = Prepared(question, np.array([11]), text, places, Windows(1).ranges(1, len(text), MODEL.seq_length))
    assert len(asked.windows) == 5

    def read(mesh: Mesh) -> Logits:
        return logits_of(
            model,
            [asked],
            control=PairTokens(0, 1, 2),
            mesh=mesh,
            hidden=on_one_stage(model, model.architecture.units).hidden,
            length=MODEL.seq_length,
            batch_size=batch_size,
            progress=Progress("windows", shown=False),
        )

    alone = read(Mesh())
    assert (alone != 0).all()
    for found in run_on_ranks(lambda rank, num_ranks: read(build_mesh(Layout(dp=num_ranks), rank)), 2):
        np.testing.assert_allclose(found, alone, rtol=1e-10, atol=1e-12)


def test_a_batch_for_measuring_has_answers_all_over_its_windows() -> None:
    model = ModelConfig(kind="bert", head="spans", seq_length=8)
    batch = Spans().random_batch(model, 5, 30, separate_documents=False)
    assert batch.answers.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 0, 1]] and batch.tokens.shape == (8, 5)
    assert Spans().counts(batch).tolist() == [5.0] and bool(batch.real.all())


def test_a_span_is_right_where_its_beginning_and_its_end_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four samples whose likeliest beginning is 1 and end 3, one has both right, two a beginning, three an end."""
    built, weights = drawn_model(), ResidentWeights()
    batch = replace(
        Spans().random_batch(MODEL, 4, 12, separate_documents=False),
        answers=torch.tensor([[1, 1, 2, 4], [3, 5, 3, 3]]),
        answer_mask=torch.ones(4),
    )
    logits = torch.zeros(MODEL.seq_length, 4, 2, dtype=torch.float64)
    logits[1, :, 0] = logits[3, :, 1] = 9.0
    monkeypatch.setattr(built.head, "predict", lambda stream: logits)
    stages = Inference([Chunk(built.architecture.units, built, weights)], built, Axis("pp"), weights)
    found = Spans().evaluate(
        built, [batch], dp=Axis("dp"), pp=Axis("pp"), hidden=stages.hidden, byte_lengths=None, tokenizer_checked=True
    )
    assert (found.start_accuracy, found.end_accuracy, found.span_accuracy) == (0.5, 0.75, 0.25)


def test_an_evaluation_of_nothing_is_refused() -> None:
    built = Spans().build(MODEL, 12, Parallel(Axis("tp")), None)
    with pytest.raises(DataError, match="no question"):
        Spans().evaluate(
            built, [], dp=Axis("dp"), pp=Axis("pp"), hidden=lambda _: None, byte_lengths=None, tokenizer_checked=True
        )


def test_metrics_tell_each_share_by_its_name() -> None:
    found = FoundSpans(loss=1.5, start_accuracy=0.5, end_accuracy=0.25, span_accuracy=0.2, samples=20)
    assert found.numbers() == {"loss": 1.5, "start_accuracy": 0.5, "end_accuracy": 0.25, "span_accuracy": 0.2}
    assert found.summary() == "loss 1.5000, 20.00% of 20 windows right (beginning 50.00%, end 25.00%)"
