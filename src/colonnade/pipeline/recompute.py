"""Which units backward computes again, and in which groups. Pure."""

from collections.abc import Sequence

from colonnade.architecture.statement import Unit


def groups(units: Sequence[Unit], every: int) -> list[tuple[list[Unit], bool]]:
    """(units, whether backward computes them again): those that may be, in groups of `every`; 0: none is.

    Embedding and head never are, for they keep next to nothing; nor is what has no backward.
    """
    found: list[tuple[list[Unit], bool]] = []
    for unit in units:
        again = every > 0 and unit.recomputes and unit.has_backward
        if again and found and found[-1][1] and len(found[-1][0]) < every:
            found[-1][0].append(unit)
        else:
            found.append(([unit], again))
    return found
