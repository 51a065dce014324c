"""Tasks on processes that are killed: what is done again, how often, and by how many at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from datatrove.pipeline.base import PipelineStep

from colonnade.corpus import executors
from colonnade.corpus.executors import LocalExecutor, _first_error, num_workers, ray_executor
from colonnade.corpus.recipe import RunSection
from colonnade.errors import DataError


class Killed(LocalExecutor):
    """An executor whose workers are killed in some tasks, each so many times; it has no processes."""

    def __init__(self, folder: Path, kills: dict[int, int], *, tasks: int, workers: int = 2, retries: int = 2) -> None:
        super().__init__(
            [], tasks=tasks, workers=workers, logging_dir=str(folder), retries=retries, lock=cast(Any, None)
        )
        self.folder, self.kills = folder, kills
        self.begun: list[tuple[list[int], int]] = []

    def _run_apart(self, ranks: Sequence[int], workers: int) -> list[int]:
        self.begun.append(([*ranks], workers))
        (self.folder / "completions").mkdir(parents=True, exist_ok=True)
        dead = [rank for rank in ranks if self.kills.get(rank)]
        for rank in ranks:
            if rank not in dead:
                (self.folder / "completions" / f"{rank:05d}").touch()
        self.kills = {rank: count - (rank in dead) for rank, count in self.kills.items()}
        return dead


def test_tasks_that_were_under_way_when_one_was_killed_are_done_again_one_by_one(tmp_path: Path) -> None:
    executor = Killed(tmp_path, {1: 1, 2: 2}, tasks=4)
    executor.run()
    assert executor.begun == [([0, 1, 2, 3], 2), ([1], 1), ([2], 1), ([2], 1)]


@pytest.mark.parametrize("retries", [0, 2])
def test_a_task_is_tried_again_as_often_as_the_recipe_says(tmp_path: Path, retries: int) -> None:
    Killed(tmp_path / "well", {0: retries}, tasks=2, retries=retries).run()
    executor = Killed(tmp_path / "ill", {1: retries + 1}, tasks=3, retries=retries)
    with pytest.raises(DataError, match=rf"^1 tasks were killed {retries + 1} times: 1; the others are done\. "):
        executor.run()
    assert len(executor.begun) == retries + 1


def test_no_more_workers_are_started_than_there_are_tasks(tmp_path: Path) -> None:
    executor = Killed(tmp_path, {}, tasks=3, workers=8)
    executor.run()
    assert executor.begun == [([0, 1, 2], 3)]


def test_only_tasks_that_had_begun_count_as_killed(tmp_path: Path) -> None:
    """Unless none had: then each may be the one. The files that say so go, and the log tells of it."""
    executor = LocalExecutor([], tasks=4, workers=2, logging_dir=str(tmp_path), retries=2, lock=cast(Any, None))
    for name in ("completions/00000", "started/00002"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert executor._under_way([0, 1, 2, 3]) == [2]
    assert os.listdir(tmp_path / "started") == []
    assert executor._under_way([0, 1, 2, 3]) == [1, 2, 3]
    lines = (tmp_path / "killed.jsonl").read_text().splitlines()
    assert [json.loads(line)["tasks under way"] for line in lines] == [[2], [1, 2, 3]]


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_task_raises_is_told_rather_than_that_the_workers_ended(order: int) -> None:
    errors = [BrokenProcessPool("a worker was killed"), ValueError("of a task")][::order]
    futures = [Future[None]() for _ in errors]
    for future, error in zip(futures, errors, strict=True):
        future.set_exception(error)
    with pytest.raises(ValueError, match="of a task"):
        _first_error(futures)
    with pytest.raises(BrokenProcessPool):
        _first_error([future for future in futures if isinstance(future.exception(), BrokenProcessPool)])


def test_as_many_workers_as_the_recipe_says_or_one_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "num_cores", lambda: 5)
    assert [num_workers(RunSection(workers=workers)) for workers in (0, 3)] == [5, 3]


@pytest.mark.parametrize(
    ("said", "is_there", "begun"),
    [
        ({}, False, [{"include_dashboard": False}]),
        ({"ray_address": "ray://head:10001"}, False, [{"address": "ray://head:10001"}]),
        ({"ray_address": "ray://head:10001"}, True, []),
    ],
)
def test_ray_is_joined_where_an_address_is_named_and_else_started_once(
    said: dict[str, Any], is_there: bool, begun: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inits: list[dict[str, Any]] = []
    ray = SimpleNamespace(is_initialized=lambda: is_there, init=lambda **how: inits.append(how))
    theirs = SimpleNamespace(RayPipelineExecutor=lambda pipeline, **how: {"pipeline": pipeline, **how})
    monkeypatch.setitem(sys.modules, "ray", cast(Any, ray))
    monkeypatch.setitem(sys.modules, "datatrove.executor.ray", cast(Any, theirs))
    silenced: list[Any] = []
    loguru = SimpleNamespace(logger=SimpleNamespace(remove=lambda *which: silenced.append(which)))
    monkeypatch.setitem(sys.modules, "loguru", cast(Any, loguru))
    for workers, asked in ((0, -1), (3, 3)):
        run = RunSection(executor="ray", workers=workers, memory_gb=5, **said)
        assert ray_executor(run, ["step"], tasks=7, log=tmp_path) == {
            "pipeline": ["step"],
            "tasks": 7,
            "workers": asked,
            "logging_dir": str(tmp_path),
            "mem_per_cpu_gb": 5,
        }
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    assert inits == [{**quiet, **how} for how in begun * 2]
    assert silenced == [(), ()], "datatrove's log stays off the screen, whoever it is for"


def test_ray_that_is_not_installed_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r'run\.executor = "ray" needs the package ray, which is not installed\. Run'):
        ray_executor(RunSection(executor="ray"), [], tasks=1, log=tmp_path)


class Remembering(PipelineStep):
    """A step that keeps the tasks that it has seen, and writes them down."""

    type, name = "test", "remembering"

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[int]()
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        self.seen.append(rank)
        (self.folder / f"{rank}.json").write_text(json.dumps([self.seen, world_size]))
        return data


def test_tasks_that_one_process_carries_out_know_nothing_of_each_other(tmp_path: Path) -> None:
    """Each begins with the steps as they are in the recipe, as on a process of its own."""
    step = Remembering(tmp_path)
    executor = LocalExecutor(
        [step], tasks=3, workers=1, logging_dir=str(tmp_path / "logs"), retries=0, lock=cast(Any, None)
    )
    executor.run()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert told == [[[0], 3], [[1], 3], [[2], 3]] and step.seen == []
    assert executor.pipeline == [step] and executor.get_incomplete_ranks() == []
