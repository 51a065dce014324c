"""[restarts]: how a run comes back by itself when ranks are lost."""

from __future__ import annotations

from typing import ClassVar, Literal

from colonnade.config.section import CountOrZero, NotNegative, Positive, Section


class RestartsConfig(Section):
    """How a run comes back by itself when a rank dies, hangs, or loses its connection: from its newest checkpoint."""

    MAY_CHANGE: ClassVar[bool] = True

    limit: CountOrZero = 3
    """[restarts] In a row without a new checkpoint between them; the next fault ends the run. 0: a run never restarts,
    and a damaged checkpoint is refused."""
    backoff: NotNegative = 5.0
    """[seconds] Before the second restart without a new checkpoint, and twice as long before each further one, up to
    ten minutes. The first comes at once."""
    fewer_ranks: bool = True
    """Where a rank cannot come back: go on with the best layout for those that are left. The global batch and the order
    of the data stay, and with them the losses but for rounding."""
    wait_for_ranks: NotNegative = 300.0
    """[seconds] How long the run waits for GPUs that are missing before it goes on with fewer ranks; it ends where none
    is left."""
    return_after: Positive = 1800.0
    """[seconds] With fewer ranks, the run saves after so long and tries its whole layout again; after twice as long
    each time that this fails, until it has held up for as long."""
    one_rank: bool = False
    """A run of one rank has a supervisor too, which restarts it, and so runs in a process of its own. Points of a sweep
    always have one."""
    damaged: Literal["fall_back", "refuse"] = "fall_back"
    """A newest checkpoint that is damaged: fall_back sets it aside, says so and goes on from the newest that is
    sound, on the disk or in checkpoint.upload_to; refuse ends the run, as where there is no other."""
