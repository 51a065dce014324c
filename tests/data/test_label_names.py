"""Names of labels: which lists give each number the same meaning, and which number of one is which of the other."""

import pytest

from colonnade.data.label_names import Comparison, compare_labels, numbers_of

OURS = ("entailment", "neutral", "not_entailment")


@pytest.mark.parametrize(
    ("theirs", "how"),
    [
        (OURS, "same"),
        (("ENTAILMENT", "Neutral", "not entailment"), "same"),
        (("entailment", "neutral", "Not-Entailment "), "same"),
        (("not entailment", "ENTAILMENT", "neutral"), "reordered"),
        (("joy", "fear", "anger"), "other"),
        (("entailment", "neutral", "contradiction"), "other"),
        (("entailment", "not_entailment"), "other"),
        ((*OURS, "unknown"), "other"),
        (("entailment", "neutral", "not_entailment", "Entailment"), "other"),
        (("LABEL_2", "LABEL_1", "LABEL_0"), "other"),
    ],
)
def test_labels_are_known_by_their_names(theirs: tuple[str, ...], how: Comparison) -> None:
    assert compare_labels(OURS, theirs) == compare_labels(theirs, OURS) == how


@pytest.mark.parametrize(
    "theirs", [(), ("0", "1", "2"), ("LABEL_0", "LABEL_1", "LABEL_2"), ("label 0", "Label-1", "label2")]
)
def test_numbers_without_names_are_taken_to_mean_the_same(theirs: tuple[str, ...]) -> None:
    assert compare_labels(OURS, theirs) == compare_labels(theirs, OURS) == compare_labels(theirs, theirs) == "same"


def test_a_name_is_the_same_label_wherever_it_stands() -> None:
    assert numbers_of(OURS, ("Not entailment", "ENTAILMENT", "neutral")) == [1, 2, 0]


def test_case_is_that_of_any_language() -> None:
    assert compare_labels(("Straße", "Weg"), ("STRASSE", "WEG")) == "same"


def test_a_list_that_has_a_name_twice_is_in_no_order() -> None:
    assert compare_labels(("a", "a", "b"), ("a", "b", "A")) == "other"
    assert compare_labels(("a", "A", "b"), ("a", "a", "b")) == "same"
