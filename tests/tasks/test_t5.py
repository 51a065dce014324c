"""Span corruption: what counts, what an evaluation finds; and whole runs of a T5, that write in the end."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.data.t5_dataset import SpanRows, text_with_gaps
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.errors import DataError
from colonnade.mesh.mesh import Mesh
from colonnade.model.t5 import T5
from colonnade.serving.trained import opened
from colonnade.tasks.t5 import SpanCorruption, Written, as_t5_batch
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.commands import forked, start
from tests.parity.runs import CPU, SERIAL, Case, configured, part, texts_with_spans
from tests.runs import assert_near, metrics
from tests.slow import first_fast
from tests.tiny import TinyCorpus, made_up, small_run_of
from tests.train.test_copies import corrupted, weight

CASE = Case(block="t5", drop=0.0)


def test_padding_is_not_counted_and_the_loss_is_the_mean_over_the_global_batch() -> None:
    batch, config = texts_with_spans(CASE, 0), configured(CASE, SERIAL)
    state = build_state(config, Mesh(), CASE.vocab_size, CPU)
    model, task = state.model, state.task
    assert isinstance(model, T5)
    carry: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for unit in list(model.units())[:-1]:
            carry = model.run(unit, carry, task.inputs(batch, None, None))
        losses, right = model.head.guesses(carry[0], batch.labels)
    mean = float((losses * batch.loss_mask).sum() / batch.loss_mask.sum())
    found = task.evaluate(
        model,
        [part(batch, slice(0, 3)), part(batch, slice(3, 8))],
        dp=Mesh().dp,
        pp=Mesh().pp,
        hidden=state.inference.hidden,
        byte_lengths=None,
        tokenizer_checked=True,
    )
    hits = float((right * batch.loss_mask).sum().double() / batch.loss_mask.sum())
    assert isinstance(found, Written) and found.tokens == int(batch.loss_mask.sum())
    assert (found.loss, found.accuracy) == pytest.approx((mean, hits), rel=1e-12)
    result = train_step(state, [part(batch, slice(i, i + 2)) for i in range(0, 8, 2)], Mesh(), config.train)
    assert result.loss == pytest.approx(mean, rel=1e-12) and result.counts == (found.tokens,)


def test_a_stage_without_the_head_counts_nothing() -> None:
    state = build_state(configured(CASE, SERIAL), Mesh(), CASE.vocab_size, CPU)
    assert isinstance(state.model, T5)
    with pytest.raises(DataError, match="no token to be written"):
        SpanCorruption().evaluate(
            state.model,
            [texts_with_spans(CASE, 0)],
            dp=Mesh().dp,
            pp=Mesh().pp,
            hidden=lambda inputs: None,
            byte_lengths=None,
            tokenizer_checked=True,
        )


def test_a_batch_says_what_is_padding() -> None:
    rows = SpanRows(
        tokens=np.array([[5, 6, 7, 1], [8, 1, 0, 0]]),
        num_tokens=np.array([4, 2]),
        decoder_tokens=np.array([[0, 9, 3], [0, 9, 1]]),
        labels=np.array([[9, 3, 1], [9, 1, 0]]),
        num_labels=np.array([3, 2]),
    )
    batch = as_t5_batch(rows, [4, 7])
    assert batch.real is not None and batch.real.t().tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.loss_mask.t().tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]] and batch.samples.tolist() == [4, 7]
    assert batch.tokens[:, 1].tolist() == [8, 1, 0, 0] and batch.decoder_tokens[:, 1].tolist() == [0, 9, 1]
    full = as_t5_batch(rows.take(np.array([0])), [4])
    assert full.real is None and full.uncounted().loss_mask.sum() == 0


def test_what_an_evaluation_tells() -> None:
    assert Written(mean_loss=710.0, accuracy=0.25, tokens=1_000).perplexity == math.inf
    found = Written(mean_loss=0.5, accuracy=0.25, tokens=1_000)
    assert found.numbers() == {"loss": 0.5, "perplexity": pytest.approx(1.6487, rel=1e-4), "accuracy": 0.25}
    assert found.summary() == "loss 0.5000, perplexity 1.65: 25.00% of 1,000 tokens to be written are right"


def test_a_batch_for_measuring_is_one_that_could_be() -> None:
    model = ModelConfig(kind="t5", seq_length=9, decoder_seq_length=5)
    batch = SpanCorruption().random_batch(model, 4, 30, separate_documents=False)
    assert batch.tokens.shape == (9, 4) and batch.labels.shape == batch.decoder_tokens.shape == (5, 4)
    assert not torch.equal(batch.tokens[:5], batch.labels), "two texts"
    assert float(batch.loss_mask.sum()) == 20.0 and batch.samples.tolist() == [0, 1, 2, 3]
    assert batch.real is None, "a text of 8 tokens fills the encoder"
    shorter = ModelConfig(kind="t5", seq_length=20, decoder_seq_length=4)
    real = SpanCorruption().random_batch(shorter, 4, 30, separate_documents=False).real
    assert real is not None and real.shape == (20, 4), "what fits into the decoder leaves room in the encoder"


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, a vocabulary made of them with sentinels and one without, and their tokens."""
    folder = tmp_path_factory.mktemp("t5")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in made_up(30, 0)))
    for name, sentinels in (("tokenizer", 4), ("plain", 0)):
        train_tokenizer([text], folder / f"{name}.json", 275, sentinels=sentinels, progress=False)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    tokenize_files([text], folder / "tokens", tokenizer, workers=1, progress=False)
    return folder


def write(texts: Path, folder: Path) -> Path:
    """The tests' own small run, of a T5 in float64."""
    return small_run_of("t5", TinyCorpus(texts), folder, model="decoder_seq_length = 8\n")


@pytest.fixture(scope="module")
def alone(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    answer = forked("train", write(texts, folder))
    assert answer.status == 0, answer
    assert "t5, " in answer.out and "2 encoder and 2 decoder layers" in answer.out, answer
    assert "16 tokens to read and 8 to write" in answer.out and "tokens to be written are right" in answer.out
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    first_fast(
        [
            ["parallel.pp=2", "train.micro_batch_size=1"],
            ["parallel.tp=2", "parallel.sequence_parallel=true"],
            ["parallel.dp=2", "parallel.zero=3"],
        ]
    ),
    ids=str,
)
def test_every_layout_trains_the_same(alone: Path, texts: Path, tmp_path: Path, layout: list[str]) -> None:
    answer = forked("train", write(texts, tmp_path), *layout, num_ranks=2)
    assert answer.status == 0, answer
    assert_near(tmp_path / "run", alone)


PRECISIONS = [
    ["train.precision=bf16", "parallel.tp=2", "parallel.sequence_parallel=true"],
    ["train.precision=bf16", "model.fp32_residual=true", "parallel.pp=2"],
    ["train.precision=fp16", "train.loss_scale=1024", "model.fp32_residual=true", "parallel.dp=2", "parallel.zero=3"],
    ["train.precision=bf16", "train.reduce_precision=16-bit", "parallel.dp=2", "parallel.offload=true"],
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", first_fast(PRECISIONS), ids=str)
def test_16_bits_stay_near_float64(alone: Path, texts: Path, tmp_path: Path, keys: list[str]) -> None:
    answer = forked("train", write(texts, tmp_path), *keys, num_ranks=2)
    assert answer.status == 0, answer
    ours, theirs = ([line["loss"] for line in metrics(run)] for run in (tmp_path / "run", alone))
    assert ours == pytest.approx(theirs, rel=0.01) and ours != pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "stack"), [(1, "encoder"), (2, "decoder")])
def test_a_bit_of_a_shared_table_is_named(texts: Path, tmp_path: Path, rank: int, stack: str) -> None:
    """Stages 0 and 1 have blocks of the encoder, 1 and 2 of the decoder: each table of positions has an axis."""
    first = corrupted(rank, weight(f"{stack}.positions", "weight"))
    answers = start("train", write(texts, tmp_path), "parallel.pp=3", num_ranks=3, first=first).answers()
    assert [answer.status for answer in answers] == [2] * 3, answers
    said = f"{stack}.positions.weight over holders {rank - 1},{rank}: rank {rank - 1} "
    assert "Step 4: " in answers[0].err and said in answers[0].err, answers[0].err


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_on_another_layout(alone: Path, texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    assert forked("train", path, "train.steps=2", "optim.decay_steps=4").status == 0
    answer = forked("train", path, "train.steps=4", "optim.decay_steps=4", "parallel.pp=2", num_ranks=2)
    assert answer.status == 0, answer
    for mine, expected in zip(metrics(tmp_path / "run"), metrics(alone), strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-10)


@pytest.mark.slow
def test_a_curriculum_grows_what_is_read(texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    with path.open("a") as stream:
        stream.write("[curriculum]\ntokens = [0, 64]\nseq_length = [8, 16]\nglobal_batch_size = [4, 4]\n")
    answer = forked("train", path)
    assert answer.status == 0, answer
    assert [line["tokens"] for line in metrics(tmp_path / "run")] == [32, 64, 128, 192]


@pytest.mark.slow
def test_it_is_measured_and_writes(alone: Path) -> None:
    answer = forked("evaluate", alone, "--part", "test")
    assert answer.status == 0 and "tokens to be written are right" in answer.out, answer
    options = ("--prompt", "ten <extra_id_0> rest", "--max-new-tokens", "5", "--temperature", "2", "--json")
    one, two = forked("generate", alone, *options), forked("generate", alone, *options, "--pp", "2", num_ranks=2)
    assert one.status == two.status == 0, (one, two)
    (text,) = json.loads(one.out)["texts"]
    assert text["prompt"] == "ten <extra_id_0> rest" and 1 <= text["tokens"] <= 5 and one.out == two.out
    with opened(alone, tp=1, device="cpu", precision=None) as (trained, _):
        ids = trained.prompt("ten <extra_id_0> rest")
        gap = trained.tokenizer.id_of("<extra_id_0>")
    assert ids.count(gap) == 1 and ids[:-1] == text_with_gaps(trained.tokenizer, "ten <extra_id_0> rest")
    answer = forked("generate", alone, "--prompt", "ten <extra_id_99999> rest")
    assert answer.status == 2 and "the vocabulary has no <extra_id_99999>" in answer.err, answer


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_text_of_its_own_is_not_measured(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("once upon a time")
    answer = forked("evaluate", alone, "--data", tmp_path / "text.txt")
    assert answer.status == 2 and 'of kind "t5" gives the tokens of a text no chances' in answer.err, answer
    assert "--part validation" in answer.err


def test_a_vocabulary_without_sentinels_or_none_is_refused_before_training(texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    answer = forked("train", path, f'data.tokenizer="{texts}/plain.json"')
    assert answer.status == 2 and "have no <extra_id_0>: T5 samples mark each span" in answer.err, answer
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("tokenizer")))
    answer = forked("train", path)
    assert answer.status == 2 and "data.tokenizer is not set: which ids these are is not known" in answer.err, answer


def test_the_model_is_given_all_of_a_batch() -> None:
    """What is padding, too."""
    batch = texts_with_spans(Case(block="t5"), 0)
    found = SpanCorruption().inputs(batch, None, None)
    assert batch.real is not None and found.real is batch.real and not batch.real.all()
    assert all(getattr(found, name) is getattr(batch, name) for name in ("tokens", "decoder_tokens", "labels"))
