"""A plugin of a session that has collected the default suite: in place of running it, it forks for each change.

A test that fails is run by itself, with the change and without any. If it fails behind other tests alone, or without
the change too, as it may in a forked session or on a busy machine, it notices nothing: the rest is asked again.
"""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.random_mutations.changes import Change
from tests.random_mutations.lines import Lines
from tests.random_mutations.loaded import replace

NOTICED, ENDLESS, UNNOTICED, UNREACHED, IMPOSSIBLE = "noticed", "endless", "unnoticed", "unreached", "impossible"
_PROCESSES = 3  # on two cores: tests wait for their ranks
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Verdict:
    """`outcome`: a test failed (NOTICED), or they did not end; all passed (UNNOTICED), or none executes the line
    (UNREACHED); the change could not be put in place of what is loaded (IMPOSSIBLE).
    """

    change: Change
    outcome: str
    tests: int
    """That were asked."""
    by: str = ""
    """The first that failed."""


class Session:
    """Appends a line to `file` for each verdict. `seconds`: of tests that are asked about a change."""

    def __init__(self, changes: Sequence[Change], lines: Lines, seconds: float, file: Path) -> None:
        self._changes, self._lines, self._seconds, self._file = changes, lines, seconds, file
        self._failed: list[str] = []
        self._items: dict[str, list[pytest.Item]] = {}
        self._passes: dict[str, bool] = {}
        """Whether a test that has failed for a change passes without any."""
        self._passed_over: defaultdict[Change, set[str]] = defaultdict(set)
        """Tests that failed for a change, and notice nothing of it."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._items.setdefault(item.nodeid.partition("[")[0], []).append(item)
        gc.collect()
        gc.freeze()
        left, running = list(reversed(self._changes)), list[_Asked]()
        while left or running:
            while left and len(running) < _PROCESSES:
                running += self._asked(left.pop())
            time.sleep(0.02)
            verdicts = [each.verdict() for each in running]
            running = [each for each, verdict in zip(running, verdicts, strict=True) if verdict is None]
            for verdict in filter(None, verdicts):
                if verdict.outcome == NOTICED and not self._notices(verdict.change, verdict.by):
                    self._passed_over[verdict.change].add(verdict.by)
                    left.append(verdict.change)
                else:
                    self._write(verdict)
        return True

    def _asked(self, change: Change) -> Iterator["_Asked"]:
        tests = self._tests(change)
        if tests:
            yield _Asked(change, len(tests), self._limit(tests), partial(self._first_failure, change, tests))
        else:
            self._write(Verdict(change, UNREACHED, 0))

    def _notices(self, change: Change, test: str) -> bool:
        """True of what is no test: the process died."""
        items = [item for item in self._items.get(test.partition("[")[0], ()) if item.nodeid == test]
        if items and test not in self._passes:
            self._passes[test] = self._outcome(None, items) == UNNOTICED
        return not items or (self._passes[test] and self._outcome(change, items) == NOTICED)

    def _outcome(self, change: Change | None, tests: list[pytest.Item]) -> str:
        asked = _Asked(self._changes[0], len(tests), self._limit(tests), partial(self._first_failure, change, tests))
        while (verdict := asked.verdict()) is None:
            time.sleep(0.02)
        return verdict.outcome

    def _limit(self, tests: Sequence[pytest.Item]) -> float:
        return 4 * sum(map(self._time, tests)) + 25

    def _tests(self, change: Change) -> list[pytest.Item]:
        """Those of the module's own test file first, then the shortest, as many as there is time for."""
        names = self._lines.tests(change.file, change.line)
        over = self._passed_over[change] | {test for test, passes in self._passes.items() if not passes}
        items = [item for name in names for item in self._items.get(name, ()) if item.nodeid not in over]
        own = f"/test_{Path(change.file).stem.strip('_')}.py::"
        chosen, left = [], self._seconds
        for item in sorted(items, key=lambda item: (own not in item.nodeid, self._time(item), item.nodeid)):
            if self._time(item) <= left or not chosen:
                chosen.append(item)
                left -= self._time(item)
        return chosen

    def _time(self, item: pytest.Item) -> float:
        return self._lines.seconds.get(item.nodeid, 0.0)

    def _first_failure(self, change: Change | None, tests: list[pytest.Item]) -> tuple[str, str]:
        if change is not None and not replace(change):
            return IMPOSSIBLE, ""
        for item, following in zip(tests, [*tests[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return NOTICED, self._failed[0]
        return UNNOTICED, ""

    def _write(self, verdict: Verdict) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


class _Asked:
    """A process in which a function is changed and its tests run, in a process group and a folder of its own."""

    def __init__(self, change: Change, tests: int, limit: float, ask: Callable[[], tuple[str, str]]) -> None:
        self._change, self._tests = change, tests
        self._end = time.monotonic() + limit
        self._folder = tempfile.mkdtemp()
        self._answer, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_answered, args=(ask, theirs, self._folder))
        self._process.start()
        theirs.close()

    def verdict(self) -> Verdict | None:
        """None while tests run."""
        answered = self._answer.poll()
        if not answered and time.monotonic() < self._end:
            return None
        outcome, by = _received(self._answer) if answered else (ENDLESS, "")
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # ranks that its tests have left too
        self._process.join()
        self._answer.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return Verdict(self._change, outcome, self._tests, by)


def _answered(ask: Callable[[], tuple[str, str]], answer: Connection, folder: str) -> None:
    os.setpgid(0, 0)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder  # tmp_path is below it
    answer.send(ask())


def _received(answer: Connection) -> tuple[str, str]:
    try:
        return answer.recv()
    except EOFError:
        return NOTICED, "the process died"
