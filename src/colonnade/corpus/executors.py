"""datatrove's executors, told to be quiet, and to notice when a worker was killed.

local   processes of this machine; what a killed one left undone is done again, by fewer at a time
ray     a cluster that exists, or Ray started here
slurm   job arrays that wait for each other; the command returns when they are submitted
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor

from colonnade.control_groups import num_cores
from colonnade.corpus.recipe import RunSection
from colonnade.dependent import deaf_to_ctrl_c, end_with_parent
from colonnade.errors import DataError, not_installed
from colonnade.lock import Lock


class LocalExecutor(LocalPipelineExecutor):
    """Runs the tasks that are missing on processes of this machine; with one worker, in this process."""

    def __init__(
        self, pipeline: list[Any], *, tasks: int, workers: int, logging_dir: str, retries: int, lock: Lock
    ) -> None:
        super().__init__(pipeline, tasks=tasks, workers=workers, logging_dir=logging_dir)
        self.pipeline: list[Any] = pipeline
        self.retries, self._lock = retries, lock

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def run(self) -> None:
        """Raises DataError where tasks were killed again and again; what a task raises goes through."""
        if self.workers == 1:
            self._run_here(self.get_incomplete_ranks())
            return
        kills: Counter[int] = Counter()
        while pending := [rank for rank in self.get_incomplete_ranks() if kills[rank] <= self.retries]:
            suspects = [rank for rank in pending if kills[rank]]
            if suspects:
                for rank in suspects:
                    kills.update(self._run_apart([rank], 1))
            else:
                kills.update(self._run_apart(pending, min(self.workers, len(pending))))
        if missing := self.get_incomplete_ranks():
            raise DataError(
                f"{len(missing)} tasks were killed {self.retries + 1} times: {', '.join(map(str, missing[:10]))}; the "
                "others are done. The system may have run out of memory (see `dmesg`). Set run.piece_bytes or "
                "read.max_bytes lower, or run.retries higher."
            )

    def _run_here(self, ranks: Sequence[int]) -> None:
        pipeline: list[Any] = self.pipeline
        for rank in ranks:
            self.pipeline = deepcopy(pipeline)
            self._run_for_rank(rank)
        self.pipeline = pipeline

    def _run_apart(self, ranks: Sequence[int], workers: int) -> list[int]:
        """Runs tasks on processes of their own, which end with this one and hold the folder's lock until then. Gives
        those that were under way when one of them was killed."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["colonnade.corpus.stages"])
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(self._lock,))
        try:
            with deaf_to_ctrl_c():  # the first task starts the fork server and all workers
                futures = [pool.submit(_run_rank, self, rank) for rank in ranks]
            _first_error(futures)
        except BrokenProcessPool:
            return self._under_way(ranks)
        except KeyboardInterrupt:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return []

    def _under_way(self, ranks: Sequence[int]) -> list[int]:
        missing = self.get_incomplete_ranks(ranks)
        found = [rank for rank in missing if self.logging_dir.isfile(_started(rank))] or missing
        with self.logging_dir.open("killed.jsonl", "a") as stream:
            stream.write(json.dumps({"event": "a worker was killed", "tasks under way": found}) + "\n")
        for rank in found:
            if self.logging_dir.isfile(_started(rank)):
                self.logging_dir.rm(_started(rank))
        return found

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        with contextlib.redirect_stderr(io.StringIO()):  # its log goes to logs/task_….log all the same
            return super()._run_for_rank(rank, local_rank, node_rank)


def _run_rank(executor: LocalExecutor, rank: int) -> None:
    executor.logging_dir.open(_started(rank), "w").close()
    executor._run_for_rank(rank)
    executor.logging_dir.rm(_started(rank))


def _started(rank: int) -> str:
    """A file that is there while a task is under way."""
    return f"started/{rank:05d}"


def _begin(lock: Lock) -> None:
    """In each worker; the lock came with it, and is held until the worker ends."""
    end_with_parent()


def _first_error(futures: Sequence[Future[None]]) -> None:
    """Waits for all; raises what a task raised, rather than that the pool broke."""
    broken: BaseException | None = None
    wait(futures, return_when="FIRST_EXCEPTION")
    for future in futures:
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            if not isinstance(error, BrokenProcessPool):
                raise error
            broken = error
    if broken is not None:
        raise broken


def num_workers(run: RunSection) -> int:
    """Tasks that run at once on this machine."""
    return run.workers or num_cores()


def local_executor(run: RunSection, pipeline: list[Any], *, tasks: int, log: Path, lock: Lock) -> LocalExecutor:
    """An executor on this machine."""
    return LocalExecutor(
        pipeline,
        tasks=tasks,
        workers=num_workers(run),
        logging_dir=str(log.resolve()),
        retries=run.retries,
        lock=lock,
    )


def ray_executor(run: RunSection, pipeline: list[Any], *, tasks: int, log: Path) -> Any:
    """An executor on Ray, which is joined or started."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise DataError(not_installed('run.executor = "ray"', "ray", "colonnade[ray]")) from error
    if not ray.is_initialized():
        options = {"address": run.ray_address} if run.ray_address else {"include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="warning", **options)
    _silence()
    executor: Any = importlib.import_module("datatrove.executor.ray").RayPipelineExecutor
    return executor(
        pipeline,
        tasks=tasks,
        workers=run.workers or -1,
        logging_dir=str(log.resolve()),
        mem_per_cpu_gb=run.memory_gb,
    )


def _silence() -> None:
    """Keeps datatrove's log of this process off the screen; tasks write theirs to files."""
    importlib.import_module("loguru").logger.remove()


def slurm_executor(run: RunSection, pipeline: list[Any], *, tasks: int, log: Path, name: str, after: list[str]) -> Any:
    """An executor on Slurm that starts when the jobs `after` have ended well."""
    _silence()
    executor: Any = importlib.import_module("colonnade.corpus.slurm").SlurmExecutor
    return executor(
        pipeline,
        tasks=tasks,
        time=run.slurm_time,
        partition=run.slurm_partition,
        workers=run.workers or -1,
        mem_per_cpu_gb=run.memory_gb,
        qos=None,
        job_name=f"colonnade-{name}",
        env_command=f"export PATH={shlex.quote(sys.prefix)}/bin:$PATH",
        logging_dir=str(log.resolve()),
        max_array_size=run.slurm_max_array,
        after=after,
    )
