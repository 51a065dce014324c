"""Which tests of the default suite execute a line of the source, and how long each takes."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.random_mutations.loaded import SOURCE

ROOT = Path(__file__).parents[2]
FOLDER = "RANDOM_MUTATIONS"
"""Of the recorded run's environment: where the plugin writes."""
_SETTINGS = """\
[run]
data_file = {folder}/lines
source = {source}
parallel = true
concurrency = multiprocessing, thread
patch = _exit
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


def record(folder: Path, tests: Sequence[str] = ()) -> int:
    """Runs the default suite, or these tests of it, and writes down for each line which tests execute it, in whatever
    process. Returns pytest's exit status: a test may fail that looks at what surrounds its process, as at its signals.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory() as added:
        Path(added, "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")  # in every Python
        settings = Path(added, "coverage.ini")
        settings.write_text(_SETTINGS.format(folder=folder, source=SOURCE))
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "COVERAGE_PROCESS_START": str(settings),
            "PYTHONPATH": os.pathsep.join([added, os.environ.get("PYTHONPATH", "")]),
            FOLDER: str(folder),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "tests.random_mutations.recorded", *tests]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    whole = Coverage(data_file=str(folder / "lines"), config_file=False)
    whole.combine()
    whole.save()
    (folder / "sources.json").write_text(json.dumps(_sources()))
    return status


def _sources() -> dict[str, str]:
    return {
        str(path.relative_to(SOURCE)): hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCE.rglob("*.py")
    }


class Lines:
    """What `record` found. Raises SystemExit where there is none, or where it is of another state of the source."""

    def __init__(self, folder: Path) -> None:
        try:
            before = json.loads((folder / "sources.json").read_text())
            self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        except FileNotFoundError:
            raise SystemExit("which tests execute which line is not known: --record first") from None
        now = _sources()
        self.files = sorted(file for file in now if before.get(file) == now[file])
        if changed := len(now) - len(self.files):
            print(f"{changed} files have changed since --record, and are left out", file=sys.stderr)
        self._data = CoverageData(str(folder / "lines"))
        self._data.read()

    def tests(self, file: str, line: int) -> frozenset[str]:
        """Node ids without parameters."""
        return self._by_line(file).get(line, frozenset())

    @lru_cache(maxsize=64)  # noqa: B019  one object a process
    def _by_line(self, file: str) -> dict[int, frozenset[str]]:
        found = self._data.contexts_by_lineno(str(SOURCE / file))
        return {
            line: frozenset(re.split(r"\[| \(", test)[0] for test in tests if test) for line, tests in found.items()
        }
