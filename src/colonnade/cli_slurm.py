"""`colonnade slurm`: the batch script of a run."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from colonnade.config.numbers import counted
from colonnade.errors import ConfigError
from colonnade.outputs import check_output, write_output

BESIDE_A_GPU = 4
"""Cores of a rank: its main thread, that of backward passes, those that read and save, and NCCL's."""


def slurm(
    config: Annotated[Path, typer.Argument(help="Configuration file (.toml).", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to replace.", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of a machine, a rank on each.", min=1, show_default=False)
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Instead: ranks of a machine without GPUs.", min=1, show_default=False)
    ] = None,
    cpus_per_rank: Annotated[
        int | None,
        typer.Option(
            help="Cores of a rank.  [default: 4 beside a GPU, else train.threads or 1]", min=1, show_default=False
        ),
    ] = None,
    time: Annotated[str, typer.Option(help="Limit, as Slurm takes it: 24:00:00, 2-12:00:00.")] = "24:00:00",
    margin: Annotated[int, typer.Option(help="[seconds] Before the limit the run saves and leaves.", min=10)] = 300,
    array: Annotated[str, typer.Option(help="Stages that follow each other instead of requeueing: 1-4.")] = "",
    partition: Annotated[str, typer.Option(help="Slurm's partition.")] = "",
    account: Annotated[str, typer.Option(help="Slurm's account.")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Write the script there; else it is printed.", show_default=False)
    ] = None,
) -> None:
    """Write the batch script of a run for Slurm.

    The job saves before its time is over and is queued again until the run is finished.
    """
    from colonnade.launch.slurm import Job, script
    from colonnade.train.start import load_for_plan

    if (gpus_per_node is None) == (ranks_per_node is None):
        raise ConfigError("--gpus-per-node and --ranks-per-node: give one of them, for the ranks of a machine.")
    check_output(output, inputs=[config], written_by="slurm")
    settings = load_for_plan(config, overrides or [])
    job = Job(
        nodes,
        gpus_per_node or ranks_per_node or 1,
        time,
        gpus=gpus_per_node is not None,
        cpus_per_rank=cpus_per_rank or (BESIDE_A_GPU if gpus_per_node else settings.train.threads or 1),
        margin=margin,
        array=array,
        partition=partition,
        account=account,
        name=config.stem,
        logs=str(Path(settings.run.folder).parent),
    )
    text = script(settings, job, [str(config), *(overrides or [])], sys.executable)
    _make_folder(Path(job.logs))
    if output is None:
        print(text, end="")
        return
    write_output(output, text.encode())
    submit = f"Submit it here, with `sbatch {shlex.quote(str(output))}`."
    print(f"{output} is written: {counted(job.num_ranks, 'rank')}. {submit}")


def _make_folder(logs: Path) -> None:
    """Where the job's log goes: Slurm makes no folder, and a job without one ends before its first line."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"{logs}, where Slurm writes the job's log, cannot be made here: {error.strerror}. Make it where the job "
            "runs, before it is submitted: without it the job ends, and nothing says why.",
            file=sys.stderr,
        )
