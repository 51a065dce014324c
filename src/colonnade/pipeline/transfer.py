"""A carry, or its gradient, on its way from one stage to another: a transfer for each tensor, in their order."""

from dataclasses import dataclass

from colonnade.mesh.mesh import Axis
from colonnade.mesh.point_to_point import receive_, send
from colonnade.mesh.transport import Pending
from colonnade.pipeline.carry import Gradients


@dataclass(frozen=True)
class Transfer:
    """Tensors that are being sent or received. They must stay as they are until `wait` has returned."""

    entries: Gradients
    pending: tuple[Pending, ...]

    def wait(self) -> Gradients:
        """Return the tensors when all have been sent, or have arrived."""
        for each in self.pending:
            each.wait()
        return self.entries


def start_sending(entries: Gradients, pp: Axis, to: int) -> Transfer:
    """Send to stage `to`. What is None is not sent."""
    tensors = tuple(None if x is None else x.contiguous() for x in entries)
    return Transfer(tensors, tuple(send(x, pp, to) for x in tensors if x is not None))


def start_receiving(buffers: Gradients, pp: Axis, source: int) -> Transfer:
    """Receive from stage `source` into memory of the same shapes and dtypes as what it sends."""
    return Transfer(buffers, tuple(receive_(x, pp, source) for x in buffers if x is not None))
