"""Text to token ids and back: a byte-level BPE as GPT-2 has it, through Hugging Face `tokenizers`.

Text never becomes a control token, unless whoever gives it asks for that: "<|endoftext|>" inside a document is encoded
as the letters that it is made of, and only the program itself puts the end-of-document id between documents.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from colonnade.atomic import write_whole
from colonnade.data.added_tokens import add_tokens
from colonnade.data.byte_level import END_OF_DOCUMENT, byte_level, load_pair
from colonnade.data.places import with_marks
from colonnade.data.sentencepiece import HIDDEN, SENTINEL, hidden, load_sentencepiece, published
from colonnade.data.tokenizer_config import TokenizerConfig, read_text
from colonnade.data.wordpiece import load_wordpiece
from colonnade.errors import DataError
from colonnade.storage import as_given, not_here
from colonnade.tokenizer_files import find_pair

_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "<EOS_TOKEN>", "[EOS]", "</s>")
_LATER = _ENDS[3:6]  # earlier versions did not know them


class Tokenizer:
    """A tokenizer.json in use."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Takes `inner` over, and changes it: nothing is padded, cut or left out by chance."""
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._end: int | None = None
        self._dropout: float | None = None  # as it is written; merges are never left out by chance
        if getattr(inner.model, "dropout", None):
            self._dropout = json.loads(inner.to_str())["model"]["dropout"]
            inner.model.dropout = None

    @classmethod
    def load(cls, path: str | Path, *, alone: bool = False) -> Self:
        """Read a tokenizer.json, a WordPiece vocab.txt, a SentencePiece .model, or the folder of one of them; or
        GPT-2's two files: their folder, one of them, or the prefix of `*-vocab.json`. What lies beside a vocabulary
        and says how its text is treated (`TokenizerConfig`) is obeyed, unless the files are to be taken `alone`.
        """
        path = Path(path)
        pair = find_pair(path)
        other = _find_other(path) if pair is None else pair[0]
        if other is not None:
            config = TokenizerConfig(other.parent) if alone else TokenizerConfig.beside(other)
            inner = load_pair(*pair, config) if pair is not None else _LOADERS[other.suffix](other, config)
            add_tokens(inner, config, only_control=other.suffix == ".model")
            return cls(inner)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"{as_given(path)} is no tokenizer: there is no such file, and no tokenizer.json, encoder.json with "
                f"vocab.bpe, vocab.json with merges.txt, vocab.txt or one *.model in it.{not_here(path)} Train one "
                "with `colonnade data train-tokenizer`, or name GPT-2's folder."
            )
        return cls.from_json(read_text(file), source=str(file))

    @classmethod
    def from_json(cls, text: str, *, source: str = "the tokenizer") -> Self:
        """Take the content of a tokenizer.json."""
        try:
            return cls(hidden(tokenizers.Tokenizer.from_str(text)))
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{source} is no tokenizer.json of Hugging Face `tokenizers`: {error}. Name a file that the library "
                "wrote, or a folder with GPT-2's encoder.json and vocab.bpe."
            ) from error

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        text = self._inner.to_str()
        if self._dropout is None:
            return text
        content = json.loads(text)
        content["model"]["dropout"] = self._dropout
        return json.dumps(content, ensure_ascii=False)

    def published(self) -> str:
        """The same as other programs read it: control tokens have their own names. `from_json` takes it back."""
        return published(self._inner)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json."""
        write_whole(Path(path), self.to_json().encode())

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of a text; `control`: names of control tokens in it are these."""
        return self.encode_batch([text], control=control)[0]

    def encode_batch(self, texts: Sequence[str], *, control: bool = False) -> list[list[int]]:
        """Token ids of several texts, on all cores; `control`: names of control tokens in them are these."""
        inner = self._with_control if control else self._inner
        found = [encoding.ids for encoding in _encodings(inner.encode_batch_fast, texts)]
        return [self._own_ids(ids) for ids in found] if control else found

    def spelled(self, text: str) -> list[str]:
        """Names of control tokens that stand in a text and are read as other text."""
        added = self._inner.get_added_tokens_decoder().items()
        names = ((number, token.content.removeprefix(HIDDEN)) for number, token in added if token.special)
        found = {number: name for number, name in names if name in text}
        read = set(self.encode(text)) if found else set[int]()  # a name may be a word of the vocabulary, too
        return [name for number, name in found.items() if number not in read]

    def encode_marked(
        self, texts: Sequence[tuple[str, Sequence[tuple[int, int]]]]
    ) -> list[tuple[list[int], list[bool]]]:
        """Token ids of texts that a program has put together, in which names of control tokens are these; and which
        tokens lie, wholly or in part, in spans of characters.
        """
        encodings = _encodings(self._with_control.encode_batch, [text for text, _ in texts])
        found = []
        for encoding, (_, spans) in zip(encodings, texts, strict=True):
            places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            marked = np.zeros(len(places), dtype=bool)
            for start, end in spans:
                marked |= (places[:, 0] < end) & (places[:, 1] > start)
            found.append((self._own_ids(encoding.ids), marked.tolist()))
        return found

    def encode_places(self, texts: Sequence[str]) -> list[tuple[list[int], NDArray[np.int64]]]:
        """Token ids of several texts, and the characters [n, 2] that each token stands for: from, to before; with the
        marks behind them.
        """
        encodings = _encodings(self._inner.encode_batch, texts)
        places = (np.array(each.offsets, dtype=np.int64).reshape(-1, 2) for each in encodings)
        return [(each.ids, with_marks(text, at)) for each, text, at in zip(encodings, texts, places, strict=True)]

    @cached_property
    def _with_control(self) -> tokenizers.Tokenizer:
        inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
        inner.encode_special_tokens = False
        inner.add_special_tokens(list(self._hidden))
        return inner

    @cached_property
    def _hidden(self) -> dict[str, int]:
        """Control tokens that the vocabulary has by other names than their own, so that no text is read as one."""
        added = self._inner.get_added_tokens_decoder().items()
        names = {token.content: number for number, token in added if token.content.startswith(HIDDEN)}
        return {name.removeprefix(HIDDEN): number for name, number in names.items()}

    @cached_property
    def _stand_ins(self) -> dict[int | None, int]:
        """The ids of `_hidden` by those that their own names have got in `_with_control`."""
        return {self._with_control.token_to_id(name): number for name, number in self._hidden.items()}

    def _own_ids(self, ids: list[int]) -> list[int]:
        """Those that the vocabulary has for the ones of `_with_control`."""
        return [self._stand_ins.get(id_, id_) for id_ in ids] if self._hidden else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, control tokens nothing if `skip_special`."""
        text = self._inner.decode([int(token) for token in ids], skip_special_tokens=skip_special)
        return text.replace(HIDDEN, "") if self._hides_names else text

    @cached_property
    def _hides_names(self) -> bool:
        return any(name.startswith(HIDDEN) for name in self._inner.get_vocab())

    def stream(self, *, behind: Sequence[int] = (), skip_special: bool = True) -> StreamDecoder:
        """A decoder for tokens that come one at a time, and go on with the text of those before them."""
        return StreamDecoder(self, behind=behind, skip_special=skip_special)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found = self._inner.token_to_id(token)
        return self._inner.token_to_id(HIDDEN + token) if found is None else found

    @cached_property
    def names(self) -> list[str]:
        """The name of each token [vocab_size]; unused ids: none."""
        result = [""] * self.vocab_size
        for name, token in self._inner.get_vocab(with_added_tokens=True).items():
            result[token] = name.removeprefix(HIDDEN)
        return result

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The ids that are tokens, rising; those between them are unused."""
        return np.flatnonzero([bool(name) for name in self.names])

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def end_of_document(self) -> int | None:
        """The id that stands behind each document; None if the vocabulary has none."""
        return self.own_end if self._end is None else self._end

    @property
    def own_end(self) -> int | None:
        """The same for text of which nothing else is known."""
        return self._first(_ENDS)

    @property
    def earlier_end(self) -> int | None:
        """`own_end` of versions that knew fewer names."""
        return self._first(sorted(_ENDS, key=_LATER.__contains__))

    def _first(self, names: Iterable[str]) -> int | None:
        return next((found for name in names if (found := self.id_of(name)) is not None), None)

    def ending(self, token: int) -> Self:
        """This tokenizer for text whose documents end with a certain id."""
        made = copy.copy(self)
        made._end = token
        return made

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens: they stand for no text."""
        added = self._inner.get_added_tokens_decoder()
        return frozenset(token for token, name in added.items() if name.special)

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of what decides the ids of a text, the same however the tokenizer was stored."""
        return self._fingerprint(unusual=True)

    def is_of(self, sha256: str) -> bool:
        """Whether a fingerprint is this tokenizer's, or the one that earlier versions gave it: what they have written
        leaves open how unusual added tokens are found. Or that of the same without BPE dropout, as exports have it.
        """
        return sha256 in (self.sha256, self._earlier) or (self._dropout is not None and self._plain.is_of(sha256))

    @cached_property
    def _earlier(self) -> str:
        return self._fingerprint(unusual=False)

    @cached_property
    def _plain(self) -> Tokenizer:
        return Tokenizer.from_json(self._inner.to_str())

    def _fingerprint(self, *, unusual: bool) -> str:
        content: dict[str, Any] = json.loads(self.to_json())
        model = content["model"]
        if isinstance(content["pre_tokenizer"], dict):
            content["pre_tokenizer"].pop("trim_offsets", None)
        properties = {
            "model": {key: value for key, value in model.items() if value and key not in ("merges", "vocab")},
            "vocab": self._inner.get_vocab(with_added_tokens=True),
            "merges": [part.split(" ") if isinstance(part, str) else part for part in model.get("merges", ())],
            "added": [(token["id"], token["content"]) for token in content["added_tokens"]],
            "normalizer": content["normalizer"],
            "pre_tokenizer": content["pre_tokenizer"],
        }
        others = [(token["id"], found) for token in content["added_tokens"] if (found := _unusual(content, token))]
        if others and unusual:
            properties["unusual"] = others
        if isinstance(model.get("vocab"), list):  # Unigram: the scores decide, too; JSON may move their last bit
            properties["scores"] = [float(np.float32(score)) for _, score in model["vocab"]]
        return hashlib.sha256(json.dumps(properties, sort_keys=True).encode()).hexdigest()

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether every token stands for certain bytes, as in GPT-2."""
        return isinstance(self._inner.decoder, decoders.ByteLevel)

    @property
    def is_gpt2_split(self) -> bool:
        """Whether text is cut into words exactly as GPT-2 does, and each word encoded by itself."""
        content: dict[str, Any] = json.loads(self.to_json())
        words = content["pre_tokenizer"] or {}
        return (
            words.get("type") == "ByteLevel"
            and words.get("use_regex") is True
            and words.get("add_prefix_space") is False
            and content["normalizer"] is None
            and all(token["special"] for token in content["added_tokens"])
            and content["model"].get("type") == "BPE"
        )

    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes of text [vocab_size] that each token stands for; control tokens: 0. For bits per byte."""
        return np.array([len(part) for part in self.token_bytes], dtype=np.int64)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token [vocab_size]; control tokens and unused ids: none."""
        if not self.is_byte_level:
            raise DataError(
                f"this tokenizer's decoder is {type(self._inner.decoder).__name__}, not ByteLevel: its tokens stand "
                "for no certain bytes, so there are no bits per byte. Use a byte-level BPE such as GPT-2's."
            )
        result, bytes_of = [b""] * self.vocab_size, _byte_alphabet()
        added = self._inner.get_added_tokens_decoder()
        for name, token in self._inner.get_vocab(with_added_tokens=True).items():
            if token not in added:
                result[token] = bytes(bytes_of[letter] for letter in name)
            elif token not in self.special_ids:
                result[token] = name.encode()
        return result


class StreamDecoder:
    """Turns tokens into text as they come, holding back the bytes of a character until it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, behind: Sequence[int] = (), skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids = self._last_text(behind)
        self._text = tokenizer.decode(self._ids, skip_special=skip_special)
        self._num_shown = len(self._text)

    def push(self, token: int) -> str:
        """The text that this token completes; often the token's own, sometimes none."""
        if not self._tokenizer.is_byte_level:
            return self._push_whole(token)
        if token in self._tokenizer.special_ids:
            return "" if self._skip_special else self.finish() + self._tokenizer.decode([token], skip_special=False)
        table = self._tokenizer.token_bytes
        return self._utf8.decode(table[token] if token < len(table) else b"")

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never became whole."""
        text = self._not_shown() + self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _last_text(self, ids: Sequence[int]) -> list[int]:
        """The last of them from one on that is text by itself: behind it a token means what it means behind all."""
        alone = (self._tokenizer.decode([token], skip_special=self._skip_special) for token in reversed(ids))
        count = next((count for count, text in enumerate(alone, 1) if text and "\ufffd" not in text), len(ids))
        return list(ids[len(ids) - count :])

    def _push_whole(self, token: int) -> str:
        """Tokens of single bytes become U+FFFD, one for each, until they are characters, which are fewer."""
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids, skip_special=self._skip_special)
        return "" if self._text.endswith("\ufffd") else self._not_shown()

    def _not_shown(self) -> str:
        new, self._num_shown = self._text[self._num_shown :], len(self._text)
        return new


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, sentinels: int = 0, min_frequency: int = 2, progress: bool = False
) -> Tokenizer:
    """Train a byte-level BPE as GPT-2's; the vocabulary is smaller than asked for when the text has too few pairs.
    `sentinels`: so many of its tokens are <extra_id_0>, <extra_id_1>, …, for T5.
    """
    smallest = 256 + 1 + sentinels
    if vocab_size < smallest:
        marks = f", {sentinels} sentinels" if sentinels else ""
        raise DataError(
            f"a vocabulary of {vocab_size} is too small for a byte-level BPE: the 256 bytes{marks} and "
            f"{END_OF_DOCUMENT} take {smallest}. Ask for {smallest} or more."
        )
    inner = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1 - sentinels,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    inner.train_from_iterator((_whole(text) for text in texts), trainer=trainer)
    inner.add_special_tokens([END_OF_DOCUMENT, *(SENTINEL.format(number) for number in range(sentinels))])
    return Tokenizer(inner)


def _unusual(content: Mapping[str, Any], token: Mapping[str, Any]) -> dict[str, bool]:
    """How an added token is found in text, where it is no control token that is looked for as it stands. What is usual
    is no part of `Tokenizer.sha256`: token files, checkpoints and runs of versions that left all of it out keep their
    sum.
    """
    usual = {"special": True, **dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)}
    if content["normalizer"] is None:
        del usual["normalized"]
    return {key: token[key] for key, value in usual.items() if token[key] != value}


_LOADERS = {".txt": load_wordpiece, ".model": load_sentencepiece}


def _find_other(path: Path) -> Path | None:
    """A vocab.txt or a .model that is meant, where there is no tokenizer.json and no pair of GPT-2's."""
    if path.is_file() and (path.name == "vocab.txt" or path.name.endswith((".model", "-vocab.txt"))):
        return path
    if not path.is_dir() or (path / "tokenizer.json").is_file():
        return None
    if (path / "vocab.txt").is_file():
        return path / "vocab.txt"
    found = sorted(path.glob("[!.]*.model"))  # what is hidden are attributes, of macOS
    return found[0] if len(found) == 1 else None


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds half of a surrogate pair at character {error.start:,}, which no UTF-8 can say. Remove it."
        ) from None
    return text


def _encodings(encode: Callable[..., list[tokenizers.Encoding]], texts: Sequence[str]) -> list[tokenizers.Encoding]:
    """Of several texts, without what a model reads around them. DataError for what the tokenizer has no token for."""
    whole = [_whole(text) for text in texts]
    try:
        return encode(whole, add_special_tokens=False)
    except Exception as error:
        if type(error) is not Exception:  # the library's errors have no kind of their own
            raise
        raise DataError(
            f"the tokenizer cannot read a text: {error}. Name a tokenizer that has a token for unknown words."
        ) from None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the others for letters from U+0100 on."""
    return dict(_letters())


def _letters() -> Iterator[tuple[str, int]]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    yield from ((chr(byte), byte) for byte in printable)
    others = (byte for byte in range(256) if byte not in printable)
    yield from ((chr(0x100 + index), byte) for index, byte in enumerate(others))
