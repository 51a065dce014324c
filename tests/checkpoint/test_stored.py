"""Checkpoints in a storage: what is whole, in which order things come and go, and what is asked again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colonnade import storage
from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.stored import RECORD, Stored, digest
from colonnade.errors import ConfigError
from colonnade.storage import below, not_here, reason
from tests.commands import here
from tests.storages import FaultyStorage, MemoryFileSystem, emptied


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSE", 0.0)
    with emptied(MemoryFileSystem, FaultyStorage):
        yield


@pytest.fixture
def calls() -> list[str]:
    """What `faulty://` is asked, by file name."""
    found: list[str] = []
    FaultyStorage.before = staticmethod(lambda operation, path: found.append(f"{operation} {path.split('/')[-1]}"))
    return found


def checkpoint(folder: Path, content: bytes = b"x" * 1000) -> list[Path]:
    folder.mkdir()
    (folder / "a.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(b"index")
    (folder / MANIFEST).write_bytes(b"manifest")
    return [folder / "a.distcp", folder / ".metadata"]


def put(stored: Stored, step: int, folder: Path) -> None:
    stored.put(step, checkpoint(folder))
    stored.seal(step, b"manifest")


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?"])
def test_a_name_that_is_a_pattern_of_others_is_refused_but_on_disks(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"has [*?[] in its path.* Name a folder without"):
        Stored(f"memory://bucket/{name}")
    mine, other = (Stored(f"file://{tmp_path}/{each}") for each in (name, "run1"))
    put(mine, 2, tmp_path / "here")
    put(other, 2, tmp_path / "there")
    mine.remove(2)
    assert (mine.steps(), other.steps()) == ({}, {2: True})


@pytest.mark.parametrize("kind", ["memory://bucket/run", "faulty://bucket/run", "file://{}/deep/run/"])
def test_there_and_back(tmp_path: Path, kind: str) -> None:
    stored = Stored(kind.format(tmp_path))
    stored.probe()
    assert stored.steps() == {}
    put(stored, 12, tmp_path / "here")
    put(stored, 4, tmp_path / "there")
    stored.put(20, [tmp_path / "here" / "a.distcp"])
    assert stored.steps() == {4: True, 12: True, 20: False}
    assert stored.read(4, MANIFEST) == b"manifest"
    come: list[int] = []
    (tmp_path / "back").mkdir()
    stored.get(12, ["a.distcp", ".metadata"], tmp_path / "back", come.append)
    assert (tmp_path / "back" / "a.distcp").read_bytes() == b"x" * 1000
    assert (tmp_path / "back" / ".metadata").read_bytes() == b"index"
    with pytest.raises(FileNotFoundError):
        stored.get(12, ["b.distcp"], tmp_path / "back")
    stored.remove(12)
    assert Stored(kind.format(tmp_path)).steps() == {4: True, 20: False}
    assert not any(path.name.endswith(".partial") for path in tmp_path.rglob("*"))


def test_a_storage_that_has_folders_gets_one_before_it_is_written_to() -> None:
    """As over SSH, where nothing can be put into a folder that is not there."""

    def refuse(operation: str, path: str) -> None:
        if operation == "pipe" and not FaultyStorage("faulty").isdir(path.rpartition("/")[0]):
            raise FileNotFoundError(path)

    FaultyStorage.before = staticmethod(refuse)
    stored = Stored("faulty://bucket/run")
    stored.probe()
    assert stored.storage.isdir("bucket/run") and stored.storage.ls("bucket/run") == [], "and nothing is left in it"


@pytest.mark.parametrize("protocol", [("s3", "s3a"), ("gs", "gcs"), ("az", "abfs", "abfss"), "oss"], ids=str)
def test_no_folder_is_made_where_that_could_make_a_bucket(
    monkeypatch: pytest.MonkeyPatch, protocol: str | tuple[str, ...]
) -> None:
    """Who may write objects often may not do that."""
    stored, made = Stored("faulty://bucket/run"), list[str]()
    monkeypatch.setattr(FaultyStorage, "makedirs", lambda self, path, exist_ok: made.append(path.strip("/")))
    stored.probe(), stored.claim()
    assert made == ["bucket/run"] * 2
    monkeypatch.setattr(FaultyStorage, "protocol", protocol)
    stored.probe(), stored.claim()
    assert made == ["bucket/run"] * 2


def test_only_a_local_storage_is_on_this_disk(tmp_path: Path) -> None:
    assert Stored(f"file://{tmp_path}/x").folder == (tmp_path / "x").resolve()
    assert Stored("memory://x").folder is None


def test_the_manifest_comes_last_and_goes_first(tmp_path: Path, calls: list[str]) -> None:
    stored = Stored("faulty://bucket/run")
    put(stored, 4, tmp_path / "one")
    puts = [call for call in calls if call.startswith(("put", "pipe"))]
    assert sorted(puts[:2]) == ["put .metadata", "put a.distcp"] and puts[2:] == [f"pipe .{MANIFEST}.partial"]
    calls.clear()
    stored.put(4, [tmp_path / "one" / "a.distcp"])
    assert [call for call in calls if not call.startswith("ls")] == [f"rm {MANIFEST}", "put a.distcp"]
    assert stored.steps() == {4: False}, "while it is written anew it is not whole"
    (tmp_path / "one" / "z.distcp").write_bytes(b"a storage may delete this before the manifest")
    stored.put(4, [tmp_path / "one" / "z.distcp"])
    stored.seal(4, b"manifest")
    calls.clear()
    stored.remove(4)
    assert [call for call in calls if call.startswith("rm")][:2] == [f"rm {MANIFEST}", "rm z.distcp"]
    assert stored.steps() == {}


def test_steps_are_told_in_their_order_whatever_the_storages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that lists names as texts, or as they come, or folders with a slash behind them."""
    stored, listed = Stored("faulty://bucket/run"), FaultyStorage.ls
    for step in (4, 100_000_000, 12):
        put(stored, step, tmp_path / str(step))
    for turned, mark in ((False, ""), (True, ""), (True, "/")):

        def ls(self: FaultyStorage, path: str, detail: bool, turned: bool = turned, mark: str = mark) -> list[str]:
            return sorted((f"{each}{mark}" for each in listed(self, path, detail=detail)), reverse=turned)

        monkeypatch.setattr(FaultyStorage, "ls", ls)
        assert list(stored.steps()) == [4, 12, 100_000_000]


def test_a_record_that_is_written_again_is_never_half_of_one(tmp_path: Path, calls: list[str]) -> None:
    stored, record = Stored("faulty://bucket/run"), tmp_path / "packed"
    put(stored, 4, tmp_path / "one")
    for content in (b"first", b"second"):
        record.write_bytes(content)
        calls.clear()
        stored.put_record(4, record)
        assert [call for call in calls if call.startswith(("put", "pipe"))] == [f"put .{RECORD}.partial"]
        assert stored.read(4, RECORD) == content and stored.steps() == {4: True}


def test_connections_that_fail_are_tried_again(tmp_path: Path) -> None:
    faults = [OSError("reset by peer"), TimeoutError(), RuntimeError("slow down")]

    def before(operation: str, path: str) -> None:
        if operation in ("put", "get") and faults:
            raise faults.pop()

    FaultyStorage.before = staticmethod(before)
    stored = Stored("faulty://bucket/run")
    stored.put(4, checkpoint(tmp_path / "one")[:1])
    faults += [OSError("reset by peer")] * 3
    come: list[int] = []
    stored.get(4, ["a.distcp"], tmp_path, come.append)
    assert sum(come) == 1000 and not faults
    faults += [OSError("reset by peer")] * 9
    with pytest.raises(OSError, match="reset by peer"):
        stored.put(4, [tmp_path / "one" / "a.distcp"])
    assert len(faults) == 9 - storage.ATTEMPTS


def test_a_storage_that_cannot_tell_whether_a_checkpoint_is_whole_does_not_say_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would go on from an older one, or begin again."""
    stored, faults = Stored("faulty://bucket/run"), list[Exception]()
    put(stored, 4, tmp_path / "one")
    honest = FaultyStorage.info

    def info(self: FaultyStorage, path: str, **more: Any) -> Any:
        if faults:
            raise faults.pop()
        return honest(self, path, **more)

    monkeypatch.setattr(FaultyStorage, "info", info)
    faults += [TimeoutError()] * (storage.ATTEMPTS - 1)
    assert stored.steps() == {4: True} and not faults
    faults += [TimeoutError()] * storage.ATTEMPTS
    with pytest.raises(TimeoutError):
        stored.steps()


def test_what_another_process_has_done_since_the_last_look_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storages of the clouds keep their listings until they are told not to."""
    kept: dict[str, Any] = {}

    def ls(self: FaultyStorage, path: str, detail: bool = True, **more: Any) -> Any:
        if path not in kept:
            kept[path] = MemoryFileSystem.ls(self, path, detail=detail, **more)
        return kept[path]

    monkeypatch.setattr(FaultyStorage, "ls", ls)
    monkeypatch.setattr(FaultyStorage, "invalidate_cache", lambda self, path=None: kept.clear())
    first, other = Stored("faulty://bucket/run"), Stored("faulty://bucket/run")
    for step in (2, 4):
        put(other, step, tmp_path / str(step))
        assert first.steps() == dict.fromkeys(range(2, step + 1, 2), True)


def test_who_claims_it_last_has_it() -> None:
    first, second = Stored("memory://bucket/run"), Stored("memory://bucket/run")
    assert first.is_claimed("nobody's yet")
    word = first.claim()
    assert first.is_claimed(word)
    other = second.claim()
    assert second.is_claimed(other) and not first.is_claimed(word)


@pytest.mark.parametrize("url", ["s3://KEY:{}@bucket/run", "https://host/run?secret={}"])
@pytest.mark.parametrize("given", ["ab/cd+ef", "ab%2Fcd%2Bef", "ab%2Fcd+ef"])
@pytest.mark.parametrize("told", ["ab/cd+ef", "ab%2Fcd%2Bef", "ab/cd%2Bef"])
def test_a_reason_hides_a_secret_whether_or_not_it_is_percent_encoded(url: str, given: str, told: str) -> None:
    assert reason(OSError(f"403: {told} is no key"), url.format(given)) == "403: … is no key"


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://b/r cannot be opened: .*Install the package"):
        Stored("nosuch://b/r")

    def refuse(operation: str, path: str) -> None:
        if operation == "pipe":
            raise PermissionError("s3cr3t-key may not write")

    FaultyStorage.before = staticmethod(refuse)
    with pytest.raises(ConfigError, match="cannot be used: … may not write") as refused:
        Stored("faulty://user:s3cr3t-key@b/r").probe()
    assert "s3cr3t" not in str(refused.value) and "'faulty://…@b/r'" in str(refused.value)

    def garble(operation: str, path: str) -> None:
        if operation == "cat":
            FaultyStorage("faulty").store[path].write(b"another")

    FaultyStorage.before = staticmethod(garble)
    with pytest.raises(ConfigError, match="gave 7 other bytes"):
        Stored("faulty://b/r").probe()


def test_an_upload_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs would hold ten parts of 50 MB of each file that is under way."""
    asked: list[tuple[str, dict[str, object]]] = []

    def url_to_fs(url: str, **options: object) -> tuple[MemoryFileSystem, str]:
        asked.append((url, options))
        return MemoryFileSystem(), "/b"

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    for url in ("s3://b/r", "gs://b/r"):
        Stored(url)
    assert asked == [("s3://b/r", {"max_concurrency": 2}), ("gs://b/r", {})]


def test_a_url_is_no_folder() -> None:
    """Nor after it was taken for a path, which makes one slash of two. What is refused shows no credentials."""
    assert all("copy what is there" in not_here(name) for name in ("s3://b/r", Path("s3://b/r")))
    assert not any(map(not_here, ("runs/books", Path("/runs/books"), ".")))
    for command in (("evaluate", "s3://u:K3Y@b/r", "--part", "test"), ("convert", "s3://u:K3Y@b/r", "x")):
        answer = here(*command)
        assert answer.status == 2 and "s3://…@b/r " in answer.err
        assert "It is a URL" in answer.err and "K3Y" not in answer.err


def test_names() -> None:
    assert below("s3://b/runs/?token=x", "p1") == "s3://b/runs/p1?token=x"
    assert below("s3://b/runs", "p1") == "s3://b/runs/p1"
    assert digest(b"a") != digest(b"b")


def test_a_second_attempt_counts_only_what_is_new(tmp_path: Path) -> None:
    """A bar that shows what has come never goes back."""

    class Breaks:
        attempts = 0

        def get_file(self, path: str, target: str, callback: Any) -> None:
            self.attempts += 1
            for come in (300, 600):
                callback.absolute_update(come)
            if self.attempts == 1:
                raise ConnectionError("reset by peer")
            callback.absolute_update(1000)

    stored, seen = Stored(f"file://{tmp_path}"), list[int]()
    stored.storage = Breaks()
    stored._get(1, "x", tmp_path / "x", seen.append)
    assert seen == [300, 300, 400]
