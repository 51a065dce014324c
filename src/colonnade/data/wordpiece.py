"""BERT's WordPiece vocabularies (vocab.txt, a token a line) through Hugging Face `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from colonnade.errors import DataError

CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def load_wordpiece(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a vocab.txt; text is lower-cased, without accents, where no token has a capital letter."""
    try:
        names = path.read_text(encoding="utf-8").split("\n")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} cannot be read as text: {error}. Copy it again from its source.") from error
    names = [name.removesuffix("\r") for name in names]
    while names and not names[-1]:
        names.pop()
    missing = [name for name in CONTROL if name not in names]
    if missing or len(set(names)) < len(names):
        what = f"has no {', '.join(missing)}" if missing else "has a token twice"
        raise DataError(f"{path} is no WordPiece vocabulary: it {what}. Use BERT's vocab.txt, one token a line.")
    lower = not any(name != name.lower() for name in names if not name.startswith("["))
    return _around({name: number for number, name in enumerate(names)}, lowercase=lower)


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2, progress: bool = False
) -> tokenizers.Tokenizer:
    """Train a lower-cased WordPiece vocabulary; smaller than asked for when the text has too few pairs.

    The control tokens are its first ids.
    """
    if vocab_size <= len(CONTROL):
        raise DataError(
            f"a vocabulary of {vocab_size} is too small: BERT's control tokens alone are {len(CONTROL)}. Ask for some "
            "thousands."
        )
    inner = _around({}, lowercase=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(CONTROL),
        continuing_subword_prefix="##",
        show_progress=progress,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return inner


def _around(ids: dict[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
    """BERT's way to cut text into words, around a vocabulary."""
    inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    if ids:
        inner.add_special_tokens(list(CONTROL))
    return inner
