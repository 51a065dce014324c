"""The two losses of a masked model: each over its own count; what an evaluation finds; and whole runs of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.config.load import load
from colonnade.config.model import ModelConfig
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import Dataset
from colonnade.data.phased_dataset import PhasedDataset
from colonnade.data.rows import Rows, Samples
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.bert import BERT
from colonnade.planner.banner import banner
from colonnade.planner.comparison import Watcher
from colonnade.planner.memory_limit import within_memory
from colonnade.tasks.bert import BertBatch, Guesses, MaskedPairs
from colonnade.train.corpus import open_corpus
from colonnade.train.products import settle
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.parity.runs import CPU, SERIAL, Case, configured, pairs_of_texts, part
from tests.runs import assert_near, course, metrics
from tests.slow import first_fast
from tests.tiny import TinyCorpus, made_up, small_run_of, write_config

CASE = Case(block="bert", drop=0.0)


def test_each_loss_is_divided_by_its_own_count() -> None:
    """A global batch has the mean masked loss + the mean sentence-order loss, whatever counts where."""
    batch = pairs_of_texts(CASE, 0)
    batch = replace(batch, pair_mask=torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 1]))
    config = configured(CASE, SERIAL)
    state = build_state(config, Mesh(), CASE.vocab_size, CPU)
    model, task = state.model, state.task
    assert isinstance(model, BERT)
    carry: tuple[Tensor, ...] = ()
    inputs = task.inputs(batch, torch.ones(2, dtype=torch.float64), None)
    with torch.no_grad():
        for unit in list(model.units())[:-1]:
            carry = model.run(unit, carry, inputs)
        masked, _ = model.head.guesses(carry[0], batch.labels)
        order, _ = model.head.tell_order(carry[0], batch.pair_labels)
    means = [
        float((masked * batch.loss_mask).sum() / batch.loss_mask.sum()),
        float((order * batch.pair_mask).sum() / batch.pair_mask.sum()),
    ]
    result = train_step(state, [part(batch, slice(i, i + 2)) for i in range(0, 8, 2)], Mesh(), config.train)
    assert result.losses == pytest.approx(means, rel=1e-12)
    assert result.loss == pytest.approx(sum(means), rel=1e-12)
    assert result.counts == (int(batch.loss_mask.sum()), 5)


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    batch, config = pairs_of_texts(CASE, 0).uncounted(), configured(CASE, SERIAL)
    state = build_state(config, Mesh(), CASE.vocab_size, CPU)
    result = train_step(state, [batch], Mesh(), config.train)
    assert (result.loss, result.losses) == (None, (None, None))
    assert (result.grad_norm, result.counts) == (0.0, (0, 0))


def test_a_batch_without_a_masked_token_has_no_sum_of_losses() -> None:
    """The order alone would be another, smaller number."""
    batch, config = pairs_of_texts(CASE, 0), configured(CASE, SERIAL)
    state = build_state(config, Mesh(), CASE.vocab_size, CPU)
    result = train_step(state, [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))], Mesh(), config.train)
    assert result.loss is None and result.losses[0] is None and result.losses[1] is not None


def found(case: Case, batches: list[BertBatch]) -> Guesses:
    state = build_state(configured(case, SERIAL), Mesh(), case.vocab_size, CPU)
    guesses = MaskedPairs().evaluate(
        state.model,
        batches,
        dp=Mesh().dp,
        pp=Mesh().pp,
        hidden=state.inference.hidden,
        byte_lengths=None,
        tokenizer_checked=True,
    )
    state.inference.close()
    return guesses


def test_an_evaluation_counts_what_is_right() -> None:
    """Labels set to what the model finds likeliest are all told; moved by one, none is."""
    batch = pairs_of_texts(CASE, 0)
    state = build_state(configured(CASE, SERIAL), Mesh(), CASE.vocab_size, CPU)
    model = state.model
    assert isinstance(model, BERT)
    with torch.no_grad():
        (x,) = state.inference.hidden(state.task.inputs(batch, None, None)) or ()
        hidden = model.head.transformed(model.head.normed(x))
        likeliest = (hidden @ model.head.output.weight.T + model.head.bias)[..., : CASE.vocab_size].argmax(-1)
        order = model.head.pair_logits(model.head.normed(x)).argmax(-1)
    right = found(CASE, [replace(batch, labels=likeliest, pair_labels=order)])
    assert (right.masked_accuracy, right.order_accuracy) == (1.0, 1.0)
    wrong = found(CASE, [replace(batch, labels=(likeliest + 1) % CASE.vocab_size, pair_labels=1 - order)])
    assert (wrong.masked_accuracy, wrong.order_accuracy) == (0.0, 0.0)
    assert right.loss < wrong.loss
    assert (right.masked_tokens, right.samples) == (int(batch.loss_mask.sum()), 8)


def test_an_evaluation_finds_the_losses_that_are_trained_on() -> None:
    batch, config = pairs_of_texts(CASE, 0), configured(CASE, SERIAL)
    guesses = found(CASE, [batch])
    result = train_step(build_state(config, Mesh(), CASE.vocab_size, CPU), [batch], Mesh(), config.train)
    assert (guesses.masked_loss, guesses.order_loss) == pytest.approx(result.losses, rel=1e-12)


def test_evaluations_do_not_depend_on_batches() -> None:
    batch = pairs_of_texts(CASE, 0)
    whole = found(CASE, [batch])
    cut = found(CASE, [*(part(batch, slice(i, i + 2)) for i in range(0, 8, 2)), batch.uncounted()])
    assert cut.numbers() == pytest.approx(whole.numbers(), rel=1e-12)
    with pytest.raises(DataError, match="no token to guess"):
        found(CASE, [batch.uncounted()])


@pytest.mark.parametrize("nothing", ["loss_mask", "pair_mask"])
def test_an_evaluation_needs_both_kinds_of_guesses(nothing: str) -> None:
    batch = pairs_of_texts(CASE, 0)
    with pytest.raises(DataError, match="no token to guess"):
        found(CASE, [replace(batch, **{nothing: torch.zeros_like(getattr(batch, nothing))})])


def _over(rank: int, num_ranks: int, axis: str) -> Guesses:
    """Each rank has some batches (dp), or the last one all of them (pp)."""
    batch, mesh = pairs_of_texts(CASE, 0), build_mesh(Layout(**{axis: num_ranks}), rank)
    state = build_state(configured(CASE, SERIAL), Mesh(), CASE.vocab_size, CPU)
    mine = (
        [part(batch, slice(0, 2)), part(batch, slice(2, 8))]
        if axis == "pp"
        else [part(batch, slice(6 * rank, 6 + 2 * rank))]
    )
    guesses = MaskedPairs().evaluate(
        state.model,
        mine,
        dp=mesh.dp,
        pp=mesh.pp,
        hidden=state.inference.hidden if axis == "dp" or rank else lambda inputs: None,
        byte_lengths=None,
        tokenizer_checked=True,
    )
    state.inference.close()
    return guesses


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_an_evaluation_adds_up_what_ranks_have_found(axis: str) -> None:
    whole = found(CASE, [pairs_of_texts(CASE, 0)])
    one, other = run_on_ranks(_over, 2, axis)
    assert one == other and one.numbers() == pytest.approx(whole.numbers(), rel=1e-12)
    assert (one.masked_tokens, one.samples) == (whole.masked_tokens, 8)


def test_what_an_evaluation_tells() -> None:
    guesses = Guesses(1.25, 0.5, 0.75, 0.875, 1_000, 2_000)
    assert guesses.loss == 2.0 and guesses.numbers() == {
        "loss": 2.0,
        "masked_loss": 1.25,
        "masked_accuracy": 0.5,
        "sentence_order_loss": 0.75,
        "sentence_order_accuracy": 0.875,
    }
    assert guesses.summary() == (
        "loss 2.0000: masked 1.2500 (50.00% of 1,000 right), sentence order 0.7500 (87.50% of 2,000 right)"
    )


def test_a_batch_for_measuring_is_one_that_could_be() -> None:
    batch = MaskedPairs().random_batch(ModelConfig(seq_length=9), 4, 30, separate_documents=False)
    assert batch.tokens.shape == batch.types.shape == batch.labels.shape == batch.loss_mask.shape == (9, 4)
    assert int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < 30 and bool(batch.real.all())
    assert batch.types[:, 0].tolist() == [0] * 5 + [1] * 4 and batch.pair_labels.tolist() == [0, 1, 0, 1]
    assert batch.pair_mask.tolist() == [1.0] * 4 and batch.samples.tolist() == [0, 1, 2, 3]


class Numbered:
    """A data set whose samples are their own numbers."""

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length

    def __len__(self) -> int:
        return 1_000

    def rows(self, positions: object) -> Samples:
        numbers = np.asarray(positions, dtype=np.int64)[:, None]
        return Rows(numbers, numbers, numbers > -1, None)

    def passes(self, positions: object) -> object:
        raise NotImplementedError


def test_phases_go_on_in_data_of_their_own_length() -> None:
    """In each phase every sample comes once, and the first is the one behind as many tokens as were used."""
    curriculum = Curriculum([0, 64, 160], [4, 8, 16], [2, 4, 4])
    sets: dict[int, Dataset] = {length: Numbered(length) for length in (4, 8, 16)}  # type: ignore[dict-item]
    data, position, seen = PhasedDataset(sets, curriculum), 0, {4: [], 8: [], 16: []}  # type: dict[int, list[int]]
    assert len(data) == 4_000  # of 4 tokens: a pass is 1,000 samples of 16
    while position * curriculum.unit < 400:
        length, before = curriculum.phase(position).seq_length, position * curriculum.unit
        for ranks in range(2):
            for positions in curriculum.rank_positions(position, micro_batch_size=1, dp_rank=ranks, dp_size=2):
                rows = data.rows(positions)
                assert isinstance(rows, Rows)
                seen[length] += rows.tokens[:, 0].tolist()
        assert min(seen[length]) * length <= before
        position = curriculum.next(position)
    for length, numbers in seen.items():
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert length == 4 or numbers[0] > 0


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of sentences, a WordPiece vocabulary made of them, and their tokens by sentences."""
    folder = tmp_path_factory.mktemp("bert")
    documents = [" ".join(text.capitalize() for text in made_up(5, seed)) for seed in range(21)]
    for number, document in enumerate(documents):
        (folder / f"{number}.txt").write_text(document)
    files = sorted(folder.glob("*.txt"))
    train_tokenizer(files, folder / "tokenizer.json", 120, kind="wordpiece", progress=False)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    for name, sentences in (("tokens", True), ("no sentences", False)):
        tokenize_files(
            files, folder / name, tokenizer, workers=1, append_end=False, sentences=sentences, progress=False
        )
    return folder


def write(texts: Path, folder: Path) -> Path:
    """The tests' own small run, of a masked model in float64."""
    return small_run_of("bert", TinyCorpus(texts), folder)


@pytest.fixture(scope="module")
def alone(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    answer = forked("train", write(texts, folder))
    assert answer.status == 0, answer
    assert "masked" in answer.out and "sentence order" in answer.out
    return folder / "run"


@pytest.mark.slow
def test_metrics_tell_each_loss(alone: Path) -> None:
    for line in metrics(alone):
        assert line["loss"] == pytest.approx(line["masked_loss"] + line["sentence_order_loss"], rel=1e-12)
    last = metrics(alone)[-1]
    assert last["validation_loss"] == pytest.approx(
        last["validation_masked_loss"] + last["validation_sentence_order_loss"], rel=1e-12
    )
    assert 0.0 <= last["validation_masked_accuracy"] <= 1.0
    assert "validation_perplexity" not in last


@pytest.mark.parametrize(
    "layout",
    first_fast(
        [
            ["parallel.tp=2", "parallel.sequence_parallel=true"],
            ["parallel.pp=2", "train.micro_batch_size=1"],
            ["parallel.dp=2", "parallel.zero=3"],
        ]
    ),
    ids=str,
)
def test_every_layout_trains_the_same(alone: Path, texts: Path, tmp_path: Path, layout: list[str]) -> None:
    answer = forked("train", write(texts, tmp_path), *layout, num_ranks=2)
    assert answer.status == 0, answer
    assert_near(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [(), ("distillation.top_k=9",)], ids=["beside", "stored"])
def test_a_student_is_taught_alike_on_every_layout(
    alone: Path, texts: Path, tmp_path: Path, stored: tuple[str, ...]
) -> None:
    small = ("model.hidden_size=12", f"distillation.teacher={alone}", *stored)
    layouts = ((), ("parallel.tp=2", "parallel.sequence_parallel=true"), ("parallel.pp=2", "parallel.zero=0"))
    runs = []
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        answer = forked("train", write(texts, folder), *small, *layout, num_ranks=2 if layout else 1)
        assert answer.status == 0, answer
        runs.append(metrics(folder / "run"))
    for run in runs[1:]:
        for mine, serial in zip(run, runs[0], strict=True):
            assert mine["loss"] == pytest.approx(serial["loss"], rel=1e-10)
            assert mine["grad_norm"] == pytest.approx(serial["grad_norm"], rel=1e-9)
    plain = metrics(alone)
    assert runs[0][0]["masked_loss"] != pytest.approx(plain[0]["masked_loss"], rel=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(alone: Path, texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    assert forked("train", path, "train.steps=2", "optim.decay_steps=4").status == 0
    assert forked("train", path, "train.steps=4", "optim.decay_steps=4").status == 0
    for mine, expected in zip(metrics(tmp_path / "run"), metrics(alone), strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-10)


@pytest.mark.slow
def test_blends_and_curricula(texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    alone = f'train = "{texts}/tokens"'
    assert alone in path.read_text()
    path.write_text(path.read_text().replace(alone, f'blend = {{ "{texts}/tokens" = 1.0 }}'))
    with path.open("a") as stream:
        stream.write("[curriculum]\ntokens = [0, 64]\nseq_length = [8, 16]\nglobal_batch_size = [4, 4]\n")
    answer = forked("train", path)
    assert answer.status == 0, answer
    assert [line["tokens"] for line in metrics(tmp_path / "run")] == [32, 64, 128, 192]


def test_the_held_out_parts_are_measured(alone: Path) -> None:
    answer = forked("evaluate", alone, "--part", "test")
    assert answer.status == 0 and "masked" in answer.out, answer


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_reads_on_is_refused(alone: Path, tmp_path: Path) -> None:
    answer = forked("generate", alone, "--prompt", "once upon")
    assert answer.status == 2 and 'a model of kind "bert" does not go on with a text' in answer.err, answer
    (tmp_path / "text.txt").write_text("once upon a time")
    answer = forked("evaluate", alone, "--data", tmp_path / "text.txt")
    assert answer.status == 2 and "--part validation" in answer.err, answer


def test_tokens_that_were_made_for_a_language_model(texts: Path, tmp_path: Path) -> None:
    config = load(write(texts, tmp_path), [f"data.train={texts}/no sentences"])
    with pytest.raises(DataError, match=r"single sequence in each of its 21 documents.*--sentences"):
        open_corpus(config)


def test_a_vocabulary_without_control_tokens(texts: Path, tmp_path: Path) -> None:
    made = tmp_path / "bpe.json"
    train_tokenizer(sorted(texts.glob("*.txt")), made, 300, progress=False)
    with pytest.raises(DataError, match=r"no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"):
        open_corpus(load(write(texts, tmp_path), [f"data.tokenizer={made}", "model.vocab_size=400"]))


def test_words_cannot_be_masked_without_a_vocabulary(texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("tokenizer")))
    with pytest.raises(DataError, match=r"data\.tokenizer is not set"):
        open_corpus(load(path, ["model.vocab_size=120"]))


@pytest.mark.slow
def test_only_a_language_model_misses_bits_per_byte(texts: Path, tmp_path: Path) -> None:
    masked = load(write(texts, tmp_path), [])
    language = load(write_config(TinyCorpus(texts), tmp_path), [f"data.train={texts}/no sentences"])
    for config, is_missed in ((masked, False), (language, True)):
        opened = open_corpus(config)
        decision = settle(config, opened.vocab_size, Mesh().world, CPU)
        watcher = Watcher(banner, within_memory, active=False)
        notes = watcher.banner(course(config), Mesh(), CPU, opened, decision).fields["notes"]
        assert ("the tokenizer is not byte-level: no bits per byte" in notes) == is_missed


def test_options_of_other_kinds_are_named_all_at_once(texts: Path, tmp_path: Path) -> None:
    path = write(texts, tmp_path)
    wrong = ["model.window=4", "model.position=alibi", "data.documents=separate", "data.packing=best_fit"]
    with pytest.raises(ConfigError) as caught:
        load(path, wrong)
    for key in ("model.window = 4", 'model.position = "alibi"', "data.documents", "data.packing"):
        assert key in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.token_types = 3.*it is for bert") as caught:
        load(path, ["model.kind=gpt", "model.token_types=3", "data.masking.share=0.2"])
    assert "[data.masking] has no effect" in str(caught.value)
