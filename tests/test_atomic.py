"""Files that are there as a whole or not at all."""

import os
from pathlib import Path

import pytest

from colonnade.atomic import remove_partial, remove_partial_of, write_new, write_whole, written
from tests.disks import room_for


def test_what_is_written_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "deep" / "file", list[int]()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        assert not path.exists()
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with written(path) as stream:
        stream.write(b"content")
        assert not path.exists() and [each.name for each in path.parent.iterdir()] != ["file"]
    assert path.read_bytes() == b"content" and synced == [7], "all of it, not what happens to be flushed"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    write_whole(tmp_path / "file", b"old")
    with pytest.raises(error), written(tmp_path / "file") as stream:
        stream.write(b"new")
        raise error
    assert (tmp_path / "file").read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_the_disk_refuses_names_the_file(tmp_path: Path) -> None:
    """And not the temporary one."""
    with room_for(3), pytest.raises(OSError, match="File too large") as full:
        write_whole(tmp_path / "file", b"four")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as taken:
        write_whole(tmp_path / "folder", b"four")
    assert [full.value.filename, taken.value.filename] == [str(tmp_path / "file"), str(tmp_path / "folder")]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_another_file_that_fails_meanwhile_keeps_its_name(tmp_path: Path) -> None:
    """And what has no number is no matter of the disk."""
    with pytest.raises(FileNotFoundError) as gone, written(tmp_path / "file"):
        (tmp_path / "other").read_bytes()
    with pytest.raises(OSError, match="cannot be read") as unknown, written(tmp_path / "file"):
        raise OSError("cannot be read")
    assert (gone.value.filename, unknown.value.filename) == (str(tmp_path / "other"), None)


def test_of_two_writers_of_one_file_each_writes_all_of_it(tmp_path: Path) -> None:
    """Threads of one process, say: that which ends last has written what stays."""
    with written(tmp_path / "file") as first:
        first.write(b"of the first, ")
        with written(tmp_path / "file") as second:
            second.write(b"of the second")
        assert (tmp_path / "file").read_bytes() == b"of the second"
        first.write(b"which is longer")
    assert (tmp_path / "file").read_bytes() == b"of the first, which is longer"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_what_killed_writers_have_left_is_removed(tmp_path: Path) -> None:
    left = ["file.7-0123abcd.partial", "deep/.hidden.123-ffffffff.partial"]
    others = ["file", "mine.partial", "file.7-0123abcd.partial.txt", "x.7-0123ABCD.partial", "x.7-123abcd.partial"]
    for name in (*left, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with written(tmp_path / "deep" / "now"):
        names = {path.name for path in (tmp_path / "deep").iterdir()}
        remove_partial(tmp_path / "nowhere")
        assert {path.name for path in (tmp_path / "deep").iterdir()} == names
    remove_partial(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*others, "deep/now"}


def test_what_killed_writers_of_one_file_have_left_is_removed_and_of_no_other(tmp_path: Path) -> None:
    """Whatever its name matches as a pattern."""
    left = ["run[1].json.7-0123abcd.partial", "run[1].json.123-ffffffff.partial"]
    others = [
        "run[1].json",
        "run1.json.7-0123abcd.partial",
        "run[1].json.old.7-0123abcd.partial",
        "run[1].json.partial",
    ]
    for name in (*left, *others):
        (tmp_path / name).touch()
    remove_partial_of(tmp_path / "run[1].json")
    assert {path.name for path in tmp_path.iterdir()} == {*others}
    remove_partial_of(tmp_path / "nowhere" / "file")


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write_new(path, b"old")
    inode = path.stat().st_ino
    write_new(path, b"old")
    assert path.stat().st_ino == inode
    write_new(path, b"new")
    assert path.read_bytes() == b"new" and [each.name for each in tmp_path.iterdir()] == ["config.toml"]
