"""Which files a tokenizer is."""

from pathlib import Path

import pytest

from colonnade.tokenizer_files import files_beside, find_pair


def made(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize("pair", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_a_pair_is_found_by_its_folder_and_by_each_of_its_files(tmp_path: Path, pair: tuple[str, str]) -> None:
    made(tmp_path, *pair, "other.txt")
    found = (tmp_path / pair[0], tmp_path / pair[1])
    assert [find_pair(path) for path in (tmp_path, *found)] == [found] * 3
    assert find_pair(tmp_path / "other.txt") is None
    for name in pair:
        (tmp_path / name).rename(tmp_path / f"no {name}")
        assert find_pair(tmp_path) is None, "a half is none"
        (tmp_path / f"no {name}").rename(tmp_path / name)


def test_a_pair_with_a_prefix_is_found_by_that_and_by_each_of_its_files(tmp_path: Path) -> None:
    made(tmp_path, "gpt2-vocab.json", "gpt2-merges.txt", "bert-vocab.json")
    found = (tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt")
    assert [find_pair(path) for path in (tmp_path / "gpt2", tmp_path / "gpt2-", *found)] == [found] * 4
    assert find_pair(tmp_path / "bert") is None and find_pair(tmp_path / "bert-vocab.json") is None
    assert find_pair(tmp_path) is None, "which of several is not said"


def test_a_folder_with_a_tokenizer_of_one_file_is_that(tmp_path: Path) -> None:
    made(tmp_path, "vocab.json", "merges.txt", "tokenizer.json")
    assert find_pair(tmp_path) is None
    assert find_pair(tmp_path / "vocab.json") == (tmp_path / "vocab.json", tmp_path / "merges.txt"), (
        "unless it is named"
    )


@pytest.mark.parametrize("name", ["vocab.txt", "encoder.json", "vocab.json", "spiece.model"])
def test_how_text_is_treated_lies_beside_a_folders_vocabulary(name: str) -> None:
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
    assert files_beside(Path("bert") / name) == tuple(Path("bert") / each for each in names)


@pytest.mark.parametrize("name", ["bert-vocab.txt", "gpt2-vocab.json", "tokenizer.json"])
def test_nothing_lies_beside_one_of_several_vocabularies(name: str) -> None:
    assert files_beside(Path("bert") / name) == ()
