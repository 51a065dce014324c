"""Which characters of a text each of its tokens stands for."""

import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

_JOINERS = "\u200c\u200d"
_FROM_MARKS_ON = re.compile("[\u0300-\U0010ffff]")
"""The first mark is U+0300: most texts have nothing else of these to look at."""


def with_marks(text: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The characters [tokens, 2] of a text's tokens, where marks that no token has, as a normalizer drops accents, are
    of the token before them: what a reader takes for one character is not cut (Unicode's Annex 29, GB9 and GB9a). So a
    token stands for the same in NFD as in NFC.
    """
    found = places.copy()
    for at in (match.start() for match in _FROM_MARKS_ON.finditer(text) if _goes_on(match.group())):
        token = int(np.searchsorted(places[:, 0], at, side="right")) - 1
        if token >= 0 and found[token, 1] == at:
            found[token, 1] = at + 1
    return found


def _goes_on(character: str) -> bool:
    """Whether it is of one character with what stands before it."""
    return unicodedata.category(character)[0] == "M" or character in _JOINERS
