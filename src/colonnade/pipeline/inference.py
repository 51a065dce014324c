"""Forward through all stages, nothing kept: what evaluation and generation run."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from colonnade.mesh.mesh import Axis
from colonnade.mesh.point_to_point import receive_, send
from colonnade.mesh.transport import Pending
from colonnade.pipeline.chunk import HEAD, Chunk, Model, Owner

_BEHIND = 2  # transfers that may still go on when the next micro-batch is begun


class Inference:
    """One stage of a pipeline that only runs forward."""

    def __init__(self, chunks: Sequence[Chunk], pp: Axis, owner: Owner, stream: Callable[[Any], Tensor]) -> None:
        """`stream` makes memory for the residual stream of a micro-batch, given its inputs."""
        self.chunks, self.pp, self.owner, self.stream = chunks, pp, owner, stream
        self._leaving: deque[tuple[Tensor, Pending]] = deque()
        self._holds_head = False

    @property
    def has_head(self) -> bool:
        """Whether this is the last stage."""
        return HEAD in self.chunks[-1].units

    def hidden(self, inputs: Any) -> Tensor | None:
        """The residual stream before the head, [s, b, h], on the last stage; None elsewhere.

        Until the next call, or `close`, the head's weights are there for who uses the stream. Sends the stream once a
        chunk. Stages work on successive micro-batches at the same time.
        """
        self._let_head_go()
        self.owner.expect([unit for chunk in self.chunks for unit in chunk.units])
        num_chunks, x = self.pp.size * len(self.chunks), None
        for index, chunk in enumerate(self.chunks):
            number = index * self.pp.size + self.pp.rank
            before, behind = (number - 1) % self.pp.size, (number + 1) % self.pp.size
            if number > 0 and before != self.pp.rank:
                x = self.stream(inputs)
                receive_(x, self.pp, before).wait()
            x = chunk.infer(x, inputs)
            if number < num_chunks - 1 and behind != self.pp.rank:
                self._send(x.contiguous(), behind)
        if not self.has_head:
            return None
        self.owner.acquire(HEAD, gradients=False)
        self._holds_head = True
        return x

    def _send(self, x: Tensor, to: int) -> None:
        self._leaving.append((x, send(x, self.pp, to)))
        while len(self._leaving) > _BEHIND:
            self._leaving.popleft()[1].wait()

    def _let_head_go(self) -> None:
        if self._holds_head:
            self.owner.release(HEAD)
            self._holds_head = False

    def close(self) -> None:
        """Return when everything sent has arrived, and nothing is held any more."""
        self._let_head_go()
        while self._leaving:
            self._leaving.popleft()[1].wait()


def on_one_stage(model: Model, units: Sequence[str]) -> Inference:
    """A model that one rank has all of."""

    def stream(inputs: Any) -> Tensor:
        raise AssertionError("nothing is received")

    return Inference([Chunk(units, model, Whole())], Axis("pp"), Whole(), stream)


class Whole:
    """An owner of weights that are all there, and take no gradients."""

    def expect(self, uses: Sequence[str]) -> None: ...
    def acquire(self, unit: str, *, gradients: bool) -> None: ...
    def release(self, unit: str) -> None: ...
    def open(self, unit: str) -> None: ...
    def left(self, unit: str, *, last: bool) -> None: ...
