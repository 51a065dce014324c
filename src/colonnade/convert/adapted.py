"""A checkpoint of adapters, opened beside its base: for what reads both, weight by weight, in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.architecture.adapters import LORA_A, LORA_B, WEIGHT, is_adapter
from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Adapters, Architecture
from colonnade.checkpoint.manifest import Manifest, check_unchanged, read_manifest, verify
from colonnade.checkpoint.whole import read_whole
from colonnade.config.compare import as_now, model_metadata
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError
from colonnade.huggingface.folder import is_published, open_published
from colonnade.serving.trained import described
from colonnade.train.base import base_path, check_base, check_given_base, content_of
from colonnade.train.metadata import RunMetadata
from colonnade.train.newest import checkpoint_at
from colonnade.train.sweep import sweep_instead


@dataclass(frozen=True)
class Adapted:
    """A checkpoint with adapters."""

    path: Path
    manifest: Manifest
    config: Config
    metadata: RunMetadata
    architecture: Architecture
    adapters: Adapters
    base: "_BaseWeights | None"
    """None where the checkpoint has all weights, or the base was not asked for."""

    @property
    def modules(self) -> list[str]:
        """What has an adapter, by logical name."""
        return [name.removesuffix(LORA_A) for name in self.architecture.weights() if name.endswith(LORA_A)]

    def read(self, name: str) -> Tensor:
        """A weight, whole."""
        if name in self.manifest.tensors or self.base is None:
            return read_whole(self.path, self.manifest, name)
        return self.base.read(name)

    def check_unchanged(self) -> None:
        """GoneError if what has been read may be of several checkpoints, or bases."""
        check_unchanged(self.path, self.manifest)
        if self.base is not None:
            self.base.check_unchanged()

    def merged_dtype(self, name: str) -> torch.dtype:
        """Of `merged`: fp32 at least."""
        here = name in self.manifest.tensors or self.base is None
        stored = self.manifest.tensors[name].dtype if here or self.base is None else self.base.dtype(name)
        return torch.promote_types(stored, torch.float32)

    def merged(self, name: str) -> Tensor:
        """The weight, with (alpha / rank) · B A of its adapter added where it has one, computed in float64."""
        weight, module = self.read(name), name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and module in self.modules:
            a, b = (self.read(module + each).double() for each in (LORA_A, LORA_B))
            weight = weight.double().addmm_(b, a, alpha=self.adapters.scale)
        return weight.to(self.merged_dtype(name))


def has_adapters(checkpoint: Path) -> bool:
    """Whether a checkpoint's weights are those of adapters too."""
    return any(is_adapter(name) for name in read_manifest(checkpoint).tensors)


def open_adapted(path: Path, base: Path | None, *, with_base: bool = True) -> Adapted:
    """Open and check a checkpoint and its base. CheckpointError for one without adapters, and for a base that has
    changed.
    """
    manifest, config, metadata = described(path)
    architecture = trained_architecture(config, metadata.model.vocab_size)
    if architecture.adapters is None:
        raise CheckpointError(f"{path} has no adapters: its lora.rank is 0. There is nothing to merge.")
    check_given_base(path, metadata.base, base)
    weights = None
    if metadata.base is not None and with_base:
        where = base_path(path, metadata.base, base)
        weights = _weights_at(where)
        check_base(path, metadata.base, weights.path, content_of(weights.path))
    return Adapted(path, manifest, config, metadata, architecture, architecture.adapters, weights)


def model_at(path: Path) -> Mapping[str, Any] | None:
    """The model of a base, as a checkpoint's metadata says it; None where there is no base any more."""
    found = checkpoint_at(path)
    if found is not None:
        return as_now(read_manifest(found).metadata.get("model", {}))
    if not is_published(path):
        return None
    published = open_published(path, whole=False)
    return model_metadata(published.model, published.vocab_size)


class _BaseWeights(NamedTuple):
    """Of a checkpoint or a published folder."""

    path: Path
    read: Callable[[str], Tensor]
    dtype: Callable[[str], torch.dtype]
    check_unchanged: Callable[[], None]


def _weights_at(path: Path) -> _BaseWeights:
    found = checkpoint_at(path)
    if found is None and is_published(path):
        published = open_published(path, whole=False)
        return _BaseWeights(path, published.read, published.dtype_of, lambda: None)
    if found is None:
        raise CheckpointError(
            sweep_instead(path, str(path))
            or f"{path} is no checkpoint and no folder of Hugging Face: it is no base of adapters."
        )
    manifest = read_manifest(found)
    verify(found, lambda name: None)
    return _BaseWeights(
        found,
        partial(read_whole, found, manifest),
        lambda name: manifest.tensors[name].dtype,
        partial(check_unchanged, found, manifest),
    )
