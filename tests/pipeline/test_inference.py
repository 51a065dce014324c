"""Forward only: what is held and what is under way between micro-batches, which no number of a result tells."""

from typing import Any

import torch
from torch import Tensor

from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import PaperTransport, Pending
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference


class Model:
    """Units that add one."""

    def run(self, name: str, x: Tensor | None, inputs: Any) -> Tensor:
        return torch.ones(2) if x is None else x + 1


class Holder:
    """An owner that knows what is held."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def expect(self, uses: Any) -> None:
        assert self.held == [], "nothing of the micro-batch before is held"

    def acquire(self, unit: str, *, gradients: bool) -> None:
        assert not gradients
        self.held.append(unit)

    def release(self, unit: str) -> None:
        self.held.remove(unit)

    def open(self, unit: str) -> None: ...
    def left(self, unit: str, *, last: bool) -> None: ...


class UnderWay(PaperTransport):
    """A transport that knows how many sends nobody has waited for."""

    def __init__(self) -> None:
        super().__init__("pp", 2, Ledger())
        self.sends, self.most = 0, 0

    def send(self, x: Tensor, to: int, site: Any) -> Pending:
        self.sends += 1
        self.most = max(self.most, self.sends)
        return Pending(self)

    def wait(self) -> None:
        self.sends -= 1


def test_the_head_is_held_until_the_next_micro_batch_and_no_longer() -> None:
    owner = Holder()
    inference = Inference([Chunk(["embedding", "head"], Model(), owner)], Axis("pp"), owner, torch.zeros_like)
    for _ in range(3):
        inference.hidden(None)
        assert owner.held == ["head"], "for whoever reads the stream"
    inference.close()
    assert owner.held == []
    inference.close()


def test_a_stage_does_not_run_far_ahead_of_the_next() -> None:
    owner, transport = Holder(), UnderWay()
    axis = Axis("pp", 2, 0, (0, 1), transport)
    inference = Inference([Chunk(["embedding"], Model(), owner)], axis, owner, torch.zeros_like)
    for _ in range(8):
        assert inference.hidden(None) is None
        assert transport.sends <= 2
    assert transport.most == 3, "two behind, and the one just sent"
    inference.close()
    assert transport.sends == 0
