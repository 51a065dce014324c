"""What a conversion writes stands whole under its name, or not at all."""

import errno
import shutil
from pathlib import Path

import pytest

from colonnade.convert import target as targets
from colonnade.convert.target import check_space, check_target, publish, workspace
from colonnade.convert.to_checkpoint import _check_name
from colonnade.errors import CheckpointError
from tests.disks import room_for


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, r"The disk is full: .*ours could not be written\. Free some space"),
        (errno.EDQUOT, r"The disk is full: .*ours could not be written\. Free some space"),
        (
            errno.EFBIG,
            r"ours could not be written: no room, more than the 3,000 bytes .*\. Raise the limit on the size of files",
        ),
    ],
)
def test_a_disk_may_be_full_a_quota_used_up_or_a_file_too_large(code: int, said: str, tmp_path: Path) -> None:
    with room_for(3_000), pytest.raises(CheckpointError, match=said), workspace(tmp_path / "ours"):
        raise OSError(code, "no room")
    assert list(tmp_path.iterdir()) == []


def test_another_failure_is_told_as_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    """Also of folders above the target that were not there."""
    with pytest.raises(PermissionError, match="not yours"), workspace(tmp_path / "a" / "b" / "ours") as folder:
        (folder / "model").mkdir()
        (folder / "model" / "half").touch()
        raise PermissionError(errno.EACCES, "not yours")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_as_much_space_as_is_needed_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk of the nearest folder that exists."""
    asked: list[Path] = []
    free = shutil._ntuple_diskusage(100, 40, 60)  # type: ignore[attr-defined]
    monkeypatch.setattr(targets.shutil, "disk_usage", lambda path: asked.append(path) or free)
    check_space(tmp_path / "not" / "yet" / "ours", 60)
    with pytest.raises(CheckpointError, match=r"ours needs 61 B, and its disk has 60 B free\."):
        check_space(tmp_path / "ours", 61)
    assert asked == [tmp_path, tmp_path]


def test_a_name_is_as_long_as_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.os, "pathconf", lambda path, name: 30)
    check_target(tmp_path / ("é" * 10 + "x"))
    with pytest.raises(CheckpointError, match=r"has a name of 22 bytes, .* a TARGET's can have 21 at most"):
        check_target(tmp_path / ("é" * 11))


def test_converted_weights_are_called_step_0_or_no_step(tmp_path: Path) -> None:
    for name in ("step_00000000", "ours", "step_3"):
        _check_name(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"step_00000003 has the name .* another name, or step_00000000\.$"):
        _check_name(tmp_path / "step_00000003")


def test_content_is_on_the_disk_before_its_name_and_the_name_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target, synced = tmp_path / "made", tmp_path / "ours", list[tuple[Path, bool]]()
    made.mkdir()
    monkeypatch.setattr(targets, "sync", lambda path: synced.append((path, target.exists())))
    publish(made, target)
    assert synced == [(made, False), (tmp_path, True)] and not made.exists()
