"""A plugin of the recorded run: tells coverage which test it is in, and writes down how long each takes."""

import json
import os
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests import distributed
from tests.random_mutations.lines import FOLDER

_seconds: Counter[str] = Counter()
_whole_rank = distributed._rank


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    if running := coverage.Coverage.current():
        running.switch_context(nodeid.partition("[")[0])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[FOLDER], "seconds.json").write_text(json.dumps(_seconds))


def _rank(connection: Connection, function: Callable[..., Any], *rest: Any) -> None:
    """A rank of a test is killed once it has answered, and would not save what it has executed."""

    def saved(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            if running := coverage.Coverage.current():
                running.stop()
                running.save()

    _whole_rank(connection, saved, *rest)


distributed._rank = _rank  # type: ignore[assignment]
