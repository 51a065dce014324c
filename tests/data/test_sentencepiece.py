"""SentencePiece models as their bytes say, without the library that writes them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from colonnade.data.chat_template import chosen_template
from colonnade.data.conversation import Chat, Marked
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

UNKNOWN, CONTROL, UNUSED = 2, 3, 5
BPE = b"\x12\x02\x18\x02"
NO_BLANK_IN_FRONT = b"\x1a\x02\x18\x00"


def piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    name = text.encode()
    content = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(content)]) + content


def loaded(folder: Path, *parts: bytes) -> Tokenizer:
    """A BPE with a piece for what is unknown, and these."""
    path = folder / "made.model"
    path.write_bytes(piece("<unk>", kind=UNKNOWN) + b"".join(parts) + BPE)
    return Tokenizer.load(path)


def unigram(folder: Path, *parts: bytes) -> Tokenizer:
    """The same of a Unigram model."""
    path = folder / "made.model"
    path.write_bytes(piece("<unk>", kind=UNKNOWN) + b"".join(parts))
    return Tokenizer.load(path)


def test_what_a_model_does_not_say_is_as_sentencepiece_has_it(tmp_path: Path) -> None:
    """A text gets a blank in front, and of several in a row one is left."""
    pieces = [piece(text) for text in "▁ab"]
    assert loaded(tmp_path, *pieces).encode("  a  b ") == [1, 2, 1, 3]
    assert loaded(tmp_path, *pieces, NO_BLANK_IN_FRONT).encode("  a  b ") == [2, 1, 3]
    assert loaded(tmp_path, *pieces, b"\x1a\x02\x20\x00").encode(" a  b") == [1, 1, 2, 1, 1, 3]


@pytest.mark.parametrize("field", [b"\x79" + b"\xff" * 8, b"\x7d" + b"\xff" * 4, b"\x7a\x03\xff\xff\xff", b"\x78\x01"])
def test_fields_that_are_not_read_may_be_of_any_kind(tmp_path: Path, field: bytes) -> None:
    pieces = [piece(text) for text in "▁ab"]
    assert loaded(tmp_path, field, *pieces, field).sha256 == loaded(tmp_path, *pieces).sha256


def test_no_merge_makes_a_control_token(tmp_path: Path) -> None:
    pieces = [piece("<s>", kind=CONTROL), piece("<"), piece("s>", -1.0), piece("s"), piece(">")]
    tokenizer = loaded(tmp_path, *pieces, NO_BLANK_IN_FRONT)
    assert tokenizer.encode("<s>") == [2, 3] and tokenizer.special_ids == {1}


@pytest.mark.parametrize("made", [loaded, unigram])
def test_a_model_with_pieces_that_no_text_becomes_is_refused(tmp_path: Path, made: Callable[..., Tokenizer]) -> None:
    with pytest.raises(
        DataError, match=r"pieces that no text becomes \(\"ab\" is the first\).* or use a tokenizer\.json"
    ):
        made(tmp_path, piece("a"), piece("ab", kind=UNUSED), piece("b", kind=UNUSED))


@pytest.mark.parametrize("made", [loaded, unigram])
def test_a_run_that_began_with_such_a_model_goes_on_with_the_tokenizer_in_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Tokenizer]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("colonnade.data.sentencepiece._UNUSED", None)  # as versions had it that took such a model
        before = made(tmp_path, piece("a"), piece("ab", kind=UNUSED), piece("b", kind=UNUSED))
    before.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").is_of(before.sha256)


def test_what_stands_for_no_text_is_decoded_by_its_name(tmp_path: Path) -> None:
    ours = unigram(tmp_path, piece("</s>", kind=CONTROL), piece("▁a", -1.0))
    assert ours.decode([2, 0, 1]) == "a<unk>" and ours.decode([2, 0, 1], skip_special=False) == "a<unk></s>"


def test_control_tokens_of_a_unigram_model_are_read_where_that_is_asked_for(tmp_path: Path) -> None:
    """By their names as they stand: text that is made one of them, here by its blank, stays text."""
    pieces = [*(piece(text, kind=CONTROL) for text in ("</s>", "<a▁b>")), piece("a", -1.0), piece("</s>.", -1.0)]
    ours = unigram(tmp_path, *pieces, NO_BLANK_IN_FRONT)
    for again in (ours, Tokenizer.from_json(ours.to_json()), Tokenizer.from_json(ours.published())):
        assert again.encode("a</s>a</s>.", control=True) == [3, 1, 3, 1, 0]
        assert again.encode("a</s>a</s>.") == [3, 0, 3, 4] and again.encode("<a b>", control=True) == [0, 3, 0]
        assert again.encode_marked([("aa</s>", [(1, 6)])]) == [([3, 3, 1], [False, True, True])]
        assert again.spelled("a</s>") == ["</s>"] and again.spelled("a") == []


def test_a_unigram_models_chat_template_ends_an_answer_with_its_end_of_document(tmp_path: Path) -> None:
    pieces = [piece("</s>", kind=CONTROL), *(piece(text, -1.0) for text in ("a", "b", "<", "/", "s", ">"))]
    ours = unigram(tmp_path, *pieces, NO_BLANK_IN_FRONT)
    chat = Chat(chosen_template("bare", ours, tmp_path), ours)
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat.encode([(answered, None)]) == [Marked([2, 3, 1], [False, True, True])] and chat.end_of_turn == 1


def test_what_is_published_names_control_tokens_as_others_do_and_is_the_same_tokenizer(tmp_path: Path) -> None:
    """No text becomes one of them when it is read again, either."""
    pieces = [piece("</s>", kind=CONTROL), *(piece(text, -1.0) for text in "▁a</s>")]
    ours = unigram(tmp_path, *pieces)
    theirs = tokenizers.Tokenizer.from_str(ours.published())
    assert [theirs.id_to_token(id_) for id_ in range(4)] == ["<unk>", "</s>", "▁", "a"]
    assert [token.content for token in theirs.get_added_tokens_decoder().values()] == ["</s>"]
    again = Tokenizer.from_json(ours.published())
    assert again.to_json() == ours.to_json()
    assert again.encode("a</s>") == [2, 3, 4, 5, 6, 7]
    assert Tokenizer.from_json(again.published()).sha256 == ours.sha256


def test_a_unigram_tokenizer_without_an_unknown_token_is_read(tmp_path: Path) -> None:
    """As the library trains it where none is named."""
    vocab = [("<s>", 0.0), ("a", -1.0), ("b", -2.0)]
    tokenizers.Tokenizer(tokenizers.models.Unigram(vocab)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("ab") == [1, 2] and tokenizer.vocab_size == 3
    with pytest.raises(DataError, match="Name a tokenizer that has a token for unknown words"):
        tokenizer.encode("z")


def test_of_several_models_in_a_folder_none_is_meant(tmp_path: Path) -> None:
    """Attributes that an archive of macOS has put beside one are none."""
    alone = loaded(tmp_path, piece("a"))
    (tmp_path / "._made.model").write_bytes(b"\0\5\x16\7")
    assert Tokenizer.load(tmp_path).sha256 == alone.sha256
    (tmp_path / "other.model").write_bytes((tmp_path / "made.model").read_bytes())
    with pytest.raises(DataError, match=r"is no tokenizer: .* or one \*\.model in it"):
        Tokenizer.load(tmp_path)
