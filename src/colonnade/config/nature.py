"""What a key is besides its type: written at the key, in its annotation, and read from there.

steps: Annotated[Count, MAY_CHANGE]                a run may go on with another value
every: Annotated[Count, WHILE_RUNNING]             `colonnade change` gives it another while the run goes on
dropout: Annotated[Fraction, NOT_THE_MODEL]        not part of what a checkpoint's tensors are
embedding_norm: Annotated[bool, Since(False)]      checkpoints that do not have it had this
token_types: Annotated[bool, Of(("bert",))]           other families have no such option

Marks are equal to marks of their own class alone: `typing` keeps one object for annotations that are equal.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MayChange:
    """The same run goes on after it is changed: it says how long, where, how fast or how talkative. Steps computed so
    far stay as they were.
    """


@dataclass(frozen=True)
class WhileRunning:
    """`colonnade change` gives it another value in mid-run, behind a step, and the steps from there on follow exactly
    from the checkpoint: nothing that is made before the first step depends on it.
    """


@dataclass(frozen=True)
class NotTheModel:
    """A key of [model] that changes neither names and shapes of weights nor what they mean."""


@dataclass(frozen=True)
class Since:
    """A key of [model] that is younger than the first checkpoints."""

    before: Any
    """What held until it was saved."""


@dataclass(frozen=True)
class Of:
    """A key of [model] that some families have."""

    families: tuple[str, ...]


MAY_CHANGE = MayChange()
WHILE_RUNNING = WhileRunning()
NOT_THE_MODEL = NotTheModel()
