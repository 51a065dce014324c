"""What draws changes of the source at random makes those that it says, and tests notice them."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.drawing.scale import percent
from tests.distributed import run_on_ranks
from tests.random_mutations.changes import Change, drawn
from tests.random_mutations.loaded import SOURCE, replace
from tests.random_mutations.run import NOTICED, UNNOTICED, Session
from tests.random_mutations.written import written

ROOT = Path(__file__).parents[1]
MODULE = '''"""A docstring, – with a sign of three bytes."""

HELD = 1


class Sum:
    def of(self, xs: list[int], *, step: int = 1) -> int:
        """A docstring."""
        if not xs or step < 1:
            raise ValueError(f"{step + 1}")
        self.last = xs[1:]
        return sum(xs, start=0) if len(xs) > 1 else max(xs[0], step)
'''
PLACES = {
    "int = 1": ["int = 2"],
    "not xs or step < 1": ["True", "False", "(not (not xs or step < 1))", "((not xs) and (step < 1))"],
    "or step < 1": ["or (step <= 1)", "or step < 2"],
    "if not xs or step < 1": ["if ((step < 1))", "if ((not xs))", "if (xs) or step < 1"],
    "self.last = xs[1:]": ["pass", "self.last = xs[:]", "self.last = xs[2:]"],
    "sum(xs, start=0) if len(xs) > 1 else max(xs[0], step)": ["(sum(xs, start=0))", "(max(xs[0], step))"],
    "sum(xs, start=0) if": ["sum(xs) if", "sum(xs, start=1) if"],
    "len(xs) > 1": ["(len(xs) >= 1)", "len(xs) > 2"],
    "max(xs[0], step)": ["min(xs[0], step)", "max(step, xs[0])", "max(xs[1], step)"],
}


def test_every_simple_change_of_a_function_is_drawn_sometimes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(MODULE)
    (draws,) = zip(*(drawn(tmp_path / "sum.py", tmp_path, Random(seed)) for seed in range(1000)), strict=True)
    expected = {MODULE.replace(old, new) for old, each in PLACES.items() for new in each}
    assert {change.applied(MODULE.encode()).decode() for change in draws} == expected
    assert {(change.file, change.function) for change in draws} == {("sum.py", "Sum.of")}


def test_a_change_is_shown_as_the_lines_before_and_after() -> None:
    begin = MODULE.encode().index(b"xs[1:]")
    change = Change("sum.py", "Sum.of", 11, begin, begin + 6, "xs[:]")
    shown = change.shown(MODULE.encode())
    assert shown == "sum.py:11 Sum.of\n-         self.last = xs[1:]\n+         self.last = xs[:]"


def test_changes_that_somebody_wrote_are_told_by_their_function_and_the_line_of_their_statement(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(MODULE.replace("sum(xs, start=0)", "sum(\n            xs, start=0\n        )"))
    changes = [("HELD = 1", "HELD = 2"), ("self.last = xs[1:]", "self.last = xs"), ("xs, start=0", "xs, start=1")]
    listed = [{"name": "n", "file": "sum.py", "old": old, "new": new} for old, new in changes]
    (tmp_path / "list.json").write_text(json.dumps(listed))
    found = written(tmp_path / "list.json", tmp_path)
    assert [(change.function, change.line) for change in found] == [("", 3), ("Sum.of", 11), ("Sum.of", 12)]
    text = (tmp_path / "sum.py").read_text()
    for change, (old, new) in zip(found, changes, strict=True):
        assert change.applied(text.encode()).decode() == text.replace(old, new)
    (tmp_path / "list.json").write_text(json.dumps([*listed, {"file": "sum.py", "old": "xs", "new": "ys"}]))
    with pytest.raises(SystemExit, match=r"change 3: 'xs' stands 6 times in sum\.py"):
        written(tmp_path / "list.json", tmp_path)


def test_a_changed_function_is_called_by_all_that_had_imported_it_and_in_ranks() -> None:
    source = (SOURCE / "drawing/scale.py").read_bytes()
    begin = source.index(b"0.995")
    change = Change("drawing/scale.py", "percent", 0, begin, begin + 5, "9.0")

    def of_one_rank(rank: int, num_ranks: int) -> tuple[str, bool, str]:
        return percent(1.0), replace(change), percent(1.0)

    before, replaced, after = run_on_ranks(of_one_rank, 1)[0]
    assert replaced and before != after


def test_who_fails_without_the_change_too_or_behind_other_tests_alone_notices_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change, names = Change("a.py", "f", 1, 0, 1, "x"), ["t.py::notices", "t.py::fails", "t.py::behind[1]"]
    lines: Any = SimpleNamespace(tests=lambda *_: [name.partition("[")[0] for name in names], seconds={})
    session = Session([change], lines, 12.0, tmp_path / "verdicts")
    session._items = {name.partition("[")[0]: [SimpleNamespace(nodeid=name)] for name in names}
    failing = {(change, names[0]), (None, names[1]), (change, names[1])}
    monkeypatch.setattr(
        Session, "_outcome", lambda _, change, tests: NOTICED if (change, tests[0].nodeid) in failing else UNNOTICED
    )
    assert [session._notices(change, name) for name in [*names, "the process died"]] == [True, False, False, True]
    session._passed_over[change].add(names[2])
    assert [test.nodeid for test in session._tests(change)] == names[:1], "the rest is asked again"


@pytest.mark.slow
def test_tests_of_a_module_notice_nearly_all_changes_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.random_mutations", "--folder", str(tmp_path / "record")]
    subprocess.run([*command, "--record", "tests/drawing/test_scale.py"], cwd=ROOT, check=True)
    options = ["--files", "drawing/scale.py", "--number", "8", "--seed", "3"]
    printed = subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    verdicts = [json.loads(line) for line in (tmp_path / "record" / "verdicts-3.jsonl").read_text().splitlines()]
    by = [each["by"] for each in verdicts if each["outcome"] == "noticed"]
    assert len(verdicts) == 8 and len(by) >= 5, printed
    assert all(test.startswith("tests/drawing/test_scale.py::") for test in by)
    assert "of 8 changes:" in printed
