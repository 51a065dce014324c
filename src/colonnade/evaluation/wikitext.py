"""WikiText-103 as in the Megatron-LM paper (appendix E): natural text in, perplexity by the original words out.

    perplexity = exp(sum of the losses / T_o)       T_o: words of the file before anything is undone, 245,566

The paper's windows are 1024 tokens that move by 32. Imports no torch.
"""

from pathlib import Path
from typing import NamedTuple

from colonnade.errors import DataError
from colonnade.evaluation.detokenize import DETOKENIZERS
from colonnade.evaluation.raw import compression_of, text_of

PAPER_WINDOW, PAPER_STRIDE = 1024, 32
"""[tokens]"""
JSON = (".json", ".jsonl", ".ndjson")


class WikiText(NamedTuple):
    """A test set."""

    text: str
    original_tokens: int
    """T_o."""


def read_wikitext(path: Path, detokenizer: str) -> WikiText:
    """A file of words (.tokens, .raw) as natural text by one of `DETOKENIZERS`. DataError for an empty one, and for one
    of JSON.
    """
    if Path(path.name.removesuffix(compression_of(path))).suffix.lower() in JSON:
        raise DataError(
            f"{path} has JSON by its name, and WikiText is words. Name its .tokens or .raw, or measure the texts of a "
            ".jsonl with `perplexity`."
        )
    words = text_of(path).replace("\r\n", "\n")
    if not words.strip():
        raise DataError(f"{path} is empty: there is no word to predict. Name WikiText's .tokens or .raw.")
    return WikiText(DETOKENIZERS[detokenizer](words), count_words(words))


def count_words(text: str) -> int:
    """T_o as Megatron-LM counts it: what single spaces separate. It has a line's end with the word before or behind."""
    return len(text.strip().split(" "))
