"""A trained model that does not fit into the memory that is there: what was asked for, what there is, what to set."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from colonnade.config.numbers import amount
from colonnade.errors import MemoryShortError
from colonnade.mesh.mesh import Mesh
from colonnade.model.precision import DTYPES
from colonnade.train.refused_memory import asked_for, is_refusal, there


class InUse(NamedTuple):
    """A checkpoint's model as it is used."""

    checkpoint: Path
    num_parameters: int
    """Of the whole model."""
    precision: str
    settings: tuple[str, ...]
    """What the command can set to take less."""


@contextmanager
def within_memory(used: InUse, mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Around opening a model and using it: memory that is refused, by the system or by CUDA, is a MemoryShortError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_refusal(error):
            raise
        asked = asked_for(error)
    else:
        return
    raise MemoryShortError(_message(used, mesh, device, asked))


def _message(used: InUse, mesh: Mesh, device: torch.device, asked: int | None) -> str:
    what = "memory was refused" if asked is None else f"{asked:,} bytes ({amount(asked)}) more were refused"
    ranks = mesh.layout.num_ranks
    weights = used.num_parameters * DTYPES[used.precision].itemsize
    on_ranks = "on 1 rank" if ranks == 1 else f"on {ranks} ranks together"
    to_set = "; or ".join(_remedies(used, mesh, device))
    return (
        f"Rank {mesh.rank} has run out of memory with {used.checkpoint}: {what}. {' '.join(there(device))} The model's "
        f"{used.num_parameters:,} parameters take {amount(weights)} in {used.precision} {on_ranks}, and in fp32 while "
        f"they are read, beside what is computed with them. To take less, {to_set}."
    )


def _remedies(used: InUse, mesh: Mesh, device: torch.device) -> Sequence[str]:
    layout = mesh.layout
    where = "GPUs" if device.type == "cuda" else "machines, under torchrun"
    larger = DTYPES[used.precision].itemsize > 2
    return [
        *used.settings,
        *([f"set --precision bf16 (now {used.precision})"] if larger else []),
        f"cut the model over more {where}: --tp (now {layout.tp}) or --pp (now {layout.pp})",
        *(["compute on the CPU: --device cpu"] if device.type == "cuda" else []),
    ]
