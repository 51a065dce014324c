"""A recipe as stages: lists of pipeline steps, each with its number of tasks, that run one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from colonnade.data.clean.decontaminate import Decontaminate
from colonnade.data.clean.duplicates import Group, Match, Remember, RemoveDuplicates, Sign
from colonnade.data.clean.executors import num_workers
from colonnade.data.clean.filters import Filter
from colonnade.data.clean.language import Language
from colonnade.data.clean.manifest import WriteManifest
from colonnade.data.clean.plan import Plan
from colonnade.data.clean.read import Read
from colonnade.data.clean.recipe import Recipe
from colonnade.data.clean.repair import Repair
from colonnade.data.clean.spool import Spool, Unspool
from colonnade.data.clean.step import Setting
from colonnade.data.clean.tokens import MakeTokens
from colonnade.data.clean.write import Write


class Stage(NamedTuple):
    """Steps that a task runs in one go."""

    name: str
    steps: list[Any]
    tasks: int


def stages(recipe: Recipe, plan: Plan) -> list[Stage]:
    """All stages of a run, in order."""
    setting = Setting(Path(recipe.write.folder), recipe.write.samples)
    num_tasks = len(plan.tasks)
    first, last = _before(recipe, plan, setting), _after(recipe, plan, setting)
    closing = [Stage("account", [WriteManifest(recipe, plan, setting)], 1), *_tokens(recipe, setting)]
    how = recipe.deduplicate
    if how is None:
        return [Stage("documents", [*first, *last], num_tasks), *closing]
    return [
        Stage("documents", [*first, Spool(setting), Sign(how, setting)], num_tasks),
        Stage("match", [Match(how, plan.index, setting)], num_tasks),
        Stage("group", [Group(how, plan.index, setting)], 1),
        Stage("finish", [Unspool(setting), RemoveDuplicates(setting), *last], num_tasks),
        *closing,
    ]


def _before(recipe: Recipe, plan: Plan, setting: Setting) -> list[Any]:
    """Steps that need nothing but the document."""
    steps: list[Any] = [Read(plan.tasks, recipe.read, setting)]
    if recipe.repair:
        steps.append(Repair(recipe.repair, setting))
    if recipe.language:
        steps.append(Language(recipe.language, setting))
    if recipe.filter:
        steps.append(Filter(recipe.filter, recipe.run.tokenizer, setting))
    return steps


def _after(recipe: Recipe, plan: Plan, setting: Setting) -> list[Any]:
    """Steps behind de-duplication."""
    steps: list[Any] = []
    if recipe.decontaminate:
        steps.append(Decontaminate(recipe.decontaminate, recipe.read.key, recipe.run.tokenizer, setting))
    steps.append(Write(recipe, setting))
    if recipe.deduplicate and recipe.deduplicate.index:
        steps.append(Remember(recipe.deduplicate, plan.identity, setting))
    return steps


def _tokens(recipe: Recipe, setting: Setting) -> list[Stage]:
    """The stage that makes token files, if the recipe has it."""
    tokenizer = recipe.tokenize and (recipe.tokenize.tokenizer or recipe.run.tokenizer)
    if not recipe.tokenize or not tokenizer:
        return []
    workers = num_workers(recipe.run) if recipe.run.executor == "local" else 1
    return [
        Stage("tokens", [MakeTokens(tokenizer, setting, append_end=recipe.tokenize.append_end, workers=workers)], 1)
    ]
