"""What a configuration file may get wrong, key by key, in words: unknown, misplaced, missing, mistyped, out of range.
`root` is the class of its schema (see `describe`).

{"train": {"step": 10}, "optim": {"num_layers": "2"}}
  -> train.step is not a key: did you mean train.steps?
  -> optim.num_layers: num_layers belongs to [model]. …
"""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from colonnade.config.check import Problem
from colonnade.config.describe import Key, all_keys, as_toml, expectation, keys_of, kind_of, section_of, sections, short
from colonnade.config.presets import PRESETS
from colonnade.config.schema import Config

SWEEP = "sweep"
"""The section beside those of a configuration that `colonnade finetune` takes out before the rest is read."""
# What other programs, or other versions, call the same thing.
ALSO_CALLED: Mapping[str, str] = MappingProxyType(
    {
        "lr": "optim.learning_rate",
        "max_lr": "optim.learning_rate",
        "min_lr": "optim.min_learning_rate",
        "warmup": "optim.warmup_steps",
        "eps": "optim.epsilon",
        "wd": "optim.weight_decay",
        "batch_size": "train.global_batch_size",
        "max_steps": "train.steps",
        "train_iters": "train.steps",
        "dtype": "train.precision",
        "grad_clip": "train.gradient_clip",
        "clip_grad": "train.gradient_clip",
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.hidden_size",
        "hidden_dropout": "model.dropout",
        "tensor_model_parallel_size": "parallel.tp",
        "pipeline_model_parallel_size": "parallel.pp",
        "output": "run.folder",
        "save_interval": "checkpoint.every",
    }
)

# Keys that one might rightly look for, and why they are not here.
NOT_HERE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("num_experts", "num_local_experts"), "there is no mixture of experts here")
)
# Values that one might rightly look for, and why they are not here.
WHY_NOT: Mapping[tuple[str, str | float], str] = MappingProxyType(
    {
        ("train.gradient_clip", float("inf")): "0 turns clipping off",
        ("model.position", "rope"): 'it is called "rotary" here',
        (
            "model.activation",
            "silu",
        ): 'gated by a second layer it is "swiglu", and alone it is not there',
    }
)


class Sorted(NamedTuple):
    """A file's content, the known keys apart from the problems with the others."""

    known: dict[str, dict[str, Any]]
    problems: list[Problem]


def sort_keys(content: Mapping[str, Any], root: type[BaseModel] = Config) -> Sorted:
    """Sections and keys that exist, as they were written; a problem for each that does not."""
    known: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for section, values in content.items():
        if section not in sections(root):
            problems += unknown_section(section, values, root)
        elif not isinstance(values, dict):
            problems.append(not_a_section(section, values, root))
        else:
            known[section] = {}
            problems += _sort_section(section, values, known[section], root)
    return Sorted(known, problems)


def _sort_section(
    section: str, values: Mapping[str, Any], known: dict[str, Any], root: type[BaseModel]
) -> Iterator[Problem]:
    """Puts what exists into `known`, with the sections within."""
    for key, value in values.items():
        name = f"{section}.{key}"
        if name in all_keys(root):
            known[key] = value
        elif name not in sections(root):
            yield unknown_key(section, key, root)
        elif isinstance(value, dict):
            known[key] = {}
            yield from _sort_section(name, value, known[key], root)
        else:
            yield not_a_section(name, value, root)


def not_a_section(section: str, value: object, root: type[BaseModel]) -> Problem:
    message = f"{section} = {as_toml(value)} gives a value to a section. Write [{section}] and its keys under it."
    return Problem(message, tuple(key for key in all_keys(root) if key.startswith(f"{section}.")))


def unknown_section(section: str, values: object, root: type[BaseModel]) -> Iterator[Problem]:
    """A section that does not exist, or a key that stands before the first section."""
    if not isinstance(values, dict):
        meant = meant_by(section, root=root)
        where = f" Write it as {' or '.join(meant)}." if meant else sections_there_are(root)
        yield Problem(f"{section} = {as_toml(values)} stands outside of any section.{where}", tuple(meant))
        return
    if section == SWEEP:
        yield Problem(
            f"[{SWEEP}] is read by `colonnade finetune` alone, which trains a run for each of its points. Use that "
            "command, or remove the section.",
            (),
        )
        return
    close = get_close_matches(section, list(sections(root)), n=1)
    guess = f" Did you mean [{close[0]}]?" if close else sections_there_are(root)
    yield Problem(f"[{section}] is not a section.{guess}", tuple(f"{close[0]}.{key}" for key in values if close))


def sections_there_are(root: type[BaseModel]) -> str:
    return f" The sections are {', '.join(f'[{name}]' for name in sections(root))}."


def unknown_key(section: str, key: str, root: type[BaseModel] = Config) -> Problem:
    """A key that its section does not have: misplaced, misspelled, another program's word, or nonsense."""
    if key in NOT_HERE:
        return Problem(f"{section}.{key} is not a key: {NOT_HERE[key]}. Leave it out.", ())
    meant = meant_by(key, section, root)
    elsewhere = [name for name in meant if short(name) == key]
    if elsewhere:
        owners = " and ".join(f"[{section_of(name)}]" for name in elsewhere)
        message = f"{section}.{key}: {key} belongs to {owners}. Write it as {' or '.join(elsewhere)}."
    elif meant:
        message = f"{section}.{key} is not a key: did you mean {' or '.join(meant)}?"
    else:
        there = ", ".join(short(each.name) for each in keys_of(section, root))
        message = f"{section}.{key} is not a key. [{section}] has {there}."
    return Problem(message, tuple(meant))


def meant_by(key: str, section: str = "", root: type[BaseModel] = Config) -> list[str]:
    """Full names of the keys that `key` may stand for: the same word elsewhere, a known synonym, the most alike."""
    keys = all_keys(root)
    same = [name for name in keys if short(name) == key]
    if same or ALSO_CALLED.get(key) in keys:
        return same or [ALSO_CALLED[key]]
    own = [short(each.name) for each in keys_of(section, root)]
    close = get_close_matches(key, own, n=1)
    if close:
        return [f"{section}.{close[0]}"]
    close = get_close_matches(key, [short(name) for name in keys], n=1, cutoff=0.8)
    return [name for name in keys if close and short(name) == close[0]]


def values_refused(error: ValidationError, root: type[BaseModel] = Config) -> list[Problem]:
    """One problem for each value that the schema refuses, and for each key that is missing."""
    return [problem for details in error.errors(include_url=False) for problem in value_refused(details, root)]


def value_refused(details: ErrorDetails, root: type[BaseModel]) -> Iterator[Problem]:
    keys, parts = all_keys(root), [str(part) for part in details["loc"]]
    depth = next((n for n in range(len(parts), 1, -1) if ".".join(parts[:n]) in keys), len(parts))
    name = ".".join(parts[:depth])
    if details["type"] == "missing":
        yield from missing(name, root)
        return
    key, value = keys[name], details["input"]
    if (key.many or key.type is dict) and len(parts) > depth:
        close = close_choices(key, value)
        guess = f' Did you mean "{close[0]}"?' if close else ""
        yield Problem(f"{name} has {as_toml(value)} in it, where {expectation(key)} is expected.{guess}", (name,))
        return
    if details["type"] == "less_than_equal":
        most = details["ctx"]["le"]
        yield Problem(f"{name} = {as_toml(value)} is out of range: it may be {most:,} at most.", (name,))
        return
    uncertain = (name, *(f"model.{each}" for each in PRESETS["gpt2-124m"])) if name == "model.preset" else (name,)
    yield Problem(f"{name} = {as_toml(value)} {why_not(key, value)}{remedy(key, value)}", uncertain)


def missing(name: str, root: type[BaseModel]) -> Iterator[Problem]:
    """A required key, or all required keys of a section that is not there."""
    for full, key in all_keys(root).items():
        if key.required and (full == name or full.startswith(f"{name}.")):
            yield Problem(f"{full} is not set, and has no default: it needs {expectation(key)}.", (full,))


def why_not(key: Key, value: object) -> str:
    """'is text, where a whole number of at least 1 is expected.'"""
    reason = WHY_NOT.get((key.name, value)) if isinstance(value, str | float) else None
    if reason:
        return f"is not possible: {reason}."
    if key.choices and type(value) is key.type:
        return "is not one of the choices."
    return f"is {kind_of(value, key)}, where {expectation(key)} is expected."


def remedy(key: Key, value: object) -> str:
    """What to write instead, where that can be guessed; else the choices; else nothing."""
    if key.choices and type(value) is key.type:
        close = close_choices(key, value)
        choices = f" Use {expectation(key)}."
        return f' Did you mean "{close[0]}"?{choices}' if close else choices
    if key.name == "data.split" and isinstance(value, int | float):
        return ' Write the shares of train and validation, like data.split = "9:1".'
    may_be_unset = not key.required and key.default is None
    if may_be_unset and isinstance(value, str) and value.lower() in ("", "none", "null"):
        return " To leave it unset, leave the key out of the file and of the command line."
    better = number_meant(key, value)
    return "" if better is None else f" Write {key.name} = {better}"


def close_choices(key: Key, value: object) -> list[str]:
    """The choice that a misspelled one is nearest to."""
    if not isinstance(value, str) or (key.name, value) in WHY_NOT:
        return []
    return get_close_matches(value.lower(), [choice for choice in key.choices if isinstance(choice, str)], n=1)


def number_meant(key: Key, value: object) -> str | None:
    """TOML for the number, or the truth value, that a value of the wrong type spells."""
    if isinstance(value, str) and key.type is bool and value.lower() in ("true", "false"):
        return f"{value.lower()}, without quotes and in small letters."
    if key.type not in (int, float) or isinstance(value, bool) or type(value) is key.type:
        return None
    number = number_in(value)
    if number is None or (key.type is int and number != int(number)):
        return None
    quotes = ", without quotes." if isinstance(value, str) else "."
    return f"{json.dumps(int(number) if key.type is int else number)}{quotes}"


def number_in(value: object) -> float | None:
    """The finite number that a float is, or that text spells: 1000.0, '1e-4', '.5'."""
    if not isinstance(value, str | float):
        return None
    try:
        number = float(cast(str, value))
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
