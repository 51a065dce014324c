"""Words, and hashes of runs of words: what de-duplication and decontamination compare.

A word is a run of letters and digits in small letters; where a script has no spaces, each of its characters is one.
Near-duplicates go by the words of a text as it is, evaluation sets by those of its normal form.
A run of n words becomes 64 bits. That is exact in all but name: two different runs agree with probability 5e-20.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from datatrove.utils.word_tokenizers import WordTokenizer
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_NO_SPACES = (  # Thai, Lao, Burmese, Khmer; kana and Chinese characters
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_ANY_NO_SPACES = re.compile(f"[{_NO_SPACES}]")
_WORD = re.compile(r"\w+")
_WORD_OR_CHARACTER = re.compile(rf"[{_NO_SPACES}]|(?:(?![{_NO_SPACES}])\w)+")
_SPACED_OR_CHARACTER = re.compile(rf"[{_NO_SPACES}]|[^\s{_NO_SPACES}]+")
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])[\"'”’)\]]*\s+")
_MAX_CACHED = 500_000
_ODD = np.uint64(0x9E3779B97F4A7C15)
_ODD_TOO = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


def pattern_for(text: str) -> re.Pattern[str]:
    """The pattern of a word in this text."""
    return _WORD if text.isascii() or _ANY_NO_SPACES.search(text) is None else _WORD_OR_CHARACTER


def words_of(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return pattern_for(text).findall(text.lower())


def normal_form(text: str) -> str:
    """A text in the form in which it is compared with an evaluation set: the same, whichever form it has."""
    return unicodedata.normalize("NFKC", text)


def spans_of(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The words of a text's normal form, and where each of them stands in that; `spans_within` finds it in the text."""
    text = normal_form(text)
    found = list(pattern_for(text).finditer(text))
    return [match.group().lower() for match in found], [match.span() for match in found]


def spans_within(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where in a text spans of its normal form come from: characters that become one are taken together."""
    if normal_form(text) == text:
        return list(spans)
    edges = [place for place, character in enumerate(text) if place == 0 or not _joins(character)] + [len(text)]
    normal = list(accumulate((len(normal_form(text[start:stop])) for start, stop in pairwise(edges)), initial=0))
    return [(edges[bisect_right(normal, start) - 1], edges[bisect_left(normal, stop)]) for start, stop in spans]


def _joins(character: str) -> bool:
    """Whether it can become one with what stands before it: a combining mark, a vowel or final of a Hangul syllable."""
    first = unicodedata.normalize("NFKD", character)[0]
    return unicodedata.category(first).startswith("M") or "\u1160" <= first <= "\u11ff"


class WordHashes(dict[str, int]):
    """64 bits of each word, remembered."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _MAX_CACHED:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        self[word] = value
        return value

    def of(self, words: Sequence[str]) -> Hashes:
        """Hashes [n] of n words."""
        return np.fromiter(map(self.__getitem__, words), np.uint64, len(words))


def ngram_hashes(words: Hashes, n: int) -> Hashes:
    """Hashes [len(words) − n + 1] of every run of n words; none where there are fewer words."""
    return ngram_hashes_by_length(words, (n,))[n]


def ngram_hashes_by_length(words: Hashes, lengths: Collection[int]) -> dict[int, Hashes]:
    """The hashes of all runs of several lengths, for little more than those of the greatest."""
    found: dict[int, Hashes] = {n: np.empty(0, np.uint64) for n in lengths}
    result = words
    for n in range(1, min(max(lengths, default=0), len(words)) + 1):
        if n > 1:
            result = mixed(result[:-1]) + words[n - 1 :]
        if n in found:
            found[n] = mixed(result ^ np.uint64(n))
    return found


def mixed(values: Hashes) -> Hashes:
    """A bijection on 64 bits that scatters its arguments (as splitmix64 does)."""
    values = (values ^ (values >> _SHIFT)) * _ODD
    return (values ^ (values >> _SHIFT)) * _ODD_TOO


def shingles_of(text: str, n: int, hashes: WordHashes) -> Hashes:
    """The set of a text's word n-grams, sorted. Of a shorter text, its words together are the only one."""
    words = hashes.of(words_of(text))
    if len(words) == 0:
        words = hashes.of([text.strip()])
    return np.unique(ngram_hashes(words, min(n, len(words))))


class PlainWords(WordTokenizer):
    """Words and sentences for datatrove's filters, without models to load or download: words stand between spaces, as
    in the papers that the filters are from (or are single characters, where a script has no spaces); sentences end
    with . ! ? and a space."""

    def __init__(self) -> None:
        super().__init__("plain")

    def word_tokenize(self, text: str) -> list[str]:
        """Words, with the signs that stand at them."""
        return text.split() if _ANY_NO_SPACES.search(text) is None else _SPACED_OR_CHARACTER.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Sentences without the space around them."""
        return [text[start:stop].strip() for start, stop in self.span_tokenize(text) if text[start:stop].strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Where each sentence begins and ends."""
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        starts = [0, *ends]
        return [(start, stop) for start, stop in zip(starts, [*ends, len(text)], strict=True) if start < stop]


def union(parts: Iterable[Hashes]) -> Hashes:
    """All values of several arrays, sorted, each once."""
    arrays = list(parts)
    return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, np.uint64)
