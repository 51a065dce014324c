"""A return to a checkpoint, and rollbacks.json in a run's folder, which has them all. Takes no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from colonnade.atomic import write_whole
from colonnade.checkpoint.names import Count
from colonnade.data.curriculum import Curriculum
from colonnade.errors import of_the_disk
from colonnade.train.run_folder import ROLLBACKS


class Rollback(BaseModel):
    """A return to a checkpoint, as the run's folder and all later checkpoints remember it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    to: Count
    """Step of the checkpoint."""
    detected: Count | None = None
    """The step that showed the divergence; None: somebody has asked for the rollback."""
    skip: Count = 0
    """Steps whose batches are passed over."""
    passed: Count | None = None
    """Positions in the data that these batches had on the course that is left, whose batch may have been changed behind
    the checkpoint. None: as many as the checkpoint's own curriculum says (of before there was this).
    """
    batches: list[list[int]] = []
    """How many of these batches, one behind the other, had how many positions. Empty where `passed` alone is known (of
    before there was this).
    """
    rate_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    rate_until: Count = 0
    """The last step with a lowered learning rate."""
    rewarm_steps: Count = 0
    """Steps in which the learning rate rises again from nothing."""
    reason: str = ""
    id: str = ""
    """What no other has: a second one may be equal in all else. Empty: of before there was this."""

    def behind(self, position: int, curriculum: Curriculum) -> int:
        """Where a run that has returned to a position in the data goes on."""
        return curriculum.steps(self.skip, position) if self.passed is None else position + self.passed

    def sizes(self, position: int, curriculum: Curriculum) -> list[int]:
        """Positions of each batch that it passes over, behind a position. Where they are not known the curriculum's,
        of which the last makes up the sum.
        """
        if self.batches or not self.skip:
            return [size for count, size in self.batches for _ in range(count)]
        *sizes, _ = curriculum.sizes(self.skip, position)
        return [*sizes, self.behind(position, curriculum) - position - sum(sizes)]

    def __str__(self) -> str:
        """What it changes, in words."""
        batches = f"pass over the batches of {self.skip} steps" if self.skip else "take the same batches"
        rate = f", with {self.rate_factor:g} × the learning rate to step {self.rate_until}"
        again = f", warming up again in {self.rewarm_steps} steps" if self.rewarm_steps else ""
        return batches + (rate if self.rate_until > self.to else "") + again


LIST = TypeAdapter(list[Rollback])


def read(run: Path) -> list[Rollback]:
    """All rollbacks of a run, in their order."""
    file = run / ROLLBACKS
    try:
        return LIST.validate_json(file.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        raise of_the_disk(
            f"{file} cannot be read: {type(error).__name__}. It says which batches the run has passed over. Put it "
            "back; without it (remove it) the run goes on as its newest checkpoint says.",
            error,
        ) from None


def write(run: Path, rollbacks: Sequence[Rollback]) -> None:
    write_whole(run / ROLLBACKS, LIST.dump_json(list(rollbacks), indent=1) + b"\n")


def in_force(recorded: Sequence[Rollback]) -> list[Rollback]:
    """Those of the steps that the run is made of: a return to an earlier step leaves behind what came after it."""
    return [each for at, each in enumerate(recorded) if all(later.to >= each.to for later in recorded[at + 1 :])]


def has_left(recorded: Sequence[Rollback], step: int, known: Sequence[Rollback]) -> bool:
    """Whether a run with these rollbacks has left the course that a checkpoint of `step` is of, which knows `known`."""
    return any(each.to < step and each not in known for each in in_force(recorded))
