"""The full matrix is broad from its beginning, and its page tells what went wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity import full
from tests.parity.compare import WHAT
from tests.parity.covering import CORE, FREE, cores, is_valid, job
from tests.parity.full import begun, matrix, named, page, run
from tests.parity.runs import Case, Way


@pytest.mark.slow
def test_every_combination_is_there_once() -> None:
    everything = matrix()
    assert len({named(job(combination)) for combination in everything}) == len(everything)
    cut = sum(core["tp"] > 1 for core in cores())
    assert len(everything) == (len(cores()) + cut) * len(FREE["zero"]) * len(FREE["recompute"])
    assert all(is_valid(combination) for combination in everything[::50])
    assert everything == matrix(), "the order is always the same: a run can go on"


def test_any_beginning_is_broad() -> None:
    first = matrix()[:400]
    for name, values in {**CORE, **FREE}.items():
        for value in values:
            assert sum(combination[name] == value for combination in first) >= 20, f"{name} = {value}"
    layouts = {(core["tp"], core["pp"], core["dp"], core["schedule"]) for core in cores()}
    seen = {tuple(combination[name] for name in ("tp", "pp", "dp", "schedule")) for combination in matrix()[:1000]}
    assert seen == layouts


@pytest.mark.slow
def test_what_fails_is_a_row() -> None:
    """The other jobs of the layout have rows of their own."""
    (good, bad) = run([(Case(num_layers=1), Way()), (Case(num_layers=1), Way(cuts=(7,)))])
    assert good["problems"] == [] and set(good["worst"]) == set(WHAT)
    assert bad["problems"][0].startswith("LayoutError: parallel.cuts")


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    found = begun(tmp_path)[1]
    equal = {"job": "tp=2 | drop=0.0", "worst": dict.fromkeys(WHAT, 1e-15), "problems": []}
    broken = {"job": "tp=2 pp=4 |", "worst": {}, "problems": ["RankFailed: a hang"]}
    return {**found, "rows": [equal, broken], "seconds": 120.0}


def test_the_page(results: dict[str, Any]) -> None:
    text = page(results, 10)
    assert "2 of 10 combinations" in text and "in 2 minutes" in text and "1 are equal" in text
    assert f"| tp2 pp1 dp1 | 1 | {' | '.join(['1e-15'] * len(WHAT))} |" in text
    assert "* WRONG: tp=2 pp=4 |: RankFailed: a hang" in text


def test_it_goes_on_where_it_was_but_not_on_another_commit(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = begun(tmp_path)
    path.write_text(json.dumps(results))
    assert begun(tmp_path) == (path, results)
    monkeypatch.setattr(full, "describe", lambda: {"commit": "another"})
    assert begun(tmp_path)[1]["rows"] == []
