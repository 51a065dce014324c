"""Transfers go on while stages compute: receives are posted ahead, sends are not waited for until they must be over."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.mesh.transport import PaperTransport, Pending
from colonnade.pipeline.mailbox import Mailbox
from colonnade.pipeline.messages import Message, sends
from colonnade.pipeline.schedule import Action, all_actions
from colonnade.pipeline.transfer import start_sending
from tests.distributed import run_on_ranks


@dataclass
class Diary:
    """What a transport was asked, and what was waited for, in order."""

    lines: list[str] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)

    def note(self, what: str, peer: int, count: dict[int, int]) -> Pending:
        number = count[peer] = count.get(peer, -1) + 1
        self.lines.append(f"{what} {peer}:{number}")
        return Pending(Wait(self, f"wait {what} {peer}:{number}"))


@dataclass
class Wait:
    diary: Diary
    line: str

    def wait(self) -> None:
        self.diary.lines.append(self.line)


class Noting(PaperTransport):
    """A transport that moves nothing and keeps a diary."""

    def __init__(self, size: int) -> None:
        super().__init__("pp", size, Ledger())
        self.diary = Diary()

    def send(self, x: Tensor, to: int, site: Any) -> Pending:
        return self.diary.note("send", to, self.diary.sent)

    def receive_(self, x: Tensor, source: int, site: Any) -> Pending:
        return self.diary.note("receive", source, self.diary.received)


def mailbox(schedules: list[list[Action]], stage: int, virtual_stages: int = 1) -> tuple[Mailbox, list[str]]:
    """A stage's mailbox, and its diary."""
    size = len(schedules)
    transport = Noting(size)
    axis = Axis("pp", size, stage, tuple(range(size)), transport)
    box = Mailbox(sends(schedules, size * virtual_stages), axis, lambda message: (torch.zeros(2),))
    return box, transport.diary.lines


def test_the_next_receive_is_posted_before_this_one_is_waited_for() -> None:
    box, diary = mailbox(all_actions("gpipe", 2, 3), 1)
    assert diary == ["receive 0:0"], "before anything is computed"
    box.take(Message("F", 0, 0))
    assert diary == ["receive 0:0", "receive 0:1", "wait receive 0:0"]
    box.take(Message("F", 1, 0))
    box.take(Message("F", 2, 0))
    assert diary[3:] == ["receive 0:2", "wait receive 0:1", "wait receive 0:2"], "and no more than will be sent"


def test_receives_are_posted_on_both_sides() -> None:
    box, diary = mailbox(all_actions("1f1b", 3, 3), 1)
    assert diary == ["receive 0:0", "receive 2:0"], "before anything is computed"
    box.take(Message("F", 0, 0))
    assert diary[2:] == ["receive 0:1", "wait receive 0:0"]


def test_a_send_is_not_waited_for() -> None:
    box, diary = mailbox(all_actions("gpipe", 2, 3), 0)
    for microbatch in range(3):
        box.put(Message("F", microbatch, 0), (torch.ones(2),))
    assert diary == ["receive 1:0", "send 1:0", "send 1:1", "send 1:2"]


def test_what_is_sent_is_contiguous() -> None:
    """A transport reads memory, not strides."""
    sent: list[Tensor] = []

    class Keeping(PaperTransport):
        def send(self, x: Tensor, to: int, site: Any) -> Pending:
            sent.append(x)
            return Pending(None)

    axis = Axis("pp", 2, 0, (0, 1), Keeping("pp", 2, Ledger()))
    x = torch.arange(6.0).view(2, 3).t()
    start_sending((x, None), axis, 1).wait()
    assert len(sent) == 1 and sent[0].is_contiguous() and torch.equal(sent[0], x)


def test_what_is_being_sent_is_kept() -> None:
    """The transport has only its memory, and reads it until the send is over."""
    box, _ = mailbox(all_actions("gpipe", 2, 3), 0)
    x = torch.ones(2)
    kept = weakref.ref(x)
    box.put(Message("F", 0, 0), x)
    del x
    gc.collect()
    assert kept() is not None
    box.close()
    assert kept() is None


def test_a_send_is_let_go_when_an_answer_proves_that_it_was_used() -> None:
    """1F1B: the gradient of micro-batch 0 says that its stream has been used, and nothing of the next one's."""
    box, diary = mailbox(all_actions("1f1b", 2, 3), 0)
    for microbatch in (0, 1):
        box.put(Message("F", microbatch, 0), (torch.ones(2),))
    box.take(Message("B", 0, 1))
    assert [line for line in diary if line.startswith("wait send")] == ["wait send 1:0"]
    assert [len(leaving) for leaving in box._leaving.values()] == [1], "only what may be under way is kept"
    box.put(Message("F", 2, 0), (torch.ones(2),))
    box.close()
    assert [line for line in diary if line.startswith("wait send")] == [
        "wait send 1:0",
        "wait send 1:1",
        "wait send 1:2",
    ]


def test_an_answer_lets_go_of_all_that_was_used_before_it() -> None:
    """gpipe: no gradient comes before every micro-batch has been used."""
    box, diary = mailbox(all_actions("gpipe", 2, 3), 0)
    for microbatch in range(3):
        box.put(Message("F", microbatch, 0), (torch.ones(2),))
    box.take(Message("B", 0, 1))
    assert diary[-3:] == ["wait send 1:0", "wait send 1:1", "wait send 1:2"]


def test_what_is_used_out_of_order_is_received_in_order() -> None:
    """Between virtual stages a message may be used later than one that was sent after it."""
    backwards = [Action("B", microbatch, 0) for microbatch in range(4)]
    schedules = [
        [*(Action("F", microbatch, 0) for microbatch in order), *backwards] for order in (range(4), (1, 0, 2, 3))
    ]
    box, diary = mailbox(schedules, 1)
    box.take(Message("F", 1, 0))
    assert diary == ["receive 0:0", "receive 0:1", "wait receive 0:1"], "one is here that is not used yet"
    box.take(Message("F", 0, 0))
    assert diary[3:] == ["receive 0:2", "wait receive 0:0"]


def test_a_stage_keeps_what_it_sends_itself() -> None:
    box, diary = mailbox(all_actions("interleaved", 1, 1, 2), 0, virtual_stages=2)
    carry = torch.ones(2), torch.ones(3)
    box.put(Message("F", 0, 0), carry)
    assert box.take(Message("F", 0, 0)) is carry and diary == []
    taken = weakref.ref(carry[0])
    del carry
    assert taken() is None, "no longer than until it is taken"


def test_each_tensor_is_a_transfer_and_what_is_none_is_none() -> None:
    """Two tensors go up; of one of them a gradient comes back."""
    schedules = all_actions("1f1b", 2, 2)
    transport = Noting(2)
    box = Mailbox(sends(schedules, 2), Axis("pp", 2, 0, (0, 1), transport), lambda message: (torch.zeros(2), None))
    assert transport.diary.lines == ["receive 1:0"]
    box.put(Message("F", 0, 0), (torch.ones(2), torch.ones(3, dtype=torch.int64)))
    assert transport.diary.lines[1:] == ["send 1:0", "send 1:1"]
    gradient, nothing = box.take(Message("B", 0, 1))
    assert gradient is not None and nothing is None
    assert transport.diary.lines[3:] == ["receive 1:1", "wait receive 1:0", "wait send 1:0", "wait send 1:1"]


def test_neighbours_that_send_to_each_other_first_do_not_wait_for_each_other() -> None:
    """The steady state of 1F1B, with more than any buffer between ranks holds."""

    def on_a_rank(rank: int, num_ranks: int) -> list[float]:
        schedules = [[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]]
        # As if both made something at once: stage 1 hands its gradient on before it takes the stream.
        axis = build_mesh(Layout(pp=2), rank).pp
        box = Mailbox(sends(schedules, 2), axis, lambda message: (torch.empty(1 << 22),))
        mine, theirs = (Message("F", 0, 0), Message("B", 0, 1))[:: 1 if rank == 0 else -1]
        box.put(mine, (torch.full((1 << 22,), 1.0 + rank),))
        (found,) = box.take(theirs)
        assert found is not None
        box.close()
        return [found.min().item(), found.max().item()]

    assert run_on_ranks(on_a_rank, 2) == [[2.0, 2.0], [1.0, 1.0]]


def test_messages_arrive_as_they_were_sent() -> None:
    """Three stages of an interleaved schedule, every number told apart."""
    schedules = all_actions("interleaved", 3, 3, 2)

    def on_a_rank(rank: int, num_ranks: int) -> int:
        axis = build_mesh(Layout(pp=3), rank).pp
        box = Mailbox(sends(schedules, 6), axis, lambda message: (torch.empty(5), torch.empty(2, dtype=torch.int64)))
        right = 0
        for kind, microbatch, chunk in schedules[rank]:
            number = chunk * 3 + rank
            needed, made = number + (-1 if kind == "F" else 1), number
            if 0 <= needed < 6:
                found = box.take(Message(kind, microbatch, needed))
                assert all((x == mark(kind, microbatch, needed)).all() for x in found if x is not None)
                right += 1
            if 0 <= number + (1 if kind == "F" else -1) < 6:
                number_ = mark(kind, microbatch, made)
                box.put(Message(kind, microbatch, made), (torch.full((5,), number_), torch.full((2,), int(number_))))
        box.close()
        return right

    assert run_on_ranks(on_a_rank, 3) == [9, 12, 9]


def mark(kind: str, microbatch: int, chunk: int) -> float:
    return 100.0 * (kind == "B") + 10.0 * microbatch + chunk
