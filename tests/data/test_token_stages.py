"""Token files of a cleaning run: which tasks' documents are in which, and what is said of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from colonnade.corpus.step import Setting
from colonnade.data import token_stages
from colonnade.data.indexed import TokenFile
from colonnade.data.sidecar import read_sidecar
from colonnade.data.token_stages import JoinTokens, ListTokens, MakeTokens, end_begun, num_joins, segment_path
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.wordpiece import train_wordpiece
from colonnade.errors import DataError

PARTS = ("train", "test")


@pytest.fixture
def cleaned(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """The folder of a run of five tasks, each with a document to train on, and the last with one to test on."""
    tokenizer.save(tmp_path / "tokenizer.json")
    for part, tasks in (("train", range(5)), ("test", range(4, 5))):
        (tmp_path / part).mkdir()
        for task in tasks:
            line = json.dumps({"text": f"Été {part} {task}", "id": "a" * 100}, ensure_ascii=False)
            (tmp_path / part / f"{task:05d}.jsonl").write_text(line + "\n", encoding="utf-8")
    return tmp_path


def make(folder: Path, tokenizer: Tokenizer, end: int | None, tasks: Sequence[int] = range(5)) -> None:
    path, setting = str(folder / "tokenizer.json"), Setting(folder, 5)
    making = MakeTokens("tokens", path, PARTS, setting, sha256=tokenizer.sha256, end=end)
    for task in tasks:
        assert list(making.run(rank=task, world_size=5)) == []


def join(folder: Path, tokenizer: Tokenizer, end: int | None) -> None:
    path, setting, num_files = str(folder / "tokenizer.json"), Setting(folder, 5), num_joins(5)
    joining = JoinTokens("join", path, PARTS, setting, sha256=tokenizer.sha256, end=end, num_tasks=5)
    for each in range(num_files):
        assert list(joining.run(rank=each, world_size=num_files)) == []
    assert list(ListTokens(num_files, setting).run()) == []


def texts(folder: Path, name: str, tokenizer: Tokenizer) -> list[str]:
    file = TokenFile(folder / "tokens" / name)
    return [tokenizer.decode(file.document(number).tolist()) for number in range(file.num_documents)]


def test_beyond_so_many_tasks_a_part_has_several_files_of_the_tasks_in_order(
    cleaned: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stages, "JOINED", 2)
    make(cleaned, tokenizer, tokenizer.end_of_document)
    left = segment_path(cleaned, "train", 5)  # by a run of more tasks
    shutil.copy(segment_path(cleaned, "train", 0), left)
    join(cleaned, tokenizer, tokenizer.end_of_document)
    tasks = {"train-00000": (0, 1), "train-00001": (2, 3), "train-00002": (4,), "test-00002": (4,)}
    listed = json.loads((cleaned / "tokens" / "tokens.json").read_bytes())
    assert list(listed) == sorted(tasks)
    for name, each in tasks.items():
        part = name.partition("-")[0]
        expected = [f"Été {part} {task}" for task in each]
        assert texts(cleaned, name, tokenizer) == expected
        file = TokenFile(cleaned / "tokens" / name)
        assert listed[name] == {"documents": len(each), "tokens": file.num_tokens, "dtype": "uint16"}
        sidecar = read_sidecar(file)
        assert sidecar is not None and sidecar.sentences is False
        assert sidecar.sources == tuple(str(cleaned / part / f"{task:05d}.jsonl") for task in each)
        assert sidecar.text_bytes == sum(len(text.encode()) for text in expected)
    assert not (cleaned / "state" / "tokens").exists()


def test_up_to_so_many_tasks_a_part_has_one_file_of_its_name(cleaned: Path, tokenizer: Tokenizer) -> None:
    make(cleaned, tokenizer, tokenizer.end_of_document)
    join(cleaned, tokenizer, tokenizer.end_of_document)
    assert texts(cleaned, "train", tokenizer) == [f"Été train {task}" for task in range(5)]
    assert sorted(path.name for path in (cleaned / "tokens").glob("*.idx")) == ["test.idx", "train.idx"]


def test_a_part_whose_documents_have_no_token_gets_no_file(cleaned: Path) -> None:
    (cleaned / "test" / "00004.jsonl").write_text(json.dumps({"text": "\u200b"}))
    tokenizer = Tokenizer(train_wordpiece(lambda: ["été train 0123456789"], 60))
    tokenizer.save(cleaned / "tokenizer.json")
    make(cleaned, tokenizer, None)
    join(cleaned, tokenizer, None)
    assert list(json.loads((cleaned / "tokens" / "tokens.json").read_bytes())) == ["train"]
    assert sorted(path.name for path in (cleaned / "tokens").iterdir()) == [
        "tokens.json",
        "train.bin",
        "train.idx",
        "train.json",
    ]


@pytest.mark.parametrize(("tasks", "files"), [(1, 1), (1_023, 1), (1_024, 1), (1_025, 2), (2_048, 2)])
def test_as_many_files_as_it_takes(tasks: int, files: int) -> None:
    assert num_joins(tasks) == files


def test_files_are_not_joined_with_another_tokenizer_than_their_tokens_were_made_with(
    cleaned: Path, tokenizer: Tokenizer
) -> None:
    make(cleaned, tokenizer, tokenizer.end_of_document)
    train_bpe(["other words"] * 9, 300).save(cleaned / "tokenizer.json")
    with pytest.raises(DataError, match="has changed since the run was started"):
        join(cleaned, tokenizer, tokenizer.end_of_document)


def test_token_files_that_were_begun_with_another_end_of_document_have_that_one(
    cleaned: Path, tokenizer: Tokenizer
) -> None:
    """As the version took it that began them."""
    assert end_begun(tokenizer, cleaned, PARTS) == tokenizer.end_of_document
    make(cleaned, tokenizer, 0, range(3))
    end = end_begun(tokenizer, cleaned, PARTS)
    make(cleaned, tokenizer, end, range(3, 5))
    assert end_begun(tokenizer, cleaned, PARTS) == end == 0
    join(cleaned, tokenizer, end)
    for name, documents in (("train", 5), ("test", 1)):
        file = TokenFile(cleaned / "tokens" / name)
        sidecar = read_sidecar(file)
        assert sidecar is not None and sidecar.end_of_document == 0
        assert [file.document(number)[-1] for number in range(file.num_documents)] == [0] * documents


def test_segments_that_end_documents_in_two_ways_are_not_joined(cleaned: Path, tokenizer: Tokenizer) -> None:
    make(cleaned, tokenizer, 0, range(3))
    make(cleaned, tokenizer, 1, range(3, 5))
    with pytest.raises(DataError, match=r"00003\.segment ends documents with token 1, and others with 0: ") as told:
        join(cleaned, tokenizer, 0)
    assert "named tokens or join in " in str(told.value), "else files that were joined before are taken for done"


def test_a_task_that_kept_no_document_of_a_part_leaves_those_of_the_others(cleaned: Path, tokenizer: Tokenizer) -> None:
    (cleaned / "train" / "00002.jsonl").write_text("")
    make(cleaned, tokenizer, tokenizer.end_of_document)
    join(cleaned, tokenizer, tokenizer.end_of_document)
    assert texts(cleaned, "train", tokenizer) == [f"Été train {task}" for task in (0, 1, 3, 4)]


def test_a_list_that_was_killed_before_it_was_marked_as_done_is_made_again(cleaned: Path, tokenizer: Tokenizer) -> None:
    make(cleaned, tokenizer, tokenizer.end_of_document)
    join(cleaned, tokenizer, tokenizer.end_of_document)
    listed = (cleaned / "tokens" / "tokens.json").read_bytes()
    left = segment_path(cleaned, "train", 0)
    left.parent.mkdir(parents=True)
    left.touch()
    assert list(ListTokens(1, Setting(cleaned, 5)).run()) == []
    assert (cleaned / "tokens" / "tokens.json").read_bytes() == listed
    assert not (cleaned / "state" / "tokens").exists()
