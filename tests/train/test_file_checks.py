"""What is wrong with files that a configuration names, as it is told before ranks start."""

import os
import shutil
from pathlib import Path

import pytest

from colonnade.config.load import load
from colonnade.data import remote
from colonnade.data.indexed import idx_path
from colonnade.launch import launch
from colonnade.train import file_checks
from colonnade.train.corpus import open_corpus
from colonnade.train.file_checks import (
    problems_of_a_beginning,
    problems_of_a_score,
    problems_of_files,
    problems_of_the_folder,
)
from tests import tiny
from tests.runs import Finished
from tests.tiny import TinyCorpus


def told(corpus: TinyCorpus, folder: Path, *overrides: str, uncertain: tuple[str, ...] = ()) -> list[str]:
    return [each.message for each in problems_of_files(tiny.config(corpus, folder, *overrides), uncertain)]


def test_weights_to_begin_from_are_needed_where_a_run_begins_and_a_teacher_always(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    gone, run = tmp_path / "gone", f"run.folder={finished.folder}"
    (wrong,) = told(corpus, tmp_path, f"train.init_from={gone}")
    assert wrong.startswith(f"train.init_from = '{gone}' does not exist: there is no such folder.")
    assert told(corpus, tmp_path, f"train.init_from={gone}", uncertain=("train.init_from",)) == []
    assert told(corpus, tmp_path, f"train.init_from={gone}", run) == [], "it goes on from its own"
    for more in ([], [run]):
        (wrong,) = told(corpus, tmp_path, f"distillation.teacher={gone}", *more)
        assert wrong.startswith(f"distillation.teacher = '{gone}' does not exist")
    (tmp_path / "model.gguf").touch()
    (wrong,) = told(corpus, tmp_path, f"train.init_from={tmp_path / 'model.gguf'}")
    assert "model.gguf' is a file, and a folder is asked for. Of a GGUF file `colonnade convert` makes" in wrong
    assert told(corpus, tmp_path, f"train.init_from={finished.folder}") == []


def test_each_token_file_that_is_not_there_is_told_once(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Also where the tokenizer is not: what is wrong with each does not hide the others."""
    missing = [f"data.train={tmp_path}/a", f"data.validation={tmp_path}/b", f"data.test={tmp_path}/a"]
    found = told(corpus, tmp_path, *missing, f"data.tokenizer={tmp_path}/none.json", "data.split=1:0:0")
    assert len(found) == 3 and [
        f"{tmp_path}/{name}" in each for name, each in zip(("none", "a", "b"), found, strict=True)
    ]
    assert told(corpus, tmp_path, *missing, "data.split=1:0:0", uncertain=("data.train",)) == []


def test_a_folder_in_the_place_of_a_reference_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = tiny.config(corpus, tmp_path)
    named = config.preferences.model_copy(update={"reference": str(tmp_path)})
    asked = config.model_copy(update={"preferences": named})
    (found,) = problems_of_files(asked, ())
    assert found.message == (
        f"preferences.reference = '{tmp_path}' is a folder. Name a file, as reference.npz is one in a run's folder."
    )
    assert found.keys == ("preferences.reference",) and problems_of_files(asked, found.keys) == []


def test_a_store_of_a_teachers_answers_that_cannot_be_made_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    """One that is there may have all that is asked for."""
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    for name, is_wrong in (("a/b", False), ("there", False), ("file/store", True), ("file", True)):
        keys = [f"distillation.teacher={tmp_path}", "distillation.top_k=4", f"distillation.store={tmp_path / name}"]
        assert told(corpus, tmp_path, *keys) == is_wrong * [
            f"distillation.store = '{tmp_path / name}' cannot be made: Not a directory ({tmp_path / 'file'}). Name "
            "another folder, or fix that."
        ]
        assert told(corpus, tmp_path, *keys, uncertain=("distillation.store",)) == []
    assert not (tmp_path / "a").exists(), "none is made"


def test_a_run_folder_may_not_be_there_and_has_to_be_one(corpus: TinyCorpus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, wrong in (("a/b/c", ""), ("file/run", "Not a directory"), ("link", "Not a directory"), ("", "")):
        config = tiny.config(corpus, tmp_path, f"run.folder={tmp_path / name}")
        found = [each.message for each in problems_of_the_folder(config, ())]
        assert len(found) == bool(wrong) and all(wrong in each for each in found), found
        assert problems_of_the_folder(config, {"run.folder"}) == []
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] in "afl") == ["file", "link"], "none is made"


@pytest.mark.parametrize("refused", [os.W_OK, os.X_OK, 0])
def test_a_run_folder_is_made_where_one_may_write_and_look(
    refused: int, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(corpus, tmp_path, f"run.folder={tmp_path / 'a' / 'run'}")
    monkeypatch.setattr(file_checks.os, "access", lambda path, mode: not mode & refused)
    found = [each.message for each in problems_of_the_folder(config, ())]
    assert len(found) == bool(refused) and all(f"Permission denied ({tmp_path})" in each for each in found), found


@pytest.mark.parametrize("linked", [True, False])
def test_a_file_that_a_blend_names_twice_is_told(
    linked: bool, corpus: TinyCorpus, finished: Finished, tmp_path: Path
) -> None:
    """By a link, say; a run that has begun so goes on."""
    for suffix in (".idx", ".bin"):
        source = Path(f"{corpus.prefix}{suffix}")
        copy = tmp_path / f"copy{suffix}"
        copy.symlink_to(source) if linked else copy.write_bytes(source.read_bytes())
    blend = f'data.blend={{"{corpus.prefix}" = 1.0, "{tmp_path}/copy" = 2.0}}'
    text = (tmp_path / "config.toml", tiny.write_config(corpus, tmp_path).read_text())
    text[0].write_text("\n".join(line for line in text[1].splitlines() if not line.startswith("train = ")))
    config = load(text[0], [blend])
    found = [each.message for each in problems_of_a_beginning(config, ()) if "which are one file" in each.message]
    assert len(found) == linked and all(f"'{corpus.prefix}' and '{tmp_path}/copy'" in each for each in found)
    assert not any(problems_of_a_beginning(load(text[0], [blend, f"run.folder={finished.folder}"]), ()))


def test_samples_are_cut_at_once_where_that_takes_no_time(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of indices that are short; the ranks look at others, and at whole examples."""
    size, long = idx_path(corpus.prefix).stat().st_size, "model.seq_length=60000"
    monkeypatch.setattr(file_checks, "INDEX_BYTES", size + 1)
    (wrong,) = told(corpus, tmp_path, long)
    assert "one sample takes model.seq_length + 1 = 60,001" in wrong
    for key in ("data.split", "model.kind", "model.seq_length", "train.steps", "train.evaluate_every"):
        assert told(corpus, tmp_path, long, uncertain=(key,)) == []
    assert told(corpus, tmp_path, long, uncertain=("curriculum.tokens",)) == []
    assert len(told(corpus, tmp_path, long, uncertain=("optim.learning_rate", "checkpoint.every"))) == 1
    assert told(corpus, tmp_path, long, "data.packing=best_fit", "data.documents=separate") == []
    monkeypatch.setattr(file_checks, "INDEX_BYTES", size)
    assert told(corpus, tmp_path, long) == []


def test_an_index_that_contradicts_itself_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Anywhere: its header and its end are as they should be."""
    shutil.copy(f"{corpus.prefix}.bin", tmp_path / "copy.bin")
    content = bytearray(idx_path(corpus.prefix).read_bytes())
    content[-24:-16] = bytes(8)
    (tmp_path / "copy.idx").write_bytes(content)
    (wrong,) = told(corpus, tmp_path, f"data.train={tmp_path / 'copy'}")
    assert f"{tmp_path / 'copy'}" in wrong and "is damaged" in wrong


def test_no_word_is_had_with_a_server(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there are ranks. Two names of an object storage are two objects, however they would be read as paths."""
    monkeypatch.setattr(remote, "open_token_file", lambda *_: pytest.fail("it is opened"))
    assert told(corpus, tmp_path, "data.train=s3://bucket/a") == []
    settings = tiny.config(corpus, tmp_path)
    blend = {"s3://bucket/a": 1.0, "s3://bucket/b/../a": 2.0}
    data = settings.data.model_copy(update={"train": None, "blend": blend})
    found = problems_of_a_beginning(settings.model_copy(update={"data": data}), ())
    assert not any("which are one file" in each.message for each in found)


def test_gpus_that_are_too_few_are_told_by_who_starts_the_ranks(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be one of many machines."""
    monkeypatch.setattr(file_checks, "count_gpus", lambda: 1)
    keys = ["train.device=cuda", "parallel.dp=2"]
    (wrong,) = told(corpus, tmp_path, *keys)
    assert (
        "this machine has 1 CUDA GPU for" in wrong and told(corpus, tmp_path, *keys, uncertain=("parallel.dp",)) == []
    )
    monkeypatch.setattr(launch, "is_rank", lambda: True)
    assert told(corpus, tmp_path, *keys) == []


def test_a_sweeps_score_is_of_a_file_that_has_a_validation_sample(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Files that share the last part of their names keep their whole names, whichever of them has samples."""
    small = tiny.make(tmp_path / "small", num_documents=1)
    blend = {str(corpus.prefix): 1.0, str(small.prefix): 1.0}
    base = tiny.config(corpus, tmp_path)
    data = base.data.model_copy(update={"train": None, "tokenizer": None, "blend": blend})
    mixed = base.model_copy(update={"data": data})
    opened = open_corpus(mixed)
    assert opened.set_names == {prefix: prefix for prefix in blend}
    assert [part.file.prefix for part in opened.datasets.validation.parts] == [str(corpus.prefix)]  # type: ignore[union-attr]
    of_small = f"loss/{small.prefix}"
    for score, uncertain in (("loss", ()), (f"loss/{corpus.prefix}", ()), (of_small, ("data.split",))):
        assert problems_of_a_score(score, mixed, uncertain) == []
    (problem,) = problems_of_a_score(of_small, mixed, ())
    assert problem.message == (
        f'sweep.score = "{of_small}", and data.split = "5:1" leaves no document of {small.prefix}, or too little text, '
        "for a validation sample. Give validation a larger share, or name another score."
    )
    gone = {str(tmp_path / "gone"): 1.0, **blend}
    lost = mixed.model_copy(update={"data": data.model_copy(update={"blend": gone})})
    assert problems_of_a_score("loss/gone", lost, ()) == [], "which is told for itself"
