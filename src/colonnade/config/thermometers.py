"""[thermometers]: what is measured of activations, gradients and updates while a run goes on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Strict

from colonnade.config.section import CountOrZero, Section

SiteName = Literal[
    "embedding",
    "attention_logits",
    "attention_output",
    "mlp_hidden",
    "residual_stream",
    "final_norm",
    "gradients",
    "updates",
]
"""What can be measured; where a model's are: architecture/sites.py."""
ALL_SITES: tuple[SiteName, ...] = get_args(SiteName)
GROWING: tuple[SiteName, ...] = ("attention_logits", "residual_stream")
"""What divergence.growth watches."""


class ThermometersConfig(Section):
    """Numbers of every block and site, by which trouble is seen before the loss shows it: thermometers.jsonl."""

    MAY_CHANGE: ClassVar[bool] = True

    every: CountOrZero = 0
    """[steps] Steps between measured steps: every so many, the smallest and largest activation of each block and site,
    their RMS and shares of unusual values, gradients and relative updates are written to thermometers.jsonl. 0: none
    are measured, at no cost; 10 is common."""

    sites: Annotated[tuple[SiteName, ...], Strict(False)] = ALL_SITES
    """What is measured, so that a run pays for what somebody looks at: sites of activations (those of attention are
    those of a decoder's attention to the memory, too), gradients, and updates. Default: all that the model has."""

    def measures(self, step: int) -> bool:
        """Whether a step is one of those."""
        return self.every > 0 and step % self.every == 0
