"""What does each stage of a cleaning run cost, how does that grow, and what would it be for 10 TB on 64 nodes?

    python -m benchmarks.cleaning_stages INPUT… --tokenizer TOKENIZER [--test SET.jsonl] [--megabytes 1.5 5 20]
        [--tasks 64 256 1024 4096] [--storage 1] [--latency 1] [--folder FOLDER] [--output OUT.md]

The input's documents, cut to the length of web pages, and changed copies of a tenth of them are cleaned at three sizes
in tasks of 256 KiB; the largest in tasks of 16 MiB too; the two largest in some 320 tasks, up to `group`, since runs of
more than 64 have a stage `gather`. Each run is a process of its own, whose processor time, bytes
(/proc/self/io), metadata operations, resident memory, open descriptors and files are taken stage by stage. What
comparing costs with so and so many tasks is measured apart, on made-up signatures; and what `gather` and `group` take
of as many bands and pairs as they hold at a time, which the runs are too small for. What that is for 10 TB is computed
by `benchmarks.cleaning_page`, which does so again from the .json beside OUT.md, with other storage.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cleaning_page import (
    DOCUMENTS_PER_TASK,
    LARGE_SPLIT_BYTES,
    MANY_TASKS,
    PAGE,
    SPLIT_BYTES,
    Bulk,
    Comparing,
    Cost,
    add_options,
    comparing_table,
    page,
)
from benchmarks.hardware import command_line, describe
from benchmarks.minhash_speed import changed_copies
from colonnade.corpus.components import PAIR, decided
from colonnade.corpus.documents import read_documents
from colonnade.corpus.duplicates import (
    Comparison,
    Gather,
    Group,
    Match,
    RemoveDuplicates,
    drops_path,
    pairs_path,
    read_pairs,
    sign_folder,
)
from colonnade.corpus.load import build
from colonnade.corpus.minhash import Bands
from colonnade.corpus.plan import keep_plan, make_plan
from colonnade.corpus.recipe import DeduplicateStep, Recipe
from colonnade.corpus.run import run_stage
from colonnade.corpus.signatures import (
    ENTRY,
    FAN_IN,
    OWN,
    SignatureWriter,
    Source,
    gather,
    gathered_path,
    num_gathered,
    signature_path,
)
from colonnade.corpus.stages import stages
from colonnade.corpus.step import Setting
from colonnade.data.cleaning import Tokenizers
from colonnade.lock import locked

SHINGLES, SAMPLED = 40, 8
ENTRIES = 250_000  # of a task's bands: 192 MB in FAN_IN files, gathered in three parts
PAIRS, TIMES = 100_000, 16  # of a task: 256 MB in FAN_IN files; each pair is found by so many tasks
BY_NAME = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}


class Operations:
    """Counts, from now on, what this process asks of files by name: that they be opened, renamed, removed, listed."""

    def __init__(self, *places: str) -> None:
        """`places`: files, and folders with all below. What is removed counts wherever it is."""
        self.count, self._places = 0, places
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in BY_NAME and (event in ("os.remove", "os.rmdir") or self._is_below(arguments[0])):
            self.count += 1

    def _is_below(self, name: Any) -> bool:
        return isinstance(name, str | bytes | os.PathLike) and os.fsdecode(name).startswith(self._places)


class Watch:
    """What a piece of work takes of this process."""

    def __init__(self, folder: Path, operations: Operations) -> None:
        self._folder, self._operations = folder, operations
        self._over, self.descriptors = threading.Event(), 0
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        self._files, self._count, self._io = _num_files(folder), operations.count, _io()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._started = time.process_time()
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.descriptors = max(self.descriptors, len(os.listdir("/proc/self/fd")) - 1)

    def stop(self) -> dict[str, Any]:
        seconds, io, operations = time.process_time() - self._started, _io(), self._operations.count - self._count
        self._over.set()
        self._thread.join()
        memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return {
            "seconds": seconds,
            "read": (io[0] - self._io[0]) / 1e6,
            "written": (io[1] - self._io[1]) / 1e6,
            "operations": operations,
            "memory": int(memory.split()[1]) * 1024 / 1e6,
            "descriptors": self.descriptors,
            "files": _num_files(self._folder) - self._files,
        }


def _io() -> tuple[int, int]:
    """Bytes that this process has read and written."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"]), int(facts["wchar"])


def _num_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def pages(inputs: Sequence[Path], megabytes: float) -> list[str]:
    """Documents of about PAGE characters, cut between paragraphs, in an order by chance; a tenth has a changed copy."""
    found = [page for text in read_documents(inputs) for page in _cut(text)]
    random.Random(0).shuffle(found)
    size, count = 0, 0
    while size < megabytes * 1e6 / 1.1 and count < len(found):
        size, count = size + len(found[count].encode()), count + 1
    texts = found[:count] + changed_copies(found[: count // 10], 1)[: count // 10]
    random.Random(1).shuffle(texts)
    return texts


def _cut(text: str) -> Iterator[str]:
    kept, size = list[str](), 0
    for paragraph in text.split("\n\n"):
        kept.append(paragraph)
        size += len(paragraph)
        if size >= PAGE:
            yield "\n\n".join(kept)
            kept, size = [], 0
    if size:
        yield "\n\n".join(kept)


def measured(
    source: Path, split_bytes: int, last: str, tokenizer: str, test: str | None, folder: str | None
) -> list[Cost]:
    """The stages of one run over some texts, up to the last that is wanted."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name).resolve()
        content: dict[str, Any] = {
            "run": {"workers": 1, "piece_bytes": split_bytes, "tokenizer": tokenizer},
            "read": {"paths": [str(source)]},
            "write": {"folder": str(place / "out")},
            "filter": {"quality": ["gopher", "repetition", "c4"]},
            **{section: {} for section in ("repair", "language", "deduplicate", "split", "tokenize")},
            **({"decontaminate": {"tests": {"test": test}}} if test else {}),
        }
        operations = Operations(str(place), str(source), *([test] if test else []))
        return _stages(build(content), source.stat().st_size / 1e6, last, operations)


def _stages(recipe: Recipe, megabytes: float, last: str, operations: Operations) -> list[Cost]:
    found, folder = [], Path(recipe.write.folder)
    with locked(folder / "state", "a benchmark") as lock:
        plan = keep_plan(make_plan(recipe), recipe)
        for stage in stages(recipe, plan, Tokenizers()):
            watch = Watch(folder, operations)
            run_stage(recipe, stage, plan, folder, lock, progress=False)
            found.append(Cost(stage.name, megabytes, len(plan.tasks), stage.tasks, **watch.stop()))
            print(found[-1], flush=True)
            if stage.name == last:
                break
    return found


def comparing(num_tasks: int, folder: str | None) -> Comparing:
    """The stages that look at all tasks, with little in each: every other document has a near-duplicate elsewhere."""
    how, draw = DeduplicateStep(), np.random.default_rng(0)
    bands = Bands(how.bands, how.rows)
    twins = draw.integers(0, 1 << 63, (num_tasks * DOCUMENTS_PER_TASK // 4, SHINGLES), np.uint64)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        comparison, number = Comparison(how, (), place, num_tasks), 0
        for task in range(num_tasks):
            writer = SignatureWriter(sign_folder(place), task, bands)
            for _ in range(DOCUMENTS_PER_TASK):
                own = draw.integers(0, 1 << 63, SHINGLES, np.uint64)
                twin = twins[draw.integers(len(twins))]
                shingles = np.sort(np.r_[twin[:-1], own[:1]] if number % 2 else own)
                writer.add(f"{number}", 1_000, shingles)
                number += 1
            writer.close()
        files = num_gathered(num_tasks)
        gathered = _seconds(lambda rank: Gather("gather", comparison).run(rank=rank), range(files))
        ranks = range(0, num_tasks, max(1, num_tasks // SAMPLED))
        match = _seconds(lambda rank: Match("match", comparison).run(rank=rank, world_size=num_tasks), ranks)
        for task in range(num_tasks):
            if task not in ranks:
                pairs_path(place, task).write_bytes(np.empty(0, PAIR).tobytes())
        group = _seconds(lambda rank: Group("group", comparison).run(), [0])
        assert drops_path(place).stat().st_size, "there are near-duplicates"
        remove = RemoveDuplicates(comparison, Setting(place, 5))
        finish = _seconds(lambda rank: remove.prepare(rank), ranks)
    return Comparing(num_tasks, gathered, match, group, finish)


def _seconds(run: Callable[[int], Any], ranks: Sequence[int]) -> float:
    """Processor seconds of a task, on average."""
    started = time.process_time()
    for rank in ranks:
        for _ in run(rank) or ():
            pass
    return (time.process_time() - started) / max(len(ranks), 1)


def gathering(folder: str | None) -> Bulk:
    """Gathers made-up bands of FAN_IN tasks, more than are sorted at a time."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        sources = [Source(OWN + task, place, task) for task in range(FAN_IN)]
        for source in sources:
            entries = np.empty(ENTRIES, ENTRY)
            entries["band"] = np.sort(draw.integers(0, 1 << 64, ENTRIES, np.uint64))
            entries["document"] = draw.integers(0, ENTRIES, ENTRIES)
            signature_path(place, source.task, "bands").write_bytes(entries.tobytes())
        return _bulk(lambda: gather(sources, gathered_path(place, 0)), place, FAN_IN * ENTRIES * ENTRY.itemsize)


def grouping(folder: str | None) -> Bulk:
    """Decides about made-up pairs that FAN_IN tasks have found, more than are held before they are reduced."""
    draw = np.random.default_rng(0)
    found = np.zeros(FAN_IN * PAIRS // TIMES, PAIR)
    found["first"] = (OWN << 32) + 2 * np.arange(len(found))
    found["second"], found["first_length"], found["second_length"] = found["first"] + 1, PAGE, PAGE
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        pairs_path(place, 0).parent.mkdir(parents=True)
        for task, chosen in enumerate(np.split(np.tile(draw.permutation(len(found)), TIMES), FAN_IN)):
            pairs_path(place, task).write_bytes(found[chosen].tobytes())
        keep = DeduplicateStep().keep
        return _bulk(
            lambda: decided(read_pairs(place, FAN_IN), keep=keep).drops(), place, FAN_IN * PAIRS * PAIR.itemsize
        )


def _bulk(work: Callable[[], Any], folder: Path, num_bytes: int) -> Bulk:
    watch = Watch(folder, Operations())
    work()
    took = watch.stop()
    return Bulk(num_bytes / 1e6, took["seconds"], took["memory"])


def measurements(options: argparse.Namespace) -> dict[str, Any]:
    """All that is measured."""
    load = [os.getloadavg()[0]]
    compared = [_apart(comparing, num_tasks, options.folder) for num_tasks in options.tasks]
    print(comparing_table(compared), flush=True)
    bulk = {"gather": _apart(gathering, options.folder), "group": _apart(grouping, options.folder)}
    print(bulk, flush=True)
    sizes = options.megabytes
    cases = [(size, SPLIT_BYTES, "list") for size in sizes] + [(sizes[-1], LARGE_SPLIT_BYTES, "list")]
    cases += [(size, round(size * 1e6 / MANY_TASKS), "group") for size in sizes[-2:]]
    runs = []
    for megabytes, split_bytes, last in cases:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            source = Path(name).resolve() / "in.jsonl"
            _apart(write_pages, options.input, megabytes, source)  # apart, so that its memory is not counted
            runs.append(_apart(measured, source, split_bytes, last, options.tokenizer, options.test, options.folder))
    return {
        **describe(),
        "command": command_line(),
        "load": [*load, os.getloadavg()[0]],
        "runs": [[asdict(cost) for cost in run] for run in runs],
        "comparing": [asdict(each) for each in compared],
        "bulk": {stage: asdict(each) for stage, each in bulk.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--test")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.5, 5.0, 20.0], help="rising")
    parser.add_argument("--tasks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--folder", help="where runs are made; a disk in memory keeps waiting out of it")
    add_options(parser)
    options = parser.parse_args()
    facts = measurements(options)
    text = page(facts, options.storage, options.latency)
    print(text)
    if options.output:
        options.output.write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def write_pages(inputs: Sequence[Path], megabytes: float, file: Path) -> None:
    """The documents of `pages`, with their numbers as ids."""
    rows = ({"text": text, "id": f"{number}"} for number, text in enumerate(pages(inputs, megabytes)))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


if __name__ == "__main__":
    main()
