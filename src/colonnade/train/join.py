"""Joining the ranks of a run, and leaving them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colonnade.mesh import launch
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh


@contextmanager
def joined(layout: Layout, device: str, threads: int = 0) -> Iterator[tuple[Mesh, torch.device]]:
    """This rank's mesh and device, for as long as the block runs; every rank of the layout enters it."""
    place = launch.connect(layout.num_ranks, device, threads=threads)
    try:
        yield build_mesh(layout, launch.rank_and_size()[0]), place
    finally:
        launch.disconnect()
