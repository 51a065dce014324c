"""Ranks agree that they train the same run before they train it: configuration, program, data.

    before the mesh      configuration, code, versions, kind of device     (a wrong layout would make other groups)
    before the state     token files and tokenizer

What differs is named key by key, with its ranks, on all of them; all end with exit status 2. What a machine may have of
its own is in `MAY_DIFFER`; paths of data may differ too, for their content is compared. Differences of hardware change
rounding and are reported, not refused: copies that drift apart are found by `checkpoint/copies.py`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from colonnade import __version__
from colonnade.config.compare import NOT_COMPARED, meaning_at
from colonnade.config.describe import all_keys, as_toml
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, ConfigError, DiskError, mistake, name_of
from colonnade.mesh.agreement import Properties, disagreements, gather_texts
from colonnade.mesh.layout import ranks_in_words
from colonnade.mesh.mesh import Axis

MAY_DIFFER = frozenset({"data.cache", "train.threads", "train.device"})
"""Keys that belong to a machine. Of train.device the kind of device that it comes to is compared."""
Made = TypeVar("Made")


def settings(config: Config) -> Properties:
    """What a configuration asks for, key by key, without what is a machine's own."""
    keys = [key for key in all_keys() if key not in MAY_DIFFER | NOT_COMPARED]
    return {key: as_toml(meaning_at(config, key)) for key in keys}


def program(device: torch.device) -> Properties:
    """What computes: all that may give other numbers from the same configuration."""
    return {
        "colonnade": __version__,
        "colonnade's source files": SOURCES,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "CUDA": str(torch.version.cuda),
        "kind of device": device.type,
        "precision of fp32 products": torch.get_float32_matmul_precision(),
    }


def hardware(device: torch.device) -> Properties:
    """What may differ between machines of one run, and lets them round differently."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {"processor": torch.backends.cpu.get_cpu_capability(), "GPU": name}


def digest_of(package: Path) -> str:
    """SHA-256 of names and contents of all .py files below a folder, its first 12 digits."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


SOURCES = digest_of(Path(__file__).parents[1])
"""Of this package as it was imported: what ranks are forked from may be older than the files on the disk now."""


def agree_on_program(properties: Mapping[str, str], device: torch.device, axis: Axis) -> None:
    """ConfigError on all ranks unless all have these properties and run the same program. Every rank calls this.

    Rank 0 says where hardware differs.
    """
    code = program(device)
    found = disagreements({**properties, **code}, axis)
    if found:
        remedies = []
        if found.keys() - code.keys():
            remedies.append("Start all ranks with the same configuration file and overrides.")
        if found.keys() & code.keys():
            remedies.append("Install the same versions on all machines, and use the same kind of device.")
        raise ConfigError(_message("The ranks were not started for the same run", found, remedies))
    other = disagreements(hardware(device), axis)
    if other and axis.rank == 0:
        print("\n".join(["The ranks have different hardware, whose rounding may differ:", *lines(other)]), flush=True)


def agree_on_data(properties: Mapping[str, str], axis: Axis) -> None:
    """ConfigError on all ranks unless all read the same data. Every rank calls this."""
    found = disagreements(properties, axis)
    if found:
        remedy = "Copy the files again from one source to all machines, or name the same ones."
        raise ConfigError(_message("The ranks do not read the same data", found, [remedy]))


def on_all_ranks(make: Callable[[], Made], axis: Axis) -> Made:
    """What `make` gives on this rank; what is a `mistake` on any rank is raised on all, as a DiskError where a disk may
    get over it. Every rank calls this.
    """
    made: list[Made] = []
    failure: ColonnadeError | OSError | None = None
    try:
        made.append(make())
    except (ColonnadeError, OSError) as error:
        failure = error
    mine = None if failure is None else mistake(failure)
    if failure is not None and mine is None:
        raise failure  # no mistake: whoever watches over the ranks ends the others, and may start all again
    passes = failure is not None and name_of(failure) == DiskError.__name__
    answers = [json.loads(text) for text in gather_texts(json.dumps((mine, passes)), axis)]
    ranks: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(answers):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    if not ranks:
        return made[0]
    if failure is not None and ranks.get(str(mine)) == [*range(len(answers))]:
        raise failure  # everyone's: who has made it does not matter
    kind = DiskError if any(each for _, each in answers) else ConfigError
    raise kind("\n".join(f"{ranks_in_words(which)}: {text}" for text, which in ranks.items()))


def lines(found: Mapping[str, Mapping[str, Sequence[int]]]) -> list[str]:
    """`  train.seed: ranks 0-2 have 1, rank 3 has 2`, a line for each property."""

    def of_one(values: Mapping[str, Sequence[int]]) -> str:
        return ", ".join(
            f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in values.items()
        )

    return [f"  {name}: {of_one(values)}" for name, values in found.items()]


def _message(what: str, found: Mapping[str, Mapping[str, Sequence[int]]], remedies: Sequence[str]) -> str:
    return "\n".join([f"{what}:", *lines(found), *remedies])
