"""Checkpoints of a run in an object storage, each a folder as on the disk, and beside it the record of its run.

    URL/step_00000100/    __0_0.distcp, config.toml, …    as on the disk, several files at a time
                          record.zip                      what the run had written down by then
                          manifest.json                   last: what has it is whole; it is deleted first

    URL/owner             the id of the process that uploads: who finds another's there stops

A folder without a manifest is what an interrupted upload, or an interrupted deletion, has left. Imports no torch.
"""

import hashlib
import importlib
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from colonnade.checkpoint.names import MANIFEST, NAME, folder_name
from colonnade.errors import CheckpointError, ConfigError
from colonnade.storage import is_there, open_storage, reason, retry

RECORD = "record.zip"
OWNER = "owner"
AT_ONCE = 4  # files under way
WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
"""Kinds of storage that have no folders to be made: making one there could make a bucket."""
PATTERN = "*?["  # what fsspec takes for a pattern of names where it moves and deletes, but on disks
Progress = Callable[[int], None]
"""Told how many more bytes have come."""


class Stored:
    """The checkpoints under a URL. What its methods raise is the storage's own, after `storage.retry`."""

    def __init__(self, url: str) -> None:
        """ConfigError where the URL is of no kind of storage that can be opened here, or that names several folders."""
        self.url = url
        self.storage, path = open_storage(url, ConfigError, "leave checkpoint.upload_to out", to_write=True)
        self.root = str(path).rstrip("/")
        if self.folder is None and (odd := [character for character in PATTERN if character in self.root]):
            raise ConfigError(
                f"checkpoint.upload_to = {url!r} has {' '.join(odd)} in its path, which makes it a pattern: what "
                "is moved and deleted there could be another run's. Name a folder without * ? and [."
            )

    @property
    def folder(self) -> Path | None:
        """Where it is on this machine's disk; None where it is elsewhere."""
        return Path(self.root).resolve() if "file" in self._protocols() else None

    def probe(self) -> None:
        """ConfigError unless a small object can be written here, read and deleted."""
        path = f"{self.root}/.colonnade-{secrets.token_hex(8)}"
        try:
            self._make(self.root)
            retry(lambda: self.storage.pipe_file(path, b"probe"))
            found = retry(lambda: self.storage.cat_file(path))
            retry(lambda: self.storage.rm_file(path))
        except Exception as error:  # noqa: BLE001  each storage's package raises its own kinds
            raise ConfigError(
                f"checkpoint.upload_to = {self.url!r} cannot be used: {reason(error, self.url)}. A small object is "
                "written there, read and deleted at the start. Check the URL, the connection, the credentials, and "
                "that they may write, list and delete; or leave checkpoint.upload_to out."
            ) from None
        if found != b"probe":
            raise ConfigError(
                f"checkpoint.upload_to = {self.url!r} gave {len(found)} other bytes for what was written there. "
                "Choose another storage."
            )

    def claim(self) -> str:
        """Write down that this process uploads here from now on; its id, for `is_claimed`."""
        own = secrets.token_hex(16)
        self._make(self.root)
        retry(lambda: self.storage.pipe_file(f"{self.root}/{OWNER}", own.encode()))
        return own

    def is_claimed(self, own: str) -> bool:
        """Whether no other process has claimed it since."""
        try:
            found: bytes = retry(lambda: self.storage.cat_file(f"{self.root}/{OWNER}"))
        except FileNotFoundError:
            return True
        return found == own.encode()

    def steps(self) -> dict[int, bool]:
        """Of each step that has a folder, in their order, whether it has its manifest."""
        self.storage.invalidate_cache()
        try:
            found = retry(lambda: self.storage.ls(self.root, detail=False))
        except FileNotFoundError:
            return {}
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        steps = sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))
        return {step: self._is_whole(step) for step in steps}

    def _is_whole(self, step: int) -> bool:
        return retry(lambda: is_there(self.storage, self._at(step, MANIFEST)))

    def read(self, step: int, name: str) -> bytes:
        """One of its small files. FileNotFoundError where it has none of that name."""
        content: bytes = retry(lambda: self.storage.cat_file(self._at(step, name)))
        return content

    def put(self, step: int, files: Iterable[Path]) -> None:
        """Write what a step has besides its manifest, which is taken away first."""
        self._make(self._at(step))
        self._unseal(step)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(self._put, step, file) for file in files]:
                done.result()

    def put_record(self, step: int, record: Path) -> None:
        """Write, or replace, the record of the run beside a checkpoint."""
        self._put_whole(step, RECORD, lambda aside: self.storage.put_file(str(record), aside))

    def seal(self, step: int, manifest: bytes) -> None:
        """Write the manifest of a step whose other files are there: from now on it is whole."""
        self._put_whole(step, MANIFEST, lambda aside: self.storage.pipe_file(aside, manifest))

    def _put_whole(self, step: int, name: str, put: Callable[[str], object]) -> None:
        """Write a file in one piece: under another name first, where a copy could be cut short."""
        aside = self._at(step, f".{name}.partial")
        retry(lambda: put(aside))
        retry(lambda: self.storage.mv(aside, self._at(step, name)))

    def get(self, step: int, names: Iterable[str], folder: Path, progress: Progress = lambda count: None) -> None:
        """Copy files of a step into a folder. FileNotFoundError where one is missing."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(self._get, step, name, folder / name, progress) for name in names]:
                done.result()

    def remove(self, step: int) -> None:
        """Delete a step: from its first moment on nobody takes it for a whole one."""
        self._unseal(step)
        retry(lambda: self.storage.rm(self._at(step), recursive=True))

    def _unseal(self, step: int) -> None:
        if self._is_whole(step):
            retry(lambda: self.storage.rm_file(self._at(step, MANIFEST)))

    def _put(self, step: int, file: Path) -> None:
        retry(lambda: self.storage.put_file(str(file), self._at(step, file.name)))

    def _get(self, step: int, name: str, target: Path, progress: Progress) -> None:
        most = 0

        def come(size: int | None, value: int, **_: Any) -> None:
            nonlocal most
            if value > most:  # a second attempt begins anew
                progress(value - most)
                most = value

        def ask() -> None:
            callback = importlib.import_module("fsspec.callbacks").Callback(hooks={"come": come})
            self.storage.get_file(self._at(step, name), str(target), callback=callback)

        retry(ask)

    def _at(self, step: int, name: str = "") -> str:
        return f"{self.root}/{folder_name(step)}" + (f"/{name}" if name else "")

    def _make(self, path: str) -> None:
        if not self._protocols() & WITHOUT_FOLDERS:
            retry(lambda: self.storage.makedirs(path, exist_ok=True))

    def _protocols(self) -> set[str]:
        known = self.storage.protocol
        return {known} if isinstance(known, str) else set(known)


def digest(manifest: bytes) -> str:
    """What tells a checkpoint from others of the same step."""
    return hashlib.sha256(manifest).hexdigest()


def unreadable(url: str, error: BaseException) -> CheckpointError:
    """What to say where a storage of checkpoints cannot be read."""
    return CheckpointError(
        f"checkpoint.upload_to = {url!r} cannot be read: {reason(error, url)}. Check the connection and the rights; to "
        "go on without what is there, leave checkpoint.upload_to out."
    )
