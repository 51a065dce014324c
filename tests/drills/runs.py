"""The runs of the drills: tiny, saved at each step, on several layouts, and what they would have been undisturbed."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from colonnade.checkpoint.manifest import verify
from colonnade.checkpoint.names import checkpoints_in
from colonnade.errors import ColonnadeError
from tests import tiny
from tests.commands import Answer, Ranks, start
from tests.runs import assert_near, assert_same_end, events
from tests.tiny import TinyCorpus

STEPS = 40
TIMEOUT = "train.timeout=30"  # on a loaded machine a rank waits for seconds for one that still starts: no fault
TIME_LIMIT = 300.0  # seconds, for any one start of a run: only a run that hangs takes so long


@dataclass(frozen=True)
class Variant:
    """A layout and a way of saving."""

    name: str
    num_ranks: int
    overrides: tuple[str, ...]


LAYOUTS = {
    "serial": (1, ()),
    "tp2": (2, ("parallel.tp=2",)),
    "dp2 zero2": (2, ("parallel.dp=2", "parallel.zero=2")),
    "pp2": (2, ("parallel.pp=2",)),
}
VARIANTS = [
    Variant(f"{layout}, {'asynchronous' if later else 'synchronous'} saves", num_ranks, (*overrides, saves))
    for later, saves in ((False, "checkpoint.asynchronous=false"), (True, "checkpoint.asynchronous=true"))
    for layout, (num_ranks, overrides) in LAYOUTS.items()
]


class Place:
    """A folder of runs on one corpus, with an undisturbed run of each variant."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.steps = folder, steps

    @cached_property
    def corpus(self) -> TinyCorpus:
        return tiny.make(self.folder / "corpus")

    def start(self, variant: Variant, run: Path, first: Callable[[int], None] = lambda rank: None, *more: str) -> Ranks:
        """Start a run of the variant in folder `run`, or go on with it."""
        config = tiny.write_config(self.corpus, run.parent)
        keys = [f"train.steps={self.steps}", "checkpoint.every=1", "train.evaluate_every=0", f"run.folder={run}"]
        return start("train", config, *keys, *variant.overrides, *more, num_ranks=variant.num_ranks, first=first)

    def expected(self, variant: Variant) -> Path:
        """The variant's run that nothing has disturbed."""
        run = self.folder / "expected" / variant.name.replace(" ", "_") / "run"
        if not run.exists():
            answers = self.start(variant, run).answers(TIME_LIMIT)
            assert {answer.status for answer in answers} == {0}, answers
        return run

    def fresh(self, name: str) -> Path:
        """Where a run may begin: a folder that is not there."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name / "run"

    def finish(self, variant: Variant, run: Path) -> list[str]:
        """Let the run go on to its end undisturbed; what is wrong with it then, a line each."""
        answers = self.start(variant, run).answers(TIME_LIMIT)
        if any(answer.status for answer in answers):
            return [f"it does not go on: {said(answers)}"]
        return self.same(variant, run)

    def same(self, variant: Variant, run: Path) -> list[str]:
        """What is wrong with a run that has ended, a line each. One that went on with fewer ranks, because one of them
        counted as lost, ends in the same numbers to rounding; any other in the same bits.
        """
        fewer = any(event["event"] == "fewer ranks" for event in events(run))
        try:
            (assert_near if fewer else assert_same_end)(run, self.expected(variant))
        except AssertionError as error:
            return [f"it ended elsewhere: {str(error)[:300] or 'tensors or metrics differ'}"]
        return []


def said(answers: Sequence[Answer]) -> str:
    """The ends of what ranks that failed have said."""
    return "; ".join(f"status {a.status}: …{a.err[-400:]}" for a in answers if a.status)


def damaged_checkpoints(run: Path) -> list[str]:
    """A line for each folder that has a checkpoint's name and is not a whole checkpoint."""
    problems = []
    for path in checkpoints_in(run / "checkpoints").values():
        try:
            verify(path)
        except ColonnadeError as error:
            problems.append(f"{path.name} is not whole: {error}")
    return problems
