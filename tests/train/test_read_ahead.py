"""The next step's batches are read while this one computes: the same data, one step ahead, and no thread is left."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.data.loader import Batch
from colonnade.launch.process import BACKGROUND
from colonnade.tasks.task import Microbatch
from colonnade.train import read_ahead
from colonnade.train.corpus import open_corpus
from colonnade.train.read_ahead import ReadAhead, pays
from tests import tiny
from tests.commands import forked
from tests.runs import Finished, assert_same, events
from tests.tiny import TinyCorpus


def batch(position: int) -> Batch:
    """One that tells where it is from."""
    one = torch.full((1, 1), position)
    return Batch(one, one, one.float(), one[0])


def taken(reader: ReadAhead, position: int, following: int | None) -> list[int]:
    return [int(each.samples) for each in reader.take(position, following)]


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == BACKGROUND]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert readers() == []


def test_one_step_ahead_and_no_further() -> None:
    asked: list[tuple[int, bool]] = []

    def read(position: int) -> list[Microbatch]:
        asked.append((position, threading.current_thread() is threading.main_thread()))
        return [batch(position)]

    with ReadAhead(read, active=True) as reader:
        assert taken(reader, 0, 4) == [0]
        reader.settle()
        assert asked == [(0, True), (4, False)]
        assert taken(reader, 4, 8) == [4] and taken(reader, 8, None) == [8]
    assert asked == [(0, True), (4, False), (8, False)]


def test_it_is_read_while_the_step_computes() -> None:
    computing = threading.Event()

    def read(position: int) -> list[Microbatch]:
        assert position == 0 or computing.wait(60)
        return [batch(position)]

    with ReadAhead(read, active=True) as reader:
        reader.take(0, 4)
        computing.set()  # a reader that is waited for in `take` would never see it
        assert taken(reader, 4, None) == [4]


def test_inactive_it_has_no_thread() -> None:
    def read(position: int) -> list[Microbatch]:
        assert threading.current_thread() is threading.main_thread()
        return [batch(position)]

    with ReadAhead(read, active=False) as reader:
        assert [taken(reader, position, position + 4) for position in (0, 4, 8)] == [[0], [4], [8]]


def test_what_is_not_wanted_is_read_anew() -> None:
    with ReadAhead(lambda position: [batch(position)], active=True) as reader:
        reader.take(0, 4)
        assert taken(reader, 12, 16) == [12] and taken(reader, 16, None) == [16]


def test_one_thread_reads_at_a_time() -> None:
    """Also where another step is wanted than is being read: files are not made for two."""
    reads = threading.Lock()

    def read(position: int) -> list[Microbatch]:
        assert reads.acquire(blocking=False), "two read at once"
        time.sleep(0.05)
        reads.release()
        return [batch(position)]

    with ReadAhead(read, active=True) as reader:
        assert taken(reader, 0, 4) == [0]
        assert taken(reader, 12, 16) == [12] and taken(reader, 16, None) == [16]


def test_an_error_is_that_of_the_step_that_wants_the_data() -> None:
    def read(position: int) -> list[Microbatch]:
        if position == 4:
            raise ValueError("unknown token")
        return [batch(position)]

    with ReadAhead(read, active=True) as reader:
        assert taken(reader, 0, 4) == [0]
        with pytest.raises(ValueError, match="unknown token"):
            reader.take(4, 8)
        assert taken(reader, 8, None) == [8]


def test_what_was_taken_is_not_held() -> None:
    asked: list[int] = []

    def read(position: int) -> list[Microbatch]:
        asked.append(position)
        return [batch(position)]

    with ReadAhead(read, active=True) as reader:
        assert taken(reader, 0, 4) == [0] and taken(reader, 4, None) == [4]
        assert taken(reader, 4, None) == [4], "who asks once more has it read once more"
    assert asked == [0, 4, 4]


def test_no_thread_is_left_after_an_error_either() -> None:
    def read(position: int) -> list[Microbatch]:
        time.sleep(0.05 if position else 0)
        return [batch(position)]

    with pytest.raises(RuntimeError, match="of the step"), ReadAhead(read, active=True) as reader:
        reader.take(0, 4)
        raise RuntimeError("of the step")


def test_who_is_asked_a_second_time_to_end_waits_for_nothing_that_is_read() -> None:
    gate = threading.Event()

    def read(position: int) -> list[Microbatch]:
        assert position == 0 or gate.wait(60)
        return [batch(position)]

    threading.Timer(20.0, gate.set).start()
    with pytest.raises(KeyboardInterrupt), ReadAhead(read, active=True) as reader:
        reader.take(0, 4)
        raise KeyboardInterrupt
    assert not gate.is_set()
    gate.set()
    for thread in readers():
        thread.join()


def test_where_it_pays(corpus: TinyCorpus, tmp_path: Path) -> None:
    here = open_corpus(tiny.config(corpus, tmp_path))
    assert pays(torch.device("cuda"), here) and not pays(torch.device("cpu"), here)
    folder = [f"data.train=file://{corpus.prefix}", f"data.cache={tmp_path}/cache"]
    elsewhere = open_corpus(tiny.config(corpus, tmp_path, *folder))
    assert pays(torch.device("cpu"), elsewhere)
    one_of_two: Any = SimpleNamespace(files={**here.files, "more": elsewhere.files["data.train"]})
    assert pays(torch.device("cpu"), one_of_two)


@pytest.mark.parametrize("more", [["parallel.dp=2"], []])
@pytest.mark.slow
def test_a_run_that_reads_ahead_is_the_same_run(finished: Finished, tmp_path: Path, more: list[str]) -> None:
    """Also one that is stopped and goes on; nothing beyond the last step is read."""
    asked = tmp_path / "asked"

    def ahead(rank: int) -> None:
        from colonnade.train import loop

        class Watched(ReadAhead):
            def __init__(self, read: read_ahead.Read, *, active: bool) -> None:
                def told(position: int) -> list[Microbatch]:
                    with asked.open("a") as file:
                        file.write(f"{rank} {position}\n")
                    return read(position)

                super().__init__(told, active=True)

        loop.ReadAhead = Watched  # type: ignore[misc]

    run, ranks = tmp_path / "run", len(more) + 1
    begin = ["train", finished.config, f"run.folder={run}", "optim.decay_steps=6", *more]
    assert forked(*begin, "train.steps=3", "checkpoint.keep=3", num_ranks=ranks, first=ahead).status == 0
    answer = forked(*begin, num_ranks=ranks, first=ahead)
    assert answer.status == 0 and [each["step"] for each in events(run) if each["event"] == "resumed"] == [3], answer
    read = sorted(asked.read_text().splitlines())
    assert read == sorted(f"{rank} {4 * step}" for rank in range(ranks) for step in range(6)), "each step once"
    whole = tmp_path / "whole"
    assert forked(*begin, f"run.folder={whole}", "checkpoint.keep=2", num_ranks=ranks).status == 0
    for path in (run, whole):
        for each in sorted((path / "checkpoints").iterdir())[:-1]:
            each.rename(path / each.name)
    assert_same(run, whole)
