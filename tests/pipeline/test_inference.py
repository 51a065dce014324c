"""Forward only: what goes into the loss is what one rank would have; what is held and under way meanwhile."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.mesh.transport import PaperTransport, Pending
from colonnade.pipeline.chunk import Chunk, Owner
from colonnade.pipeline.inference import Inference, on_one_stage
from tests.distributed import run_on_ranks
from tests.pipeline.toy import Owner as Noting
from tests.pipeline.toy import Pair, Toy, Watched, microbatches, units

NUM_BLOCKS, COUNT = 6, 5


class Holder:
    """An owner that knows what is held."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def expect(self, uses: Any) -> None:
        assert self.held == [], "nothing of the previous micro-batch is held"

    def acquire(self, unit: str, *, gradients: bool) -> None:
        assert not gradients
        self.held.append(unit)

    def release(self, unit: str) -> None:
        self.held.remove(unit)

    def open(self, unit: str) -> None: ...
    def gradients_ready(self, unit: str, *, last: bool) -> None: ...


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


def inference(model: Watched, pp: Axis, virtual_stages: int, owner: Owner) -> Inference:
    names, count = model.names, pp.size * virtual_stages
    ends = [len(names) * i // count for i in range(count + 1)]
    held = [names[start:end] for start, end in pairwise(ends)][pp.rank :: pp.size]
    return Inference([Chunk(units(each), model, owner) for each in held], model, pp, owner)


@pytest.mark.parametrize(("size", "virtual_stages"), [(2, 1), (3, 2), (1, 2)])
@pytest.mark.parametrize("kind", [Toy, Pair])
def test_the_last_stage_has_what_goes_into_the_loss(kind: type[Watched], size: int, virtual_stages: int) -> None:
    def on_a_rank(rank: int, num_ranks: int) -> list[tuple[Tensor, ...] | None]:
        stage = inference(kind(NUM_BLOCKS), build_mesh(Layout(pp=size), rank).pp, virtual_stages, Noting())
        found = [stage.hidden(given) for given in microbatches(COUNT)]
        stage.close()
        return found

    model = kind(NUM_BLOCKS)
    alone = on_one_stage(model, units(model.names))
    expected = [alone.hidden(given) for given in microbatches(COUNT)]
    *others, last = run_on_ranks(on_a_rank, size)
    assert all(found == [None] * COUNT for found in others)
    for found, carry in zip(last, expected, strict=True):
        assert found is not None and carry is not None
        assert len(carry) == (1 if kind is Toy else 3)
        assert all(torch.equal(a, b) for a, b in zip(found, carry, strict=True))


def test_units_are_acquired_as_announced() -> None:
    owner = Noting()
    inference(Toy(2), Axis("pp"), 1, owner).hidden(microbatches(1)[0])
    assert owner.acquired() == owner.expected == Toy(2).names


def test_the_loss_is_held_until_the_next_micro_batch_and_no_longer() -> None:
    owner = Holder()
    stage = inference(Toy(1), Axis("pp"), 1, owner)
    for given in microbatches(3):
        stage.hidden(given)
        assert owner.held == ["head"], "for whoever reads what goes into it"
    stage.close()
    assert owner.held == []
    stage.close()


def test_a_stage_does_not_run_far_ahead_of_the_next() -> None:
    owner, transport = Holder(), UnderWay()
    stage = inference(Toy(2), Axis("pp", 2, 0, (0, 1), transport), 1, owner)
    for given in microbatches(8):
        assert stage.hidden(given) is None
        assert transport.sends <= 2
    assert transport.most == 3, "two under way, and the one just sent"
    stage.close()
    assert transport.sends == 0
