"""What the numbers of labels mean: whether two lists of names give each number the same meaning.

A label's number is its place in a list of names: of files of examples, of a checkpoint, of a published folder. Names
are compared without case, and with "_", "-" and spaces alike. A list that only repeats the numbers, like LABEL_0 and
LABEL_1, has no names.
"""

from collections.abc import Sequence
from typing import Literal

Comparison = Literal["same", "reordered", "other"]


def compare_labels(one: Sequence[str], other: Sequence[str]) -> Comparison:
    """Whether a number means the same label in both lists, as far as both have names; whether these are the same labels
    in another order; or whether some have other names, which may mean the same.
    """
    ours, theirs = _names(one), _names(other)
    if ours == theirs or not (ours and theirs):
        return "same"
    return "reordered" if len({*ours}) == len(ours) and sorted(ours) == sorted(theirs) else "other"


def numbers_of(names: Sequence[str], labels: Sequence[str]) -> list[int]:
    """The number that each name has among `labels`, which are the same in another order."""
    assert compare_labels(names, labels) == "reordered", "others have no number there"
    there = _names(labels)
    return [there.index(name) for name in _names(names)]


def _names(labels: Sequence[str]) -> list[str]:
    """As they are compared; nothing where they only repeat their numbers."""
    names = [" ".join(label.casefold().replace("_", " ").replace("-", " ").split()) for label in labels]
    is_numbered = all(name.removeprefix("label").strip() == str(number) for number, name in enumerate(names))
    return [] if is_numbered else names
