"""A recipe as stages: lists of pipeline steps, each with its number of tasks, that run one after the other.

Steps are sent to every task, so they hold nothing that grows with the number of tasks: what a task reads it looks up
(`tasks`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from colonnade.data.clean.decontaminate import Decontaminate
from colonnade.data.clean.duplicates import Comparison, Gather, Group, Match, Remember, RemoveDuplicates, Sign
from colonnade.data.clean.filters import Filter
from colonnade.data.clean.language import Language
from colonnade.data.clean.manifest import WriteManifest
from colonnade.data.clean.needs import Needs
from colonnade.data.clean.plan import Plan
from colonnade.data.clean.read import Read
from colonnade.data.clean.recipe import Recipe
from colonnade.data.clean.repair import Repair
from colonnade.data.clean.signatures import num_gathered
from colonnade.data.clean.spool import Spool, Unspool
from colonnade.data.clean.step import Setting
from colonnade.data.clean.tokens import JoinTokens, ListTokens, MakeTokens, num_joins
from colonnade.data.clean.write import Write


class Stage(NamedTuple):
    """Steps that a task runs in one go."""

    name: str
    steps: list[Any]
    tasks: int


def stages(recipe: Recipe, plan: Plan) -> list[Stage]:
    """All stages of a run, in order; each checks that all tasks of the one before are done."""
    setting = Setting(Path(recipe.write.folder), recipe.write.samples)
    found = _stages(recipe, plan, setting)
    return [
        stage._replace(steps=[Needs(before.name, before.tasks, setting), *stage.steps]) if before else stage
        for before, stage in zip([None, *found], found, strict=False)
    ]


def _stages(recipe: Recipe, plan: Plan, setting: Setting) -> list[Stage]:
    num_tasks = len(plan.tasks)
    first, last = _before(recipe, setting), _after(recipe, plan, setting)
    closing = [Stage("account", [WriteManifest(recipe, plan, setting)], 1), *_tokens(recipe, num_tasks, setting)]
    how = recipe.deduplicate
    if how is None:
        return [Stage("documents", [*first, *last], num_tasks), *closing]
    comparison = Comparison(how, plan.index, setting.folder, num_tasks)
    num_files = num_gathered(len(comparison.sources()))
    gathering = [Stage("gather", [Gather("gather", comparison)], num_files)] if num_files else []
    return [
        Stage("documents", [*first, Spool(setting), Sign(how, setting)], num_tasks),
        *gathering,
        Stage("match", [Match("match", comparison)], num_tasks),
        Stage("group", [Group("group", comparison)], 1),
        Stage("finish", [Unspool(setting), RemoveDuplicates(comparison, setting), *last], num_tasks),
        *closing,
    ]


def _before(recipe: Recipe, setting: Setting) -> list[Any]:
    """Steps that need nothing but the document."""
    steps: list[Any] = [Read(recipe.read, setting)]
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


def _tokens(recipe: Recipe, num_tasks: int, setting: Setting) -> list[Stage]:
    """The stages that make token files, if the recipe has them."""
    tokenizer = recipe.tokenize and (recipe.tokenize.tokenizer or recipe.run.tokenizer)
    if not recipe.tokenize or not tokenizer:
        return []
    parts, append_end, num_files = list(recipe.parts), recipe.tokenize.append_end, num_joins(num_tasks)
    joining = JoinTokens("join", tokenizer, parts, setting, append_end=append_end, num_tasks=num_tasks)
    return [
        Stage("tokens", [MakeTokens("tokens", tokenizer, parts, setting, append_end=append_end)], num_tasks),
        Stage("join", [joining], num_files),
        Stage("list", [ListTokens(num_files, setting)], 1),
    ]
