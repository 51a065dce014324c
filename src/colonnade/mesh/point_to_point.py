"""One rank of an axis sends a tensor to another: what a pipeline's stages say to each other.

    rank 0 ── send(x, axis, to=1) ──▶ receive_(x, axis, source=0) ── rank 1

Both ends return at once with a `Pending`; wait before the tensor is read (receive) or written or dropped (send). What
one rank sends to another arrives in the order of sending, so the receiver must ask in that order; nothing else ties
the two programs together.

On CUDA, transfers to higher ranks and transfers to lower ranks each have a process group of their own. NCCL carries out
what one group is asked for in turn, and a send ends only when it is received. Between two stages of a pipeline
activations go up while gradients go down: if both ranks start with their send and both directions shared a group, each
receive would stand in line behind a send that waits for it. With a group for each direction the line upward holds
nothing but what goes up, and its order is the same on both ends (`transport.warm_up_p2p` says what else NCCL
wants). gloo needs no such care: its transfers do not wait for each other, so the axis' own group carries them.
"""

from torch import Tensor

from colonnade.mesh.ledger import call_site
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending, Transport


def send(x: Tensor, axis: Axis, to: int) -> Pending:
    """Start sending contiguous `x` to rank `to` of the axis. Neither change nor drop x before waiting."""
    return _transport(axis, to).send(x, to, call_site())


def receive_(x: Tensor, axis: Axis, source: int) -> Pending:
    """Start overwriting contiguous `x` with what rank `source` of the axis sends: same shape, same dtype."""
    return _transport(axis, source).receive_(x, source, call_site())


def _transport(axis: Axis, peer: int) -> Transport:
    assert axis.transport is not None, f"{axis.name} has one rank: it has nobody to talk to"
    assert 0 <= peer < axis.size and peer != axis.rank, f"rank {axis.rank} of {axis.name} cannot talk to rank {peer}"
    return axis.transport
