"""One rank's file: arguments and tensors, read as data.

A file of Megatron-LM holds more than tensors: the arguments of the run (argparse.Namespace), enums, states of random
generators and of the optimizer. torch's reader of weights makes no object of a class that it was not told of, and it
is told of stand-ins here: none of the classes that a file names is imported, and nothing of theirs runs. What the file
names beyond known packages is refused by name, before anything is read.
"""

import re
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from colonnade.checkpoint.plan import names_in_words
from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import CODES, DTYPES
from colonnade.huggingface.pickled import PICKLE_FAULTS, Extent, extent_of, load_without_numbers

_NAMESPACE = "argparse.Namespace"
_STOOD_IN_FOR = re.compile(
    r"(megatron|apex|transformer_engine|deepspeed|numpy)\..*|_codecs\.encode|types\.SimpleNamespace"
    r"|pathlib\.(Pure|Posix|Windows)*Path|signal\.Signals|_?io\.BytesIO|datetime\.\w+|collections\.deque|copyreg\._reconstructor"
    r"|torch\.distributed\.\S+|(builtins|__builtin__)\.(object|slice|type|getattr)"
)
"""Names whose objects are no weights: the states of random generators and optimizers, enums and paths of arguments.
Python 3.11.0 to 3.11.3 write a member of an enum as getattr(its class, its name)."""
_AGAIN = "Copy it again from where it was written."


class Arguments:
    """Stands for argparse.Namespace: it has what was in it, and does nothing."""


class StandIn:
    """Stands for an object of a class that is not imported: it takes whatever the pickle gives it."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __new__(cls, *args: object) -> "StandIn":
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"an object {getattr(self, 'args', ())!r}"


@dataclass(frozen=True)
class RankTensor:
    """A tensor in a rank's file."""

    file: "RankFile"
    path: tuple[str, ...]
    """Keys of the tables in which it lies."""
    place: Extent
    kind: str
    """Its number format, as safetensors calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def read(self) -> Tensor:
        """Its numbers, in memory of their own."""
        return self.place.read()


@dataclass(frozen=True)
class RankFile:
    """The file of one rank. CheckpointError for one that is damaged, or wants code."""

    path: Path

    @cached_property
    def _names(self) -> list[str]:
        """What the pickle names, all of it allowed."""
        _check_file(self.path)
        try:
            named = get_unsafe_globals_in_checkpoint(str(self.path))
        except PICKLE_FAULTS as error:
            raise _damaged(self.path, error) from None
        foreign = sorted(name for name in named if name != _NAMESPACE and not _STOOD_IN_FOR.fullmatch(name))
        if foreign:
            raise CheckpointError(
                f"{self.path} names code that no checkpoint of Megatron-LM needs: "
                f"{names_in_words(map(clip, foreign))}. Nothing of it was run. Get the checkpoint from whom you trust, "
                f"with weights and arguments alone."
            )
        return named

    def content(self) -> dict[str, Any]:
        """Everything in it; tensors are without their numbers."""
        stand_ins: list[Any] = [(Arguments if name == _NAMESPACE else StandIn, name) for name in self._names]
        try:
            with safe_globals(stand_ins):
                found = load_without_numbers(self.path)
        except PICKLE_FAULTS as error:
            raise _damaged(self.path, error) from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path} is no checkpoint of Megatron-LM: it holds a {type(found).__name__}.")
        return found


def _check_file(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no plain file. {_AGAIN}")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is no file that torch.save writes since torch 1.6: it is cut off, damaged or older. {_AGAIN} An "
            f"older one whose makers you trust becomes newer by torch.save(torch.load(path, weights_only=False), path)."
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(f"{path} cannot be read: {clip(why)} It is damaged or cut off. {_AGAIN}")


def tensors_of(file: RankFile, tables: Mapping[str, Any], key: str) -> dict[str, RankTensor]:
    """The tensors of a table within the file, by their names with dots. CheckpointError for what is no tensor."""
    found: dict[str, RankTensor] = {}

    def collect(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict) and all(isinstance(name, str) for name in value):
            for name, inner in value.items():
                collect(inner, (*path, name))
            return
        if path[-1].endswith("_extra_state"):
            return
        place = extent_of(file.path, value) if isinstance(value, Tensor) else None
        if place is None:
            raise CheckpointError(f"{file.path} has {clip('.'.join(path))}, which is no plain tensor. {_AGAIN}")
        kind = CODES.get(place.dtype, str(place.dtype))
        found[".".join(path[1:])] = RankTensor(file, path, place, kind)

    collect(tables[key], (key,))
    return found
