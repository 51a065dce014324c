"""Tokens to text as they come: whole characters, ends, and where a document starts."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import DataError
from colonnade.generation.sample import End, Generated
from colonnade.generation.stream import end_note, prompt_tokens, stream_text

TOKENIZER = train_bpe(["the cat and the hat and the bat"] * 3, 270)


def as_generated(tokens: list[int], prompt: int = 0, end: End = "length") -> list[Generated]:
    last = len(tokens) - 1
    return [Generated(prompt, token, end if i == last else None) for i, token in enumerate(tokens)]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_deltas_joined_are_the_texts(texts: list[str]) -> None:
    tokens = [TOKENIZER.encode(text) for text in texts]
    generated = [new for prompt, text in enumerate(tokens) for new in as_generated(text, prompt)]
    deltas = list(stream_text(generated, TOKENIZER))
    assert len(deltas) == len(generated), "a delta for each token"
    for prompt, text in enumerate(texts):
        assert "".join(delta.text for delta in deltas if delta.prompt == prompt) == text


def test_a_character_is_shown_when_it_is_whole() -> None:
    tokens = TOKENIZER.encode("é∞")  # 2 and 3 bytes, each a token of its own
    assert [delta.text for delta in stream_text(as_generated(tokens), TOKENIZER)] == ["", "é", "", "", "∞"]


def test_half_a_character_at_the_end_does_not_run_into_the_next_text() -> None:
    half = TOKENIZER.encode("é")[:1]
    deltas = stream_text(as_generated(half) + as_generated(TOKENIZER.encode("a"), 1), TOKENIZER)
    assert [delta.text for delta in deltas] == ["\ufffd", "a"]
    stopped = as_generated([*half, *prompt_tokens(TOKENIZER, "")], end="stop")
    deltas = stream_text(stopped + as_generated(TOKENIZER.encode("a"), 1), TOKENIZER)
    assert [delta.text for delta in deltas] == ["", "\ufffd", "a"], "nor where a control token ends it"


def test_texts_of_whole_words_begin_anew_too(tmp_path: Path) -> None:
    """A word's text depends on what stands before it, and before the first of a text there is nothing."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwalk\n##ing\n")
    words = Tokenizer.load(tmp_path)
    assert not words.is_byte_level
    tokens = words.encode("walk walking")
    deltas = stream_text(as_generated(tokens) + as_generated(tokens, 1), words)
    assert [delta.text for delta in deltas] == ["walk", " walk", "ing"] * 2


def test_the_end_of_document_is_no_text() -> None:
    end = TOKENIZER.end_of_document
    assert end is not None
    deltas = list(stream_text(as_generated([*TOKENIZER.encode("a"), end], end="stop"), TOKENIZER))
    assert [(delta.text, delta.end) for delta in deltas] == [("a", None), ("", "stop")]


def test_every_text_shows_control_tokens_that_are_asked_for() -> None:
    """As of a T5 that fills in the spans of several prompts."""
    tokenizer = train_bpe(["the cat and the hat"], 270, sentinels=2)
    first, second = (tokenizer.id_of(f"<extra_id_{number}>") for number in range(2))
    assert first is not None and second is not None
    tokens = [first, *tokenizer.encode("a"), second]
    deltas = stream_text(as_generated(tokens) + as_generated(tokens, 1), tokenizer, skip_special=False)
    assert [delta.text for delta in deltas] == ["<extra_id_0>", "a", "<extra_id_1>"] * 2
    deltas = stream_text(as_generated(tokens, end="stop"), tokenizer, skip_special=False)
    assert [delta.text for delta in deltas] == ["<extra_id_0>", "a", ""], "but not the one that ends the text"


def test_prompts() -> None:
    assert TOKENIZER.decode(prompt_tokens(TOKENIZER, "the cat")) == "the cat"
    assert prompt_tokens(TOKENIZER, "") == [TOKENIZER.end_of_document]


def test_a_document_may_begin_behind_token_0() -> None:
    """That is the end of documents of GPT-NeoX' tokenizer."""
    content = json.loads(TOKENIZER.to_json())
    (end,), others = content["added_tokens"], content["model"]["vocab"]
    content["model"]["vocab"] = {end["content"]: 0, **{token: place + 1 for token, place in others.items()}}
    end["id"] = 0
    assert prompt_tokens(Tokenizer.from_json(json.dumps(content)), "") == [0]


def test_an_empty_prompt_needs_an_end_of_document() -> None:
    without = Tokenizer.from_json(TOKENIZER.to_json().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_tokens(without, "")


def test_a_text_without_tokens_is_none(tmp_path: Path) -> None:
    """As one of spaces is to a tokenizer of words."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwalk\n")
    words = Tokenizer.load(tmp_path)
    assert prompt_tokens(words, " walk ") == words.encode("walk") and words.encode("  ") == []
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_tokens(words, "  ")


def test_only_a_full_model_needs_a_note() -> None:
    assert end_note("stop", seq_length=8) is None and end_note("length", seq_length=8) is None
    assert "8 positions" in (end_note("full", seq_length=8) or "")
