"""Tensors of a checkpoint read whole, one at a time, by one process that is no run."""

import math
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.confined import open_plain
from colonnade.checkpoint.files import read_box
from colonnade.checkpoint.manifest import Manifest, damaged
from colonnade.checkpoint.plan import Box, narrow


def read_whole(path: Path, contents: Manifest, name: str) -> Tensor:
    """A logical tensor of the checkpoint in folder `path`, in the type that it was written in.

    Sizes and hashes are the caller's to check (`manifest.verify`), and in the end that it was one checkpoint
    (`manifest.check_unchanged`). CheckpointError if it cannot be read.
    """
    saved = contents.tensors[name]
    whole = torch.empty(saved.shape, dtype=saved.dtype)
    assert sum(math.prod(stored.box.sizes) for stored in saved.shards) == whole.numel(), "a manifest's shards cover it"
    for stored in saved.shards:
        inner = Box((0,) * len(saved.shape), stored.box.sizes)
        try:
            with open_plain(path / stored.file) as file:
                read_box(file, stored, saved.dtype, inner, narrow(whole, stored.box))
        except (zipfile.BadZipFile, EOFError) as error:
            what = f"{path / stored.file} is damaged: {name} cannot be read from it ({error})."
            raise damaged(path, contents, what) from None
    return whole
