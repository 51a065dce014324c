"""A schema, read as a list of keys: what the messages about values and the reference page are made from.

`root` is the schema's outermost class: Config, or that of another kind of file (a cleaning recipe). Its fields are
sections, which may be unset.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from colonnade import __version__
from colonnade.config.nature import MayChange, NotTheModel, Of, Since, WhileRunning
from colonnade.config.numbers import counted
from colonnade.config.presets import PRESETS
from colonnade.config.schema import Config
from colonnade.config.section import Section


class Key(NamedTuple):
    """One key of the configuration."""

    name: str  # section.key, or section.section.key
    type: type[int] | type[float] | type[str] | type[bool] | type[dict[str, float]]
    inner: Any  # the type of the values in a table; else the same
    choices: tuple[str | int, ...]  # empty: any value of the type
    many: bool  # a list of such values
    limits: tuple[str, ...]  # in words: "of at least 1"
    required: bool
    default: Any
    unit: str  # empty: none
    meaning: str
    may_change: bool  # whether a run may go on with another value
    while_running: bool  # whether `colonnade change` may give it another value in mid-run
    is_the_model: bool  # whether it is part of what a checkpoint's weights are
    since: Since | None  # None: all checkpoints have it
    families: tuple[str, ...]  # that have it; empty: all


@cache
def sections(root: type[BaseModel] = Config) -> Mapping[str, type[Section]]:
    """The sections of a configuration and their classes, in the schema's order; [model.rotary] is "model.rotary"."""
    return MappingProxyType(dict(_sections(root, "")))


def _sections(of: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in of.model_fields.items():
        if (section := _section_of(field)) is not None:
            yield prefix + name, section
            yield from _sections(section, f"{prefix}{name}.")


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The class of a section, which may be one that can be unset."""
    kinds = [part for part in get_args(field.annotation) if part is not NoneType] or [field.annotation]
    kind = kinds[0]
    return kind if len(kinds) == 1 and isinstance(kind, type) and issubclass(kind, Section) else None


def all_keys(root: type[BaseModel] = Config) -> Mapping[str, Key]:
    """Every key by its full name, in the schema's order."""
    return _all_keys(root)


@cache
def _all_keys(root: type[BaseModel]) -> Mapping[str, Key]:
    found = {
        f"{name}.{key}": key_of(f"{name}.{key}", field, may_change=section.MAY_CHANGE)
        for name, section in sections(root).items()
        for key, field in section.model_fields.items()
        if _section_of(field) is None
    }
    return MappingProxyType(found)


def section_of(name: str) -> str:
    """ "model.rotary.base" -> "model.rotary"."""
    return name.rpartition(".")[0]


def short(name: str) -> str:
    """ "model.rotary.base" -> "base"."""
    return name.rpartition(".")[2]


def keys_of(section: str, root: type[BaseModel] = Config) -> list[Key]:
    """The keys of one section, in the schema's order."""
    return [key for name, key in all_keys(root).items() if section_of(name) == section]


def key_of(name: str, field: FieldInfo, *, may_change: bool = False) -> Key:
    """What the schema says about one field. Its documentation is '[unit] meaning' or 'meaning'."""
    parts = list(parts_of(field.annotation)) + field.metadata
    choices = tuple(part for part in parts if isinstance(part, str | int))
    types = [part for part in parts if part in (bool, int, float, str)] or [type(part) for part in choices]
    table = any(get_origin(part) is dict for part in inner_types(field.annotation))
    description = " ".join((field.description or "").split())
    unit, _, meaning = description[1:].partition("] ") if description.startswith("[") else ("", "", description)
    return Key(
        name=name,
        type=dict if table else types[0] if types else str,
        inner=types[-1] if types else str,
        choices=tuple(PRESETS) if name == "model.preset" else choices,
        many=any(get_origin(part) in (tuple, list) for part in inner_types(field.annotation)),
        limits=tuple(limit_in_words(part) for part in parts if _is_told(part)),
        required=field.is_required(),
        default=field.default,
        unit=unit,
        meaning=meaning,
        may_change=may_change or _marked(parts, MayChange) is not None,
        while_running=_marked(parts, WhileRunning) is not None,
        is_the_model=section_of(name).startswith("model") and _marked(parts, NotTheModel) is None,
        since=_marked(parts, Since),
        families=of.families if (of := _marked(parts, Of)) else (),
    )


Mark = TypeVar("Mark", MayChange, WhileRunning, NotTheModel, Since, Of)


def _marked(parts: list[Any], kind: type[Mark]) -> Mark | None:
    return next((part for part in parts if isinstance(part, kind)), None)


def parts_of(annotation: object) -> Iterator[Any]:
    """The types, literal values and limits of an annotation: Annotated[int, Ge(1)] | None -> int, Ge(1), NoneType."""
    origin = get_origin(annotation)
    if origin is None:
        yield annotation
    elif origin is Literal:
        yield from get_args(annotation)
    elif origin is Annotated:
        inner, *limits = get_args(annotation)
        yield from parts_of(inner)
        yield from limits
    else:
        for part in get_args(annotation):
            yield from parts_of(part)


def inner_types(annotation: object) -> Iterator[object]:
    """An annotation and those it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from inner_types(part)


def expectation(key: Key) -> str:
    """What a key accepts: 'a whole number of at least 1', '"fp32", "bf16" or "fp64"'."""
    if key.choices:
        *others, last = (as_toml(choice) for choice in key.choices)
        return ("a list of " if key.many else "") + (f"{', '.join(others)} or {last}" if others else last)
    limits = " and ".join(key.limits)
    if key.many or key.type is dict:
        each = {int: "whole numbers", float: "numbers", bool: "truth values"}.get(key.inner, "texts in quotes")
        return f"a {'list' if key.many else 'table'} of {each} {limits}".rstrip()
    if key.type is str:
        return "text in quotes"
    if key.type is bool:
        return "true or false"
    return f"{'a whole number' if key.type is int else 'a number'} {limits}".rstrip()


def _is_told(part: object) -> TypeGuard[Ge | Gt | Le | Lt]:
    """Whether it is a limit that somebody might not expect: those of counts are far above any use."""
    return isinstance(part, Ge | Gt | Lt) or (isinstance(part, Le) and isinstance(part.le, float))


def limit_in_words(limit: Ge | Gt | Le | Lt) -> str:
    if isinstance(limit, Ge | Le):
        return f"of at least {limit.ge}" if isinstance(limit, Ge) else f"at most {limit.le}"
    return f"above {limit.gt}" if isinstance(limit, Gt) else f"below {limit.lt}"


def kind_of(value: object, key: Key) -> str:
    """What a value of the wrong kind, or out of range, is: 'text', 'a list', 'out of range', 'not finite'."""
    if value is None:
        return "no value"
    if isinstance(value, bool):
        return "a truth value"
    if value in ("", [], {}):
        return "empty"
    if isinstance(value, str):
        return "text"
    if isinstance(value, float) and key.type in (int, float) and not key.many and not math.isfinite(value):
        return "not finite"
    if type(value) is (list if key.many else key.type) or (isinstance(value, int) and key.type is float):
        return "out of range"
    return {int: "a number", float: "a number with a decimal point or exponent", list: "a list", dict: "a section"}.get(
        type(value), "a date or time"
    )


def as_toml(value: object) -> str:
    """A value as it stands in a TOML file. None, which TOML does not have, is '(unset)'."""
    if value is None:
        return "(unset)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(key)} = {as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, str | bool | int | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
    return str(value)


def first_line(config: Config) -> str:
    """How a run introduces itself."""
    return f"Colonnade {__version__}: training {config.run.folder} on {counted(config.parallel.num_ranks, 'rank')}."
