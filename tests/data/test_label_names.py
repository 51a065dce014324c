"""Names of labels: which lists give each number the same meaning, and which number of one is which of the other."""

import pytest

from colonnade.data.label_names import numbers_of, same_labels

OURS = ("entailment", "neutral", "contradiction")


@pytest.mark.parametrize(
    ("theirs", "numbers"),
    [
        (OURS, [0, 1, 2]),
        (("ENTAILMENT", "Neutral", "contradiction"), [0, 1, 2]),
        (("contradiction", "ENTAILMENT", "neutral"), [1, 2, 0]),
        (("joy", "fear", "anger"), None),
        (("entailment", "not_entailment"), None),
        ((*OURS, "unknown"), None),
        (("entailment", "neutral", "contradiction", "Entailment"), None),
    ],
)
def test_labels_are_known_by_their_names(theirs: tuple[str, ...], numbers: list[int] | None) -> None:
    assert numbers_of(OURS, theirs) == numbers
    assert same_labels(OURS, theirs) == same_labels(theirs, OURS) == (numbers == [0, 1, 2])


def test_numbers_without_names_are_taken_to_mean_the_same() -> None:
    assert same_labels(OURS, ()) and same_labels((), OURS) and same_labels((), ())
