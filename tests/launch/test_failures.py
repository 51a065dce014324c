"""What a rank under watch tells of its errors: to the others when it leaves, and of a lost connection."""

from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from colonnade.launch import watch
from colonnade.launch.board import FolderBoard, report_file
from colonnade.launch.explanation import Report
from colonnade.launch.reporter import IN_ORDER
from colonnade.launch.watch import Watch
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (SystemExit(3), IN_ORDER),
        (ValueError("two is broken. Mend it.\nBadly."), "raised ValueError: two is broken"),
        (RuntimeError("[/deep/pair.cc:547] Connection closed. Good luck"), "raised RuntimeError: Connection closed"),
    ],
)
def test_why_a_rank_leaves_is_one_sentence_and_ending_is_in_order(
    error: BaseException, left: str, tmp_path: Path
) -> None:
    board = FolderBoard(tmp_path)
    with pytest.raises(type(error)), Watch(paper_mesh(Layout(tp=2), 0), 5.0, board):
        raise error
    assert Report.from_json(report_file(tmp_path, 0).read_text()).left == left
    assert board.is_alarmed() == (left != IN_ORDER)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionResetError(), "ConnectionResetError"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
        (DistBackendError("NCCL communicator was aborted. Last error:"), "NCCL communicator was aborted"),
        (
            RuntimeError("[/deep/pair.cc:547] Read error: Connection reset by peer"),
            "Read error: Connection reset by peer",
        ),
        (RuntimeError("Wait TIMEOUT after 5 ms"), "Wait TIMEOUT after 5 ms"),
        (RuntimeError("tensors must have the same number of elements"), ""),
        (ValueError("what a program does wrong"), ""),
    ],
)
def test_an_operation_that_fails_for_want_of_a_peer_is_told_as_that(
    error: Exception, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And other errors are the program's own."""
    monkeypatch.setattr(watch, "_STAND", 0.0)
    mine = Watch(paper_mesh(Layout(tp=2), 0), 5.0, FolderBoard(tmp_path))
    mine._fail(error)
    assert mine._describe("", False).error == told
