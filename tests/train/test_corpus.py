"""What a run reads: the vocabulary's size from wherever it is known, and data, tokenizer and model that must match."""

import json
import shutil
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.data.curriculum_dataset import CurriculumDataset
from colonnade.data.datasets import Passes
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.phased_dataset import PhasedDataset
from colonnade.data.rows import Rows
from colonnade.data.sidecar import sidecar_path
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter, merge
from colonnade.errors import ColonnadeError, ConfigError, DataError
from colonnade.examples.formats import FORMATS
from colonnade.examples.make import make_examples
from colonnade.train import corpus as module
from colonnade.train.corpus import open_corpus, step_by, tokens_of
from colonnade.train.rollback import Rollback
from tests import tiny
from tests.commands import here
from tests.tasks import examples, questions
from tests.tiny import VOCAB_SIZE, TinyCorpus, config


def without_tokenizer(settings: Config) -> Config:
    return settings.model_copy(update={"data": settings.data.model_copy(update={"tokenizer": None})})


def bare(corpus: TinyCorpus, folder: Path) -> Path:
    """The token file without what `data tokenize` wrote beside it: like one of Megatron's own."""
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus.prefix}{ending}", f"{folder / 'bare'}{ending}")
    return folder / "bare"


def test_the_vocabulary_is_the_tokenizers(corpus: TinyCorpus, tmp_path: Path) -> None:
    opened = open_corpus(config(corpus, tmp_path))
    assert opened.vocab_size == VOCAB_SIZE
    assert opened.byte_lengths is not None and len(opened.byte_lengths) == VOCAB_SIZE
    assert opened.datasets.validation is not None and opened.datasets.test is None


def test_or_what_is_set(corpus: TinyCorpus, tmp_path: Path) -> None:
    assert open_corpus(config(corpus, tmp_path, "model.vocab_size=300")).vocab_size == 300


def test_or_what_the_token_file_tells(corpus: TinyCorpus, tmp_path: Path) -> None:
    opened = open_corpus(without_tokenizer(config(corpus, tmp_path)))
    assert opened.vocab_size == VOCAB_SIZE and opened.byte_lengths is None


def test_or_unknown(corpus: TinyCorpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"size is unknown.*Set data.tokenizer .*or model.vocab_size"):
        open_corpus(without_tokenizer(config(corpus, tmp_path, f"data.train={bare(corpus, tmp_path)}")))


def test_fewer_ids_than_the_tokenizer_has(corpus: TinyCorpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size = 100 is less than the 275 ids"):
        open_corpus(config(corpus, tmp_path, "model.vocab_size=100"))


def test_another_tokenizer_than_the_datas(corpus: TinyCorpus, tmp_path: Path) -> None:
    other = tiny.make(tmp_path / "other", seed=5)
    with pytest.raises(DataError, match="was made with another tokenizer"):
        open_corpus(config(corpus, tmp_path, f"data.tokenizer={other.tokenizer}"))
    with pytest.raises(DataError, match="was made with another tokenizer"):
        open_corpus(config(corpus, tmp_path, f"data.validation={other.prefix}"))


def labelled(folder: Path, *tasks: str) -> Path:
    """The same texts as token files of several tasks of two labels."""
    examples.write_examples(folder, ["qqp"])
    for task in tasks:
        make_examples(FORMATS[task], [folder / "qqp.jsonl"], folder / task, Tokenizer.load(folder / "tokenizer.json"))
    return folder


def test_a_labels_number_means_the_same_in_all_files_of_a_run(tmp_path: Path) -> None:
    """RTE and WNLI have the same labels in another order; QNLI has those of RTE."""
    folder = labelled(tmp_path, "rte", "qnli", "wnli")
    path = examples.write_config(folder, "rte", tmp_path / "at")
    same = open_corpus(load(path, [f"data.test={folder / 'qnli'}"]))
    assert same.labels == ["entailment", "not_entailment"] and same.other_labels == []
    said = r"wnli has the labels not_entailment, entailment, and .*rte entailment, not_entailment: a label's number"
    for key in ("validation", "test"):
        with pytest.raises(DataError, match=said):
            open_corpus(load(path, [f"data.{key}={folder / 'wnli'}"]))
    blend = f'blend = {{"{folder}/rte" = 1, "{folder}/wnli" = 1}}'
    path.write_text(path.read_text().replace(f'train = "{folder}/rte"', blend))
    with pytest.raises(DataError, match=said):
        open_corpus(load(path))


def test_labels_of_other_names_are_taken_by_their_numbers_and_told(tmp_path: Path) -> None:
    """A duplicate, and a sentence that means the same."""
    folder = labelled(tmp_path, "mrpc")
    path = examples.write_config(folder, "qqp", tmp_path / "at")
    told = (
        f"{folder / 'mrpc'} has the labels not_equivalent, equivalent, and {folder / 'qqp'} not_duplicate, duplicate: "
        "their numbers are taken to mean the same"
    )
    of_both = [f"data.{key}={folder / 'mrpc'}" for key in ("validation", "test")]
    assert open_corpus(load(path, of_both)).other_labels == [told], "once"
    answer = here("train", path, of_both[0], "--dry-run")
    assert answer.status == 0 and f"note       {told}." in answer.out, answer
    blend = f'blend = {{"{folder}/qqp" = 1, "{folder}/mrpc" = 1}}'
    path.write_text(path.read_text().replace(f'train = "{folder}/qqp"', blend))
    assert open_corpus(load(path)).other_labels == [told]


def test_a_token_file_of_megatrons_tools_has_nothing_to_hold_against(corpus: TinyCorpus, tmp_path: Path) -> None:
    prefix = bare(corpus, tmp_path)
    assert not sidecar_path(prefix).exists()
    assert open_corpus(config(corpus, tmp_path, f"data.train={prefix}")).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(("end", "taken"), [(7, 7), (0, 0), (None, None), ("no sidecar", None)])
def test_documents_end_as_the_token_file_says(corpus: TinyCorpus, tmp_path: Path, end: Any, taken: int | None) -> None:
    prefix = bare(corpus, tmp_path)
    if end != "no sidecar":
        known = json.loads(sidecar_path(corpus.prefix).read_bytes())
        sidecar_path(prefix).write_text(json.dumps({**known, "end_of_document": end}))
    assert open_corpus(config(corpus, tmp_path, f"data.train={prefix}")).end_of_document == taken


def test_labels_that_do_not_count_are_tokens(corpus: TinyCorpus, tmp_path: Path) -> None:
    assert open_corpus(config(corpus, tmp_path, f"data.no_loss_on=[0, {VOCAB_SIZE - 1}]"))
    with pytest.raises(ConfigError, match=f"data.no_loss_on has token {VOCAB_SIZE}, and there are {VOCAB_SIZE} of"):
        open_corpus(config(corpus, tmp_path, f"data.no_loss_on=[0, {VOCAB_SIZE}]"))


def test_all_epochs_must_last_for_the_run(corpus: TinyCorpus, tmp_path: Path) -> None:
    enough = ["data.order=all_epochs", "data.epochs=1"]
    samples = len(open_corpus(config(corpus, tmp_path, *enough)).datasets.train)
    open_corpus(config(corpus, tmp_path, *enough, f"train.steps={samples // 4}"))
    with pytest.raises(ConfigError, match=rf"Set train.steps to {samples // 4} or less, or raise data.epochs"):
        open_corpus(config(corpus, tmp_path, *enough, f"train.steps={samples // 4 + 1}"))
    batch = f"train.global_batch_size={2 * (samples // 2 + 1)}"  # no number of steps is short enough
    with pytest.raises(ConfigError, match=r"\. Lower train\.global_batch_size: one step takes more, or raise data\.ep"):
        open_corpus(config(corpus, tmp_path, *enough, "train.steps=1", batch))
    even = [*enough, "data.epochs=4"]  # samples of all epochs make up whole batches
    open_corpus(config(corpus, tmp_path, *even, f"train.steps={samples}"))
    with pytest.raises(ConfigError, match=rf"Set train.steps to {samples} or less, or raise data.epochs"):
        open_corpus(config(corpus, tmp_path, *even, f"train.steps={samples + 1}"))


def test_every_refusal_is_the_users_to_mend(corpus: TinyCorpus, tmp_path: Path) -> None:
    for override in ("data.train=nowhere", "data.tokenizer=nowhere", "model.seq_length=100000", "data.test=nowhere"):
        with pytest.raises(ColonnadeError):
            open_corpus(config(corpus, tmp_path, override))


def test_a_blends_vocabulary_is_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 300, "b": 500, "c": 400}
    monkeypatch.setattr(module, "open_token_file", lambda name, cache: name)
    monkeypatch.setattr(module, "read_sidecar", lambda name: SimpleNamespace(vocab_size=sizes[name]))
    data = SimpleNamespace(blend=sizes, train=None, cache=None)
    stub: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=None), data=data)
    assert module.vocab_size_of(stub, None) == 500


def samples_of_length(seq_length: int, count: int) -> Any:
    """Stands for a dataset of so many samples, all of one pass; `read` is how many of them have been."""

    class Samples:
        def __init__(self) -> None:
            self.seq_length, self.read = seq_length, 0

        def __len__(self) -> int:
            return count

        def passes(self, positions: Any) -> Passes:
            return Passes(np.zeros_like(positions), np.zeros_like(positions))

        def rows(self, positions: Any) -> Rows:
            self.read = max(self.read, int(np.max(positions)) + 1)
            zeros = np.zeros((len(positions), seq_length), np.int64)
            return Rows(zeros, zeros, zeros == 0, None)

    return Samples()


def test_a_part_of_a_sample_is_a_sample(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Ten samples of 16 tokens, one epoch: 40 steps of 4 tokens are all there is."""
    curriculum = Curriculum([0, 10_000], [4, 16], [1, 1])
    training = CurriculumDataset(samples_of_length(16, 10), curriculum)
    for steps in (40, 41):
        settings = config(corpus, tmp_path, f"train.steps={steps}", "data.order=all_epochs", "data.epochs=1")
        assert curriculum.steps(steps) * curriculum.unit == 4 * steps
        with nullcontext() if steps == 40 else pytest.raises(ConfigError, match="takes 11 samples"):
            module.check_length(settings, training, curriculum)


def test_a_group_of_samples_is_used_by_its_first_pieces(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Twenty samples in groups of twelve: the second has four too few, from its first step on."""
    curriculum = Curriculum([0, 5_000], [4, 16], [12, 12])
    training = CurriculumDataset(samples_of_length(16, 20), curriculum)
    for steps in (4, 5, 6):
        settings = config(corpus, tmp_path, f"train.steps={steps}", "data.order=all_epochs", "data.epochs=1")
        told = pytest.raises(ConfigError, match=r"takes 24 samples of 16 tokens, .* Set train\.steps to 4 ")
        with nullcontext() if steps == 4 else told:
            module.check_length(settings, training, curriculum)


@given(
    st.lists(st.sampled_from([4, 8]), max_size=2),
    st.lists(st.integers(1, 2_000), min_size=2, max_size=2),
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.integers(1, 60),
)
def test_what_is_used_is_what_is_read(lengths: list[int], tokens: list[int], batches: list[int], steps: int) -> None:
    """To the last sample, whether samples are cut or made anew at each phase's length."""
    lengths = [*sorted(lengths), 16]
    begins = [0, *sorted(tokens)][: len(lengths)]
    curriculum = Curriculum(begins, lengths, batches[: len(lengths)])
    parts = {length: samples_of_length(length, 10**9) for length in curriculum.lengths}
    for training in (PhasedDataset(parts, curriculum), CurriculumDataset(parts[16], curriculum)):
        for part in parts.values():
            part.read = 0
        position = 0
        for _ in range(steps):
            for chunk in curriculum.rank_positions(position, micro_batch_size=1, dp_rank=0, dp_size=1):
                training.rows(chunk)
            position = curriculum.next(position)
        used = dict.fromkeys(parts, 0)
        for part, count in training.used(position, curriculum):
            used[part.seq_length] = max(used[part.seq_length], count)
        assert used == {length: part.read for length, part in parts.items()}


def test_samples_that_are_made_at_a_shorter_length_are_used_up_by_its_sequences(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Ten examples: sequences of half the length take ten, though their positions are those of five whole ones."""
    curriculum = Curriculum([0, 6 * 16], [8, 16], [2, 2])
    training = PhasedDataset({8: samples_of_length(8, 10), 16: samples_of_length(16, 10)}, curriculum)
    keys = ["data.order=all_epochs", "data.epochs=1"]
    assert [phase.begin for phase in curriculum.phases] == [0, 12], "six steps of two, and all examples are two too few"
    module.check_length(config(corpus, tmp_path, "train.steps=5", *keys), training, curriculum)
    for steps, step, position in ((6, 0, 0), (9, 0, 0), (9, 4, 8), (9, 5, 10)):
        settings = config(corpus, tmp_path, f"train.steps={steps}", *keys)
        told = r"12 samples of 8 tokens, but data\.epochs = 1 epochs of 10 samples are 10\. Set train\.steps to 5 "
        with pytest.raises(ConfigError, match=told):
            module.check_length(settings, training, curriculum, step=step, position=position)
    longer = Curriculum([0, 4 * 16], [8, 16], [2, 2])
    training = PhasedDataset({8: samples_of_length(8, 10), 16: samples_of_length(16, 10)}, longer)
    module.check_length(config(corpus, tmp_path, "train.steps=7", *keys), training, longer)
    settings = config(corpus, tmp_path, "train.steps=8", *keys)
    for at, where in (({}, ""), ({"step": 6, "position": 16}, ", behind step 6 from sample 9 on,")):
        told = rf"train\.steps = 8{where} the run takes 12 samples of 16 tokens, .* Set train\.steps to 7 "
        with pytest.raises(ConfigError, match=told):
            module.check_length(settings, training, longer, **at)


def test_batches_that_were_passed_over_are_not_there_any_more(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Ten samples, a batch of one: five steps are left to a run that has read five, and four where one was skipped."""
    curriculum = Curriculum([0], [4], [1])
    training = PhasedDataset({4: samples_of_length(4, 10)}, curriculum)
    settings = config(corpus, tmp_path, "train.steps=10", "data.order=all_epochs", "data.epochs=1")
    for position in (5, 6):
        with nullcontext() if position == 5 else pytest.raises(ConfigError, match="takes 11 samples"):
            module.check_length(settings, training, curriculum, step=5, position=position)


def test_a_file_that_is_split_is_read_once(corpus: TinyCorpus, tmp_path: Path) -> None:
    """It is known by what it is, and not by its parts."""
    opened = open_corpus(config(corpus, tmp_path))
    assert opened.datasets.validation is not None and list(opened.files) == ["data.train"]
    shutil.copytree(Path(corpus.prefix).parent, tmp_path / "other")
    own = open_corpus(config(corpus, tmp_path, f"data.validation={tmp_path / 'other' / Path(corpus.prefix).name}"))
    assert list(own.files) == ["data.train", "data.validation"]


def test_a_blends_validation_file_is_read_whole(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings, prefix = config(corpus, tmp_path), str(corpus.prefix)
    data = settings.data.model_copy(update={"train": None, "blend": {prefix: 1.0}, "validation": prefix})
    part: Any = open_corpus(settings.model_copy(update={"data": data})).datasets.validation
    assert part.documents == range(part.file.num_documents) and len(part.documents) > 1


def blended(settings: Config, corpus: TinyCorpus, **more: Any) -> Config:
    data = settings.data.model_copy(update={"train": None, "blend": {str(corpus.prefix): 1.0}, **more})
    return settings.model_copy(update={"data": data})


def test_another_tokenizer_than_that_of_a_blend(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Of any of its files, and of those that are read beside it."""
    settings, other = config(corpus, tmp_path), tiny.make(tmp_path / "other", seed=5)
    tokenizer = {"tokenizer": str(other.tokenizer)}
    mixed = {"blend": {str(corpus.prefix): 1.0, str(other.prefix): 1.0}}
    for more in (tokenizer, mixed, {"validation": str(other.prefix)}, {"test": str(other.prefix)}):
        with pytest.raises(DataError, match="was made with another tokenizer"):
            open_corpus(blended(settings, corpus, **more))


def test_a_blend_is_read_as_the_configuration_says(corpus: TinyCorpus, tmp_path: Path) -> None:
    """In the order of its seed, each epoch in another or all shuffled as one; by URL, through data.cache."""
    cached = {"blend": {f"file://{corpus.prefix}": 3.0}, "cache": str(tmp_path / "cache"), "blend_by": "epochs"}
    orders = []
    for seed, order in ((1, "epoch"), (2, "epoch"), (1, "all_epochs")):
        settings = config(corpus, tmp_path, f"train.seed={seed}")
        trained = open_corpus(blended(settings, corpus, order=order, **cached)).datasets.train
        number = len(trained.parts[0])
        read = trained.rows(range(2 * number)).tokens  # type: ignore[attr-defined]
        again = sorted(map(tuple, read[:number].tolist())) == sorted(map(tuple, read[number:].tolist()))
        assert again == (order == "epoch"), "the second epoch begins where the first ends"
        orders.append(read.tolist())
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_a_file_is_read_in_the_order_of_the_runs_seed(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings = [config(corpus, tmp_path, f"train.seed={seed}") for seed in (1, 1, 2)]
    first, same, other = (open_corpus(each).datasets.train.rows(range(20)).tokens.tolist() for each in settings)  # type: ignore[union-attr]
    assert first == same != other


def test_a_file_beside_a_blend_is_read_through_the_cache(corpus: TinyCorpus, tmp_path: Path) -> None:
    own = {"validation": f"file://{corpus.prefix}", "cache": str(tmp_path / "cache")}
    part: Any = open_corpus(blended(config(corpus, tmp_path), corpus, **own)).datasets.validation
    assert part.file.num_documents == 24 and list((tmp_path / "cache").rglob("tokens.idx"))


def test_the_samples_before_a_change_of_a_blend_are_drawn_as_they_were(corpus: TinyCorpus, tmp_path: Path) -> None:
    merge([corpus.prefix] * 2, tmp_path / "more")
    files = (str(corpus.prefix), str(tmp_path / "more"))

    def first(earlier: Any, *numbers: float) -> list[list[int]]:
        settings = blended(config(corpus, tmp_path), corpus, blend=dict(zip(files, numbers, strict=True)))
        tokens: list[list[int]] = open_corpus(settings, earlier).datasets.train.rows(range(12)).tokens.tolist()  # type: ignore[union-attr]
        return tokens

    was, now = first((), 1.0, 5.0), first((), 5.0, 1.0)
    changed = first([(8, {files[0]: 1.0, files[1]: 5.0})], 5.0, 1.0)
    assert changed[:8] == was[:8] != now[:8] and changed[8:] != was[8:]


def test_a_blend_that_was_changed_is_another_from_the_same_text_on_in_samples_of_every_length(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    merge([corpus.prefix] * 2, tmp_path / "more")
    files = (str(corpus.prefix), str(tmp_path / "more"))
    settings = blended(config(corpus, tmp_path), corpus, blend=dict(zip(files, (5.0, 1.0), strict=True)))
    earlier = [(6, dict(zip(files, (1.0, 5.0), strict=True)))]
    for times in (1, 2):
        length = settings.model.seq_length // times
        opened: Any = module._open_blend(settings, VOCAB_SIZE, None, TextSamples(), length, earlier=earlier).train
        assert opened.blend.counts(6 * times).tolist() == [times, 5 * times]
        assert opened.blend.counts(12 * times).tolist() == [6 * times, 6 * times]


def test_a_temperature_makes_files_of_unequal_sizes_more_alike(corpus: TinyCorpus, tmp_path: Path) -> None:
    merge([corpus.prefix] * 4, tmp_path / "more")
    given = {"blend": {str(corpus.prefix): 1.0, str(tmp_path / "more"): 1.0}, "blend_by": "temperature"}
    for temperature in (1.0, 2.0):
        settings = blended(config(corpus, tmp_path), corpus, temperature=temperature, **given)
        train: Any = open_corpus(settings).datasets.train
        (small, large), (less, more) = train.blend.weights, (part.sample_tokens for part in train.parts)
        assert large / small == pytest.approx((more / less) ** (1 / temperature), rel=1e-3) and more > 3 * less


def test_parts_with_files_of_their_own_take_no_share_of_a_blend(corpus: TinyCorpus, tmp_path: Path) -> None:
    """And each has its own: what is tested on is not what is validated on."""
    prefix = str(corpus.prefix)
    other = tiny.make(tmp_path / "other", num_documents=30, seed=0)
    opened = open_corpus(blended(config(corpus, tmp_path), corpus)).datasets
    parts: list[Any] = [opened.train.parts[0], opened.validation.parts[0]]  # type: ignore[union-attr, attr-defined]
    assert [len(part.documents) for part in parts] == [20, 4] and opened.test is None
    settings = blended(config(corpus, tmp_path), corpus, validation=prefix, test=prefix)
    own = open_corpus(settings).datasets
    trained: Any = own.train
    assert len(trained.parts[0].documents) == 24 and own.validation is not None and own.test is not None
    tokenizer = settings.data.model_copy(update={"test": str(other.prefix), "tokenizer": None})
    model = settings.model.model_copy(update={"vocab_size": VOCAB_SIZE})
    both: Any = open_corpus(settings.model_copy(update={"data": tokenizer, "model": model})).datasets
    assert (len(both.validation.documents), len(both.test.documents)) == (24, 30)


def test_a_run_of_a_blend_whose_epochs_are_shuffled_as_one_is_as_long_as_those(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    """It has the epochs of each file, and no data.epochs."""
    whole = {"blend": {str(corpus.prefix): 2.0}, "blend_by": "epochs", "order": "all_epochs"}
    train: Any = open_corpus(blended(config(corpus, tmp_path), corpus, **whole)).datasets.train
    steps = train.end // 4
    open_corpus(blended(config(corpus, tmp_path, f"train.steps={steps}"), corpus, **whole))
    with pytest.raises(DataError, match=f"have {train.end} in all"):
        open_corpus(blended(config(corpus, tmp_path, f"train.steps={steps + 1}"), corpus, **whole))


def test_no_part_is_needed_for_evaluations_that_nobody_has_asked_for(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Unset, evaluate_every evaluates where there is something to."""
    with TokenFileWriter(tmp_path / "one", np.dtype("<u2")) as writer:
        writer.add_document([1, 2] * 99)
    settings = config(corpus, tmp_path, f"data.train={tmp_path / 'one'}")
    train = settings.train
    for every in (0, None):
        opened = open_corpus(settings.model_copy(update={"train": train.model_copy(update={"evaluate_every": every})}))
        assert opened.datasets.validation is None
    with pytest.raises(DataError, match="leaves none for validation"):
        open_corpus(settings)


def test_files_that_do_not_say_whose_they_are(corpus: TinyCorpus, tmp_path: Path) -> None:
    known = open_corpus(config(corpus, tmp_path))
    prefix = bare(corpus, tmp_path)
    silent = open_corpus(config(corpus, tmp_path, f"data.train={prefix}"))
    assert known.unchecked == [] and silent.unchecked == [str(prefix)]
    for key in ("data.validation", "data.test"):
        beside = open_corpus(config(corpus, tmp_path, f"{key}={prefix}"))
        assert beside.unchecked == [str(prefix)], f"{key} too, beside a file to train on that says it"


def test_what_ranks_compare_tells_tokenizer_vocabulary_and_files(corpus: TinyCorpus, tmp_path: Path) -> None:
    opened = open_corpus(config(corpus, tmp_path, "model.vocab_size=1300"))
    assert opened.tokenizer is not None
    assert opened.properties == {
        "data.tokenizer": f"275 ids, sha256 {opened.tokenizer.sha256[:12]}",
        "vocabulary": "1,300",
        "data.train": str(opened.identities["data.train"]),
    }
    settings = config(corpus, tmp_path, "model.vocab_size=1300")
    assert open_corpus(without_tokenizer(settings)).properties["data.tokenizer"] == "none"


def test_what_ranks_compare_tells_the_questions_that_are_asked(tmp_path: Path) -> None:
    """Ranks with other questions would answer another number of them, and wait for each other."""
    folder = questions.write_questions(tmp_path)
    path = questions.write_config(folder, tmp_path / "at")
    unasked = open_corpus(load(path)).properties
    assert "data.questions" not in unasked
    opened = open_corpus(load(path, [f"data.questions={folder / 'dev.json'}"]))
    assert opened.questions is not None
    content = sha256((folder / "dev.json").read_bytes()).hexdigest()
    assert opened.properties == {**unasked, "data.questions": f"sha256 {content[:12]}"}


@pytest.mark.parametrize(("head", "times"), [("tokens", 1), ("preferences", 2)])
def test_tokens_and_steps_are_counted_by_each_other(head: str, times: int, corpus: TinyCorpus, tmp_path: Path) -> None:
    """Over phases of a curriculum; a sample of preferences is two sequences."""
    phases = ["curriculum.tokens=[0, 64]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    settings = config(corpus, tmp_path, *phases, "train.steps=6")
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"head": head})})
    counts = [times * count for count in (16, 32, 48, 64, 128, 192)]
    assert [tokens_of(settings, step) for step in range(1, 7)] == counts and tokens_of(settings) == counts[-1]
    for step, count in enumerate(counts, 1):
        assert [step_by(settings, count - 1), step_by(settings, count), step_by(settings, count + 1)] == [
            step,
            step,
            step + 1,
        ]


def test_batches_that_any_of_several_rollbacks_passes_over_are_no_tokens_of_a_run(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    settings = config(corpus, tmp_path, "train.steps=6")
    for past in ([Rollback(to=2, skip=3), Rollback(to=4, skip=1)], [Rollback(to=2, skip=3), Rollback(to=2, skip=1)]):
        assert [tokens_of(settings, step, past) for step in (2, 3, 4, 6)] == [128, 192, 256, 384]


def test_files_of_a_blend_are_numbered_from_one(corpus: TinyCorpus, tmp_path: Path) -> None:
    other = tiny.make(tmp_path / "other", seed=0)
    settings = blended(config(corpus, tmp_path), corpus)
    data = settings.data.model_copy(update={"blend": {str(corpus.prefix): 1.0, str(other.prefix): 2.0}})
    opened = open_corpus(settings.model_copy(update={"data": data}))
    assert {key: file.prefix for key, file in opened.files.items()} == {
        "data.blend, file 1": str(corpus.prefix),
        "data.blend, file 2": str(other.prefix),
    }
