"""What a measurement found, and how."""

from collections.abc import Mapping
from dataclasses import dataclass

HELD_OUT = "held-out part"
"""Protocol of `evaluate --part`, where a model is no GPT of text."""


@dataclass(frozen=True)
class Measured:
    """What a task found."""

    protocol: str
    parameters: Mapping[str, object]
    """Of the protocol: with them the number can be had again."""
    numbers: Mapping[str, object]
    line: str
    """For people."""
    notes: tuple[str, ...] = ()
