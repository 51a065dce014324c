"""What a masked model has to guess: whole words, up to three in a row, replaced as in BERT.

Of a sample's tokens 15 % are chosen, as runs of n whole words with a probability in proportion to 1/n, n ≤ 3 (the
Megatron-LM paper, after Lan et al., "ALBERT", section 4.1). A chosen token becomes [MASK] with a chance of 80 %, any
other token with 10 %, and stays itself with 10 % (Devlin et al., "BERT", section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.data.draws import Draws
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class WordPieces:
    """What masking has to know of a vocabulary."""

    pad: int
    classify: int
    separate: int
    mask: int
    ordinary: Integers
    """Ids that a masked token may be replaced with: all but the control tokens."""
    continues: Flags
    """[vocab_size]: whether a token goes on with the word of the one before ("##ing")."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordPieces:
        """Of a BERT tokenizer. Raises DataError for a vocabulary without BERT's control tokens."""
        control = {name: tokenizer.id_of(name) for name in _CONTROL}
        missing = [name for name, token in control.items() if token is None]
        if missing:
            raise DataError(
                f"the tokenizer has no {', '.join(missing)}: masked samples need BERT's control tokens. Use a "
                "WordPiece vocabulary such as bert-base-uncased's vocab.txt."
            )
        continues = np.array([name.startswith("##") for name in tokenizer.names], dtype=bool)
        ids = {name: int(token) for name, token in control.items() if token is not None}
        return cls(
            ids["[PAD]"],
            ids["[CLS]"],
            ids["[SEP]"],
            ids["[MASK]"],
            np.setdiff1d(tokenizer.ids, [*ids.values()]),
            continues,
        )


@dataclass(frozen=True)
class Masking:
    """How much is masked, and in which pieces."""

    share: float = 0.15
    longest: int = 3
    """Words of a run at most; n words are chosen with a probability in proportion to 1/n."""

    def lengths(self, uniform: NDArray[np.float64]) -> Integers:
        """Words of each run, from numbers in (0, 1)."""
        chances = 1 / np.arange(1, self.longest + 1)
        return np.searchsorted(np.cumsum(chances / chances.sum())[:-1], uniform, side="right") + 1


def choose(tokens: Integers, pieces: WordPieces, masking: Masking, draws: Draws) -> Flags:
    """Which of the tokens are to be guessed: bool [s]. At least one, where there is a word."""
    words = _words(tokens, pieces)
    if not len(words):
        return np.zeros(len(tokens), dtype=bool)
    budget = max(1, round(masking.share * int((words[:, 1] - words[:, 0]).sum())))
    lengths = masking.lengths(draws.uniform(len(words)))
    chosen = np.zeros(len(tokens), dtype=bool)
    left = budget
    for first in draws.order(len(words)).tolist():
        taken = _take(words, first, int(lengths[first]), left, chosen)
        chosen[taken] = True
        left -= taken.stop - taken.start
        if not left:
            break
    if left == budget:  # every word is longer than the budget: the first of the order, then
        chosen[slice(*words[int(draws.integer(0, len(words)))])] = True
    return chosen


def shown_to_model(tokens: Integers, chosen: Flags, pieces: WordPieces, draws: Draws) -> Integers:
    """The tokens as the model sees them."""
    count = int(chosen.sum())
    fate, other = draws.uniform(count), draws.uniform(count)
    others = pieces.ordinary[(other * len(pieces.ordinary)).astype(np.int64)]
    shown = tokens.copy()
    shown[chosen] = np.where(fate < 0.8, pieces.mask, np.where(fate < 0.9, others, tokens[chosen]))
    return shown


def _words(tokens: Integers, pieces: WordPieces) -> Integers:
    """Begin and end of each whole word: [words, 2]."""
    control = np.isin(tokens, [pieces.pad, pieces.classify, pieces.separate, pieces.mask])
    before = np.concatenate([[True], control[:-1]])
    begins = ~control & (before | ~pieces.continues[tokens])
    starts = np.flatnonzero(begins)
    ends = np.flatnonzero(begins | control)
    ends = np.append(ends, len(tokens))
    return np.stack([starts, ends[np.searchsorted(ends, starts, side="right")]], axis=1)


def _take(words: Integers, first: int, count: int, left: int, chosen: Flags) -> slice:
    """Up to `count` words from `first` on: as many as are within the budget, side by side, and not yet chosen."""
    begin = end = int(words[first, 0])
    for word_begin, word_end in words[first : first + count].tolist():
        if word_begin != end or word_end - begin > left or chosen[word_begin]:
            break
        end = word_end
    return slice(begin, end)
