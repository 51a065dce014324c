"""From a recipe to a cleaned corpus: plan, run the stages, tell the result."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colonnade.atomic import remove_partial
from colonnade.config.numbers import counted, size_of_text
from colonnade.corpus.executors import local_executor, ray_executor, slurm_executor
from colonnade.corpus.filters import list_of, urls_of
from colonnade.corpus.folders import MANIFEST, told_aside
from colonnade.corpus.language import UNKNOWN, check_language
from colonnade.corpus.manifest import read_manifest
from colonnade.corpus.needs import log_folder, missing_tasks, require
from colonnade.corpus.plan import Plan, keep_plan, make_plan, run_file, tokenizers_of
from colonnade.corpus.progress import so_far
from colonnade.corpus.recipe import OWN_FOLDERS, Recipe
from colonnade.corpus.slurm import check_no_jobs, not_taken, remember_jobs
from colonnade.corpus.stages import CleaningStage, Tokenizing, stages
from colonnade.corpus.testsets import read_tests, titles
from colonnade.errors import DataError
from colonnade.lock import Lock, locked
from colonnade.terminal import BarColumn, Console, Progress, TaskID, TextColumn, TimeRemainingColumn

_POLL_SECONDS = 0.5


def clean(recipe: Recipe, tokenizing: Tokenizing, *, progress: bool = True) -> str:
    """Runs a recipe, or what is left of it. Gives some lines for people.

    `data.cleaning.clean` is this, with tokenizers."""
    folder = Path(recipe.write.folder)
    check_named_files(recipe, tokenizing)
    check_folder(recipe)
    for note in not_meant(recipe):
        print(f"note: {note}", file=sys.stderr)
    plan = make_plan(recipe, tokenizing.other_than_alone)
    purpose, instead = f"colonnade data clean, write.folder = {folder}", "set another write.folder"
    with locked(folder / "state", purpose, what=str(folder), instead=instead) as lock:
        check_no_jobs(folder)
        remove_partial(folder)
        plan = keep_plan(plan, recipe)
        planned, started = stages(recipe, plan, tokenizing), time.perf_counter()
        if recipe.run.executor == "slurm":
            return submit(recipe, planned, folder)
        is_done = not any(missing_tasks(folder, stage.name, stage.tasks) for stage in planned)
        for stage in planned:
            run_stage(recipe, stage, plan, folder, lock, progress=progress)
        return summary(folder, None if is_done else time.perf_counter() - started)


def check_named_files(recipe: Recipe, tokenizing: Tokenizing) -> None:
    """Raises DataError for tokenizers, lists and evaluation sets that cannot be read, and languages that are never
    found, before any work."""
    for path in tokenizers_of(recipe):
        tokenizing.check(path)
    if recipe.language:
        check_language(recipe.language)
    if recipe.filter:
        for listed in recipe.filter.remove_urls:
            urls_of(listed)
        for listed in recipe.filter.remove_ids.values():
            list_of(listed)
    if recipe.decontaminate:
        read_tests(recipe.decontaminate.tests, ngram=recipe.decontaminate.ngram, key=recipe.read.key)
        for listed in recipe.decontaminate.titles:
            titles(Path(listed))


def not_meant(recipe: Recipe) -> Iterator[str]:
    """What a recipe asks for and hardly means, in words."""
    others = [code for code in recipe.language.keep if code not in ("en", UNKNOWN)] if recipe.language else []
    if others and recipe.filter and "gopher" in recipe.filter.quality:
        yield (
            'filter.quality has "gopher", which keeps texts with common English words alone, and language.keep has '
            f"{', '.join(others)}: nearly all of these will be dropped. Clean them by a recipe of their own without it."
        )


def check_folder(recipe: Recipe) -> None:
    """Raises DataError where the result would stand among files that are no run's."""
    folder = Path(recipe.write.folder)
    foreign = [name for name in (*recipe.parts, *OWN_FOLDERS, MANIFEST) if name != "state" and _holds(folder / name)]
    if foreign and not run_file(folder).exists():
        raise DataError(
            f"write.folder = {folder} holds {', '.join(foreign)}, and no run that these are of: the result would "
            "replace files there, or stand among them. Set write.folder to a new folder."
        )


def _holds(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def run_stage(recipe: Recipe, stage: CleaningStage, plan: Plan, folder: Path, lock: Lock, *, progress: bool) -> None:
    """Runs the tasks of a stage that are missing. Raises DataError where some are still missing afterwards."""
    log = log_folder(folder, stage.name)
    if recipe.run.executor == "ray":
        executor: Any = ray_executor(recipe.run, stage.steps, tasks=stage.tasks, log=log)
    else:
        executor = local_executor(recipe.run, stage.steps, tasks=stage.tasks, log=log, lock=lock)
    with bar(stage, plan, folder, shown=progress):
        executor.run()
    require(folder, stage.name, stage.tasks)


def submit(recipe: Recipe, planned: list[CleaningStage], folder: Path) -> str:
    """Submits the stages to Slurm, each waiting for all jobs of the one before."""
    if shutil.which("sbatch") is None:
        raise DataError(
            'run.executor = "slurm" needs `sbatch`, which is not on this machine. Start it on a login node.'
        )
    jobs, after = list[str](), list[str]()
    try:
        for stage in planned:
            executor: Any = slurm_executor(
                recipe.run,
                stage.steps,
                tasks=stage.tasks,
                log=log_folder(folder, stage.name),
                name=stage.name,
                after=after,
            )
            before = len(jobs)
            for job in executor.submitted():
                jobs.append(job)
                remember_jobs(folder, jobs)
            after = jobs[before:] or after
    except subprocess.CalledProcessError as error:
        raise DataError(not_taken(stage.name, error.returncode, jobs)) from error
    if not jobs:
        return _nothing_left(folder)
    return f"{len(jobs)} jobs are submitted (see `squeue`). The last one writes {folder / MANIFEST}."


@contextlib.contextmanager
def bar(stage: CleaningStage, plan: Plan, folder: Path, *, shown: bool) -> Iterator[None]:
    """The stage, the share of it that is done, documents/s and the time left, on standard error."""
    columns = (TextColumn(f"{stage.name:10}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    # The stream of now: tasks in this process redirect it. Rich before 14.3 ends a hidden bar with a blank line.
    console = Console(file=sys.stderr, quiet=not shown)
    display = Progress(*columns, console=console, disable=not shown, transient=True)
    total = sum(split.num_bytes for task in plan.tasks for split in task) if stage.name == "documents" else None
    task = display.add_task(stage.name, total=total, speed="")
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(display, task, stage, folder, over), daemon=True)
    with display:
        if shown:
            watcher.start()
        try:
            yield
        finally:
            over.set()
            if shown:
                watcher.join()


def _watch(display: Progress, task: TaskID, stage: CleaningStage, folder: Path, over: threading.Event) -> None:
    first, started = so_far(folder, stage.name), time.perf_counter()
    while not over.wait(_POLL_SECONDS):
        done = so_far(folder, stage.name)
        speed = (done.documents - first.documents) / (time.perf_counter() - started)
        display.update(task, completed=done.bytes, speed=f"{counted(done.documents, 'document')} · {speed:,.0f}/s")


def summary(folder: Path, seconds: float | None) -> str:
    """What came in, what went out, and what was dropped why. `seconds`: None where nothing was left to do."""
    content = read_manifest(folder)
    steps = content["steps"]
    read, kept = steps["read"]["out"], steps["write"]["out"]
    lines = [
        f"{counted(read['documents'], 'document')}, {size_of_text(read['bytes'])} of text -> "
        f"{counted(kept['documents'], 'document')}, {size_of_text(kept['bytes'])} in {folder}"
    ]
    if seconds is None:
        lines.insert(0, _nothing_left(folder))
    else:
        lines[0] += f"; {seconds:.1f} s, {read['documents'] / seconds:,.0f} documents/s"
    if not kept["documents"]:
        lines.append(f"no document was kept: {_most_dropped(steps)}")
    lines += told_aside(content["left_aside"])
    for step, counts in steps.items():
        for reason, amount in counts["dropped"].items():
            lines.append(f"  {step:14} {amount['documents']:>10,}  {reason}")
    lines += [f"{part}: {counted(total['documents'], 'document')}" for part, total in content["parts"].items()]
    return "\n".join(lines)


def _nothing_left(folder: Path) -> str:
    return f"nothing is left to do: {folder / MANIFEST} is there."


def _most_dropped(steps: Mapping[str, Any]) -> str:
    """The step and the reason by which most was dropped, for a run that kept nothing."""
    lost = {step: sum(amount["documents"] for amount in counts["dropped"].values()) for step, counts in steps.items()}
    step = max(lost, key=lambda name: lost[name])
    if not lost[step]:
        return "the inputs hold none."
    reasons = steps[step]["dropped"]
    reason = max(reasons, key=lambda name: reasons[name]["documents"])
    return f'most were dropped by the step {step} ({lost[step]:,} of {sum(lost.values()):,}), mostly as "{reason}".'
