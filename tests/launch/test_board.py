"""What ranks pin up for each other."""

from pathlib import Path

from colonnade.launch.board import FolderBoard, report_file


def test_who_reads_a_report_reads_one_of_them(tmp_path: Path) -> None:
    """All of the old one or all of the new one, whenever the next is posted."""
    board = FolderBoard(tmp_path)
    assert board.read(0) is None
    board.post(0, "an old report, which is the longer one")
    with report_file(tmp_path, 0).open() as reader:
        board.post(0, "a new report")
        assert reader.read() == "an old report, which is the longer one"
    assert board.read(0) == "a new report" and [path.name for path in tmp_path.iterdir()] == ["rank0.report"]
