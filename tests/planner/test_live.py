"""Counting the bytes of what is alive, under labels."""

from collections.abc import Sequence

import torch

from colonnade.planner.live import LiveTensors, Watch, storage_bytes


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


def test_each_result_of_an_operator_counts() -> None:
    with LiveTensors() as live:
        values, places = torch.arange(12.0).view(4, 3).max(0)
        assert live.bytes.total() == 3 * 4 + 3 * 8 and len(values) == len(places)


def test_memory_behind_several_tensors_counts_once() -> None:
    x, y = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    assert storage_bytes([x, x[2:], x.view(2, 5), y]) == 40 + 24


class Told:
    """An owner that notes what it is asked for, and makes a buffer for it."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.made: list[torch.Tensor] = []

    def note(self, *call: object) -> None:
        self.calls.append(call)
        self.made.append(torch.zeros(10))

    def expect(self, uses: Sequence[str]) -> None:
        self.note("expect", *uses)

    def acquire(self, unit: str, *, gradients: bool) -> None:
        self.note("acquire", unit, gradients)

    def release(self, unit: str) -> None:
        self.note("release", unit)

    def open(self, unit: str) -> None:
        self.note("open", unit)

    def gradients_ready(self, unit: str, *, last: bool) -> None:
        self.note("ready", unit, last)


def test_who_watches_an_owner_asks_it_for_all_that_chunks_ask_for() -> None:
    """What it makes then is buffers, whatever is made between is activations."""
    owner = Told()
    with LiveTensors("activations") as live:
        watch = Watch(owner, [], live)
        watch.expect(["a", "b"])
        kept = torch.zeros(5)
        watch.acquire("a", gradients=True)
        watch.acquire("a", gradients=False)
        watch.release("a")
        del kept
        watch.open("b")
        watch.gradients_ready("b", last=True)
        watch.gradients_ready("b", last=False)
    assert owner.calls == [
        ("expect", "a", "b"), ("acquire", "a", True), ("acquire", "a", False), ("release", "a"), ("open", "b"),
        ("ready", "b", True), ("ready", "b", False),
    ]  # fmt: skip
    assert (watch.activations, watch.buffers) == (20, 7 * 40)
