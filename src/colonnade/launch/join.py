"""Joining the ranks of a run, watching over them, and leaving."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

import torch

from colonnade.launch import launch
from colonnade.launch.agreement import agree_on_program
from colonnade.launch.watch import Watch
from colonnade.mesh.agreement import all_ranks
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import LONGEST, TIMEOUT, Axis, Mesh, build_mesh

_LATER = 30.0  # seconds that process groups wait on: for what is not in the ledger, the watch being the first else
_START = 600.0  # seconds, at least, that ranks have to come together: some machines are slow to start Python


@contextmanager
def joined(
    layout: Layout,
    device: str,
    threads: int = 0,
    *,
    timeout: float = TIMEOUT,
    deterministic: bool = False,
    properties: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[Mesh, torch.device]]:
    """This rank's mesh and device, for as long as the block runs; every rank of the layout enters it.

    First the ranks prove to each other that they have the same layout, `properties` and program: ConfigError on all of
    them where they differ. A rank that waits longer than `timeout` seconds for the others says for whom, and ends the
    run. Without a supervisor, which knows what ends are good, ranks leave in order with rank 0, which may have more to
    do: torchrun takes the first that ends with another status than 0 for a failure, and kills rank 0 after 30 s.
    Behind the block torch has as many threads as before it.
    """
    timeout = min(timeout, LONGEST)
    limit = max(timeout, _START) + _LATER
    with _threads_kept():
        place = launch.connect(layout.num_ranks, device, threads=threads, timeout=limit, deterministic=deterministic)
        try:
            ranks = all_ranks() if launch.is_rank() else Axis("world")  # a program's own ranks may be at other work
            agree_on_program(properties or {"layout": str(layout)}, place, ranks)
            mesh = build_mesh(layout, launch.rank_and_size()[0], timeout=timeout + _LATER)
            board = launch.board()
            stays, near = not launch.has_supervisor(), launch.neighbours()
            with nullcontext() if board is None else Watch(mesh, timeout, board, near, device=place, stays=stays):
                try:
                    yield mesh, place
                except Exception as error:
                    launch.note_failure(error)  # before the watch tells the others that this rank leaves
                    raise
        finally:
            launch.disconnect()


@contextmanager
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
