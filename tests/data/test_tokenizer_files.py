"""WordPiece vocabularies and SentencePiece models: the ids that their own programs give."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.data.wordpiece import train_wordpiece
from colonnade.errors import DataError
from tests import tiny

from .conftest import SHARED

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "walk", "##ing", "##s", "dog", ".", "!", "cafe"]
HARD = ["", "  a  b  ", "Ünïcödé ﬁ ① ½ 漢字 🙂", "x\ty z", "a <s> b </s> <unk>", "don't — stop… \uffff<s>", "e\u0301"]
BLANKS = ["\na\n", "\t", " \n \u3000", " \u00a0a \n", "▁", "▁a ▁ b▁ ", "a\r\n\n b"]
"""What the rules of normalization treat in different ways."""


def write_vocab(folder: Path, names: list[str]) -> Path:
    path = folder / "vocab.txt"
    path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return path


# WordPiece


def test_a_trained_wordpiece_begins_with_berts_control_tokens_in_berts_order() -> None:
    """Padding is 0, as in every vocabulary of BERT."""
    trained = train_wordpiece(lambda: ["the cat sat on the mat", "the dog sat on the cat"] * 3, 40)
    assert [trained.token_to_id(each) for each in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    assert trained.encode("The cat [MASK] zzz").tokens[:3] == ["the", "cat", "[MASK]"]


def test_a_vocabulary_has_no_more_tokens_than_were_asked_for() -> None:
    """The control tokens, each character, and those within a word once more."""
    smallest = 5 + 3 + 2
    assert train_wordpiece(lambda: ["abc"], smallest).get_vocab_size() == smallest
    with pytest.raises(DataError, match=rf"of {smallest - 1} is too small .* take {smallest}\. Ask for {smallest}"):
        train_wordpiece(lambda: ["abc"], smallest - 1)


def test_the_same_text_gives_the_same_wordpiece_vocabulary() -> None:
    """Nearly all of its pairs are as frequent as others, and the library alone then takes any."""
    text = "pack my box with five dozen liquor jugs while the quick brown fox jumps over a lazy dog"
    trained = [train_wordpiece(lambda: [text], 80, min_frequency=1).get_vocab() for _ in range(6)]
    assert len(trained[0]) == 80 and all(each == trained[0] for each in trained)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_same_files_give_the_same_vocabulary(kind: Literal["bpe", "wordpiece"], tmp_path: Path) -> None:
    """Of many documents, which the library counts with several threads."""
    lines = [json.dumps({"text": text}) for text in tiny.made_up(200, seed=3)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    made = []
    for name in ("one.json", "two.json", "three.json"):
        train_tokenizer([tmp_path / "corpus.jsonl"], tmp_path / name, 400, kind=kind, min_frequency=1, progress=False)
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1] == made[2]


def test_documents_that_a_wordpiece_vocabulary_reads_twice_are_counted_once(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one two three"}), json.dumps({"no": "text"}), json.dumps({"text": "four"})]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    made = train_tokenizer([tmp_path / "corpus.jsonl"], tmp_path / "made.json", 60, kind="wordpiece", progress=False)
    assert (made.documents, made.rejected, len(made.examples)) == (2, 1, 1)


def test_wordpiece(tmp_path: Path) -> None:
    for source in (write_vocab(tmp_path, VOCAB), tmp_path):
        tokenizer = Tokenizer.load(source)
        assert tokenizer.encode("The dogs, walking! Café [MASK]") == [5, 9, 8, 1, 6, 7, 11, 12, 1, 1, 1]
        assert tokenizer.decode([5, 6, 7, 9, 8]) == "the walking dogs"
        assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.id_of("[CLS]")) == (13, None, 2)
        assert tokenizer.names == VOCAB


@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\r\n\r\n\r\n"])
def test_lines_without_a_token_at_the_end_of_a_vocabulary_count_for_none(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(("\n".join(VOCAB) + ending).encode())
    assert Tokenizer.load(path).names == VOCAB


def test_words_of_more_than_a_hundred_characters_are_unknown(tmp_path: Path) -> None:
    """As BERT's own tokenizer has it."""
    tokenizer = Tokenizer.load(write_vocab(tmp_path, [*VOCAB, "a", "##a"]))
    first, within = len(VOCAB), len(VOCAB) + 1
    assert tokenizer.encode("a" * 100) == [first] + [within] * 99 and tokenizer.encode("a" * 101) == [1]


def test_a_cased_vocabulary_keeps_case(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_vocab(tmp_path, [*VOCAB, "Dog"]))
    assert tokenizer.encode("dog Dog The") == [9, 13, 1]


def test_names_in_brackets_do_not_make_a_vocabulary_a_cased_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_vocab(tmp_path, [*VOCAB, "[ENT]", "[unused0]"]))
    assert tokenizer.encode("dog Dog The") == [9, 9, 5]


def test_the_published_vocabulary() -> None:
    folder = SHARED / "bert-vocab"
    if not folder.is_dir():
        pytest.skip(f"{folder} with bert-base-uncased's vocab.txt is not on this machine")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == 30_522
    assert tokenizer.encode("Hello world") == [7592, 2088]
    assert tokenizer.encode("unaffable") == [14477, 20961, 3468]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], r"has no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ([*VOCAB, "dog"], 'has "dog" more than once'),
        ([], r"has no \[PAD\]"),
    ],
)
def test_what_is_no_vocabulary(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tokenizer.load(write_vocab(tmp_path, names))


# SentencePiece


def train(folder: Path, lines: list[str], **settings: Any) -> tuple[Any, Path]:
    """A small model of the library's own, and its processor."""
    library = pytest.importorskip("sentencepiece")
    stream = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=stream, minloglevel=2, **{"vocab_size": 400, **settings}
    )
    path = folder / "spiece.model"
    path.write_bytes(stream.getvalue())
    return library.SentencePieceProcessor(model_proto=stream.getvalue()), path


@pytest.fixture
def lines(stories: list[str]) -> list[str]:
    return [line for line in stories[0].split("\n") if line.strip()]


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram"},
        {"model_type": "unigram", "byte_fallback": True},
        {"model_type": "unigram", "add_dummy_prefix": False},
        {"model_type": "unigram", "split_by_whitespace": False},
        {"model_type": "unigram", "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
        {"model_type": "unigram", "normalization_rule_name": "nfkc"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "bpe"},
        {"model_type": "bpe", "vocab_size": 384},  # its low seven bits are 0, as those of Llama's 32,000 are
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "bpe", "normalization_rule_name": "nfkc", "split_by_whitespace": False},
    ],
    ids=str,
)
def test_sentencepiece_gives_the_same_ids(
    tmp_path: Path, lines: list[str], stories: list[str], settings: dict[str, Any]
) -> None:
    theirs, path = train(tmp_path, lines, **settings)
    ours = Tokenizer.load(path)
    assert ours.vocab_size == theirs.vocab_size()
    assert ours.end_of_document == theirs.eos_id()
    for text in [*HARD, *BLANKS, *stories[1].split("\n")[:150]]:
        expected = theirs.encode(text.replace("\uffff", "\ufffd"))
        assert ours.encode(text) == expected, text
        if theirs.unk_id() not in expected and "▁" not in text:
            assert ours.decode(expected) == theirs.decode(expected)
    assert Tokenizer.load(path.parent).sha256 == ours.sha256 == Tokenizer.from_json(ours.to_json()).sha256


def test_symbols_of_ones_own_are_refused(tmp_path: Path, lines: list[str]) -> None:
    _, path = train(tmp_path, lines, user_defined_symbols=["<mark>"])
    with pytest.raises(DataError, match=r"symbols of its user's.*user_defined_symbols"):
        Tokenizer.load(path)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_spaces_behind_words_are_refused(tmp_path: Path, lines: list[str], kind: str) -> None:
    _, path = train(tmp_path, lines, model_type=kind, treat_whitespace_as_suffix=True)
    with pytest.raises(DataError, match=r"behind words, .*Train it without treat_whitespace_as_suffix"):
        Tokenizer.load(path)


def test_other_kinds_of_models_are_refused(tmp_path: Path, lines: list[str]) -> None:
    _, path = train(tmp_path, lines, model_type="char", hard_vocab_limit=False)
    with pytest.raises(DataError, match="model of kind 4"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff" * 40, b"no model", b"\x0a\xff\x01abc", b"\x0a\x03abc"),
        b"\x08\x01",  # a piece that is a number
        b"\x0a\x02\x08\x01",  # its text
        b"\x0a\x02\x10\x01",  # its score
        b"\x0a\x02\x1a\x00",  # its kind is text
        b"\x0a\x03\x0a\x01a\x1a\x02\x10\x01",  # the map of characters is a number
        b"\x0a\x03\x0a\x01a",  # nothing is unknown
    ],
)
def test_what_is_no_model(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.model"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"broken.model is (no|a) SentencePiece model"):
        Tokenizer.load(path)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_words_that_come_as_often_as_is_asked_become_tokens(kind: Any, tmp_path: Path) -> None:
    source, words = tmp_path / "text.jsonl", ["once", "will", "will", "dry", "dry", "dry"]
    source.write_text(json.dumps({"text": " " + " ".join(words)}) + "\n")
    for least, whole in ((1, ["dry", "once", "will"]), (2, ["dry", "will"]), (3, ["dry"]), (4, [])):
        output = tmp_path / f"{least}.json"
        made = train_tokenizer([source], output, 400, kind=kind, min_frequency=least, progress=False).tokenizer
        assert [word for word in sorted(set(words)) if len(made.encode(f" {word}")) == 1] == whole


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_documents_without_text_are_nothing_to_train_on(kind: Any, tmp_path: Path) -> None:
    source, made = tmp_path / "text.jsonl", tmp_path / "tokenizer.json"
    source.write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError):
        train_tokenizer([source], made, 300, kind=kind, progress=False)
    assert not made.exists()
    source.write_text('{"text": ""}\n{"text": "the cat sat"}\n{"text": "the mat"}\nno document\n')
    found = train_tokenizer([source], made, 300, kind=kind, progress=False)
    assert (found.documents, found.rejected) == (2, 1) and Tokenizer.load(made).vocab_size > 5


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_merges_of_number_signs_are_no_comments(tmp_path: Path, ending: str) -> None:
    """GPT-2 has one for ##; the first line alone says a version. Lines may end as on Windows."""
    (tmp_path / "vocab.json").write_text(json.dumps({"#": 0, "##": 1}))
    (tmp_path / "merges.txt").write_bytes(f"#version: 0.2{ending}# #{ending}".encode())
    found = Tokenizer.load(tmp_path)
    assert found.encode("###") == [1, 0]
    assert (found.vocab_size, found.end_of_document) == (2, None), "nothing is added to what it has"
