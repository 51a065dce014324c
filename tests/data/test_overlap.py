"""How much of an evaluation set a corpus has: of several files, of which some lines are no documents."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from colonnade.corpus.recipe import ReadStep
from colonnade.data.indexed import HEADER, TokenFile, idx_path
from colonnade.data.overlap import overlap
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import train_bpe
from colonnade.errors import DataError
from tests.data.sidecars import write_sidecar

EXAM = "one two three four five six seven eight nine ten"
OTHER = "of a corpus that has no words in a row like those"


def lines(path: Path, *texts: str, key: str = "text") -> Path:
    """A file of documents; what begins with a brace stands there as it is."""
    rows = [text if text.startswith("{") else json.dumps({key: text}) for text in texts]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def test_documents_and_lines_of_all_files_are_counted(tmp_path: Path) -> None:
    exam = lines(tmp_path / "exam.jsonl", EXAM, " ".join(reversed(EXAM.split())))
    first = lines(tmp_path / "a.jsonl", EXAM, OTHER, "{", '{"no": 1}')
    second = lines(tmp_path / "b.jsonl", EXAM, EXAM, "{")
    found = overlap([first, second], exam, ngram=8)
    assert (found.documents, found.documents_touched, found.rejected) == (4, 3, 3)
    assert "(3; in 1 of 2 passages, from 3 of 4 documents); 3 lines of the corpus are no documents" in found.summary()
    assert found.as_json()["share"] == 0.5


def test_no_document_is_too_long_to_compare(tmp_path: Path) -> None:
    """As for tokenizing, which reads texts that cleaning rejects unless it is told otherwise."""
    (tmp_path / "corpus.txt").write_text(EXAM + " " * ReadStep(paths=["in"]).max_bytes)
    found = overlap([tmp_path / "corpus.txt"], lines(tmp_path / "exam.jsonl", EXAM))
    assert (found.documents, found.rejected, found.share) == (1, 0, 1.0)


def test_files_whose_names_are_not_utf8_are_compared(tmp_path: Path) -> None:
    corpus = lines(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), EXAM)
    assert overlap([corpus], lines(tmp_path / "exam.jsonl", EXAM)).share == 1.0


def test_records_of_any_kind_of_file_are_compared(tmp_path: Path) -> None:
    head = f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: <urn:1>\r\nContent-Length: {len(EXAM)}\r\n\r\n"
    (tmp_path / "corpus.warc").write_text(f"{head}{EXAM}\r\n\r\n")
    assert overlap([tmp_path / "corpus.warc"], lines(tmp_path / "exam.jsonl", EXAM)).share == 1.0


def test_the_text_is_that_of_the_key_in_both(tmp_path: Path) -> None:
    exam, corpus = (lines(tmp_path / f"{name}.jsonl", EXAM, key="body") for name in ("exam", "corpus"))
    assert overlap([corpus], exam, key="body").share == 1.0


def test_the_first_line_that_is_no_document_is_told_where_there_is_none(tmp_path: Path) -> None:
    exam = lines(tmp_path / "exam.jsonl", EXAM)
    lines(tmp_path / "corpus" / "a.jsonl", '{"no": 1}', "{broken")
    lines(tmp_path / "corpus" / "b.jsonl", "{broken")
    with pytest.raises(
        DataError, match=r"no document with text to compare: 3 lines rejected\. The first: .*"
    ) as refused:
        overlap([tmp_path / "corpus"], exam)
    said = str(refused.value).partition("The first: ")[2]
    assert "a.jsonl" in said and "no key 'text'" in said and "JSON" not in said


def test_a_file_that_is_cut_short_counts_as_a_line_that_is_none(tmp_path: Path) -> None:
    exam = lines(tmp_path / "exam.jsonl", EXAM)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(exam.read_bytes() * 3_000)[:-20])
    found = overlap([tmp_path / "corpus.jsonl.gz"], exam)
    assert found.share == 1.0 and found.rejected == 1


def test_token_files_of_earlier_versions_are_read_and_damaged_ones_are_not(tmp_path: Path) -> None:
    """An earlier fingerprint left open how unusual added tokens are found."""
    tokenizer, exam = train_bpe([EXAM], 300), lines(tmp_path / "exam.jsonl", EXAM)
    tokenizer._inner.add_tokens(["<keep>"])
    tokenizer.save(tmp_path / "tokenizer.json")
    tokenize_files([lines(tmp_path / "a.jsonl", OTHER, EXAM, OTHER)], tmp_path / "a", tokenizer, progress=False)
    sidecar = read_sidecar(TokenFile(tmp_path / "a"))
    assert sidecar is not None
    write_sidecar(
        tmp_path / "a", replace(sidecar, tokenizer_sha256=tokenizer._fingerprint(unusual=False), index_sha256=None)
    )
    assert overlap([tmp_path / "a"], exam, tokenizer=tmp_path / "tokenizer.json").share == 1.0
    index = bytearray(idx_path(tmp_path / "a").read_bytes())
    index[HEADER.size + 4] ^= 1  # the length of the second document
    idx_path(tmp_path / "a").write_bytes(index)
    with pytest.raises(DataError, match=r"a\.idx is damaged: sequence 2 has"):
        overlap([tmp_path / "a"], exam, tokenizer=tmp_path / "tokenizer.json")
