"""How long the sequences are that span corruption makes of a text (Raffel et al., 2020, section 3.1.4). Pure."""

from bisect import bisect_left
from typing import NamedTuple

SHARE, MEAN_LENGTH = 0.15, 3
"""As published."""
LONGEST = 1 << 40
"""[tokens] Of a text: more than any model reads."""


class Lengths(NamedTuple):
    """How much is cut out of texts."""

    share: float = SHARE
    """Of the tokens."""
    mean_length: float = MEAN_LENGTH
    """[tokens] Of a span."""

    def cut(self, text: int) -> tuple[int, int]:
        """Tokens that are cut out of a text of so many, and in how many spans; always the same for one length."""
        tokens = min(max(round(text * self.share), 1), text - 1)
        return tokens, min(max(round(tokens / self.mean_length), 1), tokens, text - tokens)

    def widths(self, text: int) -> tuple[int, int]:
        """Tokens of the encoder's and of the decoder's sequence for a text of so many: a sentinel for each span, and
        an end behind both.
        """
        tokens, spans = self.cut(text)
        return text - tokens + spans + 1, tokens + spans + 1

    def text(self, encoder: int, decoder: int | None = None) -> int:
        """The longest text that fits into sequences of these lengths (None: any); 1 where none of two tokens does."""

        def is_too_long(text: int) -> bool:
            widths = self.widths(text)
            return widths[0] > encoder or (decoder is not None and widths[1] > decoder)

        limit = 2
        while limit < LONGEST and not is_too_long(limit):
            limit *= 2
        return 1 + bisect_left(range(2, limit + 1), True, key=is_too_long)  # widths never fall as texts grow
