"""Documents to a token file: the right tokens whatever the workers, and nothing lost or half-written."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from colonnade.data import bundle
from colonnade.data.indexed import TokenFile, bin_path, idx_path
from colonnade.data.inspect import inspect
from colonnade.data.sidecar import read_sidecar, sidecar_path
from colonnade.data.tokenize import rejected_path, tokenize_files, train_tokenizer
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError


def jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_document_is_there_with_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["One.", "Two: é — 👀", "", "three <|endoftext|> three"]
    report = tokenize_files(
        [jsonl(tmp_path / "a.jsonl", *texts), tmp_path / "a.jsonl"], tmp_path / "out" / "a", tokenizer, progress=False
    )
    file = TokenFile(tmp_path / "out" / "a")
    kept = [text for text in texts if text] * 2
    assert [tokenizer.decode(file.document(index).tolist()) for index in range(file.num_documents)] == kept
    assert all(file.document(index)[-1] == tokenizer.end_of_document for index in range(6))
    assert (report.documents, report.empty, report.rejected, report.dtype) == (6, 2, 0, "uint16")
    assert report.tokens == file.num_tokens
    assert report.text_bytes == len("".join(kept).encode())
    assert files(tmp_path / "out") == {"a.bin", "a.idx", "a.json"}


def test_without_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer, append_end=False, progress=False)
    file = TokenFile(tmp_path / "a")
    assert file.document(0).tolist() == tokenizer.encode("One.")
    sidecar = read_sidecar(file)
    assert sidecar is not None
    assert sidecar.end_of_document is None


def test_the_same_bytes_from_any_number_of_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "b.txt").write_text("a text\n\nof its own\n")
    inputs = [bundle.books(), tmp_path / "b.txt"]
    for workers in (1, 2):
        report = tokenize_files(inputs, tmp_path / f"{workers}", tokenizer, workers=workers, progress=False)
        assert report.documents == 38
    for path in (bin_path, idx_path, sidecar_path):
        assert path(tmp_path / "1").read_bytes() == path(tmp_path / "2").read_bytes()


def test_the_sidecar_and_inspect(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", "One.", "Two.")
    tokenize_files([source], tmp_path / "a", tokenizer, progress=False)
    found = inspect(tmp_path / "a")
    assert json.loads(json.dumps(found)) == found
    assert found == {
        "prefix": str(tmp_path / "a"),
        "documents": 2,
        "sequences": 2,
        "tokens": TokenFile(tmp_path / "a").num_tokens,
        "dtype": "uint16",
        "bytes": bin_path(tmp_path / "a").stat().st_size,
        "index_bytes": idx_path(tmp_path / "a").stat().st_size,
        "files": [str(tmp_path / "a.bin"), str(tmp_path / "a.idx")],
        "mean_document_length": found["tokens"] / 2,
        "vocab_size": 600,
        "end_of_document": 599,
        "tokenizer_sha256": tokenizer.sha256,
        "text_bytes": 8,
        "bytes_per_token": 8 / found["tokens"],
        "sources": [str(source)],
    }
    sidecar_path(tmp_path / "a").unlink()
    assert inspect(tmp_path / "a")["vocab_size"] is None


def test_bad_lines_are_counted_listed_and_the_rest_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\nnot json\n' + b"{}\n" * 20 + b'{"text": "also good"}\n')
    report = tokenize_files([file], tmp_path / "a", tokenizer, progress=False)
    assert (report.documents, report.rejected, len(report.examples)) == (2, 22, 10)
    listed = [json.loads(line) for line in rejected_path(tmp_path / "a").read_text().splitlines()]
    assert [one["line"] for one in listed] == list(range(2, 24))
    assert listed[1] == {"file": str(file), "line": 3, "reason": "not JSON (Expecting value at column 1)"}
    summary = report.summary()
    assert "22 lines were no documents and were left out" in summary
    assert f"{file}, line 2: not UTF-8" in summary
    tokenize_files([jsonl(file, "all good")], tmp_path / "a", tokenizer, overwrite=True, progress=False)
    assert not rejected_path(tmp_path / "a").exists()


def test_large_vocabularies_take_int32(tmp_path: Path, tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.to_json())
    end = content["added_tokens"][0]
    content["added_tokens"] = [{**end, "id": 70_000}]
    content["model"]["vocab"].pop("<|endoftext|>", None)
    content["model"]["vocab"]["<|endoftext|>"] = 70_000
    large = Tokenizer.from_json(json.dumps(content))
    assert (large.vocab_size, large.end_of_document) == (70_001, 70_000)
    tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", large, progress=False)
    file = TokenFile(tmp_path / "a")
    assert (file.dtype, file.document(0)[-1]) == (np.dtype("int32"), 70_000)


def test_nothing_to_tokenize(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"1 lines rejected, 1 empty documents. The first: .*line 1: no key 'text'"):
        tokenize_files([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, progress=False)
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError, match="0 lines rejected, 1 empty"):
        tokenize_files([tmp_path / "b.txt"], tmp_path / "out", tokenizer, progress=False)
    assert files(tmp_path) == {"a.jsonl", "b.txt"}


def test_what_exists_is_kept_unless_it_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", "One.")
    tokenize_files([source], tmp_path / "a", tokenizer, progress=False)
    before = bin_path(tmp_path / "a").read_bytes()
    with pytest.raises(DataError, match=r"exist already\. Choose another output, or pass --overwrite"):
        tokenize_files([jsonl(source, "Two.")], tmp_path / "a", tokenizer, progress=False)
    assert bin_path(tmp_path / "a").read_bytes() == before
    tokenize_files([source], tmp_path / "a", tokenizer, overwrite=True, progress=False)
    assert bin_path(tmp_path / "a").read_bytes() != before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cut_input_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer, workers: int) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d good"}\n{"bad\n' % number for number in range(100_000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read to its end"):
        tokenize_files([tmp_path / "a.jsonl.gz"], tmp_path / "a", tokenizer, workers=workers, progress=False)
    assert files(tmp_path) == {"a.jsonl.gz"}


def test_a_full_disk_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    source = jsonl(tmp_path / "a.jsonl", "One.")
    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device.* Free some space"):
        tokenize_files([source], tmp_path / "a", tokenizer, progress=False)
    assert files(tmp_path) == {"a.jsonl"}


def test_a_tokenizer_without_an_end_of_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.to_json())
    content["added_tokens"].clear()
    content["model"]["vocab"].pop("<|endoftext|>", None)
    endless = Tokenizer.from_json(json.dumps(content))
    with pytest.raises(DataError, match="no end-of-document token"):
        tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", endless, progress=False)


def test_no_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="workers = 0"):
        tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer, workers=0, progress=False)


def test_the_progress_bar_goes_to_standard_error(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer)
    assert capsys.readouterr().out == ""


def test_training_a_tokenizer_on_files(tmp_path: Path) -> None:
    made = train_tokenizer([bundle.books()], tmp_path / "made" / "tokenizer.json", 400, progress=False)
    assert made.vocab_size == 400
    assert Tokenizer.load(tmp_path / "made").sha256 == made.sha256
    with pytest.raises(DataError, match="exists"):
        train_tokenizer([bundle.books()], tmp_path / "made" / "tokenizer.json", 400, progress=False)
    with pytest.raises(DataError, match="no document with the key 'body'"):
        train_tokenizer([bundle.books()], tmp_path / "none.json", 400, key="body", progress=False)
    assert not (tmp_path / "none.json").exists()
