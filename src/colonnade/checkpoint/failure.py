"""One failure for all ranks: what `torch.distributed.checkpoint` gathers from them, told in one message."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from colonnade.errors import CheckpointError


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Around `dcp.save` or `dcp.load`: raise, on every rank alike, what went wrong on one of them.

    A CheckpointError comes before anything else, as the one that says what to do; what the disk refuses becomes one;
    the other failures are bugs, and keep their tracebacks. One process without a process group is as good as many here,
    so the warning of that is dropped.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as gathered:
            failures = [(rank, error, trace) for rank, (error, trace) in sorted(gathered.failures.items())]
        else:
            return
    rank, error, trace = min(failures, key=lambda failure: not isinstance(failure[1], CheckpointError))
    if isinstance(error, OSError):
        raise CheckpointError(
            f"Rank {rank} could not read or write the checkpoint: {error}. Mend that (permissions, disk, mount), and "
            f"start again."
        ) from None
    if not isinstance(error, CheckpointError):
        error.add_note(f"on rank {rank}:\n{''.join(traceback.format_list(trace))}")
    raise error from None
