"""Tokens to text as they come: whole characters, ends, and where a document starts."""

import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def of_kind(kind: str, folder: Path) -> Tokenizer:
    """A tokenizer whose decoder treats the first token of a text otherwise than later ones; GPT-2's does not."""
    if kind == "GPT-2":
        return TOKENIZER
    if kind == "BERT":
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwalk\n##ing\n世\n")
        return Tokenizer.load(folder)
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", "▁walk", "ing", *"▁walking"]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [("w", "a"), ("l", "k"), ("wa", "lk"), ("▁", "walk"), ("i", "n"), ("in", "g")]
    vocab |= {name: len(vocab) + number for number, name in enumerate(("wa", "lk", "walk", "in"))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if kind == "LLaMA 2":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(parts)
    else:
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner)


@pytest.mark.parametrize("kind", ["LLaMA 2", "Metaspace", "BERT", "GPT-2"])
def test_a_text_that_goes_on_with_its_prompt_is_as_that_of_both(kind: str, tmp_path: Path) -> None:
    """As the streamers of transformers show it, which decode prompt and new tokens together. What begins anew, or
    behind control tokens alone, is a text by itself.
    """
    tokenizer = of_kind(kind, tmp_path)
    both = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_json()))
    new = tokenizer.encode("walk walking walk")
    goes_on = tokenizer.encode("walking")[1:] + new
    control = [next(iter(tokenizer.special_ids))]
    told = [tokenizer.encode(text) for text in ("walk", "walking walk", "walk 世", " ")] + [control]
    told += [tokenizer.encode("walk walk") + control]
    given = [list(prompt) for prompt in told]
    for tokens, skip in product((new, goes_on, tokenizer.encode("世")[-3:] + new), (True, False)):
        decode = partial(both.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        generated = [each for number in range(len(told)) for each in as_generated(tokens, number)]
        deltas = list(stream_text(generated, tokenizer, prompts=told, skip_special=skip))
        for number, prompt in enumerate(told):
            text = "".join(delta.text for delta in deltas if delta.prompt == number)
            assert decode(prompt) + text == decode(prompt + tokens), prompt
        anew = "".join(delta.text for delta in stream_text(as_generated(tokens), tokenizer, skip_special=skip))
        assert anew == decode(tokens) and told == given


def test_tokens_are_decoded_behind_few_of_a_long_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is before a token is decoded again with it."""
    tokenizer, decode, decoded = of_kind("LLaMA 2", tmp_path), Tokenizer.decode, list[int]()

    def noted(self: Tokenizer, ids: list[int], *, skip_special: bool) -> str:
        decoded.append(len(ids))
        return decode(self, ids, skip_special=skip_special)

    prompt, new = tokenizer.encode("walk " * 1000 + "世"), tokenizer.encode("walk walk")
    monkeypatch.setattr(Tokenizer, "decode", noted)
    deltas = stream_text(as_generated(new), tokenizer, prompts=[prompt])
    assert [delta.text for delta in deltas] == [" walk", " walk"] and sum(decoded) < 50


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
