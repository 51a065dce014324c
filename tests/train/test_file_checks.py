"""What is wrong with files that a configuration names, as it is told before ranks start."""

from pathlib import Path

import pytest

from colonnade.config.load import load
from colonnade.train.file_checks import problems_of_a_beginning, problems_of_files, problems_of_the_folder
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


def test_a_run_folder_may_not_be_there_and_has_to_be_one(corpus: TinyCorpus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, wrong in (("a/b/c", ""), ("file/run", "Not a directory"), ("link", "Not a directory"), ("", "")):
        config = tiny.config(corpus, tmp_path, f"run.folder={tmp_path / name}")
        found = [each.message for each in problems_of_the_folder(config, ())]
        assert len(found) == bool(wrong) and all(wrong in each for each in found), found
        assert problems_of_the_folder(config, {"run.folder"}) == []
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] in "afl") == ["file", "link"], "none is made"


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
