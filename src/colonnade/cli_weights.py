"""`colonnade merge` and `convert`, and the options that they share with other commands."""

from pathlib import Path
from typing import Annotated

import typer

from colonnade.garbage import imports_stay

BaseFolder = Annotated[
    Path | None, typer.Option("--base", help="Of adapters: where their base lies now.", show_default=False)
]
Best = Annotated[
    bool, typer.Option("--best", help="Of a run, the checkpoint with the lowest validation loss, not the newest.")
]


def merge(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint with adapters, or a run's folder (its newest).", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="A new folder: an ordinary checkpoint.", show_default=False)],
    base: BaseFolder = None,
    best: Best = False,
) -> None:
    """Add adapters to their base: an ordinary checkpoint of both."""
    from colonnade.convert import merge as merging

    merging.merge(source, target, base=base, best=best)


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A local folder of Hugging Face, PEFT or Megatron-LM, a GGUF file, a checkpoint, or a run's folder.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="A new folder: a checkpoint, or of Hugging Face.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16 or fp64. Unset: as the weights are stored.", show_default=False)
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="Of a folder of Hugging Face that is written: the largest file, like 500MB. Unset: 5GB.",
            show_default=False,
        ),
    ] = None,
    best: Best = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list what would be taken, and write nothing.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Of others' weights: a tokenizer in the place of theirs.", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of Megatron-LM: rows of the padded table that are tokens.", show_default=False)
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Of adapters of PEFT: the folder of Hugging Face beside which they lie.", show_default=False),
    ] = None,
) -> None:
    """Turn weights of others into checkpoints, and back.

    A folder of Hugging Face, a checkpoint of Megatron-LM or a GGUF file becomes a checkpoint that any layout loads,
    with its tokenizer; adapters of PEFT are merged with their base.
    A checkpoint becomes a folder that transformers loads. Nothing is downloaded or overwritten.
    """
    with imports_stay():
        from colonnade.convert import convert as conversion

    conversion.convert(
        source,
        target,
        dtype=dtype,
        max_shard_size=max_shard_size,
        dry_run=dry_run,
        best=best,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        base=base,
    )
