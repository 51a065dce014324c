"""What commands that use a checkpoint share: its options, and starting their ranks."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or the folder of a run (its newest one).", show_default=False)
]
TensorParallel = Annotated[
    int, typer.Option(help="Tensor-parallel ranks; any number that divides heads and MLP.", min=1)
]
PipelineParallel = Annotated[int, typer.Option(help="Pipeline stages; up to the number of layers + 2.", min=1)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; the checkpoint's own where unset.")]

Threads = Annotated[
    int, typer.Option(help="CPU threads of a rank. 0: as train.threads, OMP_NUM_THREADS or the cores shared.", min=0)
]


def run_on_ranks(
    num_ranks: int,
    arguments: list[str],
    keep: Sequence[int] = (),
    after_a_loss: Callable[[], str] = lambda: "",
    *,
    file: str | None = None,
) -> None:
    """Returns where this process is a rank or the only one. Else runs `colonnade arguments` on local ranks; exits.

    `keep`: descriptors that the ranks inherit. `after_a_loss`: what to do when a rank was lost, in words.
    `file`: that of `run_ranks`.
    """
    from colonnade.launch import launch

    if num_ranks > 1 and not launch.is_rank():
        command = [sys.executable, "-m", "colonnade", *arguments]
        raise typer.Exit(launch.run_ranks(num_ranks, command, file=file, keep=keep, after_a_loss=after_a_loss))
