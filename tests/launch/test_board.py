"""What ranks pin up for each other."""

from pathlib import Path

from colonnade.launch.board import FolderBoard, note_end, report_file


def test_who_reads_a_report_reads_one_of_them(tmp_path: Path) -> None:
    """All of the old one or all of the new one, whenever the next is posted."""
    board = FolderBoard(tmp_path)
    assert board.read(0) is None
    board.post(0, "an old report, which is the longer one")
    with report_file(tmp_path, 0).open() as reader:
        board.post(0, "a new report")
        assert reader.read() == "an old report, which is the longer one"
    assert board.read(0) == "a new report" and [path.name for path in tmp_path.iterdir()] == ["rank0.report"]


def test_who_has_ended_is_read_with_how_whatever_its_number(tmp_path: Path) -> None:
    board, ends = FolderBoard(tmp_path), {3: "by SIGKILL", 12: "with exit status 1", 1040: "without a word"}
    assert board.ended() == {}
    for rank, how in ends.items():
        note_end(tmp_path, rank, how)
        board.post(rank + 1, "a report")
    assert board.ended() == ends
