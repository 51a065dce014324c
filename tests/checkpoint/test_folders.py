"""Which checkpoints of a run's folder stay."""

import errno
import os
import stat
from collections.abc import Collection
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from colonnade.checkpoint.folders import discard_after, publish, set_aside_damaged, tidy
from colonnade.checkpoint.names import checkpoints_in, newest_in, newest_step


def make(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"step_{step:08d}").mkdir(parents=True)


def none(steps: Collection[int]) -> Collection[int]:
    return ()


@pytest.mark.parametrize("keep", range(1, 8))
@pytest.mark.parametrize("before", range(6))
def test_the_newest_so_many_stay(tmp_path: Path, keep: int, before: int) -> None:
    """All of them, where there are fewer; the new one always."""
    steps = list(range(10, 10 * before + 1, 10))
    make(tmp_path, *steps)
    (tmp_path / ".step_00000099.partial").mkdir()
    publish(tmp_path / ".step_00000099.partial", tmp_path / "step_00000099", keep, none)
    assert list(checkpoints_in(tmp_path)) == [*steps, 99][-keep:]
    tidy(tmp_path, keep, none)
    assert list(checkpoints_in(tmp_path)) == [*steps, 99][-keep:]
    assert all(path.name.startswith("step_") for path in tmp_path.iterdir())


def test_that_a_checkpoint_is_damaged_outlasts_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would come back under the name of a sound one."""
    make(tmp_path, 10)
    fsync, synced = os.fsync, list[tuple[int, list[str]]]()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, [path.name for path in tmp_path.iterdir()]))

    monkeypatch.setattr(os, "fsync", note)
    aside = set_aside_damaged(tmp_path / "step_00000010")
    assert synced == [(tmp_path.stat().st_ino, [aside.name])]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_that_syncs_no_folders_has_checkpoints(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails there says so."""
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    partial, final = tmp_path / ".step_00000010.partial", tmp_path / "step_00000010"
    partial.mkdir()
    with pytest.raises(OSError, match="Input/output error") if number == errno.EIO else nullcontext():
        publish(partial, final, 1, none)
    assert list(tmp_path.iterdir()) == [partial if number == errno.EIO else final]


def test_what_was_damaged_before_makes_room_for_what_is_damaged_now(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make(tmp_path, 10)
        (tmp_path / "step_00000010" / name).touch()
        aside = set_aside_damaged(tmp_path / "step_00000010")
        assert [path.name for path in aside.iterdir()] == [name]
    assert list(tmp_path.iterdir()) == [aside] and not list(checkpoints_in(tmp_path))


def test_files_that_go_with_others_are_no_error_where_a_folder_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS keeps attributes of NAME in ._NAME on a volume that has none, and removes it with that."""
    make(tmp_path, 10, 20)
    for name in ("a", "b", "c"):
        (tmp_path / "step_00000010" / name).touch()
        (tmp_path / "step_00000010" / f"._{name}").touch()
    unlink = os.unlink

    def unlink_both(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        with suppress(FileNotFoundError):
            unlink(f"._{path}", dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_both)
    tidy(tmp_path, 1, none)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000020"]


def test_a_folder_that_cannot_be_deleted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 10, 20)

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*step_00000010\.deleted"):
        tidy(tmp_path, 1, none)


def test_what_cannot_be_deleted_keeps_its_name_where_that_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has protected it, or it is another user's; the others go."""
    make(tmp_path, 10, 20, 30)
    access, refused = os.access, list[tuple[str, int | None]]()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "step_00000010" and access(path, mode))
    tidy(tmp_path, 1, none, lambda path, error: refused.append((path.name, error.errno)))
    assert refused == [("step_00000010", errno.EACCES)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000030"]


def test_what_was_taken_away_before_and_cannot_be_deleted_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 10, 20, 30)
    (tmp_path / ".step_00000020.deleted").mkdir()

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    refused: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        discard_after(tmp_path, 10, lambda path, error: refused.append(path))
    assert list(checkpoints_in(tmp_path)) == [10] and len(refused) == 3
    discard_after(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_of_a_link_to_an_archive_only_the_link_goes(tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    make(archive, 10)
    (archive / "step_00000010" / "weights").touch()
    make(run, 20)
    (run / "step_00000010").symlink_to(archive / "step_00000010")
    tidy(run, 1, none)
    assert [path.name for path in run.iterdir()] == ["step_00000020"]
    assert (archive / "step_00000010" / "weights").exists()


def test_a_link_that_leads_nowhere_makes_room_for_a_checkpoint(tmp_path: Path) -> None:
    """To an archive that is not mounted any more, say."""
    final, partial = tmp_path / "step_00000010", tmp_path / ".step_00000010.partial"
    final.symlink_to(tmp_path / "unmounted" / "step_00000010")
    partial.mkdir()
    publish(partial, final, 2, none)
    assert list(tmp_path.iterdir()) == [final] and final.is_dir() and not final.is_symlink()


def test_what_is_written_again_stays_though_it_is_old(tmp_path: Path) -> None:
    """A run that goes on from an older checkpoint comes by the same steps; what lay there was another."""
    make(tmp_path, 10, 20, 30)
    (tmp_path / "step_00000010" / "old").touch()
    (tmp_path / ".step_00000010.deleted").mkdir()
    (tmp_path / ".step_00000010.deleted" / "older").touch()
    (tmp_path / ".step_00000010.partial").mkdir()
    publish(tmp_path / ".step_00000010.partial", tmp_path / "step_00000010", 2, none)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000030"]
    assert list((tmp_path / "step_00000010").iterdir()) == []


def test_what_is_spared_stays_and_is_asked_for_among_all(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def spared(steps: Collection[int]) -> Collection[int]:
        asked.append(sorted(steps))
        return [10]

    make(tmp_path, 10, 20, 30, 40)
    tidy(tmp_path, 2, spared)
    assert list(checkpoints_in(tmp_path)) == [10, 30, 40] and asked == [[10, 20, 30, 40]]
    tidy(tmp_path, 3, spared)
    assert len(asked) == 1, "where nothing would go, nobody is asked"


def test_the_old_ones_stay_until_the_new_one_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where giving it fails, nothing is lost; which are spared is asked when it is among them."""
    make(tmp_path, 10, 20)
    partial, final = tmp_path / ".step_00000030.partial", tmp_path / "step_00000030"
    partial.mkdir()

    def fails(self: Path, target: Path) -> Path:
        if self == partial:
            raise OSError("Input/output error")
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        publish(partial, final, 1, none)
    assert list(checkpoints_in(tmp_path)) == [10, 20]
    monkeypatch.undo()
    asked: list[list[int]] = []

    def spared(steps: Collection[int]) -> Collection[int]:
        asked.append(sorted(steps))
        return ()

    publish(partial, final, 1, spared)
    assert list(checkpoints_in(tmp_path)) == [30] and asked == [[10, 20, 30]]


def test_what_is_undone_goes_from_the_newest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in between leaves no later step beside a gap."""
    make(tmp_path, 10, 20, 30, 40)
    discard_after(tmp_path, 40)
    assert list(checkpoints_in(tmp_path)) == [10, 20, 30, 40]
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == "step_00000030":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        discard_after(tmp_path, 10)
    assert list(checkpoints_in(tmp_path)) == [10, 20, 30]
    monkeypatch.undo()
    discard_after(tmp_path, 10)
    assert list(checkpoints_in(tmp_path)) == [10]


def test_a_step_has_one_name(tmp_path: Path) -> None:
    """Eight digits, more where it takes them: other names are somebody's own."""
    names = ("step_00000007", "step_100000000", "step_99999999", "step_000000008", "step_9", "step_00000009.old")
    for name in names:
        (tmp_path / name).mkdir()
    assert list(checkpoints_in(tmp_path)) == [7, 99_999_999, 100_000_000], "in the order of steps, not of names"
    assert newest_in(tmp_path) == tmp_path / "step_100000000" and newest_step(tmp_path) == 100_000_000
    assert newest_in(tmp_path / "step_9") is newest_in(tmp_path / "nowhere") is None
