"""Training a tokenizer on files: what of the options reaches it, and what is refused before it begins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.errors import ConfigError, DataError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = [json.dumps({"body": "some good words"}) for _ in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join([*["no JSON"] * 12, *lines]))
    return tmp_path / "text.jsonl"


def test_the_text_is_that_of_the_key_and_the_first_of_what_was_left_out_is_shown(text: Path, tmp_path: Path) -> None:
    made = train_tokenizer(iter([text]), tmp_path / "made.json", 270, key="body", progress=False)
    assert (made.documents, made.rejected, [each.line for each in made.examples]) == (20, 12, list(range(1, 11)))
    assert "left out: 12 unusable documents; the first:" in made.summary("made.json")
    assert len(made.tokenizer.encode("good words")) < len("good words"), "its pairs were merged"


def test_inputs_need_no_names_in_utf8(text: Path, tmp_path: Path) -> None:
    named = text.rename(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    made = train_tokenizer([named], tmp_path / "made.json", 270, key="body", progress=False)
    assert (made.documents, made.rejected) == (20, 12)
    made.summary("made.json").encode()


def test_what_is_left_aside_in_a_folder_is_told(text: Path) -> None:
    for name in ("a.parquet", "b.zip", "c.zip"):
        text.with_name(name).touch()
    made = train_tokenizer([text.parent], text.parent / "made.json", 270, key="body", progress=False)
    told = made.summary("made.json").splitlines()
    assert told[1] == "files of other kinds, left aside by ending: .parquet 1, .zip 2"


def test_pairs_that_are_too_rare_are_not_merged(text: Path, tmp_path: Path) -> None:
    made = train_tokenizer([text], tmp_path / "made.json", 300, key="body", min_frequency=21, progress=False)
    assert made.tokenizer.vocab_size == 257, "the bytes, and the end of documents"


def test_an_output_that_is_there_is_replaced_only_where_it_is_said(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "made.json"
    output.write_text("mine")
    with pytest.raises(DataError, match=r"exists\. Choose another output, or pass --overwrite"):
        train_tokenizer([text], output, 270, key="body", progress=False)
    assert output.read_text() == "mine"
    made = train_tokenizer([text], output, 270, key="body", overwrite=True, progress=False)
    assert Tokenizer.load(output).sha256 == made.tokenizer.sha256


def test_no_input_is_replaced(text: Path) -> None:
    before, link = text.read_bytes(), text.with_name("made.json")
    link.symlink_to(text)
    with pytest.raises(ConfigError, match=r"made\.json is among what this command is given"):
        train_tokenizer([text], link, 270, key="body", overwrite=True, progress=False)
    assert text.read_bytes() == before


@pytest.mark.parametrize("name", ["vocab.txt", "merges.txt", "spiece.model", "tokenizer"])
def test_an_output_of_a_name_that_says_another_kind_is_refused(text: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"what is written is \.json\. Use a name that ends so"):
        train_tokenizer([text], tmp_path / name, 270, key="body", progress=False)
    assert not (tmp_path / name).exists()


def test_numbers_that_no_tokenizer_can_have_are_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--sentinels -1 with --kind bpe: a BPE can have sentinels, none or more"):
        train_tokenizer([text], tmp_path / "made.json", 270, sentinels=-1, key="body", progress=False)
    with pytest.raises(DataError, match="--vocab-size 10000001: there is room for 10,000,000 tokens at most"):
        train_tokenizer([text], tmp_path / "made.json", 10_000_001, key="body", progress=False)


def test_another_key_is_advised_where_any_line_lacks_it(text: Path, tmp_path: Path) -> None:
    """The first lines may be left out for another reason."""
    with pytest.raises(DataError, match=r"Check --key \(it is 'text'\)\. Left out: 32 unusable documents; the first:"):
        train_tokenizer([text], tmp_path / "made.json", 270, progress=False)
    text.write_text("no JSON\n")
    with pytest.raises(DataError, match=r"Check the files\. Left out: 1 unusable document; the first:"):
        train_tokenizer([text], tmp_path / "made.json", 270, progress=False)


def test_what_is_read_twice_is_counted_once(text: Path, tmp_path: Path) -> None:
    """As a WordPiece vocabulary is trained. Of documents those that have text."""
    with text.open("a") as file:
        file.write('\n{"body": ""}')
    made = train_tokenizer([text], tmp_path / "made.json", 60, kind="wordpiece", key="body", progress=False)
    assert (made.documents, made.rejected, len(made.examples)) == (20, 12, 10)


def test_documents_without_text_are_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError, match="the inputs hold no text at all"):
        train_tokenizer([tmp_path / "text.jsonl"], tmp_path / "made.json", 270, progress=False)
    assert not (tmp_path / "made.json").exists()
