"""Encoding by remembered words gives the library's own ids, for any text."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import word_cache
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.word_cache import DocumentEncoder

UINT16 = np.dtype("<u2")
# Characters around which the classes of GPT-2's pattern turn, more often than chance would have them.
tricky = st.sampled_from(
    list(
        "'stmdrevl S1²½Ⅷé ÀдЯ中あ\n\t\r\x0b\x1c\x1f\x85\xa0\u180e\u200a\u200b\u2028\u3000—’“_-!́👍🏽\U0001e900\U00020000"
    )
)
texts = st.text(st.one_of(tricky, st.characters(exclude_categories=["Cs"])), max_size=50)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> DocumentEncoder:
    return DocumentEncoder(tokenizer, UINT16)


def ids(encoder: DocumentEncoder, text: str) -> list[int]:
    return [int(token) for token in np.frombuffer(encoder.encode(text), UINT16)]


@given(texts)
def test_the_same_ids_as_the_library(tokenizer: Tokenizer, encoder: DocumentEncoder, text: str) -> None:
    assert ids(encoder, text) == tokenizer.encode(text)


@pytest.mark.parametrize("separator", list("\x1c\x1d\x1e\x1f"), ids=ascii)
def test_spaces_before_a_separator_that_python_takes_for_one(separator: str) -> None:
    """With a tokenizer that has tokens of several spaces, the ids show where a run of them is cut."""
    indented = train_bpe(["a    b" * 20], 270)
    assert len(indented.encode("   ")) < 3
    text = f"a   {separator}b"
    assert ids(DocumentEncoder(indented, UINT16), text) == indented.encode(text)


SPACES = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace() and not 0x1C <= code <= 0x1F]


@pytest.mark.parametrize("space", SPACES, ids=ascii)
def test_every_space_of_unicode_is_one(space: str) -> None:
    """With a tokenizer that has tokens of several of them, the ids show where a run of them is cut."""
    spaced = train_bpe([f"a {space} {space}\n" * 20], 270)
    encoder = DocumentEncoder(spaced, UINT16)
    assert len(spaced.encode(f" {space}")) < len(f" {space}".encode()) and not encoder._unknown.search(space)
    for text in (f"a {space}b", f"a{space} b", f"{space}{space} {space}1", f"a {space}"):
        assert ids(encoder, text) == spaced.encode(text)


@pytest.mark.parametrize("ending", ["s", "t", "m", "d", "re", "ve", "ll"])
def test_endings_behind_an_apostrophe_are_words(ending: str) -> None:
    """With a tokenizer that has a token for each, the ids show that they are cut off as words."""
    contracting = train_bpe([f"she'{ending} he'{ending}" * 20], 262)
    text = f"they'{ending} x'{ending}y"
    found = ids(DocumentEncoder(contracting, UINT16), text)
    assert found == contracting.encode(text) and len(contracting.encode(f"'{ending}")) == 1


@pytest.mark.slow
def test_every_character_by_itself_and_among_others(tokenizer: Tokenizer, encoder: DocumentEncoder) -> None:
    """Each character after a letter, a digit, a sign and a space: one character of another class would show."""
    codes = [*range(0x3100), *range(0x3100, 0xD800, 97), *range(0xE000, sys.maxunicode + 1, 97)]
    known = [chr(code) for code in codes if code < 128 or not encoder._unknown.search(chr(code))]
    assert len(known) > 10_000
    texts = [
        "".join(f"a{c}1{c}!{c} {c}{c}\n" for c in known[start : start + 500]) for start in range(0, len(known), 500)
    ]
    assert [ids(encoder, text) for text in texts] == tokenizer.encode_batch(texts)


def test_stories(tokenizer: Tokenizer, encoder: DocumentEncoder, stories: list[str]) -> None:
    for story in stories[-3:]:
        assert ids(encoder, story) == tokenizer.encode(story)


def test_gpt2_on_web_text(gpt2: Tokenizer, megatron: Path) -> None:
    with lzma.open(megatron / "openwebtext_1000.decoded.jsonl.xz", "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines][:200]
    encoder = DocumentEncoder(gpt2, UINT16)
    assert [ids(encoder, document) for document in documents] == gpt2.encode_batch(documents)


@pytest.mark.parametrize("kind", ["blank in front", "composed", "added token"])
def test_other_kinds_of_tokenizers_take_the_librarys_way(tokenizer: Tokenizer, kind: str) -> None:
    content = json.loads(tokenizer.to_json())
    if kind == "blank in front":
        content["pre_tokenizer"]["add_prefix_space"] = True
    elif kind == "composed":
        content["normalizer"] = {"type": "NFC"}
    else:
        flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": 600, "content": "<keep>", **flags})
    other = Tokenizer.from_json(json.dumps(content))
    assert tokenizer.is_gpt2_split and not other.is_gpt2_split
    texts = ("Hello world", " Hello", "…and — so\n\non", "e\u0301", "so <keep> on")
    assert [text for text in texts if other.encode(text) != tokenizer.encode(text)], "another kind"
    for text in texts:
        assert ids(DocumentEncoder(other, UINT16), text) == other.encode(text)


def test_the_memory_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_WORDS", 10)
    encoder = DocumentEncoder(tokenizer, UINT16)
    for start in range(50):
        text = " ".join(f"word{chr(97 + start % 26)}{letter}" for letter in "abcdef") + "z" * 1_000
        assert ids(encoder, text) == tokenizer.encode(text)
        assert encoder._words is not None
        assert len(encoder._words) < 30
        assert all(len(word) <= 64 for word in encoder._words)


def test_int32(tokenizer: Tokenizer) -> None:
    encoder = DocumentEncoder(tokenizer, np.dtype("<i4"))
    assert np.frombuffer(encoder.encode("Watson"), "<i4").tolist() == tokenizer.encode("Watson")
