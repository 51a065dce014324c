"""`colonnade merge`: adapters and their base become one ordinary checkpoint, W + (alpha / rank) · B A."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade import __version__
from colonnade.architecture.adapters import is_adapter
from colonnade.checkpoint.confined import read_plain
from colonnade.checkpoint.manifest import verify
from colonnade.checkpoint.save import Payload, Target, save_made
from colonnade.config.compare import model_metadata
from colonnade.config.load import to_toml
from colonnade.config.numbers import amount, counted
from colonnade.config.parts import LoraConfig
from colonnade.convert.adapted import Adapted, open_adapted
from colonnade.convert.progress import Progress
from colonnade.convert.target import check_space, publish, when_full, workspace
from colonnade.convert.to_checkpoint import check_new
from colonnade.serving.options import chosen
from colonnade.serving.trained import described, find
from colonnade.tokenizer_files import CONFIG
from colonnade.train.metadata import MOST_BYTES


def merge(source: Path, target: Path, *, base: Path | None, best: bool) -> None:
    """Write the merged checkpoint and print what was done. A ColonnadeError says what cannot be."""
    check_new(target)
    it = open_adapted(find(chosen(source, best)), base)
    names = [name for name in it.architecture.weights() if not is_adapter(name)]
    kinds = {name: (it.architecture.weights()[name].shape, it.merged_dtype(name)) for name in names}
    needed = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds.values())
    check_space(target, needed)
    verify(it.path, lambda name: None)
    with workspace(target) as folder:
        progress = Progress("merged", needed)

        def make(name: str) -> Tensor:
            x = it.merged(name).clone(memory_format=torch.contiguous_format)
            progress.advance(x.nbytes)
            return x

        beside = Target(folder, 1, when_full=partial(when_full, target))
        made = save_made(beside, Payload(0, _metadata(it), _files(it)), kinds, make)
        described(made)
        it.check_unchanged()
        publish(made, target)
    print(f"{it.path}: adapters of rank {it.adapters.rank} beside {counted(len(it.modules), 'weight')}, merged")
    print(f"Written: {target}, {len(names)} tensors, {amount(needed)}", flush=True)


def _metadata(it: Adapted) -> dict[str, Any]:
    base = it.metadata.base
    return {
        "step": 0,
        "samples": 0,
        "model": model_metadata(it.config.model, it.metadata.model.vocab_size),
        "tokenizer_sha256": it.metadata.tokenizer_sha256,
        "end_of_document": it.metadata.end_of_document,
        "labels": list(it.metadata.labels),
        "published": None if it.metadata.published is None else it.metadata.published.model_dump(),
        "merged_from": {
            "step": it.metadata.step,
            "samples": it.metadata.samples,
            "head": it.config.model.head,
            "rank": it.adapters.rank,
            "scale": it.adapters.scale,
            "base": None if base is None else base.path,
        },
        "versions": {"colonnade": __version__, "torch": torch.__version__},
    }


def _files(it: Adapted) -> dict[str, bytes]:
    """The run's own configuration without adapters or a reference, and its tokenizer."""
    config = it.config
    train = config.train.model_copy(update={"init_from": None})
    plain = config.model_copy(update={"lora": LoraConfig(), "train": train, "parts": type(config.parts)()})
    if config.model.head == "preferences":  # of the reference nothing is left but what it has made of the weights
        model = config.model.model_copy(update={"head": "pretraining"})
        plain = plain.model_copy(update={"model": model, "preferences": type(config.preferences)()})
    files = {"config.toml": to_toml(plain).encode()}
    for name in ("tokenizer.json", CONFIG):
        if name in it.manifest.files:
            files[name] = read_plain(it.path / name, MOST_BYTES)
    return files
