"""Every format of examples by its name, as `colonnade data examples` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from colonnade.errors import DataError
from colonnade.examples.format import Format
from colonnade.examples.glue import GLUE

FORMATS: Mapping[str, Format] = MappingProxyType({**{task.name: task for task in GLUE}})


def format_of(name: str) -> Format:
    """The format of a name. DataError for none."""
    if name not in FORMATS:
        raise DataError(f'"{name}" is no format of examples. There are: {", ".join(FORMATS)}.')
    return FORMATS[name]
