"""What somebody who asks for a rollback may want of it: the options of `colonnade rollback`, which imports no torch."""

from typing import NamedTuple

from colonnade.config.section import MOST
from colonnade.errors import ConfigError


class RollbackOptions(NamedTuple):
    """How a run is to go on behind the checkpoint that it returns to."""

    skip: int = 0
    """Steps whose batches are passed over."""
    rate_factor: float = 1.0
    """Multiplies the learning rate for `rate_steps` steps."""
    rate_steps: int = 0
    rewarm: int = 0
    """Steps in which the learning rate rises again, from nothing to what it would have been."""

    def check(self, step: int | None) -> None:
        """ConfigError for a factor that is none, and where an option means nothing without another, or without the step
        to return to.
        """
        if str(self) and step is None:
            raise ConfigError(f"{self} says how to go on behind a rollback. Give --rollback STEP too, or leave it out.")
        if not 0.0 < self.rate_factor <= 1.0:
            raise ConfigError(
                f"--rate-factor {self.rate_factor:g} would leave no learning rate to train with, which is multiplied "
                "with it. Give a number above 0 and of at most 1, like 0.5."
            )
        for option, value in (("--skip", self.skip), ("--rate-steps", self.rate_steps), ("--rewarm", self.rewarm)):
            if value > MOST:
                raise ConfigError(f"{option} {value} is more steps than a run can have. Give {MOST} or less.")
        if (self.rate_factor < 1.0) != (self.rate_steps > 0):
            raise ConfigError(
                f"--rate-factor {self.rate_factor:g} and --rate-steps {self.rate_steps} go together: by what the "
                "learning rate is multiplied, and for how many steps. Give both, or neither."
            )

    def __str__(self) -> str:
        """As they are written: those that are given."""
        given = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
