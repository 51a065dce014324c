"""The model beside which adapters are trained: named in their checkpoints, not written again, and never mistaken.

A checkpoint of adapters has what is trained, and which content its base had: the digest of a checkpoint's manifest, or
the SHA-256 of a published folder's config.json and of the files that its weights are read from. Going on, evaluating
and merging begin with a look whether that is what lies there still; so does a run that returns because copies differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.schema import clip
from colonnade.data.sidecar import hash_file
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import weight_files
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.mesh import Axis

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BaseMetadata(BaseModel):
    """Of a base, in a checkpoint's metadata."""

    model_config = ConfigDict(frozen=True)

    path: str
    files: dict[str, Digest]
    """Content by file: of a checkpoint, its manifest's digest, which knows all other files."""
    weights: tuple[str, ...]
    """What is not in the checkpoint but there, by logical name."""
    model: dict[str, Any] | None = None
    """The base's own, as a checkpoint's metadata says it. Was not written at first."""


@dataclass(frozen=True)
class Base:
    """What a run takes from its base, and does not save."""

    path: Path
    files: Mapping[str, str]
    weights: frozenset[str]
    model: Mapping[str, Any]
    """As a checkpoint's metadata says it."""
    fill: Callable[[Sequence[Shard]], None]
    """Reads its weights into shards; every rank calls it."""

    def metadata(self) -> dict[str, object]:
        return {
            "path": str(self.path.absolute()),
            "files": dict(self.files),
            "weights": sorted(self.weights),
            "model": dict(self.model),
        }


def content_of(path: Path) -> dict[str, str]:
    """What identifies the weights of a checkpoint or a published folder, by file. Reads all of a published one.

    CheckpointError for a folder without weights.
    """
    if (path / MANIFEST).exists():
        return {MANIFEST: read_manifest(path).digest}
    files = sorted([path / "config.json", *weight_files(path)])
    return {file.name: hash_file(file) for file in files if file.exists()}


def content_together(path: Path, ranks: Axis) -> dict[str, str]:
    """The same, read by the first rank alone, and raised on all; every rank calls this."""
    found = on_all_ranks(lambda: {} if ranks.rank else content_of(path), ranks)
    lines = "\n".join(f"{digest} {name}" for name, digest in found.items())
    told = broadcast_text(lines, ranks)
    return {name: digest for digest, _, name in (line.partition(" ") for line in told.splitlines())}


def of_same_files(recorded: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """What is `recorded` of the files that are `found`: earlier versions recorded all *.safetensors and *.bin of a
    published folder, also those that nobody reads, which may come and go.
    """
    return {name: digest for name, digest in recorded.items() if name in found}


def check_base(what: Path, wanted: BaseMetadata, path: Path, found: Mapping[str, str]) -> None:
    """CheckpointError unless the content `found` at `path` is that beside which the adapters in `what` were trained."""
    recorded = of_same_files(wanted.files, found)
    lines = [
        f"{name}: {_short(recorded.get(name))} when the adapters were trained, {_short(found[name])} now"
        for name in sorted(found)
        if recorded.get(name) != found[name]
    ]
    if lines:
        raise CheckpointError(
            f"{what} has adapters of another base than {str(path)!r} (SHA-256):\n  "
            + "\n  ".join(map(clip, lines))
            + f"\nThey mean nothing beside other weights. They were trained beside {wanted.path!r}: put that back, or "
            "name where it lies now, with train.init_from or --base."
        )


def check_given_base(what: Path, wanted: BaseMetadata | None, given: Path | None) -> None:
    """CheckpointError for a base that is named for the checkpoint `what`, which needs none."""
    if given is not None and wanted is None:
        raise CheckpointError(
            f"--base {given}: {what} has all of its weights, and no base that lies elsewhere. Leave it out."
        )


def base_path(what: Path, wanted: BaseMetadata, given: Path | None) -> Path:
    """Where the base of the adapters in `what` lies. CheckpointError where there is nothing."""
    path = Path(wanted.path) if given is None else given
    if path.is_dir():
        return path
    raise CheckpointError(
        f"{what} has adapters alone, and their base {str(path)!r} is not there. Name where it lies with --base."
    )


def _short(digest: str | None) -> str:
    return "not there" if digest is None else f"{digest[:12]}…"
