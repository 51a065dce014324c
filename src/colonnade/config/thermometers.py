"""[thermometers]: what is measured of activations, gradients and updates while a run goes on."""

from __future__ import annotations

from typing import ClassVar

from colonnade.config.section import CountOrZero, Section


class ThermometersConfig(Section):
    """Numbers of every block and site, by which trouble is seen before the loss shows it: thermometers.jsonl."""

    MAY_CHANGE: ClassVar[bool] = True

    every: CountOrZero = 0
    """[steps] Steps between measured steps: every so many, the smallest and largest activation of each block and site,
    their RMS and shares of unusual values, gradients and relative updates are written to thermometers.jsonl. 0: none
    are measured, at no cost; 10 is common."""

    def measures(self, step: int) -> bool:
        """Whether a step is one of those."""
        return self.every > 0 and step % self.every == 0
