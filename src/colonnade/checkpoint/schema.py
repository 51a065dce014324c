"""What a manifest may say, checked before anything is done with it: a checkpoint may come from a stranger.

Types and ranges are pydantic's business. What follows is geometry, and bounds all memory by the size of the files:

    every shard lies in its tensor, in a listed file, within that file, and has about the bytes of its numbers
    the shards of a tensor cover it, each element once; no two shards share bytes of a file
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from colonnade.checkpoint.names import Count
from colonnade.checkpoint.plan import Box, tile

OVERHEAD = 1 << 16
"""Bytes that `torch.save` writes around a tensor's numbers, at most (about 1,500)."""
SHOWN = 200  # characters of a stranger's text in a message

Name = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.\-]{1,512}$")]
FileName = Annotated[str, Field(strict=True, pattern=r"^\.?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}$")]
"""One name, without a folder: it can lead nowhere else."""
Numbers = Annotated[tuple[Count, ...], Field(max_length=16)]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]  # fmt: skip


class WrittenShard(NamedTuple):
    """A row of "pieces"."""

    offsets: Numbers
    sizes: Numbers
    file: FileName
    start: Count
    length: Count


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class WrittenTensor(_Part):
    """A value of "tensors"."""

    shape: Numbers
    dtype: Dtype
    pieces: tuple[WrittenShard, ...]

    @model_validator(mode="after")
    def _covered(self) -> "WrittenTensor":
        itemsize = getattr(torch, self.dtype).itemsize
        for shard in self.pieces:
            _check_shard(shard, self.shape, itemsize)
        if not tile(self.shape, [Box(shard.offsets, shard.sizes) for shard in self.pieces]):
            raise ValueError("its shards do not cover it, each element once")
        return self


class WrittenFile(_Part):
    """A value of "files"."""

    size: Count
    sha256: Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]


class Written(_Part):
    """A manifest's content, "format", "version" and "sha256" apart. Keys of later versions are let pass."""

    step: Count
    facts: dict[str, JsonValue]
    tensors: dict[Name, WrittenTensor]
    files: dict[FileName, WrittenFile]

    @field_validator("facts")
    @classmethod
    def _a_model_is_a_table(cls, facts: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if not isinstance(facts.get("model", {}), dict):
            raise ValueError('"model" in it is no table')
        return facts

    @model_validator(mode="after")
    def _in_files(self) -> "Written":
        ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            for shard in tensor.pieces:
                file, end = self.files.get(shard.file), shard.start + shard.length
                if file is None:
                    raise ValueError(f"{name} lies in {shard.file}, which is not among the files")
                if end > file.size:
                    raise ValueError(f"{name} ends at byte {end} of {shard.file}, which has {file.size}")
                ranges[shard.file].append((shard.start, end))
        for name, parts in ranges.items():
            if any(end > start for (_, end), (start, _) in itertools.pairwise(sorted(parts))):
                raise ValueError(f"two tensors share bytes of {name}")
        return self


def _check_shard(shard: WrittenShard, shape: tuple[int, ...], itemsize: int) -> None:
    if not len(shard.offsets) == len(shard.sizes) == len(shape):
        raise ValueError(f"a shard at {list(shard.offsets)} has other dims than its shape {list(shape)}")
    if any(o + n > whole for o, n, whole in zip(shard.offsets, shard.sizes, shape, strict=True)):
        raise ValueError(f"a shard at {list(shard.offsets)} of {list(shard.sizes)} reaches beyond {list(shape)}")
    num_bytes = math.prod(shard.sizes) * itemsize
    if not num_bytes <= shard.length <= num_bytes + OVERHEAD:
        raise ValueError(f"a shard of {list(shard.sizes)} has {shard.length} bytes, and its numbers alone {num_bytes}")


def parse(text: str) -> Any:
    """JSON in which no key stands twice. ValueError says in words what is wrong with it."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def validate(content: Any) -> Written:
    """The content of a manifest. ValueError says in words what is wrong with it."""
    try:
        return Written.model_validate(content)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """What pydantic finds wrong first, and where: one line that is safe to show."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    return f"{clip(message)} (at {clip(where, 80)})" if where else clip(message)


def clip(text: str, limit: int = SHOWN) -> str:
    """A stranger's text as a message may show it: printable characters only, and not too many."""
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:limit])
    return shown if len(text) <= limit else f"{shown}…"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(_repeated(pairs))
        raise ValueError(f"the key {clip(twice)!r} stands twice")
    return content


def _repeated(pairs: list[tuple[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            yield key
        seen.add(key)
