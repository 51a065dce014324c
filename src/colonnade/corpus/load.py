"""A recipe from its file and the command line. All that is wrong with it is reported at once, before any work.

    TOML ─┐
          ├─▶ known keys ─▶ schema ─▶ go together? ─▶ files there? ─▶ Recipe
    a.b=c ┘

What is read, and what is said of keys and values, is `config`'s, as for a run's configuration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from colonnade.config.check import Problem
from colonnade.config.describe import as_toml, sections
from colonnade.config.load import TomlTable, listed, read_with
from colonnade.config.problems import sort_keys, values_refused
from colonnade.corpus.folders import began_with, named_twice
from colonnade.corpus.formats import KINDS_IN_WORDS, kind_of
from colonnade.corpus.recipe import OWN_FOLDERS, Recipe, RunSection
from colonnade.errors import ConfigError
from colonnade.tokenizer_files import find_pair


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `section.key=value` overrides. Raises ConfigError with every problem."""
    content, problems = read_with(path, overrides, Recipe)
    return build(content, problems, source=str(path))


def build(content: TomlTable, problems: Sequence[Problem] = (), *, source: str = "recipe") -> Recipe:
    """The Recipe of a file's content. Raises ConfigError with the problems so far and all others."""
    known, of_keys = sort_keys(content, Recipe)
    found = [*problems, *of_keys]
    try:
        recipe = _without_disabled(Recipe.model_validate(known))
    except ValidationError as error:
        found += values_refused(error, Recipe)
        recipe = _of_sound_sections(known)
    told = (*_disagreements(recipe), *_missing_files(recipe), *_overlaps(recipe))
    found += [Problem(message, ()) for message in told]
    if found:
        raise ConfigError(listed(found, source))
    return recipe


def _of_sound_sections(known: TomlTable) -> Recipe:
    """A Recipe of the sections that are right in themselves, good only for further checks; the others are None."""
    sound: TomlTable = {}
    for name, section in sections(Recipe).items():
        try:
            sound[name] = section.model_validate(known[name]) if name in known or name == "run" else None
        except (ValidationError, KeyError):
            sound[name] = RunSection() if name == "run" else None
    return _without_disabled(Recipe.model_construct(**sound))


def _without_disabled(recipe: Recipe) -> Recipe:
    """The recipe without the steps that are switched off."""
    off = {name: None for name in sections(Recipe) if getattr(getattr(recipe, name), "enabled", True) is False}
    return recipe.model_copy(update=off)


def _disagreements(recipe: Recipe) -> Iterator[str]:
    for key in ("min_tokens", "max_tokens") if recipe.filter and recipe.run.tokenizer is None else ():
        if value := getattr(recipe.filter, key):
            yield (
                f"filter.{key} = {value} counts tokens, and run.tokenizer is not set. Set run.tokenizer to the "
                f"tokenizer in use, or filter.{key} = 0."
            )
    if recipe.filter and 0 < recipe.filter.max_tokens < recipe.filter.min_tokens:
        yield (
            f"filter.max_tokens = {recipe.filter.max_tokens} is below filter.min_tokens = {recipe.filter.min_tokens}: "
            "every document would be dropped. Set filter.min_tokens to less, or 0."
        )
    for code in recipe.language.thresholds if recipe.language else ():
        if recipe.language and code not in recipe.language.keep:
            yield (
                f'language.thresholds has "{code}", which language.keep has not: {code} is dropped however sure it is. '
                f"Keep it too, or leave its threshold out."
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
        if not name.replace("-", "").replace("_", "").isalnum() or name in OWN_FOLDERS:
            yield f'split.shares has a part "{name}", which is no name for a folder here. Use letters and digits.'
    if recipe.split and math.isinf(sum(recipe.split.shares.values())):
        yield "split.shares add up to more than a number can be. They are proportions: set smaller ones."
    if recipe.read and not _is_encoding(recipe.read.encoding):
        yield (
            f"read.encoding = {as_toml(recipe.read.encoding)} is not a text encoding that Python can decode and "
            'that ends lines with one byte. Use "utf-8", or convert the files.'
        )


def _is_encoding(name: str) -> bool:
    """Whether lines end with one byte in it, and what is damaged can be replaced."""
    try:
        return "\n".encode(name) == b"\n" and b"\n".decode(name, "replace") == "\n"
    except (LookupError, ValueError):  # not known; no name, or refused by the encoding itself: undefined, idna
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


def files_of(path: str) -> list[Path]:
    """The files that a name stands for: itself, all in a folder, or GPT-2's vocabulary and merges."""
    place = Path(path)
    found = sorted(place.rglob("*")) if place.is_dir() else find_pair(place) or (place,)
    return [file for file in found if file.is_file()]


def _missing_files(recipe: Recipe) -> Iterator[str]:
    for path in recipe.read.paths if recipe.read else ():
        if not Path(path).exists():
            yield f"read.paths: {path} does not exist."
        elif not Path(path).is_file() and not Path(path).is_dir():
            yield f"read.paths: {path} is neither a file nor a folder. Write what it gives into a file."
        elif Path(path).is_file() and kind_of(Path(path)) is None:
            yield f"read.paths: {path} has an ending that says nothing about documents. Known are {KINDS_IN_WORDS}."
    yield from (f"{key}: {path} does not exist." for key, path in _named_files(recipe) if not Path(path).exists())
    folders = {
        "write.folder": recipe.write.folder if recipe.write else None,
        "deduplicate.index": recipe.deduplicate.index if recipe.deduplicate else None,
    }
    for key, value in folders.items():
        if value is not None and Path(value).is_file():
            yield f"{key} = {as_toml(value)} is a file. Name a folder."


def _overlaps(recipe: Recipe) -> Iterator[str]:
    """A result within what is read, and inputs within each other, but of a run that an earlier version began so."""
    paths = recipe.read.paths if recipe.read else []
    for folder in dict.fromkeys(paths):
        if recipe.write and is_within(recipe.write.folder, folder):
            yield (
                f"write.folder = {as_toml(recipe.write.folder)} is within {folder}, a folder of read.paths: when the "
                "command is started again, what it has written there would be read as text. Set write.folder to a "
                "folder beside the inputs, or let read.paths name the files in place of the folder."
            )
    twice = [f"read.paths names {named}" for named in named_twice([path for path in paths if Path(path).exists()])]
    if twice and not (recipe.write and began_with(Path(recipe.write.folder), paths)):
        yield from twice


def is_within(path: str, folder: str) -> bool:
    """Whether a path, which need not be there, is a folder or below it, links and dots followed."""
    if not Path(folder).is_dir():
        return False
    real = [os.path.realpath(each) for each in (path, folder)]
    return os.path.commonpath(real) == real[1]


def _named_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for key, value in (("run.tokenizer", recipe.run.tokenizer), ("tokenize.tokenizer", _tokenizer(recipe))):
        if value is not None and not files_of(value):
            yield key, value
    if recipe.filter:
        yield from (("filter.remove_urls", path) for path in recipe.filter.remove_urls)
        yield from ((f"filter.remove_ids.{name}", path) for name, path in recipe.filter.remove_ids.items())
    if recipe.decontaminate:
        yield from ((f"decontaminate.tests.{name}", path) for name, path in recipe.decontaminate.tests.items())
        yield from (("decontaminate.titles", path) for path in recipe.decontaminate.titles)


def _tokenizer(recipe: Recipe) -> str | None:
    return recipe.tokenize.tokenizer if recipe.tokenize else None
