"""Which marks behind a token's characters are of it: those that no token has."""

import numpy as np
import pytest

from colonnade.data import places as module
from colonnade.data.places import with_marks


@pytest.mark.parametrize(
    ("text", "places", "expected"),
    [
        ("a\u0301b", [[0, 1], [2, 3]], [[0, 2], [2, 3]]),
        ("a\u0301b", [[0, 1], [1, 2], [2, 3]], [[0, 1], [1, 2], [2, 3]]),
        ("a\u0301\u0301b", [[0, 1], [1, 2], [3, 4]], [[0, 1], [1, 3], [3, 4]]),
        ("\u0301a", [[1, 2]], [[1, 2]]),
        ("\u0301", [], []),
        ("a \u0301b", [[0, 1], [3, 4]], [[0, 1], [3, 4]]),
        ("\u0915\u093f", [[0, 1]], [[0, 2]]),
        ("1\u20e3", [[0, 1]], [[0, 2]]),
        ("\U00011013\U00011046", [[0, 1]], [[0, 2]]),
        ("a\u200d\u0301\u200c", [[0, 1]], [[0, 4]]),
        ("a\u2060b", [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        ("a\u0301bc\u0301", [[0, 4]], [[0, 5]]),
    ],
    ids=[
        *("between tokens", "a token of its own", "behind one that is", "before all tokens", "without any"),
        *(
            "behind white space",
            "spacing",
            "enclosing",
            "beyond 16 bits",
            "joiners",
            "another format character",
            "within a token",
        ),
    ],
)
def test_a_mark_that_no_token_has_is_of_the_token_before_it(
    text: str, places: list[list[int]], expected: list[list[int]]
) -> None:
    given = np.array(places, dtype=np.int64).reshape(-1, 2)
    assert with_marks(text, given).tolist() == expected and given.tolist() == places


def test_letters_of_most_texts_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_goes_on", lambda character: pytest.fail(f"{character} is looked at"))
    with_marks("Plain, naïve, façade, Łódź.", np.zeros((0, 2), dtype=np.int64))
