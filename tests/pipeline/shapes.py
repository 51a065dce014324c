"""Pipelines of every shape that the schedules are promised for."""

from typing import NamedTuple

from hypothesis import strategies as st

from colonnade.pipeline.schedule import NAMES


class Shape(NamedTuple):
    """A schedule's name and its numbers, in the order in which functions take them."""

    name: str
    num_stages: int
    num_microbatches: int
    virtual_stages: int


@st.composite
def shapes(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> Shape:
    """Up to 16 stages, 64 micro-batches and, where they can be, 4 virtual stages."""
    name, num_stages = draw(st.sampled_from(names)), draw(st.integers(1, 16))
    if name == "interleaved":
        return Shape(name, num_stages, num_stages * draw(st.integers(1, 64 // num_stages)), draw(st.integers(1, 4)))
    return Shape(name, num_stages, draw(st.integers(1, 64)), 1)
