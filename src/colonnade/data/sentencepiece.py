"""SentencePiece models (.model) through Hugging Face `tokenizers`: Unigram, and BPE as Llama has it.

A .model is one protocol buffer (sentencepiece_model.proto). Only what decides the ids of a text is read:

    ModelProto   1 pieces: 1 piece (text) · 2 score (float) · 3 type
                 2 trainer_spec: 3 model_type · 22 split_by_whitespace · 24 treat_whitespace_as_suffix
                                 35 byte_fallback
                 3 normalizer_spec: 2 precompiled_charsmap · 3 add_dummy_prefix · 4 remove_extra_whitespaces
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from colonnade.architecture.huggingface.keys import shown
from colonnade.data.tokenizer_config import TokenizerConfig
from colonnade.errors import DataError

Fields = Mapping[int, int | bytes]

_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
_SPACE = "▁"
HIDDEN = "\uffff"
"""Before the names of a Unigram model's control tokens and its unknown one, so that no text can be taken for one."""
_NO_TEXT_HAS_IT = {"type": "Replace", "pattern": {"String": HIDDEN}, "content": "\ufffd"}
"""The first step of `_normalizer`, as a tokenizer.json has it."""
SENTINEL = "<extra_id_{}>"
"""What stands for a span that is cut out, by its number: T5's names."""
_T5, _MT5 = "T5Tokenizer", "MT5Tokenizer"
OTHERS = (
    "AlbertTokenizer",
    "BarthezTokenizer",
    "BartphoTokenizer",
    "CamembertTokenizer",
    "CpmTokenizer",
    "FNetTokenizer",
    "LayoutXLMTokenizer",
    "M2M100Tokenizer",
    "MBart50Tokenizer",
    "MBartTokenizer",
    "MLukeTokenizer",
    "NllbTokenizer",
    "PLBartTokenizer",
    "PegasusTokenizer",
    "SeamlessM4TTokenizer",
    "SiglipTokenizer",
    "Speech2TextTokenizer",
    "XGLMTokenizer",
    "XLMRobertaTokenizer",
    "XLNetTokenizer",
)
"""Classes of transformers that read such a model and give other ids than it does."""


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class _Model:
    pieces: list[_Piece]
    kind: int
    no_spaces_within: bool
    spaces_behind: bool
    byte_fallback: bool
    charsmap: bytes
    dummy_prefix: bool
    squeeze_spaces: bool

    @property
    def knows_blanks(self) -> bool:
        """Whether its map makes blanks of all white space and of `_SPACE` itself, as SentencePiece's nmt rules do."""
        if not self.charsmap:
            return False
        return not normalizers.Precompiled(self.charsmap).normalize_str(f"\t\n\r\u3000{_SPACE}").strip(" ")

    @property
    def is_cut_at_spaces(self) -> bool:
        """Whether no piece crosses a space, so that a text can be cut before each `_SPACE`."""
        return self.kind == _UNIGRAM and self.no_spaces_within and self.squeeze_spaces and self.knows_blanks


def load_sentencepiece(path: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """A tokenizer that gives the ids that SentencePiece gives, with T5's sentinels if it is one's. Raises DataError for
    what is no such model.
    """
    try:
        model = _parse(path.read_bytes())
    except (IndexError, UnicodeDecodeError, ValueError, struct.error) as error:
        raise DataError(f"{path} is no SentencePiece model: {error}. Copy it again from its source.") from error
    if not model.pieces or model.kind not in (_UNIGRAM, _BPE):
        raise DataError(
            f"{path} is a SentencePiece model of kind {model.kind} with {len(model.pieces)} pieces; those that can be "
            f"read are Unigram ({_UNIGRAM}) and BPE ({_BPE}). Use its library to write a tokenizer.json."
        )
    if not any(piece.kind == _UNKNOWN for piece in model.pieces):
        raise DataError(
            f"{path} is a SentencePiece model without a piece for what is unknown, which all have: it is damaged. Copy "
            "it again from its source."
        )
    if any(piece.kind == _USER for piece in model.pieces):
        raise DataError(
            f"{path} has symbols of its user's, which `tokenizers` does not treat as SentencePiece does. Train it "
            "without user_defined_symbols, or use a tokenizer.json."
        )
    unused = next((piece.text for piece in model.pieces if piece.kind == _UNUSED), None)
    if unused is not None:
        raise DataError(
            f"{path} has pieces that no text becomes ({shown(unused)} is the first), as a restricted vocabulary "
            "has them, and `tokenizers` would use them. Take the model as it was trained, or use a tokenizer.json (a "
            "run that has begun with this one has it in its checkpoints)."
        )
    if model.spaces_behind:
        raise DataError(
            f"{path} has the marks of spaces behind words, and `tokenizers` puts them before words alone. Train it "
            "without treat_whitespace_as_suffix."
        )
    name = config.class_of("LlamaTokenizer", _T5, _MT5, others=OTHERS)
    config.fixed("add_prefix_space", model.dummy_prefix, why=f"the add_dummy_prefix of {path.name} says otherwise")
    config.fixed("sp_model_kwargs", {}, why="a text has the same tokens each time here")
    inner = tokenizers.Tokenizer(_unigram(model) if model.kind == _UNIGRAM else _bpe(model))
    inner.normalizer = _normalizer(model)
    if model.is_cut_at_spaces:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(
            _SPACE, prepend_scheme="always" if model.dummy_prefix else "never"
        )
    inner.decoder = _decoder(model)
    inner.add_special_tokens([_name(model, piece) for piece in model.pieces if piece.kind == _CONTROL])
    if name in (_T5, _MT5):
        inner.add_special_tokens(_sentinels(model, config))
    return inner


def published(inner: tokenizers.Tokenizer) -> str:
    """The content of a tokenizer.json in which control tokens have the names by which other programs look for them."""
    text = inner.to_str()
    if not isinstance(inner.model, models.Unigram):
        return text
    content = json.loads(text)
    for token in content["added_tokens"]:
        token["content"] = token["content"].removeprefix(HIDDEN)
    content["model"]["vocab"] = [(name.removeprefix(HIDDEN), score) for name, score in content["model"]["vocab"]]
    return json.dumps(content, ensure_ascii=False)


def hidden(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer whose content was `published`; any other as it is."""
    if not isinstance(inner.model, models.Unigram):
        return inner
    content = json.loads(inner.to_str())
    unknown, vocab = content["model"]["unk_id"], content["model"]["vocab"]
    if unknown is None or vocab[unknown][0].startswith(HIDDEN):
        return inner
    if _NO_TEXT_HAS_IT not in (content["normalizer"] or {}).get("normalizers", ()):
        return inner
    control = [token for token in content["added_tokens"] if token["special"] and token["id"] < len(vocab)]
    for token in control:
        token["content"] = HIDDEN + token["content"]
    for id_ in {unknown, *(token["id"] for token in control)}:
        vocab[id_][0] = HIDDEN + vocab[id_][0]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _sentinels(model: _Model, config: TokenizerConfig) -> list[str]:
    """T5's, whose ids fall behind the pieces, unless they are among these."""
    number, names = config.settings.get("extra_ids"), {piece.text for piece in model.pieces}
    number = 100 if number is None else number
    if type(number) is not int or number < 0:
        config.refuse(f"extra_ids = {shown(number)}, which is no number of tokens")
    sentinels = (SENTINEL.format(each) for each in reversed(range(number)))
    return [name for name in sentinels if name not in names]


def _name(model: _Model, piece: _Piece) -> str:
    hidden = piece.kind in (_UNKNOWN, _CONTROL) and model.kind == _UNIGRAM
    return HIDDEN + piece.text if hidden else piece.text


def _unigram(model: _Model) -> Any:
    unknown = next(i for i, piece in enumerate(model.pieces) if piece.kind == _UNKNOWN)
    return models.Unigram([(_name(model, piece), piece.score) for piece in model.pieces], unknown, model.byte_fallback)


def _bpe(model: _Model) -> Any:
    """Merges are not stored: two pieces merge where their union is a piece, those of the highest score first."""
    ids = {piece.text: i for i, piece in enumerate(model.pieces)}
    ranked: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for piece in model.pieces:
        for cut in () if piece.kind in (_UNKNOWN, _CONTROL) else range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                ranked[piece.text].append((left, right))
    for pairs in ranked.values():
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    whole = sorted(ranked, key=lambda text: (-model.pieces[ids[text]].score, ids[text]))
    unknown = next(piece.text for piece in model.pieces if piece.kind == _UNKNOWN)
    return models.BPE(
        ids,
        [pair for text in whole for pair in ranked[text]],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _normalizer(model: _Model) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Replace(HIDDEN, "\ufffd")]
    if model.knows_blanks and not model.squeeze_spaces:
        steps.append(normalizers.Replace("\r\n", "\n\n"))  # of which `Precompiled` makes one blank
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.squeeze_spaces:
        ends = normalizers.Replace(tokenizers.Regex(rf"\A +|[ {_SPACE}]+\z"), "")
        steps.append(normalizers.Strip() if model.knows_blanks else ends)
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if not model.is_cut_at_spaces:
        steps += [normalizers.Prepend(_SPACE)] if model.dummy_prefix else []
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: _Model) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    if model.byte_fallback:
        steps += [decoders.ByteFallback(), decoders.Fuse()]
    else:
        steps.append(decoders.Fuse())
    return decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if model.dummy_prefix else steps)


def _parse(data: bytes) -> _Model:
    parts = list(_fields(data))
    trainer, normalizer = (dict(_fields(_bytes(dict(parts), number))) for number in (2, 3))
    return _Model(
        pieces=[_piece(dict(_fields(_bytes({1: piece}, 1)))) for number, piece in parts if number == 1],
        kind=_number(trainer, 3, _UNIGRAM),
        no_spaces_within=bool(_number(trainer, 22, 1)),
        spaces_behind=bool(_number(trainer, 24, 0)),
        byte_fallback=bool(_number(trainer, 35, 0)),
        charsmap=_bytes(normalizer, 2),
        dummy_prefix=bool(_number(normalizer, 3, 1)),
        squeeze_spaces=bool(_number(normalizer, 4, 1)),
    )


def _piece(fields: Fields) -> _Piece:
    (score,) = struct.unpack("<f", _bytes(fields, 2, b"\0\0\0\0"))
    return _Piece(_bytes(fields, 1).decode(), score, _number(fields, 3, 1))


def _bytes(fields: Fields, number: int, default: bytes = b"") -> bytes:
    value = fields.get(number, default)
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is a number, where text is expected")
    return value


def _number(fields: Fields, number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is text, where a number is expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protocol buffer: whole numbers, and bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"there is a field of wire type {wire} at byte {at}")
        length, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + length > len(data):
            raise ValueError(f"it ends in the middle of a field, at byte {len(data)}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"there is no number at byte {at}")
