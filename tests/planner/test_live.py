"""Counting the bytes of what is alive, under labels."""

import torch

from colonnade.planner.live import LiveTensors


def test_bytes_leave_the_label_that_they_were_counted_under() -> None:
    with LiveTensors("first") as live:
        made = torch.zeros(10)
        live.label = "second"
        other = torch.zeros(3)
        assert live.bytes == {"first": 40, "second": 12}
        del made
        assert live.bytes["first"] == 0 and live.bytes["second"] == 12
        del other
        assert live.bytes["second"] == 0
    assert live.most == {"first": 40, "second": 12}, "the most that was alive at once"


def test_a_view_and_what_is_written_into_counts_once() -> None:
    with LiveTensors() as live:
        x = torch.zeros(4, 5)
        view = x.view(20)[3:]
        view.add_(1)
        assert live.bytes.total() == 80
        del x
        assert live.bytes.total() == 80, "the view holds on to its storage"
        del view
        assert live.bytes.total() == 0


def test_what_was_there_before_counts_nothing() -> None:
    x = torch.zeros(8)
    with LiveTensors() as live:
        x.mul_(2)
        assert live.bytes.total() == 0
        y = x + 1
        assert live.bytes.total() == y.untyped_storage().nbytes() == 32
