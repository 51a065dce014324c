"""Byte-level BPEs as GPT-2 has them, and its two files: a vocabulary (JSON) and merges, a pair a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from colonnade.data.tokenizer_config import TokenizerConfig, read_text
from colonnade.errors import ColonnadeError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "llama-bpe": _NUMBERS.replace("{DIGITS}", "{1,3}"),
    "qwen2": _NUMBERS.replace("{DIGITS}", ""),
}
"""Ways to cut text into words, by the name of `tokenizer.ggml.pre` of GGUF; None: as GPT-2."""
CLASSES: Mapping[str, tuple[str, bool, bool]] = {
    "GPT2Tokenizer": ("gpt-2", False, False),
    "Qwen2Tokenizer": ("qwen2", True, False),
    "GPTNeoXTokenizer": ("gpt-2", True, False),
    "BlenderbotTokenizer": ("gpt-2", False, True),
}
"""How classes of transformers that read the two files cut text, whether it is brought to NFC before, and whether it
gets a space in front where nothing is said. Others, as RoBERTa's, treat it as GPT-2's does, but for `OTHERS`.
"""
OTHERS = (
    "BioGptTokenizer",
    "BlenderbotSmallTokenizer",
    "CLIPTokenizer",
    "CTRLTokenizer",
    "ClvpTokenizer",
    "CohereTokenizer",
    "FSMTTokenizer",
    "FlaubertTokenizer",
    "HerbertTokenizer",
    "NougatTokenizer",
    "OpenAIGPTTokenizer",
    "Qwen3_5Tokenizer",
    "XLMTokenizer",
)
"""Those that have the two files, or such, and give other ids."""


def byte_level(
    model: models.Model, *, split: str | None = None, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Around a model. `split`: of `SPLITS`."""
    inner = tokenizers.Tokenizer(model)
    level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=split is None)
    words = [] if split is None else [pre_tokenizers.Split(tokenizers.Regex(split), "isolated")]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*words, level]) if words else level
    inner.decoder = decoders.ByteLevel()
    return inner


def load_pair(vocab_path: Path, merges_path: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """The tokenizer of GPT-2's two files, without what is added to its vocabulary but the end of documents."""
    way, composed, prefix = CLASSES[config.class_of(*CLASSES, others=OTHERS)]
    prefixed = config.flag("add_prefix_space", default=prefix)
    try:
        vocab = json.loads(read_text(vocab_path))
        lines = read_text(merges_path).split("\n")
        merges = [_pair_of(line) for line in lines if line and not line.startswith("#version")]
        model = models.BPE(vocab=vocab, merges=merges)
        inner = byte_level(model, split=SPLITS[way], add_prefix_space=bool(prefixed))
    except ColonnadeError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{vocab_path} and {merges_path} are not the vocabulary and the merges of one byte-level BPE: {error}. "
            "Copy both from one source."
        ) from error
    if composed:
        inner.normalizer = normalizers.NFC()
    if END_OF_DOCUMENT in vocab:
        inner.add_special_tokens([END_OF_DOCUMENT])
    return inner


def _pair_of(line: str) -> tuple[str, str]:
    first, second = line.removesuffix("\r").split(" ")
    return first, second
