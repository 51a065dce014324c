"""A recipe as stages: lists of pipeline steps, each with its number of tasks, that run one after the other.

Steps are sent to every task, so they hold nothing that grows with the number of tasks: what a task reads it looks up
(`tasks`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from colonnade.corpus.decontaminate import Decontaminate
from colonnade.corpus.duplicates import Comparison, Gather, Group, Match, Remember, RemoveDuplicates, Sign
from colonnade.corpus.filters import Filter
from colonnade.corpus.language import Language
from colonnade.corpus.manifest import WriteManifest
from colonnade.corpus.needs import Needs, missing_tasks
from colonnade.corpus.plan import Plan
from colonnade.corpus.read import Read
from colonnade.corpus.recipe import Recipe
from colonnade.corpus.repair import Repair
from colonnade.corpus.signatures import num_gathered
from colonnade.corpus.spool import Spool, Unspool
from colonnade.corpus.step import MakeCounter, Setting
from colonnade.corpus.write import Write


class CleaningStage(NamedTuple):
    """Steps that a task runs in one go."""

    name: str
    steps: list[Any]
    tasks: int


class Tokenizing(Protocol):
    """What a run asks of tokenizers and token files, which stand above this folder: `data.cleaning` has the answers."""

    def check(self, tokenizer: str) -> None:
        """Raises DataError where a tokenizer cannot be read."""

    def other_than_alone(self, tokenizer: str) -> str | None:
        """A tokenizer's fingerprint, where what lies beside its files makes it another than they are alone."""

    def counter(self, tokenizer: str) -> MakeCounter:
        """What makes a counter of tokens; it is sent to the tasks."""

    def stages(self, recipe: Recipe, num_tasks: int, setting: Setting) -> list[CleaningStage]:
        """The stages that make token files, if the recipe has them."""


def stages(recipe: Recipe, plan: Plan, tokenizing: Tokenizing) -> list[CleaningStage]:
    """All stages of a run, in order; each checks that all tasks of the one before are done."""
    setting = Setting(Path(recipe.write.folder), recipe.write.samples)
    found = [*_stages(recipe, plan, setting, tokenizing), *tokenizing.stages(recipe, len(plan.tasks), setting)]
    return [
        stage._replace(steps=[Needs(before.name, before.tasks, setting), *stage.steps]) if before else stage
        for before, stage in zip([None, *found], found, strict=False)
    ]


def _stages(recipe: Recipe, plan: Plan, setting: Setting, tokenizing: Tokenizing) -> list[CleaningStage]:
    num_tasks = len(plan.tasks)
    counter = tokenizing.counter(recipe.run.tokenizer) if recipe.run.tokenizer else None
    first, last = _before(recipe, setting, counter), _after(recipe, plan, setting, counter)
    closing = CleaningStage("account", [WriteManifest(recipe, plan, setting)], 1)
    how = recipe.deduplicate
    if how is None:
        return [CleaningStage("documents", [*first, *last], num_tasks), closing]
    is_done = not missing_tasks(setting.folder, closing.name, closing.tasks)  # then the index may be gone
    comparison = Comparison(how, () if is_done else plan.index, setting.folder, num_tasks)
    num_files = num_gathered(len(comparison.sources()))
    gathering = [CleaningStage("gather", [Gather("gather", comparison)], num_files)] if num_files else []
    return [
        CleaningStage("documents", [*first, Spool(setting), Sign(how, setting)], num_tasks),
        *gathering,
        CleaningStage("match", [Match("match", comparison)], num_tasks),
        CleaningStage("group", [Group("group", comparison)], 1),
        CleaningStage("finish", [Unspool(setting), RemoveDuplicates(comparison, setting), *last], num_tasks),
        closing,
    ]


def _before(recipe: Recipe, setting: Setting, counter: MakeCounter | None) -> list[Any]:
    """Steps that need nothing but the document."""
    steps: list[Any] = [Read(recipe.read, setting)]
    if recipe.repair:
        steps.append(Repair(recipe.repair, setting))
    if recipe.language:
        steps.append(Language(recipe.language, setting))
    if recipe.filter:
        steps.append(Filter(recipe.filter, counter, setting))
    return steps


def _after(recipe: Recipe, plan: Plan, setting: Setting, counter: MakeCounter | None) -> list[Any]:
    """Steps behind de-duplication."""
    steps: list[Any] = []
    if recipe.decontaminate:
        steps.append(Decontaminate(recipe.decontaminate, recipe.read.key, counter, setting))
    steps.append(Write(recipe, setting))
    if recipe.deduplicate and recipe.deduplicate.index:
        steps.append(Remember(recipe.deduplicate, plan.identity, setting))
    return steps
