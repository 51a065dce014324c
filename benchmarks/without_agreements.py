"""`colonnade` with ranks that trust each other, beside which `benchmarks.start_up` measures what agreements cost.

    python -m torch.distributed.run … -m benchmarks.without_agreements train CONFIG

Ranks compare neither configuration and program nor data, a mistake of one rank is not told to the others, and copies
are not compared at saves. What they compare is still made: digests of source files and of data belong to checkpoints.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from colonnade.checkpoint.copies import Copies
from colonnade.launch import agreement

Made = TypeVar("Made")


def alone(make: Callable[[], Made], _: object) -> Made:
    """In place of `on_all_ranks`."""
    return make()


def nothing(*_: object) -> None:
    """In place of a comparison."""


LEFT_OUT: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (agreement, "on_all_ranks", alone),
    (agreement, "agree_on_program", nothing),
    (agreement, "agree_on_data", nothing),
    (Copies, "check", nothing),
)


def leave_out() -> None:
    for module, name, other in LEFT_OUT:
        assert hasattr(module, name), f"{module} has {name}"
        setattr(module, name, other)


def main() -> None:
    leave_out()
    from colonnade.__main__ import main as command  # what it imports takes the functions above by name

    command()


if __name__ == "__main__":
    main()
