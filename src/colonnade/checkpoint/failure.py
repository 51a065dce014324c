"""One failure for all ranks: what `torch.distributed.checkpoint` gathers from them, in one message."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from colonnade.errors import AWAY, CheckpointError, UnreadableError


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Around `dcp.save` or `dcp.load`: raise, on every rank alike, what went wrong on one of them.

    A CheckpointError comes before anything else, as the one that says what to do; what the disk refuses becomes one;
    the other failures are bugs, and keep their tracebacks.
    """
    try:
        yield
    except CheckpointException as gathered:
        failures = [(rank, error, trace) for rank, (error, trace) in sorted(gathered.failures.items())]
    else:
        return
    rank, error, trace = min(failures, key=lambda failure: not isinstance(failure[1], CheckpointError))
    if isinstance(error, OSError):
        kind = UnreadableError if error.errno in AWAY else CheckpointError
        raise kind(
            f"Rank {rank} could not read or write the checkpoint: {error}. Fix that (permissions, disk, mount), and "
            f"start again."
        ) from None
    if not isinstance(error, CheckpointError):
        error.add_note(f"on rank {rank}:\n{''.join(traceback.format_list(trace))}")
    raise error from None


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """Without torch's warning that there is no process group: one process is as good as many here.

    Filters of warnings belong to the whole process, so this is for the main thread; it covers the others meanwhile.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
