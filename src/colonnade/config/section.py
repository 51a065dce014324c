"""What the sections of every schema are made of: their base class, and the numbers that keys may have."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ConfigDict, Strict

MOST = 10**18  # of anything that is counted: what 64-bit numbers hold, and products of a few do not wrap
LARGEST = 10**9  # of any dimension, and of any number of ranks: factors are found by trying
DEEPEST = 10**5  # layers: there are lists with an entry for each

Size = Annotated[int, Ge(1), Le(LARGEST)]
Sizes = Annotated[tuple[Size, ...], Strict(False)]  # a TOML list
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Text = Annotated[str, MinLen(1)]
CountsOrZero = Annotated[tuple[CountOrZero, ...], Strict(False)]


class Section(BaseModel):
    """What all sections share: frozen, strict, no unknown keys, no infinities."""

    MAY_CHANGE: ClassVar[bool] = False
    """Whether a run may go on with other values of all keys of the section."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
