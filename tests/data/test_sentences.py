"""Sentences: where they end and where they do not, and token files that keep them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import tokenize
from colonnade.data.indexed import TokenFile
from colonnade.data.sentences import split_sentences
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Holmes met Dr. J. Watson. They spoke.", ["Mr. Holmes met Dr. J. Watson.", "They spoke."]),
        ("It is 3.50, e.g. in the U.S. today. Yes.", ["It is 3.50, e.g. in the U.S. today.", "Yes."]),
        ('"Come!" he said. "Now."', ['"Come!" he said.', '"Now."']),
        ('He asked "Why?" She left.', ['He asked "Why?"', "She left."]),
        ("Wait… What?! (Really.) Yes", ["Wait…", "What?!", "(Really.)", "Yes"]),
        ("A title\n\nThe text goes\non. And on.", ["A title", "The text goes\non.", "And on."]),
        ("CHAPTER I\r\n\r\nIt was late", ["CHAPTER I", "It was late"]),
        ("A title\n \t\nThe text", ["A title", "The text"]),
        ("It took approx. Ten days. Then 3 came. 4 left.", ["It took approx. Ten days.", "Then 3 came.", "4 left."]),
        ("In the U.S.A. Today is late. He came.", ["In the U.S.A. Today is late.", "He came."]),
        ("So did I. Then we left.", ["So did I.", "Then we left."]),
        ("今日は。元気？はい！「そう。」うん", ["今日は。", "元気？", "はい！", "「そう。」", "うん"]),
        ("Été. Élan vital. über alles", ["Été.", "Élan vital. über alles"]),
        ("He said “Stop.” (“no one did”) Then. ('So') ", ["He said “Stop.” (“no one did”) Then.", "('So')"]),
        ("The end of it." + 80 * " " + "and not. So", ["The end of it." + 80 * " " + "and not.", "So"]),
        ("  \n ", []),
        ("", []),
    ],
)  # fmt: skip
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.text(st.sampled_from("ab A.B!? \n\"'。Mr"), max_size=60))
def test_nothing_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


def test_a_long_text_takes_time_in_proportion() -> None:
    assert len(split_sentences("Word " * 200_000 + ". " + "a. B. " * 20_000)) >= 1
    contents = "Contents " + "." * 300_000 + "9"
    assert split_sentences(contents) == [contents]


@pytest.mark.parametrize("segment_bytes", [tokenize.SEGMENT_BYTES, 1])
def test_a_token_file_of_sentences(
    segment_bytes: int, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SEGMENT_BYTES", segment_bytes)
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "One two. Three four! Five."}\n{"text": "Alone"}\n{"text": " "}\n')
    report = tokenize_files([text], tmp_path / "out", tokenizer, workers=1, sentences=True, progress=False)
    file = TokenFile(tmp_path / "out")
    assert (file.num_documents, report.documents, file.num_sequences, report.empty) == (2, 2, 4, 1)
    assert file.boundaries.tolist() == [0, 3, 4]
    starts = file.sequence_starts(0, file.num_tokens).tolist()
    words = [tokenizer.decode(file.read(a, b - a)) for a, b in zip(starts, [*starts[1:], file.num_tokens], strict=True)]
    assert words == ["One two.", "Three four!", "Five.", "Alone"]
    tokens = file.read(0, file.num_tokens)
    ends = (np.flatnonzero(tokens == tokenizer.end_of_document) + 1).tolist()
    assert ends == [starts[3], file.num_tokens], "behind each document, not behind each sentence"
