"""What the numbers of labels mean: whether two lists of names give each number the same meaning, or how they differ.

A label's number is its place in a list of names: of files of examples, of a checkpoint, of a published folder. Names
are compared without case. A list without names says nothing: a number is then taken to mean the same.
"""

from collections.abc import Sequence


def same_labels(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether a number means the same label in both lists, as far as both have names."""
    return not (one and other) or _folded(one) == _folded(other)


def numbers_of(names: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """The number that each name has among `labels`; None where these are other labels."""
    wanted, there = _folded(names), _folded(labels)
    if len({*there}) < len(there) or {*wanted} != {*there}:
        return None
    return [there.index(name) for name in wanted]


def _folded(names: Sequence[str]) -> list[str]:
    return [name.casefold() for name in names]
