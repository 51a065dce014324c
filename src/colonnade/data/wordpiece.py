"""BERT's WordPiece vocabularies (vocab.txt, a token a line) through Hugging Face `tokenizers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from colonnade.architecture.huggingface.keys import shown
from colonnade.data.tokenizer_config import TokenizerConfig, control_tokens, read_text
from colonnade.errors import DataError

CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WITHIN = "##"
"""Begins a token that goes on with a word."""
OTHERS = ("BertJapaneseTokenizer", "RoFormerTokenizer")
"""Classes of transformers that read a vocab.txt and give other ids than BERT's, by cutting text otherwise."""


def load_wordpiece(path: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """The tokenizer of a vocab.txt. Where `config` does not say whether text is lower-cased, it is if no token has a
    capital letter; and it loses its accents where it is lower-cased.
    """
    _check(config)
    names = [name.removesuffix("\r") for name in read_text(path).split("\n")]
    while names and not names[-1]:
        names.pop()
    missing = [name for name in CONTROL if name not in names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if missing or twice:
        what = f"has no {', '.join(missing)}" if missing else f"has {shown(twice[0])} more than once"
        raise DataError(f"{path} is no WordPiece vocabulary: it {what}. Use BERT's vocab.txt, one token a line.")
    lower = not any(name != name.lower() for name in names if not name.startswith("["))
    inner = _around({name: number for number, name in enumerate(names)})
    inner.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(config.flag("tokenize_chinese_chars", default=True)),
        strip_accents=config.flag("strip_accents", default=None),
        lowercase=bool(config.flag("do_lower_case", default=lower)),
    )
    return inner


def _check(config: TokenizerConfig) -> None:
    """DataError for what is not BERT's way to cut words."""
    config.class_of("BertTokenizer", others=OTHERS)
    config.fixed("do_basic_tokenize", True, why="text is cut into words at blanks and punctuation here")
    config.fixed("never_split", [], why="every word is cut into pieces here")
    config.fixed("wordpieces_prefix", _WITHIN, why=f"what goes on with a word begins with {_WITHIN} here")
    unknown = control_tokens({**config.settings, **config.names}).get("unk_token", CONTROL[1])
    if unknown != CONTROL[1]:
        config.refuse(f"unk_token = {shown(unknown)}, and what is no word is {CONTROL[1]} here")


def train_wordpiece(
    texts: Callable[[], Iterable[str]], vocab_size: int, *, min_frequency: int = 2, progress: bool = False
) -> tokenizers.Tokenizer:
    """Train a lower-cased WordPiece vocabulary; smaller than asked for when the text has too few pairs.

    The same texts give the same vocabulary. For that they are read twice: `tokenizers` numbers the characters within
    words in the order of a hash table, and pairs of equal counts go by these numbers, but those that it is given keep
    theirs. The control tokens are the first ids, then come the characters.
    Raises DataError where the text's characters alone are more than `vocab_size`.
    """
    if vocab_size <= len(CONTROL):
        raise DataError(
            f"a vocabulary of {vocab_size} is too small: BERT's control tokens alone are {len(CONTROL)}. Ask for some "
            "thousands."
        )
    characters = sorted(_trained(texts(), len(CONTROL), list(CONTROL), min_frequency, progress), key=_within_last)
    first = list(dict.fromkeys([*CONTROL, *characters]))
    if len(first) > vocab_size:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small for the text: its characters, at the beginning of a word and "
            f"within one, and BERT's control tokens take {len(first)}. Ask for {len(first)} or more."
        )
    return _lowering(_trained(texts(), vocab_size, first, min_frequency, progress))


def _trained(
    texts: Iterable[str], vocab_size: int, first: list[str], min_frequency: int, progress: bool
) -> dict[str, int]:
    """The ids of a vocabulary of so many tokens, or of the text's characters where these are more."""
    inner = _lowering({})
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=first,
        continuing_subword_prefix=_WITHIN,
        show_progress=progress,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return dict(inner.get_vocab())


def _within_last(token: str) -> tuple[bool, str]:
    return token.startswith(_WITHIN), token


def _lowering(ids: dict[str, int]) -> tokenizers.Tokenizer:
    inner = _around(ids)
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    return inner


def _around(ids: dict[str, int]) -> tokenizers.Tokenizer:
    """BERT's way to cut text into words, around a vocabulary."""
    inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=CONTROL[1], max_input_chars_per_word=100))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    if ids:
        inner.add_special_tokens(list(CONTROL))
    return inner
