"""Files that commands write, held against the disk before torch is imported."""

from collections.abc import Iterator, Sequence
from pathlib import Path


def output_problems(output: Path | None, suffixes: Sequence[str]) -> Iterator[str]:
    """What is wrong with --output."""
    if output is None:
        return
    if output.suffix not in suffixes:
        yield f"--output {output}: what is written is {' or '.join(suffixes)}. Use a name that ends so."
    if not output.absolute().parent.is_dir():
        yield f"--output {output}: there is no folder {output.absolute().parent}. Make it, or name another."
    elif output.is_dir():
        yield f"--output {output} is a folder. Name a file."
