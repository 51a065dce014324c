"""A group of all ranks for a thread that works beside training.

Ranks match the operations of a group by their order. Two threads that share a group would have to keep one order
between them on every rank; with a group of its own the second thread can take its time.
"""

from datetime import timedelta

import torch.distributed as dist

from colonnade.mesh.mesh import LONGEST

Group = dist.ProcessGroup


def background_group(timeout: float) -> Group | None:
    """A gloo group of all ranks; None where one process is alone. Every rank calls this, in its main thread.

    An operation that takes longer than `timeout` seconds fails.
    """
    if not dist.is_initialized():
        return None
    group: Group = dist.new_group(backend="gloo", timeout=timedelta(seconds=min(timeout, LONGEST)))
    return group
