"""Lines of JSON: which are whole, which step they tell of, and what a disk may get over."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.train import lines
from colonnade.train.lines import Lines, append, append_text, object_in, objects_in, step_in


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (b'{"step": 7, "loss": 1.0}', 7),
        (b'{"step": 9007199254740991}', 2**53 - 1),
        (b'{"step": 9007199254740992}', 0),
        (b'{"step": 0}', 0),
        (b'{"step": -1}', 0),
        (b'{"step": true}', 0),
        (b'{"step": 7.0}', 0),
        (b'{"loss": 1.0}', 0),
        (b"[7]", 0),
        (b'{"step": 7', 0),
        (b"\xff", 0),
        (b"[" * 100_000, 0),
    ],
    ids=range(12),
)
def test_the_step_of_a_line_is_a_number_of_a_step_or_none(line: bytes, step: int) -> None:
    """Whoever has written it: a line that tells of none is passed over, and no error."""
    assert step_in(object_in(line)) == step


def test_a_folder_that_is_gone_is_to_be_put_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        Lines(patient=True).write(tmp_path / "moved" / "metrics.jsonl", {"step": 1})
    assert str(told.value) == (
        f"{tmp_path / 'moved' / 'metrics.jsonl'} cannot be written: No such file or directory. Put the folder back, or "
        "set run.folder to where it is now, and run the same command again: it goes on from the last checkpoint."
    )


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    """Else strict readers, such as jq, stop at the line."""
    path = tmp_path / "metrics.jsonl"
    Lines().write(path, {"step": 2, "validation_loss": math.inf, "each": [math.nan, 1.5]})
    assert path.read_text() == '{"step": 2, "validation_loss": null, "each": [null, 1.5]}\n'


@pytest.mark.parametrize("before", [b"", b'{"n": 1}\n', b'{"n": 1}\n{"n": 2, "ur'], ids=["no line", "whole", "cut off"])
def test_a_line_behind_one_that_was_cut_off_is_a_line_of_its_own(tmp_path: Path, before: bytes) -> None:
    """Else both are lost: power has failed in the midst of the first, or the disk was full."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(before)
    append(path, {"n": 3})
    assert objects_in(path) == [*[{"n": 1}] * bool(before), {"n": 3}]
    assert path.read_bytes().startswith(before), "what was there stays"


@pytest.mark.parametrize("others", [[], ["theirs"]], ids=["alone", "beside another's"])
def test_a_text_that_does_not_reach_the_disk_takes_nobody_elses_away(
    others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two who ask the run to change at once, the second has been told that theirs is on the disk."""
    path = tmp_path / "changes.jsonl"
    path.write_text("before\n")

    def full(descriptor: int) -> None:
        monkeypatch.undo()
        for other in others:
            append_text(path, other, sync=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        append_text(path, "mine", sync=True)
    assert path.read_text().splitlines() == ["before", *["mine"] * len(others), *others]


@pytest.mark.parametrize(
    ("number", "waits"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EFBIG, True),
        (errno.EIO, True),
        (errno.EROFS, True),
        (errno.ESTALE, True),
        (errno.ETIMEDOUT, True),
        (errno.ENOTCONN, True),
        (errno.EACCES, False),
        (errno.EISDIR, False),
    ],
    ids=lambda each: errno.errorcode.get(each, str(each)),
)
def test_what_a_disk_may_get_over_is_waited_for_and_nothing_else(
    number: int, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Path, *args: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    patient, names = Lines(patient=True), ["metrics.jsonl", "events.jsonl", "metrics.jsonl"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fails)
        if not waits:
            with pytest.raises(ConfigError, match=rf"metrics\.jsonl cannot be written: {os.strerror(number)}"):
                patient.write(tmp_path / names[0], {"number": 0})
            return
        told = [patient.write(tmp_path / name, {"number": number}) for number, name in enumerate(names)]
    assert [bool(each) for each in told] == [True, False, False]
    order = list[int]()
    append = lines.append
    monkeypatch.setattr(
        lines, "append", lambda path, line, **how: (order.append(line["number"]), append(path, line, **how))
    )
    patient.check()
    assert order == [0, 1, 2], "in the order in which they came, over all files"
    assert [json.loads(line)["number"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 2]
