"""The commands that make token files: sentences, and shards joined."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colonnade.data.indexed import TokenFile
from colonnade.data.tokenizer import Tokenizer
from colonnade.storage import as_given
from tests.commands import here


@pytest.fixture
def shards(tmp_path: Path, tokenizer: Tokenizer) -> list[str]:
    """Token files of two and of one document, with a sequence a sentence."""
    tokenizer.save(tmp_path / "tokenizer.json")
    prefixes = []
    for name, lines in (("a", ["One. Two.", "Three."]), ("b", ["Four. Five. Six."])):
        text = tmp_path / f"{name}.jsonl"
        text.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        prefixes.append(str(tmp_path / name))
        answer = here(
            "data",
            "tokenize",
            text,
            "--output",
            prefixes[-1],
            "--tokenizer",
            tmp_path / "tokenizer.json",
            "--sentences",
        )
        assert answer.status == 0, answer
    return prefixes


def test_shards_are_joined_with_their_sentences(shards: list[str], tmp_path: Path) -> None:
    answer = here("data", "merge", *shards, "--output", tmp_path / "all")
    assert answer.status == 0, answer
    assert "all: 3 documents" in answer.out
    whole, parts = TokenFile(tmp_path / "all"), [TokenFile(prefix) for prefix in shards]
    assert whole.boundaries.tolist() == [0, 2, 3, 6]
    assert whole.read(0, whole.num_tokens).tolist() == [
        token for part in parts for token in part.read(0, part.num_tokens).tolist()
    ]


@pytest.mark.parametrize(
    ("options", "ends"),
    [([], True), (["--no-append-end"], False), (["--sentences"], False), (["--sentences", "--append-end"], True)],
)
def test_ends_of_documents_are_put_as_asked(
    options: list[str], ends: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "One. Two."}\n')
    files = ["--tokenizer", tmp_path / "tokenizer.json", "--output", tmp_path / "a", "--workers", 1]
    answer = here("data", "tokenize", tmp_path / "a.jsonl", *files, *options)
    assert answer.status == 0, answer
    assert (tokenizer.end_of_document in TokenFile(tmp_path / "a").document(0).tolist()) is ends


def test_joining_says_that_the_tokenizer_is_not_known(shards: list[str], tmp_path: Path) -> None:
    assert "Note" not in here("data", "merge", *shards, "--output", tmp_path / "known").out
    Path(f"{shards[0]}.json").unlink()
    answer = here("data", "merge", *shards, "--output", tmp_path / "all")
    assert answer.status == 0 and f"because {shards[0]} has none" in answer.out
    assert not (tmp_path / "all.json").exists()


def test_a_prefix_with_an_ending_is_refused(shards: list[str], tmp_path: Path) -> None:
    tokenizer = Path(shards[0]).with_name("tokenizer.json")
    answers = [
        here("data", "merge", *shards, "--output", tmp_path / "new.bin"),
        here(
            "data",
            "tokenize",
            tokenizer.with_name("a.jsonl"),
            "--tokenizer",
            tokenizer,
            "--output",
            tmp_path / "new.bin",
        ),
    ]
    for answer in answers:
        assert answer.status == 2 and f"Write --output {tmp_path}/new." in answer.err, answer
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("output", ["", "mine/"])
def test_an_output_without_a_name_is_refused(
    output: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "One. Two."}\n')
    monkeypatch.chdir(tmp_path)
    answer = here("data", "tokenize", "a.jsonl", "--tokenizer", "tokenizer.json", "--output", output)
    assert answer.status == 2 and f'--output "{output}"' in answer.err and "no name stands there" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer.json"]


def test_numbers_of_a_file_are_rounded_for_people(shards: list[str]) -> None:
    words = here("data", "inspect", shards[0]).out
    told = dict(line.split(None, 1) for line in words.replace("mean document length", "mean").splitlines())
    assert len(told["mean"].partition(".")[2]) == 2 and "[" not in words and "'" not in words


def test_names_that_are_not_utf8_are_told_as_a_terminal_takes_them(shards: list[str], tmp_path: Path) -> None:
    output = str(tmp_path / os.fsdecode(b"caf\xe9"))
    (tmp_path / "made.tsv").write_text("sentence\tlabel\nOne.\t1\nTwo.\tnone\n")
    Path(f"{output}.txt").write_text("One two three four five six seven eight nine.")
    made = ["--tokenizer", tmp_path / "tokenizer.json", "--output", output, "--overwrite"]
    for words in (
        ["merge", *shards, "--output", output],
        ["inspect", output],
        ["examples", "sst2", tmp_path / "made.tsv", *made],
        ["overlap", tmp_path / "a.jsonl", f"{output}.txt", "--workers", 1],
    ):
        answer = here("data", *words)
        assert answer.status == 0 and "caf\ufffd" in answer.out, answer
        answer.out.encode()


def test_joining_replaces_a_file_with_its_list_of_rejected_lines(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "One."}\nnot json\n')
    options = ["--output", tmp_path / "all", "--tokenizer", tmp_path / "tokenizer.json"]
    assert here("data", "tokenize", tmp_path / "bad.jsonl", *options).status == 0
    assert sorted(path.name for path in tmp_path.glob("all.*")) == [
        "all.bin",
        "all.idx",
        "all.json",
        "all.rejected.jsonl",
    ]
    assert here("data", "merge", *shards, "--output", tmp_path / "all", "--overwrite").status == 0
    assert sorted(path.name for path in tmp_path.glob("all.*")) == ["all.bin", "all.idx", "all.json"]


def test_joining_leaves_what_exists(shards: list[str]) -> None:
    answer = here("data", "merge", shards[0], "--output", shards[1])
    assert answer.status == 2
    assert "exist already. Choose another output, or pass --overwrite." in answer.err


@pytest.mark.parametrize("command", ["tokenize", "train-tokenizer", "overlap"])
def test_a_key_without_a_name_is_told(command: str, tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "One. Two."}\n')
    more = {
        "tokenize": ["--output", tmp_path / "a", "--tokenizer", tmp_path / "tokenizer.json"],
        "train-tokenizer": ["--output", tmp_path / "t.json", "--vocab-size", 300],
        "overlap": [text],
    }
    answer = here("data", command, text, *more[command], "--key", "")
    assert answer.status == 2 and answer.err.startswith("colonnade: --key is empty."), answer


def test_a_corpus_that_is_not_there_is_told(tmp_path: Path) -> None:
    exam = tmp_path / "exam.txt"
    exam.write_text("one two three four five six seven eight nine\n")
    answer = here("data", "overlap", tmp_path / "corpus", exam)
    assert answer.status == 2 and "/corpus does not exist. Name text files, a folder" in answer.err, answer
    os.mkfifo(tmp_path / "fifo.jsonl")
    answer = here("data", "overlap", tmp_path / "fifo.jsonl", exam)
    assert answer.status == 2 and "/fifo.jsonl is neither a file nor a folder. Name text files" in answer.err, answer


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["overlap", "URL", "exam.txt"], "URL does not exist."),
        (["overlap", "exam.txt", "URL"], "URL does not exist."),
        (
            ["examples", "chat", "URL", "--output", "chat", "--tokenizer", "tokenizer.json", "--template", "plain"],
            "URL does not exist.",
        ),
        (
            ["tokenize", "exam.txt", "--output", "exam", "--tokenizer", "URL"],
            "URL is no tokenizer: there is no such file, and no tokenizer.json, encoder.json with vocab.bpe, "
            "vocab.json with merges.txt, vocab.txt or one *.model in it.",
        ),
        (["inspect", "URL"], "there is no URL.bin and no URL.idx."),
        (["merge", "URL", "--output", "joined"], "there is no URL.bin and no URL.idx."),
        (["train-tokenizer", "URL", "--output", "t.json"], "URL does not exist."),
    ],
)
def test_a_url_where_files_are_asked_for_is_told_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, command: list[str], named: str
) -> None:
    """A path has one slash where a URL has two."""
    monkeypatch.chdir(tmp_path)
    Path("exam.txt").write_text("one two three four five six seven eight nine\n")
    tokenizer.save("tokenizer.json")
    answer = here("data", *(each.replace("URL", "https://me:secret@host/corpus") for each in command))
    hidden = named.replace("URL", "https://…@host/corpus")
    assert answer.status == 2 and f"{hidden} It is a URL, and what is named has to be on this machine" in answer.err
    assert "secret" not in answer.err


def test_a_url_of_a_file_has_three_slashes() -> None:
    for url in (
        "file:///mnt/corpus",
        "FILE:///mnt/corpus",
        "local:///mnt/corpus",
        "memory://corpus",
        "s3://bucket/corpus",
        "hf://datasets/corpus",
    ):
        assert as_given(url) == as_given(Path(url)) == url
    assert as_given(Path("corpus/a:b")) == "corpus/a:b"
