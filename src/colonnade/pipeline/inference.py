"""Forward through all stages, nothing kept: what evaluation and generation run."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from colonnade.architecture.statement import Unit
from colonnade.mesh.mesh import Axis
from colonnade.pipeline.carry import Carry, complete
from colonnade.pipeline.chunk import Chunk, Model, Owner
from colonnade.pipeline.transfer import Transfer, start_receiving, start_sending

_UNDER_WAY = 2  # transfers that may still go on when the next micro-batch is begun


class Inference:
    """One stage of a pipeline that only runs forward."""

    def __init__(self, chunks: Sequence[Chunk], model: Model, pp: Axis, owner: Owner) -> None:
        self.chunks, self.model, self.pp, self.owner = chunks, model, pp, owner
        self._leaving: deque[Transfer] = deque()
        self._holds_loss = False

    @property
    def loss_unit(self) -> Unit | None:
        """The unit that makes the loss, on the last stage."""
        last = self.chunks[-1].units[-1]
        return last if last.is_loss else None

    def hidden(self, inputs: Any) -> Carry | None:
        """What goes into the loss, on the last stage; None elsewhere.

        Until the next call, or `close`, the weights of the loss's unit are there for who uses it. Sends the carry once
        a chunk. Stages work on successive micro-batches at the same time.
        """
        self._release_loss()
        self.owner.expect([unit.name for chunk in self.chunks for unit in chunk.units])
        num_chunks = self.pp.size * len(self.chunks)
        carry: Carry = ()
        for index, chunk in enumerate(self.chunks):
            number = index * self.pp.size + self.pp.rank
            previous, following = (number - 1) % self.pp.size, (number + 1) % self.pp.size
            if number > 0 and previous != self.pp.rank:
                buffers = self.model.carry_buffers(inputs, chunk.units[0].name)
                carry = complete(start_receiving(buffers, self.pp, previous).wait())
            carry = chunk.infer(carry, inputs)
            if number < num_chunks - 1 and following != self.pp.rank:
                self._send(carry, following)
        if self.loss_unit is None:
            return None
        self.owner.acquire(self.loss_unit.name, gradients=False)
        self._holds_loss = True
        return carry

    def _send(self, carry: Carry, to: int) -> None:
        self._leaving.append(start_sending(carry, self.pp, to))
        while len(self._leaving) > _UNDER_WAY:
            self._leaving.popleft().wait()

    def _release_loss(self) -> None:
        if self._holds_loss and self.loss_unit is not None:
            self.owner.release(self.loss_unit.name)
            self._holds_loss = False

    def close(self) -> None:
        """Return when everything sent has arrived, and nothing is held any more."""
        self._release_loss()
        while self._leaving:
            self._leaving.popleft().wait()


def on_one_stage(model: Model, units: Sequence[Unit]) -> Inference:
    """A model of which one rank has all units."""
    return Inference([Chunk(units, model, ResidentWeights())], model, Axis("pp"), ResidentWeights())


class ResidentWeights:
    """An owner of weights that are all there, and take no gradients."""

    def expect(self, uses: Sequence[str]) -> None: ...
    def acquire(self, unit: str, *, gradients: bool) -> None: ...
    def release(self, unit: str) -> None: ...
    def open(self, unit: str) -> None: ...
    def gradients_ready(self, unit: str, *, last: bool) -> None: ...
