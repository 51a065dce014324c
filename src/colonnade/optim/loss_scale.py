"""The number that fp16 training multiplies the loss with, as a pure function of what happened so far.

fp16 has no numbers below 6e-8 and none above 65,504. The loss is multiplied with a scale, so that small gradients
survive, and gradients are divided by it before they are used. Too large a scale makes gradients overflow; then the step
is skipped and the scale halved. It doubles after a window of steps without overflow (Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3.2, and NVIDIA's rules for choosing the scale as training goes).

    value     65536 ── 65536 ── 32768 ── 32768 ── … window steps … ── 65536
    overflow        no       yes       no       no                 no

Other number formats have fp32's range and a constant scale of 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from colonnade.errors import ColonnadeError

MAXIMUM = 2.0**40
"""No larger scale is tried. A token's gradient is multiplied with scale ÷ loss tokens of the global batch: this allows
2¹⁶, which is more than fp16 can hold, for a batch of 16 million tokens."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step. Equal on all ranks, because they all are told of the same overflows."""

    value: float = 1.0
    good_steps: int = 0
    """Steps without overflow since the value last changed."""
    window: int = 0
    """Steps without overflow after which the value doubles. 0: it is constant."""
    minimum: float = 1.0
    """An overflow at this value or below ends the run."""

    @property
    def is_dynamic(self) -> bool:
        """Whether an overflow changes the scale (and skips the step)."""
        return self.window > 0

    def next(self, overflow: bool) -> "LossScale":
        """The scale after a step whose gradients overflowed or did not.

        Raises ColonnadeError where they overflow at the minimum.
        """
        if not self.is_dynamic:
            return self
        if overflow:
            return replace(self, value=self._lower(), good_steps=0)
        if self.good_steps + 1 < self.window:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=max(self.value, min(2.0 * self.value, MAXIMUM)), good_steps=0)

    def _lower(self) -> float:
        if self.value <= self.minimum:
            raise ColonnadeError(
                f"the gradients overflow fp16 at a loss scale of {self.value:g}, and train.min_loss_scale = "
                f"{self.minimum:g} allows none below. Gradients that overflow at such a scale are infinite or NaN "
                "because the run has diverged. Go on from an earlier checkpoint with a lower optim.learning_rate, or "
                'set train.precision = "bf16", which needs no loss scale.'
            )
        return max(self.value / 2.0, self.minimum)

    # --- what checkpoints remember of a run ---------------------------------------------------------------------------

    def metadata(self) -> dict[str, float | int]:
        """What a run that goes on needs to know; nothing where the scale is constant. JSON keeps it exactly."""
        return {"value": self.value, "good_steps": self.good_steps} if self.is_dynamic else {}

    def resumed(self, metadata: Mapping[str, float | int]) -> "LossScale":
        """This scale, with this configuration's rules, as far as a run with this `metadata` was.

        A run that was no fp16 run has none, and one that is no fp16 run needs none: then it is this scale itself.
        """
        if not metadata or not self.is_dynamic:
            return self
        return replace(self, value=float(metadata["value"]), good_steps=int(metadata["good_steps"]))
