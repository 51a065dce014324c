"""A recipe from its file and the command line. All that is wrong with it is reported at once, before any work.

TOML ─┐
      ├─▶ known keys ─▶ schema ─▶ go together? ─▶ files there? ─▶ Recipe
a.b=c ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from colonnade.config.describe import as_toml
from colonnade.config.load import read, value_of
from colonnade.corpus.formats import KINDS_IN_WORDS, kind_of
from colonnade.corpus.recipe import Recipe, RunSection
from colonnade.errors import ConfigError

Content = dict[str, Any]


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `section.key=value` overrides. Raises ConfigError with every problem."""
    content = read(path)
    problems = [problem for override in overrides for problem in _apply(content, override)]
    return build(content, problems, source=str(path))


def build(content: Content, problems: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """The Recipe of a file's content. Raises ConfigError with the problems so far and all others."""
    found = [*problems, *_unknown(content)]
    known = _known(content)
    try:
        recipe = _without_disabled(Recipe.model_validate(known))
    except ValidationError as error:
        found += [message for details in error.errors(include_url=False) for message in _refused(details)]
        recipe = _of_sound_sections(known)
    found += [*_disagreements(recipe), *_missing_files(recipe)]
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ConfigError("\n".join([f"{source}: {count}", *(f"  - {problem}" for problem in dict.fromkeys(found))]))
    return recipe


def sections() -> dict[str, type[BaseModel]]:
    """The sections of a recipe and their classes."""
    return {name: _section_of(field.annotation) for name, field in Recipe.model_fields.items()}


def _section_of(annotation: object) -> type[BaseModel]:
    options = [option for option in get_args(annotation) if option is not type(None)] or [annotation]
    return cast(type[BaseModel], options[0])


def _apply(content: Content, override: str) -> Iterator[str]:
    name, equals, value = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        yield f"{override!r} is not of the form section.key=value. Write for instance write.folder=clean"
        return
    there = content.setdefault(section, {})
    *outer, last = key.split(".")
    for part in outer:
        there = there.setdefault(part, {}) if isinstance(there, dict) else {}
    if isinstance(there, dict):
        there[last] = value_of(value.strip())


def _unknown(content: Content) -> Iterator[str]:
    for section, values in content.items():
        if section not in sections():
            yield _unknown_section(section, values)
        elif not isinstance(values, dict):
            yield f"{section} = {as_toml(values)} gives a value to a section. Write [{section}] and its keys under it."
        else:
            yield from (_unknown_key(section, key) for key in values if key not in sections()[section].model_fields)


def _unknown_section(section: str, values: object) -> str:
    owners = [name for name, kind in sections().items() if section in kind.model_fields]
    if not isinstance(values, dict) and owners:
        named = " or ".join(f"{owner}.{section}" for owner in owners)
        return f"{section} = {as_toml(values)} stands outside of any section. Write it as {named}."
    close = get_close_matches(section, sections(), n=1, cutoff=0.5)
    there = ", ".join(f"[{name}]" for name in sections())
    return f"[{section}] is not a step. {f'Did you mean [{close[0]}]? ' if close else ''}The sections are {there}."


def _unknown_key(section: str, key: str) -> str:
    own = list(sections()[section].model_fields)
    owners = [f"{name}.{key}" for name, kind in sections().items() if key in kind.model_fields and key != "enabled"]
    close = get_close_matches(key, own, n=1)
    if close:
        return f"{section}.{key} is not a key: did you mean {section}.{close[0]}?"
    if owners:
        return f"{section}.{key} is not a key: did you mean {' or '.join(owners)}?"
    return f"{section}.{key} is not a key. [{section}] has {', '.join(own)}."


def _known(content: Content) -> Content:
    return {
        section: {key: value for key, value in values.items() if key in sections()[section].model_fields}
        for section, values in content.items()
        if section in sections() and isinstance(values, dict)
    }


def _refused(details: ErrorDetails) -> Iterator[str]:
    parts = [str(part) for part in details["loc"]]
    name = ".".join(parts)
    if details["type"] == "missing":
        if len(parts) == 1:
            needed = [key for key, field in sections()[parts[0]].model_fields.items() if field.is_required()]
            yield f"{parts[0]}.{needed[0]} is not set, and has no default. Add [{parts[0]}] with it."
        else:
            yield f"{name} is not set, and has no default."
        return
    value, message = details["input"], details["msg"].removeprefix("Input should be ").replace("'", '"')
    choices = details.get("ctx", {}).get("expected", "") if details["type"] == "literal_error" else ""
    close = get_close_matches(str(value), [choice.strip("' ") for choice in choices.replace(" or ", ",").split(",")], 1)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    yield f"{name} = {as_toml(value)} is not possible: it has to be {message}.{guess}"


def _of_sound_sections(known: Content) -> Recipe:
    """A Recipe of the sections that are right in themselves, good only for further checks; the others are None."""
    sound: Content = {}
    for name, section in sections().items():
        try:
            sound[name] = section.model_validate(known[name]) if name in known or name == "run" else None
        except (ValidationError, KeyError):
            sound[name] = RunSection() if name == "run" else None
    return _without_disabled(Recipe.model_construct(**sound))


def _without_disabled(recipe: Recipe) -> Recipe:
    """The recipe without the steps that are switched off."""
    off = {name: None for name in sections() if getattr(getattr(recipe, name), "enabled", True) is False}
    return recipe.model_copy(update=off)


def _disagreements(recipe: Recipe) -> Iterator[str]:
    if recipe.filter and (recipe.filter.min_tokens or recipe.filter.max_tokens) and recipe.run.tokenizer is None:
        yield (
            f"filter.min_tokens = {recipe.filter.min_tokens} counts tokens, and run.tokenizer is not set. Set "
            "run.tokenizer to the tokenizer in use, or filter.min_tokens = 0."
        )
    if recipe.tokenize and (recipe.tokenize.tokenizer or recipe.run.tokenizer) is None:
        yield "[tokenize] has no tokenizer. Set tokenize.tokenizer or run.tokenizer."
    if recipe.tokenize and recipe.write and recipe.write.format != "jsonl":
        yield f'[tokenize] reads .jsonl, and write.format = "{recipe.write.format}". Set write.format = "jsonl".'
    if recipe.decontaminate and not (recipe.decontaminate.tests or recipe.decontaminate.titles):
        yield "[decontaminate] names no evaluation set. Set decontaminate.tests or decontaminate.titles."
    if recipe.run.executor == "slurm" and recipe.run.slurm_partition is None:
        yield 'run.executor = "slurm" needs run.slurm_partition: name the partition (see `sinfo`).'
    if recipe.filter and recipe.read:
        yield from _sources_named(recipe)
    for name in recipe.split.shares if recipe.split else ():
        if not name.replace("-", "").replace("_", "").isalnum() or name in ("dropped", "state", "tokens"):
            yield f'split.shares has a part "{name}", which is no name for a folder here. Use letters and digits.'
    if recipe.read and not _is_encoding(recipe.read.encoding):
        yield (
            f'read.encoding = "{recipe.read.encoding}" is not an encoding that Python knows and that ends lines with '
            'one byte. Use "utf-8", or convert the files.'
        )


def _is_encoding(name: str) -> bool:
    try:
        return "\n".encode(name) == b"\n"
    except LookupError:
        return False


def _sources_named(recipe: Recipe) -> Iterator[str]:
    assert recipe.filter is not None, "asked only where there is a filter"
    sources = {source_of(path) for path in recipe.read.paths}
    for name in recipe.filter.remove_ids:
        if name not in sources:
            there = ", ".join(sorted(sources))
            yield f'filter.remove_ids names the source "{name}", which read.paths does not have. There are: {there}.'


def source_of(path: str) -> str:
    """The name of a source: the last part of its path, without endings."""
    return Path(path).name.split(".")[0] or Path(path).resolve().name


def _missing_files(recipe: Recipe) -> Iterator[str]:
    for path in recipe.read.paths if recipe.read else ():
        if not Path(path).exists():
            yield f"read.paths: {path} does not exist."
        elif not Path(path).is_file() and not Path(path).is_dir():
            yield f"read.paths: {path} is neither a file nor a folder. Write what it gives into a file."
        elif Path(path).is_file() and kind_of(Path(path)) is None:
            yield f"read.paths: {path} has an ending that says nothing about documents. Known are {KINDS_IN_WORDS}."
    yield from (f"{key}: {path} does not exist." for key, path in _named_files(recipe) if not Path(path).exists())
    if recipe.write and Path(recipe.write.folder).is_file():
        yield f"write.folder = {as_toml(recipe.write.folder)} is a file. Name a folder."


def _named_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for key, value in (("run.tokenizer", recipe.run.tokenizer), ("tokenize.tokenizer", _tokenizer(recipe))):
        if value is not None and not list(Path(value).parent.glob(f"{Path(value).name}*")):
            yield key, value
    if recipe.filter:
        yield from (("filter.remove_urls", path) for path in recipe.filter.remove_urls)
        yield from ((f"filter.remove_ids.{name}", path) for name, path in recipe.filter.remove_ids.items())
    if recipe.decontaminate:
        yield from ((f"decontaminate.tests.{name}", path) for name, path in recipe.decontaminate.tests.items())
        yield from (("decontaminate.titles", path) for path in recipe.decontaminate.titles)


def _tokenizer(recipe: Recipe) -> str | None:
    return recipe.tokenize.tokenizer if recipe.tokenize else None
