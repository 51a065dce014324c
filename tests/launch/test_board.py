"""What ranks pin up for each other."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from colonnade.launch.board import Board, FolderBoard, StoreBoard, explanation_file, note_end, report_file
from tests.disks import room_for


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_ranks_see_what_others_have_pinned_up(kind: str, tmp_path: Path) -> None:
    """Reports by rank, the newest of each, and an alarm. Explanations have a reader where there is a supervisor."""
    store = HashStore()

    def board() -> Board:
        return FolderBoard(tmp_path) if kind == "folder" else StoreBoard(store)

    one, other = board(), board()
    assert [other.read(rank) for rank in (0, 1)] == [None, None] and not other.is_alarmed() and other.ended() == {}
    for text in ("an old report", "eine Lücke"):
        one.post(1, text), one.post(12, "of another")
        assert [other.read(rank) for rank in (0, 1, 2, 12)] == [None, text, None, "of another"]
        assert not other.is_alarmed()
    one.raise_alarm(), other.raise_alarm()
    assert one.is_alarmed() and other.is_alarmed() and board().is_alarmed()
    assert one.explain(1, "rank 1 waits") == (kind == "folder")
    if kind == "folder":
        assert explanation_file(tmp_path, 1).read_text() == "rank 1 waits"
    else:
        assert store.timeout == timedelta(seconds=5), "a store that does not answer is soon given up"


def test_who_reads_a_report_reads_one_of_them(tmp_path: Path) -> None:
    """All of the old one or all of the new one, whenever the next is posted."""
    board = FolderBoard(tmp_path)
    assert board.read(0) is None
    board.post(0, "an old report, which is the longer one")
    with report_file(tmp_path, 0).open() as reader:
        board.post(0, "a new report")
        assert reader.read() == "an old report, which is the longer one"
    assert board.read(0) == "a new report" and [path.name for path in tmp_path.iterdir()] == ["rank0.report"]


def test_what_is_pinned_up_is_the_same_in_any_locale(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from colonnade.launch.board import FolderBoard\n"
        "board = FolderBoard(Path(sys.argv[1])); board.post(0, 'L\\xfccke'); assert board.read(0) == 'L\\xfccke'"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", program, str(tmp_path)], env=environment, check=True)
    assert report_file(tmp_path, 0).read_bytes() == "Lücke".encode()


def test_who_has_ended_is_read_with_how_whatever_its_number(tmp_path: Path) -> None:
    board, ends = FolderBoard(tmp_path), {3: "by SIGKILL", 12: "with exit status 1", 1040: "without a word"}
    assert board.ended() == {}
    for rank, how in ends.items():
        note_end(tmp_path, rank, how)
        board.post(rank + 1, "a report")
    assert board.ended() == ends


def test_who_tells_of_an_end_on_a_full_disk_goes_on(tmp_path: Path) -> None:
    """Others learn of it later, and never the half of it."""
    with room_for(4):
        note_end(tmp_path, 3, "by SIGKILL")
    assert FolderBoard(tmp_path).ended() == {}
    note_end(tmp_path, 3, "by SIGKILL")
    assert FolderBoard(tmp_path).ended() == {3: "by SIGKILL"}
