"""A configuration from its file and the command line, and back to TOML.

    TOML ─┐
          ├─▶ sort_keys ─▶ schema ─▶ check ─▶ Config       problems of all three in one ConfigError
    a.b=c ┘

Only a file that is no TOML at all is reported alone. A value on the command line replaces the file's; both take
precedence over the preset's, which takes precedence over the schema's default.
"""

import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from colonnade.config.check import Problem, check
from colonnade.config.describe import all_keys, as_toml, sections, short
from colonnade.config.presets import with_preset
from colonnade.config.problems import meant_by, sort_keys, values_refused
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, hidden, of_the_disk

TomlTable = dict[str, Any]
DEEPEST = 8  # tables and lists within each other
TOO_DEEP = f"it has more than {DEEPEST} lists or tables within each other, and no key takes that"
TOO_LARGE = "it has a whole number that 64 bits cannot hold, and TOML has none"
ZERO = "it has a text with a zero byte (\\u0000), and no name of a file has one"
MoreChecks = Callable[[Config, set[str]], list[Problem]]


@dataclass(frozen=True)
class TomlFile:
    """A configuration file as it was when it was read: it may be edited later, or be a pipe, which is read once."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> "TomlFile":
        """ConfigError where it cannot be read."""
        try:
            return cls(path, path.read_text(encoding="utf-8-sig"))  # some editors begin with a mark
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text file in UTF-8 ({error}). Save it as UTF-8.") from error
        except OSError as error:
            raise of_the_disk(
                f"{path} cannot be read: {error.strerror}. Name a configuration file (.toml).", error
            ) from error

    def __str__(self) -> str:
        return str(self.path)


def load(
    path: Path | TomlFile,
    overrides: Sequence[str] = (),
    *,
    complete: Callable[[TomlTable], list[Problem]] = lambda content: [],
    also: MoreChecks = lambda config, uncertain: [],
) -> Config:
    """The configuration in a TOML file, with `section.key=value` overrides. Raises ConfigError with every problem.

    `complete` may add keys that the file and the overrides leave out, and gives back what keeps it from that. `also`:
    further problems, of a configuration and the keys in it whose values are not to be trusted.
    """
    content, problems = read_with(path, overrides)
    problems += complete(content)
    return build(content, problems, source=str(path), also=also)


def read_with(
    path: Path | TomlFile, overrides: Sequence[str], root: type[BaseModel] = Config
) -> tuple[TomlTable, list[Problem]]:
    """What a TOML file and the overrides say, and what is wrong with the form of these."""
    content = read(path)
    return content, [problem for override in overrides for problem in apply_(content, override, root)]


def loads(text: str, *, source: str = "configuration") -> Config:
    """The configuration in TOML text, checked like a file's; `source` names it in messages."""
    return build(parse(text, source), [], source=source)


def to_toml(config: Config, *, credentials: bool = False) -> str:
    """Every key that has a value, as TOML that loads to an equal configuration.

    But for the credentials in URLs: they are hidden, as this is stored, unless it is asked for them.
    """
    content = config.model_dump(exclude_none=True)
    content = content if credentials else hidden(content)
    return "\n\n".join(_blocks(content)) + "\n"


def _blocks(content: TomlTable, prefix: str = "") -> Iterator[str]:
    """A section at a time, each before those within it."""
    for name, values in content.items():
        inner = {key: value for key, value in values.items() if f"{prefix}{name}.{key}" in sections()}
        keys = {key: value for key, value in values.items() if key not in inner}
        yield "\n".join([f"[{prefix}{name}]", *(f"{key} = {as_toml(value)}" for key, value in keys.items())])
        yield from _blocks(inner, f"{prefix}{name}.")


def read(path: Path | TomlFile) -> TomlTable:
    """The content of a TOML file. Raises ConfigError where there is none to be had."""
    file = path if isinstance(path, TomlFile) else TomlFile.read(path)
    return parse(file.text, str(path))


def parse(text: str, source: str) -> TomlTable:
    try:
        return _content_of(text)
    except _NotOurs as error:
        raise ConfigError(f"{source} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source} is not TOML: {error}. A line is [section], key = value or # comment; text stands in quotes."
        ) from error


class _NotOurs(ValueError):
    """TOML, perhaps, but with what no configuration needs."""


def _content_of(text: str) -> TomlTable:
    """The content of TOML text. TOMLDecodeError if it is none; _NotOurs if it is too deep, or has too large numbers or
    zero bytes.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _NotOurs(TOO_DEEP) from None
    except ValueError:  # Python itself refuses to read thousands of digits
        raise _NotOurs(TOO_LARGE) from None
    values: list[object] = [content]
    for _ in range(DEEPEST):
        values = [inner for value in values for inner in _inside(value)]
        if any(type(value) is int and not -(2**63) <= value < 2**63 for value in values):
            raise _NotOurs(TOO_LARGE)
        if any("\0" in text for value in values for text in _texts(value)):
            raise _NotOurs(ZERO)
    if values:
        raise _NotOurs(TOO_DEEP)
    return content


def _texts(value: object) -> Collection[str]:
    """The text that a value is, or the names in a table."""
    return (value,) if isinstance(value, str) else value if isinstance(value, dict) else ()


def _inside(value: object) -> Collection[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def apply_(content: TomlTable, override: str, root: type[BaseModel] = Config) -> list[Problem]:
    """Puts one `section.key=value` into the content, in place; where the key is a table, `section.key.name=value`.
    Gives a problem back where it has another form."""
    section, key, value = _parts(override, root)
    if not (section and key and "=" in override and _may_hold(section, root)):
        meant = meant_by(key, section, root) if key else meant_by(section, root=root)
        example = f"{meant[0] if meant else _example(root)}={value.strip() or '…'}"
        return [
            Problem(f"{override!r} is not of the form section.key=value. Write for instance {example}", tuple(meant))
        ]
    there: object = content
    for part in section.split("."):
        there = there.setdefault(part, {}) if isinstance(there, dict) else None
    try:
        read = value_of(value.strip(), f"{section}.{key}")
    except ConfigError as error:
        return [Problem(str(error), (f"{section}.{key}",))]
    if isinstance(there, dict):
        there[key] = read
    return []


def _parts(override: str, root: type[BaseModel]) -> tuple[str, str, str]:
    """Section, key and value. Names in a table, patterns and paths, may have points and signs of equality."""
    tables = (name for name, key in all_keys(root).items() if key.type is dict)
    table = next((table for table in tables if override.strip().startswith(f"{table}.")), None)
    if table is not None:
        name, equals, value = override.rpartition("=")
        return table, name.strip().removeprefix(f"{table}."), value if equals else ""
    name, _, value = override.partition("=")
    section, _, key = name.strip().rpartition(".")
    return section, key, value


def _may_hold(section: str, root: type[BaseModel]) -> bool:
    """Whether what stands before the last point of an override may have keys: of unknown sections, others tell."""
    known = all_keys(root).get(section)
    return "." not in section or section in sections(root) or (known is not None and known.type is dict)


def _example(root: type[BaseModel]) -> str:
    keys = all_keys(root)
    return "train.steps" if "train.steps" in keys else [name for name, key in keys.items() if key.required][-1]


def value_of(text: str, name: str) -> Any:
    """The value that TOML reads in the text; the text itself where TOML reads none (a path without quotes). ConfigError
    for one that no configuration has, with the name of what it was given to.
    """
    try:
        content = _content_of(f"value = {text}")
    except _NotOurs as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError:
        return text
    return content["value"] if len(content) == 1 else text


def build(
    content: TomlTable,
    problems: list[Problem],
    *,
    source: str,
    also: MoreChecks = lambda config, uncertain: [],
) -> Config:
    """The Config of a file's content. Raises ConfigError with the problems so far and all others."""
    known, of_keys = sort_keys(content)
    problems = problems + of_keys
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        problems += values_refused(error)
        config = without(known, {name for problem in problems for name in problem.keys})
    problems += check(config, {name for problem in problems for name in problem.keys})
    problems += also(config, {name for problem in problems for name in problem.keys})
    if problems:
        raise ConfigError(listed(problems, source))
    return config


def without(known: TomlTable, uncertain: Collection[str]) -> Config:
    """A Config of the sound values alone, unchecked: good only for checks that read none of the uncertain keys."""
    known = {**known, "model": with_preset(known.get("model", {}))}
    return cast(Config, _sound(Config, known, uncertain, ""))


def _sound(kind: type[BaseModel], values: TomlTable, uncertain: Collection[str], prefix: str) -> BaseModel:
    """A section, or all, of what is certain in `values`."""
    kept: TomlTable = {key: value for key, value in values.items() if prefix + key not in uncertain}
    for name, section in sections().items():
        if name.startswith(prefix) and "." not in name.removeprefix(prefix):
            key = short(name)
            kept[key] = _sound(section, values.get(key, {}), uncertain, f"{name}.")
    return kind.model_construct(**kept)


def listed(problems: Sequence[Problem], source: str) -> str:
    """One message for all problems; those of unknown keys first, as they may explain the others."""
    messages = list(dict.fromkeys(problem.message for problem in problems))
    count = "1 problem" if len(messages) == 1 else f"{len(messages)} problems"
    return "\n".join([f"{source}: {count}", *(f"  - {message}" for message in messages)])
