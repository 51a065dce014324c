"""The tokenizer: known ids, every way of storing it, text to ids and back, and as it streams to a terminal."""

from __future__ import annotations

import errno
import json
import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from colonnade.data.byte_level import END_OF_DOCUMENT
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import DataError, DiskError

# Text of all kinds: letters, spaces, emoji, control characters; no half surrogates, which are no Unicode text.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def save_pair(tokenizer: Tokenizer, vocab: Path, merges: Path) -> None:
    """Write a tokenizer as OpenAI stored GPT-2."""
    content = json.loads(tokenizer.to_json())
    words = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab.write_text(json.dumps(words), encoding="utf-8")
    lines = [" ".join(pair) for pair in content["model"]["merges"]]
    merges.write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")


def test_gpt2s_own_files(gpt2: Tokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode([15496, 995]) == "Hello world"
    assert (gpt2.vocab_size, gpt2.end_of_document, gpt2.id_of(END_OF_DOCUMENT)) == (50_257, 50_256, 50_256)


def test_training(tokenizer: Tokenizer, stories: list[str]) -> None:
    assert tokenizer.vocab_size == 600
    assert tokenizer.end_of_document == 599
    assert len(tokenizer.encode(stories[5])) < 0.5 * len(stories[5].encode())


def test_training_needs_room_for_the_bytes() -> None:
    with pytest.raises(DataError, match=r"256 bytes and <\|endoftext\|> take 257"):
        train_bpe(["some text"], 256)
    with pytest.raises(DataError, match=r"256 bytes, 3 sentinels and .* take 260\. Ask for 260 or more"):
        train_bpe(["some text"], 259, sentinels=3)
    assert train_bpe(["some text"], 257).vocab_size == 257
    smallest = train_bpe(["some text"], 260, sentinels=3)
    assert (smallest.vocab_size, smallest.id_of("<extra_id_2>")) == (260, 259)


def test_a_poor_text_gives_a_smaller_vocabulary() -> None:
    assert train_bpe(["aa aa aa"], 1_000).vocab_size < 270
    assert train_bpe(["ab cd"], 1_000).vocab_size == 257, "a pair that comes once is none"


@given(texts)
def test_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_token_is_added_that_the_text_does_not_have(tokenizer: Tokenizer) -> None:
    """Whatever the file says of the beginning and the end of a text: who puts rows together adds these."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    end = [(END_OF_DOCUMENT, inner.token_to_id(END_OF_DOCUMENT))]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_DOCUMENT} $A {END_OF_DOCUMENT}", special_tokens=end
    )
    framed, text = Tokenizer(inner), "the cat"
    assert len(inner.encode(text).ids) == len(tokenizer.encode(text)) + 2
    assert framed.encode(text) == tokenizer.encode(text)
    assert framed.encode_batch([text]) == tokenizer.encode_batch([text])
    assert framed.encode_marked([(text, [(0, 3)])]) == tokenizer.encode_marked([(text, [(0, 3)])])
    assert framed.encode_places([text])[0][0] == tokenizer.encode(text)


def test_a_token_has_the_marks_that_its_text_is_read_without(tmp_path: Path) -> None:
    """As BERT drops accents: offsets of `tokenizers` in NFC are in NFD behind the mark, and no mark is left over."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "zoe", "##s", "a", "\u092e", "\u2764", "\u0d28"]
    (tmp_path / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    words, composed = Tokenizer.load(tmp_path), "Zoës \u1ea4 zoë"
    text = unicodedata.normalize("NFD", composed)
    ((ids, places),) = words.encode_places([text])
    wanted = words._inner.encode(composed, add_special_tokens=False)
    assert ids == wanted.ids and len(text) == len(composed) + 4
    before = [len(unicodedata.normalize("NFD", composed[:at])) for at in range(len(composed) + 1)]
    assert places.tolist() == [[before[start], before[stop]] for start, stop in wanted.offsets]
    for one in ("\u092e\u0947\u0902", "\u2764\ufe0f", "\u0d28\u0d4d\u200d", "a\u0301\u200c\u0301"):  # none in NFC
        assert [words.encode_places([text])[0][1].tolist() for text in (one, f" {one}. ", f"\u0301 {one} \u0301")] == [
            [[0, len(one)]],
            [[1, 1 + len(one)], [1 + len(one), 2 + len(one)]],
            [[2, 2 + len(one)]],
        ]


def test_what_ends_where_a_span_begins_is_not_marked(tokenizer: Tokenizer) -> None:
    """Nor what begins where it ends."""
    start = 1 + len(END_OF_DOCUMENT)
    text = f"a{END_OF_DOCUMENT}b{END_OF_DOCUMENT}"
    ((ids, marked),) = tokenizer.encode_marked([(text, [(start, start + 1)])])
    end = tokenizer.end_of_document
    assert [token == end for token in ids] == [False, True, False, True]
    assert marked == [False, False, True, False]


@given(st.lists(texts, max_size=5))
def test_a_batch_is_its_texts(tokenizer: Tokenizer, batch: list[str]) -> None:
    assert tokenizer.encode_batch(batch) == [tokenizer.encode(text) for text in batch]


def test_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    text = f"before {END_OF_DOCUMENT} after"
    assert tokenizer.end_of_document not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_becomes_control_tokens_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    """As the library reads it by itself, and transformers."""
    theirs = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    texts = [f"before {END_OF_DOCUMENT}{END_OF_DOCUMENT} after", "<|endoftext", ""]
    assert tokenizer.encode_batch(texts, control=True) == [theirs.encode(text).ids for text in texts]
    assert [tokenizer.encode(text, control=True) for text in texts] == tokenizer.encode_batch(texts, control=True)
    assert tokenizer.encode(texts[0], control=True).count(599) == 2
    assert [tokenizer.spelled(text) for text in texts] == [[END_OF_DOCUMENT], [], []]
    words = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    words.add_special_tokens(["<s>"])
    assert Tokenizer(words).spelled("<s>") == [], "it is the token already"


def test_control_tokens_are_shown_on_demand(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the end"), 599]
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.decode(ids, skip_special=False) == "the end<|endoftext|>"


@given(texts)
def test_byte_lengths_sum_to_the_texts_bytes(tokenizer: Tokenizer, text: str) -> None:
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (600,)
    assert lengths[599] == 0
    assert sum(lengths[token] for token in tokenizer.encode(text)) == len(text.encode())


def test_a_token_that_was_added_to_a_vocabulary_stands_for_its_bytes(tokenizer: Tokenizer) -> None:
    """Unless it is for control: else bits per byte would leave out a part of the text."""
    content = json.loads(tokenizer.to_json())
    (token,) = content["added_tokens"]
    for number, (name, special) in enumerate((("<thïnk>", False), ("<pad>", True)), 600):
        content["added_tokens"].append({**token, "id": number, "content": name, "special": special})
    wider = Tokenizer.from_json(json.dumps(content))
    text = "So <thïnk> about it"
    lengths, ids = wider.byte_lengths(), wider.encode(text)
    assert 600 in ids and sum(lengths[id_] for id_ in ids) == len(text.encode())
    assert wider.token_bytes[600] == "<thïnk>".encode() and lengths[599] == lengths[601] == 0


@given(texts)
def test_a_stream_shows_the_text_and_no_broken_character(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) == text
    assert stream.finish() == ""


@given(st.lists(st.integers(0, 599), max_size=40), st.booleans())
def test_a_stream_of_any_tokens_is_what_they_decode_to(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """A young model writes bytes that are no UTF-8: they become U+FFFD, as when everything is decoded at once."""
    ids = ids if skip else [token for token in ids if token != 599]
    stream = tokenizer.stream(skip_special=skip)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids, skip_special=skip)


def test_a_stream_holds_back_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    stream = tokenizer.stream(skip_special=False)
    assert [stream.push(ids[0]), stream.push(ids[1])] == ["", "é"]
    assert [stream.push(ids[0]), stream.push(599), stream.finish()] == ["", "\ufffd<|endoftext|>", ""]


def test_tokenizers_that_are_not_byte_level_stream_too(stories: list[str]) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"the": 0, "dog": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = Tokenizer(inner)
    stream = words.stream()
    assert "".join(map(stream.push, words.encode("the dog"))) + stream.finish() == words.decode([0, 1])
    assert words.end_of_document is None
    assert not words.is_gpt2_split
    with pytest.raises(DataError, match="not ByteLevel"):
        words.byte_lengths()


@pytest.mark.parametrize(
    ("added", "end"),
    [
        (["<s>", "</s>", "<eos>"], "<eos>"),
        (["<s>", "</s>"], "</s>"),
        (["</s>", "[EOS]"], "[EOS]"),
        (["[EOS]", "<EOS_TOKEN>"], "<EOS_TOKEN>"),
        (["<EOS_TOKEN>", "<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>"),
        (["<｜end▁of▁sentence｜>", "<eos>"], "<eos>"),
        (["</s>", "<eos>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["</s>", "<eos>", "<|end_of_text|>", END_OF_DOCUMENT], END_OF_DOCUMENT),
    ],
)
def test_where_several_tokens_could_end_a_document_it_is_the_one_with_no_other_use(added: list[str], end: str) -> None:
    """Beside <eos>, </s> is a tag of HTML."""
    words = Tokenizer(tokenizers.Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate(added)}, added[0])))
    assert words.end_of_document == added.index(end)


def test_words_that_a_tokenizer_has_no_token_for_are_told() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"the": 0, "dog": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = Tokenizer(inner)
    assert words.encode("the dog") == [0, 1]
    for encode in (words.encode, lambda text: words.encode_batch([text]), lambda text: words.encode_places([text])):
        with pytest.raises(DataError, match=r"cannot read a text: .* Name a tokenizer that has a token for unknown"):
            encode("the cat")


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama's: what has no token of its own is written in tokens of single bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁": 257, "a": 258, "b": 259}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(inner)


def test_a_stream_holds_back_tokens_of_single_bytes_until_a_character_is_whole(byte_fallback: Tokenizer) -> None:
    stream, ids = byte_fallback.stream(), byte_fallback.encode("a世界b")
    assert len(ids) == 8
    assert [*map(stream.push, ids), stream.finish()] == ["a", "", "", "世", "", "", "界", "b", ""]


def test_what_never_becomes_a_character_is_shown_when_that_is_known(byte_fallback: Tokenizer) -> None:
    a, b, half = 258, 259, byte_fallback.encode("世")[:2]
    stream = byte_fallback.stream()
    assert [*map(stream.push, [a, *half, b]), stream.finish()] == ["a", "", "", "\ufffd\ufffdb", ""]
    stream = byte_fallback.stream()
    assert [*map(stream.push, [a, *half]), stream.finish()] == ["a", "", "", "\ufffd\ufffd"]


@given(texts)
def test_tokens_of_single_bytes_stream_to_the_whole_text(byte_fallback: Tokenizer, text: str) -> None:
    ids, stream = byte_fallback.encode(text), byte_fallback.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == byte_fallback.decode(ids) == text.replace("▁", " ")


def test_every_way_of_storing_it_is_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "made" / "tokenizer.json")
    for folder in ("openai", "huggingface"):
        (tmp_path / folder).mkdir()
    save_pair(tokenizer, tmp_path / "openai" / "encoder.json", tmp_path / "openai" / "vocab.bpe")
    save_pair(tokenizer, tmp_path / "huggingface" / "vocab.json", tmp_path / "huggingface" / "merges.txt")
    save_pair(tokenizer, tmp_path / "tiny-vocab.json", tmp_path / "tiny-merges.txt")
    for path in (
        "made",
        "made/tokenizer.json",
        "openai",
        "openai/encoder.json",
        "openai/vocab.bpe",
        "huggingface",
        "huggingface/merges.txt",
        "tiny",
        "tiny-vocab.json",
    ):
        loaded = Tokenizer.load(tmp_path / path)
        assert loaded.sha256 == tokenizer.sha256, path
        assert loaded.encode("Elementary, my dear Watson.") == tokenizer.encode("Elementary, my dear Watson.")
        assert loaded.end_of_document == 599


def test_a_tokenizers_own_truncation_and_padding_are_switched_off(tokenizer: Tokenizer, stories: list[str]) -> None:
    """Published ones cut a text after 512 tokens, and fill shorter ones up."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    inner.enable_truncation(8)
    inner.enable_padding(length=64)
    other = Tokenizer(tokenizers.Tokenizer.from_str(inner.to_str()))
    for text in (stories[0], "dog"):
        assert other.encode(text) == tokenizer.encode(text)
        assert [list(each) for each in other.encode_batch([text])] == [tokenizer.encode(text)]


def test_the_fingerprint_tells_tokenizers_apart(tokenizer: Tokenizer, stories: list[str]) -> None:
    content = json.loads(tokenizer.to_json())
    changes: list[Callable[[Any], object]] = [
        lambda c: c["model"]["merges"].pop(),
        lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
        lambda c: c.update(normalizer={"type": "NFC"}),
        lambda c: c["added_tokens"].clear(),
    ]
    prints = {tokenizer.sha256}
    for change in changes:
        other = json.loads(json.dumps(content))
        change(other)
        prints.add(Tokenizer.from_json(json.dumps(other)).sha256)
    assert len(prints) == 5


def _with_added(tokenizer: Tokenizer, *, normalizer: Any = None, **attributes: Any) -> Tokenizer:
    """The tokenizer, with other attributes of its one added token."""
    content = json.loads(tokenizer.to_json())
    content["normalizer"] = normalizer
    (token,) = content["added_tokens"]
    token.update(attributes)
    content["model"]["vocab"][token["content"]] = token["id"]
    return Tokenizer.from_json(json.dumps(content))


def test_the_fingerprint_tells_added_tokens_of_other_ids_apart(tokenizer: Tokenizer) -> None:
    text = "A dog <|endoftext|> ran"
    as_text = _with_added(tokenizer, special=False)
    assert as_text.encode(text) != tokenizer.encode(text)
    nfc = {"type": "NFC"}
    found = [
        tokenizer,
        as_text,
        *(_with_added(tokenizer, **{key: True}) for key in ("lstrip", "rstrip", "single_word")),
        _with_added(tokenizer, normalizer=nfc),
        _with_added(tokenizer, normalizer=nfc, normalized=True),
    ]
    assert len({each.sha256 for each in found}) == len(found)
    for each in found:
        assert each.is_of(each.sha256) and not each.is_of(found[each is tokenizer].sha256[::-1])
        assert each.is_of(tokenizer.sha256) == (each._earlier == tokenizer.sha256), "as what is older has it"
    assert not tokenizer.is_of(as_text.sha256) and as_text.is_of(tokenizer.sha256)


def test_the_fingerprint_of_usual_added_tokens_is_that_of_earlier_versions(tokenizer: Tokenizer) -> None:
    """Token files, checkpoints and runs hold it."""
    step = Path(__file__).parents[1] / "checkpoint" / "written" / "tp2" / "step_00000003"
    written = Tokenizer.load(step)
    assert written.sha256 == json.loads((step / "manifest.json").read_text())["facts"]["tokenizer_sha256"]
    # Published GPT-2 has normalized = true, which is nothing without a normalizer.
    assert _with_added(tokenizer, normalized=True).sha256 == tokenizer.sha256
    # GPT-NeoX's runs of blanks, and a name of Qwen 3's: the sums that versions without this test gave are known too.
    for sha256, token in (
        ("0489d42921fd", {"content": "  ", "special": False, "normalized": True}),
        ("ffb248205236", {"content": "<think>", "special": False}),
    ):
        unusual = _with_added(written, normalizer={"type": "NFC"}, **token)
        assert unusual._earlier.startswith(sha256) and unusual.is_of(unusual._earlier)
        assert unusual.sha256 != unusual._earlier
        content = json.loads(unusual.to_json())
        content["model"]["dropout"] = 0.1
        assert Tokenizer.from_json(json.dumps(content)).is_of(unusual._earlier), "without BPE dropout too"


@pytest.mark.parametrize("dropout", [0.1, 1.0, 0.0, None])
def test_no_merge_is_left_out_by_chance(tokenizer: Tokenizer, tmp_path: Path, dropout: float | None) -> None:
    """Whatever the file says; in its fingerprint that counts, as what earlier versions wrote has it."""
    content = json.loads(tokenizer.to_json())
    content["model"]["dropout"] = dropout
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found, text = Tokenizer.load(tmp_path), "a small dog was in the garden <|endoftext|>"
    for each in (found, Tokenizer.from_json(found.to_json()), found.ending(3)):
        assert each.sha256 == found.sha256 and json.loads(each.to_json())["model"] == content["model"]
        assert [each.encode(text) for _ in range(20)] == [tokenizer.encode(text)] * 20
        assert [each.encode(text, control=True) for _ in range(20)] == [tokenizer.encode(text, control=True)] * 20
    assert (found.sha256 == tokenizer.sha256) == (not dropout)
    assert found.is_of(Tokenizer.from_json(found.published()).sha256), "a model that was exported is begun from"
    assert found.is_of(tokenizer.sha256) and tokenizer.is_of(found.sha256) == (not dropout)
    assert not json.loads(found.published())["model"]["dropout"]


def test_the_fingerprint_of_merges_left_out_by_chance_is_that_of_earlier_versions() -> None:
    written = Tokenizer.load(Path(__file__).parents[1] / "checkpoint" / "written" / "tp2" / "step_00000003")
    content = json.loads(written.to_json())
    content["model"]["dropout"] = 0.1
    assert Tokenizer.from_json(json.dumps(content)).sha256.startswith("da060b60e3ff")


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        Tokenizer.load(tmp_path / "absent.json")
    with pytest.raises(DataError, match="no such file"):
        Tokenizer.load(tmp_path)
    for content in (b"", b"{}", b"[1]", b'{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(DataError, match=r"is no tokenizer.json"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt"])
def test_a_file_that_is_no_text_is_named(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    if name != "tokenizer.json":
        save_pair(tokenizer, tmp_path / "vocab.json", tmp_path / "merges.txt")
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path / name))} cannot be read as text: .*0xff"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt"])
def test_a_file_that_the_disk_withholds_for_a_while_is_not_told_as_broken(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    honest = Path.read_text

    def away(path: Path, *words: Any, **more: Any) -> str:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return honest(path, *words, **more)

    if name == "tokenizer.json":
        tokenizer.save(tmp_path / name)
    else:
        save_pair(tokenizer, tmp_path / "vocab.json", tmp_path / "merges.txt")
    monkeypatch.setattr(Path, "read_text", away)
    with pytest.raises(DiskError, match=rf"^{re.escape(str(tmp_path / name))} cannot be read .* when its disk answers"):
        Tokenizer.load(tmp_path)


def test_two_files_that_do_not_belong_together(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_pair(tokenizer, tmp_path / "vocab.json", tmp_path / "merges.txt")
    for merges in ("#version: 0.2\nqz xj\n", "one two three\n", "alone\n"):
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(DataError, match="not the vocabulary and the merges of one"):
            Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match="half of a surrogate pair at character 1"):
            encode("a\ud800b")
