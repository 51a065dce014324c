"""[checkpoint]: when and where a run's state is saved, and how the run goes on from it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from colonnade.config.nature import WHILE_RUNNING
from colonnade.config.section import Count, CountOrZero, NotNegative, Section, Text


class CheckpointConfig(Section):
    """When the state is saved under run.folder/checkpoints, and whether a run goes on from there."""

    MAY_CHANGE: ClassVar[bool] = True

    every: Annotated[CountOrZero, WHILE_RUNNING] = 500
    """[steps] Steps between saves. 0: only at the end, and when the run is interrupted."""
    memory_every: CountOrZero = 0
    """[steps] Between copies of the state in memory (/dev/shm), from which ranks that the supervisor or torchrun starts
    again go on; each machine keeps the next one's, too. 0: none."""
    keep: Annotated[Count, WHILE_RUNNING] = 2
    """[checkpoints] The newest so many are kept, older ones are deleted."""
    keep_every: Annotated[CountOrZero, WHILE_RUNNING] = 0
    """[steps] Keep also each checkpoint whose step is a multiple of this, however old it is. 0: none."""
    keep_best: Annotated[bool, WHILE_RUNNING] = True
    """Keep also the checkpoint with the lowest validation loss, however old it is, for `--best`: one more on the disk,
    where a later one is worse. Checkpoints at steps without an evaluation do not count."""
    asynchronous: bool = False
    """Write in the background: training waits only for the copy to memory. Needs memory for that copy."""
    resume: bool = True
    """Go on from the newest whole checkpoint of run.folder. false: refuse a folder that has one."""
    compare_copies_every: Annotated[CountOrZero, WHILE_RUNNING] = 0
    """[steps] Steps between comparisons of what several ranks hold as copies: weights and optimizer state, bit by bit.
    0: at each save only, which always compares before it writes."""
    unequal_copies: Literal["return", "mend", "stop"] = "return"
    """What a run does whose copies differ, having named the rank: return goes back to the last checkpoint, before which
    they were equal; mend gives the rank that stands against a majority their state, and returns where there is none;
    stop ends the run. At most restarts.limit times from one checkpoint."""
    retry_for: Annotated[NotNegative, WHILE_RUNNING] = 3600.0
    """[seconds] A save that fails (a full disk, an error of the file system) is said and tried again; it ends the run
    if saves have failed for longer than this. So it is with a newest checkpoint that the disk refuses. 0: the first
    failure ends the run."""
    upload_to: Text | None = None
    """URL of a folder in an object storage (`s3://bucket/runs/books`, `file:///mnt/…`, whatever fsspec opens). Each
    checkpoint is uploaded there beside training, and a run whose folder has none, or older ones, goes on from there.
    Each run needs a URL of its own. Credentials within it are hidden wherever it is kept."""
    upload_keep: Count | None = None
    """[checkpoints] The newest so many are kept in the storage, besides those that keep_every and keep_best keep on the
    disk. Unset: checkpoint.keep."""
    upload_patience: NotNegative = 600.0
    """[seconds] How long a run that ends, or is asked to stop, waits for its last upload."""
    allow_other_data: bool = False
    """Go on although token files are not those that the checkpoint was trained on, which is refused otherwise. The
    place in the data is kept as a number: samples of files that have changed may come again, or never."""
