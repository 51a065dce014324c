"""`manifest.json`: what a checkpoint holds, and how to tell that it is whole.

    {"format": "colonnade checkpoint", "version": 1, "step": 100,
     "facts": {…},                                              the metadata: whatever the run wants to find again
     "tensors": {"head.norm.weight": {"shape": [768], "dtype": "float32",
                 "pieces": [[[0], [768], "__0_0.distcp", 0, 4096]]}},       offsets, sizes, file, start, bytes
     "files": {"__0_0.distcp": {"size": 4096, "sha256": "…"}},
     "sha256": "…"}                                             of the manifest without this line

Everything needed for reading is here, so that reading a checkpoint runs no pickled code. A folder that carries a
checkpoint's name is whole or damaged: writing goes to a temporary name, which the last step changes.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.confined import open_plain, plain_size, read_plain
from colonnade.checkpoint.names import MANIFEST, NAME, checkpoints_in, folder_name, newest_in
from colonnade.checkpoint.plan import Box
from colonnade.checkpoint.schema import Written, clip, parse, validate
from colonnade.errors import CheckpointError, DamagedError, GoneError

FORMAT = "colonnade checkpoint"
VERSION = 1
HASH_BLOCK = 1 << 22  # bytes read at a time
MOST_BYTES = 1 << 30  # of a manifest: ten million shards


@dataclass(frozen=True)
class StoredShard:
    """One written box of a tensor: `length` bytes from `start` in `file`, as `torch.save` writes a tensor."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A logical tensor in a checkpoint. Its shards cover it, each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class SavedFile:
    """What a file of a checkpoint has to be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    step: int
    metadata: dict[str, Any]
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]
    digest: str = ""
    """SHA-256 of manifest.json's content, once it is read."""


def to_json(manifest: Manifest) -> str:
    """The text of `manifest.json`."""
    tensors = {
        name: {
            "shape": tensor.shape,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "pieces": [[p.box.offsets, p.box.sizes, p.file, p.start, p.length] for p in tensor.shards],
        }
        for name, tensor in manifest.tensors.items()
    }
    files = {name: asdict(file) for name, file in manifest.files.items()}
    content = {"format": FORMAT, "version": VERSION, "step": manifest.step, "facts": manifest.metadata}
    content |= {"tensors": tensors, "files": files}
    content |= {"sha256": _digest(content)}
    return _lined(content, lambda value: _lined(value) if isinstance(value, dict) else json.dumps(value))


def _lined(content: Mapping[str, Any], text: Callable[[Any], str] = json.dumps) -> str:
    """A JSON object with a line for each key: an indent would have all of it written by Python, not by C."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text(value)}" for name, value in content.items()) + "\n}"


def read_manifest(path: Path, known: Manifest | None = None) -> Manifest:
    """The manifest of the checkpoint in folder `path`. CheckpointError if it is none of ours, damaged or newer. `known`
    was read before: where it is still that one it is given back, which takes a hundredth of the time.
    """
    data = _read(path)
    manifest = known if known is not None and _is_of(known, data) else _parsed(path, data)
    _check_name(path, manifest)
    if known is not None and known.digest == manifest.digest:  # perhaps with its keys in another order
        return known
    return manifest


def _parsed(path: Path, data: bytes) -> Manifest:
    """The manifest that `manifest.json` is, whose content is `data`. CheckpointError where it is none."""
    content = _content(path, data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of Colonnade: its {MANIFEST} does not say format = {FORMAT!r}. "
            f"Name a folder that `colonnade train` has written."
        )
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{path} is in checkpoint format {clip(repr(version))}, and this version of Colonnade reads format "
            f"{VERSION}: it was written by another version. Install that version to read it."
        )
    digest = content.pop("sha256", None)
    if digest != _digest(content):
        raise DamagedError(f"{path / MANIFEST} is damaged: its content does not match its hash. {remedy(path)}")
    try:
        manifest = _from_content(validate(content))
    except ValueError as error:
        raise CheckpointError(
            f"{path / MANIFEST} says what no checkpoint of Colonnade can: {error}. {remedy(path)}"
        ) from None
    return replace(manifest, digest=digest)


def _check_name(path: Path, manifest: Manifest) -> None:
    """A folder with a checkpoint's name is the one of that step: which one is the newest goes by names."""
    if NAME.fullmatch(path.name) and path.name != folder_name(manifest.step):
        raise CheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}, as its {MANIFEST} says: it has been given the name "
            f"of another step. Rename it to {folder_name(manifest.step)}, or move it elsewhere."
        )


def _is_of(manifest: Manifest, data: bytes) -> bool:
    """Whether `data` is the text of a manifest, as `to_json` writes it: its own digest comes last. Cheap. Others may
    stand before, that of a base say.
    """
    last = data[-200:].rstrip().removesuffix(b"}").rstrip()
    return last.endswith(b'"sha256": "%s"' % manifest.digest.encode())


def _content(path: Path, data: bytes) -> Any:
    """What `manifest.json` says as JSON, whatever it is."""
    try:
        return parse(data.decode())
    except UnicodeDecodeError:
        raise DamagedError(f"{path / MANIFEST} is damaged: it is not text. {remedy(path)}") from None
    except ValueError as error:
        raise DamagedError(f"{path / MANIFEST} is damaged: it is not JSON ({error}). {remedy(path)}") from None


def _read(path: Path) -> bytes:
    try:
        return read_plain(path / MANIFEST, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        what = "has no manifest.json" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        raise DamagedError(
            f"{path} {what}, so it is not a whole checkpoint of Colonnade. Name a folder such as "
            f"RUN/checkpoints/{folder_name(100)}. {remedy(path)}"
        ) from None


def _from_content(content: Written) -> Manifest:
    tensors = {
        name: SavedTensor(
            shape=tensor.shape,
            dtype=getattr(torch, tensor.dtype),
            shards=tuple(StoredShard(Box(p.offsets, p.sizes), p.file, p.start, p.length) for p in tensor.pieces),
        )
        for name, tensor in content.tensors.items()
    }
    files = {name: SavedFile(file.size, file.sha256) for name, file in content.files.items()}
    return Manifest(content.step, content.facts, tensors, files)


def _digest(content: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True)
    except RecursionError:
        return "none: nobody has written anything that is nested so deeply"
    return hashlib.sha256(text.encode()).hexdigest()


def remedy(path: Path) -> str:
    """What to do about a damaged checkpoint: which older one there is to go on from."""
    beside = checkpoints_in(path.parent) if path.parent.is_dir() else {}
    step = next((step for step, other in beside.items() if other == path), None)
    if step is None:
        return "It cannot be used."
    older = [other for other in beside if other < step]
    if older:
        return f"Delete {path} to go on from step {older[-1]}."
    return "There is no older one: delete the whole run's folder to start again from step 0."


def check_unchanged(path: Path, manifest: Manifest) -> None:
    """GoneError if the checkpoint in folder `path` is another now than the one that `manifest` was read of: what has
    been read since may be of both.
    """
    found: Manifest | None = None
    try:
        found = read_manifest(path, manifest)
    except CheckpointError as error:
        if isinstance(error, GoneError):
            raise
    if found is not manifest:
        raise gone(path)


def gone(path: Path) -> GoneError:
    """Of a checkpoint in whose place there is another."""
    return GoneError(
        f"{path} was replaced while it was read, as by a run that has returned to an earlier step and saves this one "
        "anew: what was read is of two checkpoints, and is not used. Run the command again."
    )


def damaged(path: Path, manifest: Manifest, what: str) -> DamagedError:
    """Of a file that is not as `manifest` says. GoneError where that is of another checkpoint."""
    check_unchanged(path, manifest)
    return DamagedError(f"{what} {remedy(path)}")


def check_sizes(path: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """CheckpointError if a file of the checkpoint is missing or has another size than it was written with. `names`: of
    the files to look at; None: all.
    """
    for name in manifest.files if names is None else names:
        file, where = manifest.files[name], path / name
        try:
            size = plain_size(where)
        except FileNotFoundError:
            raise damaged(path, manifest, f"{path} is damaged: {name} is missing.") from None
        if size != file.size:
            raise damaged(path, manifest, f"{where} is damaged: it has {size} bytes and was written with {file.size}.")


def check_hash(path: Path, manifest: Manifest, name: str) -> None:
    """CheckpointError if one file of the checkpoint is not byte for byte what was written."""
    if hash_file(path / name) != manifest.files[name].sha256:
        raise damaged(path, manifest, f"{path / name} is damaged: its bytes are not those that were written (SHA-256).")


def looked_at(path: Path) -> Manifest:
    """The manifest of the checkpoint in folder `path`, all of whose files are there, by their sizes. CheckpointError
    where it is not so.
    """
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    return manifest


def verify(path: Path, progress: Callable[[str], None] = lambda name: None) -> Manifest:
    """Check every byte of a checkpoint, in this process alone; CheckpointError names the first file that is damaged."""
    manifest = looked_at(path)
    for name in manifest.files:
        progress(name)
        check_hash(path, manifest, name)
    return manifest


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a run's folder of checkpoints, or None where there is none.

    What an interrupted save has left under a temporary name does not count. A checkpoint that carries its final name
    and is not whole has been damaged since, and is never passed over in silence: CheckpointError names the file.
    """
    found = newest_in(folder)
    if found is not None:
        looked_at(found)
    return found


def hash_file(path: Path) -> str:
    """SHA-256 of a plain file's bytes, in hexadecimal."""
    digest, block = hashlib.sha256(), memoryview(bytearray(HASH_BLOCK))
    with open_plain(path) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:count])
    return digest.hexdigest()


def compare_metadata(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each field that differs, nested ones by their dotted names. Empty if they agree."""
    lines = []
    for key in sorted(saved.keys() | wanted.keys()):
        old, new = saved.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += [f"{key}.{line}" for line in compare_metadata(old, new)]
        elif old != new:
            lines.append(f"{clip(key)}: {_value(saved, key)} in the checkpoint, {_value(wanted, key)} wanted")
    return lines


def _value(metadata: Mapping[str, Any], key: str) -> str:
    return clip(repr(metadata[key])) if key in metadata else "absent"
