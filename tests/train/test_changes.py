"""A run that goes on with other values says so, and a value that was in effect already is no change."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from colonnade.config.compare import difference
from colonnade.config.load import load
from colonnade.data.datasets import TrainingDataset
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.train import change, loop
from colonnade.train.change import Change, Expected, ahead
from colonnade.train.changes import changes, other_curve, what_changed
from colonnade.train.corpus import open_corpus
from colonnade.train.rollback import Rollback
from colonnade.train.state import learning_rate_of
from tests.commands import Answer, forked
from tests.runs import Finished, events, metrics
from tests.tiny import TinyCorpus, config, write_config

assert loop, "imported once, here, and not by every forked rank"


@pytest.mark.parametrize(("steps", "fits"), [(19, False), (20, False), (21, True)])
def test_a_run_is_not_over_before_it_knows(corpus: TinyCorpus, tmp_path: Path, steps: int, fits: bool) -> None:
    """A change behind step 20 leaves a last step, which saves."""
    began = load(write_config(corpus, tmp_path), ["train.steps=100", "optim.decay_steps=100"])
    asked = Change(at=20, values={"train.steps": steps}, was={"train.steps": 100}, line="1", position=80)
    found = ahead(Expected(began), [asked])
    assert found.refused == ([] if fits else [(asked, f"train.steps = {steps} would be over at step 20.")])
    assert found.config.train.steps == (steps if fits else 100)


BATCH, STEPS = "train.global_batch_size", "train.steps"


def to_come(*values: dict[str, int]) -> list[Change]:
    """Behind step 2, 4, 6, ..."""
    return [
        Change(at=2 * number, values=each, was=dict.fromkeys(each, 4), line=str(number))
        for number, each in enumerate(values, 1)
    ]


def lasts(course: Expected, training: TrainingDataset, coming: Sequence[Change] = ()) -> bool:
    try:
        course.check_lasts(training, coming)
    except ColonnadeError:
        return False
    return True


def test_data_last_where_they_do_for_some_of_the_changes_to_come(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Drawn at random, beside a search of all their subsets."""

    def search(course: Expected, coming: Sequence[Change]) -> bool:
        made = ahead(course, coming[:1]).stages[1:]
        return lasts(course, training) or any(search(each, coming[1:]) for each in (course, *made) if coming)

    file, draw, found = write_config(corpus, tmp_path), random.Random(3), Counter[bool]()
    keys = ["data.order=all_epochs", "data.epochs=1"]
    training = open_corpus(load(file, keys)).training
    longest = load(file, [*keys, "train.steps=30"])
    for _ in range(24):
        both = {BATCH: [2, 4, 6, 8], STEPS: range(12, 32)}
        names = [draw.choice([[BATCH], [STEPS], [BATCH, STEPS]]) for _ in range(4)]
        coming = to_come(*({name: draw.choice(both[name]) for name in each} for each in names))
        course = Expected(longest, rollbacks=draw.choice([(), (Rollback(to=5, skip=2, passed=draw.randint(1, 20)),)]))
        found[search(course, coming)] += 1
        assert lasts(course, training, coming) == search(course, coming), (course, coming)
    assert min(found[True], found[False]) >= 4


def test_changes_to_come_of_which_none_is_enough_are_soon_tried(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = iter(range(100))

    def check_length(*args: object, **kwargs: object) -> None:
        assert next(tried, None) is not None, "no subset of them is tried for itself"
        raise ConfigError("too little")

    monkeypatch.setattr(change, "check_length", check_length)
    began = load(write_config(corpus, tmp_path), ["train.steps=5000"])
    coming = to_come(*({BATCH: 4 * (2 + number % 2)} for number in range(20)))
    with pytest.raises(ConfigError, match="too little"):
        Expected(began).check_lasts(cast(Any, None), coming)


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the run that has ended at step 6."""
    shutil.copytree(finished.folder, tmp_path / "run")
    return tmp_path / "run"


def go_on(finished: Finished, run: Path, *more: str) -> Answer:
    return forked("train", finished.config, f"run.folder={run}", *more)


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(run)]


@pytest.mark.slow
def test_a_longer_run_says_that_its_curve_changes(finished: Finished, run: Path) -> None:
    answer = go_on(finished, run, "train.steps=9")
    assert answer.status == 0 and answer.out.count("The learning rate follows another curve") == 1, answer
    assert "its decay ends at step 9 instead of 6, so that step 7 has 0.0" in answer.out
    assert f"step 7 has {rates(run)[6]:.3g} and not 0." in answer.out and "Set optim.decay_steps = 6" in answer.out
    assert "Changed since: train.steps: 6 -> 9; optim.decay_steps: 6 -> 9" in answer.out
    (told,) = [event for event in events(run) if event["event"] == "resumed"]
    assert told["changed"][:2] == ["train.steps: 6 -> 9", "optim.decay_steps: 6 -> 9"]


def test_the_first_step_that_has_another_rate_is_named(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Within the warm-up both curves are the same, and a run that ends there notices nothing."""
    before = config(corpus, tmp_path, "train.steps=4", "optim.warmup_steps=10")
    assert other_curve(before, config(corpus, tmp_path, "train.steps=9", "optim.warmup_steps=10"), 4, []) == []
    ((line),) = other_curve(before, config(corpus, tmp_path, "train.steps=20", "optim.warmup_steps=10"), 4, [])
    assert "from step 11 on: its decay ends at step 20 instead of 4, so that step 11 has 0.00978 and not 0.001" in line
    ((line),) = other_curve(before, config(corpus, tmp_path, "train.steps=20", "optim.warmup_steps=10"), 14, [])
    assert "from step 15 on" in line


def test_another_height_is_no_other_curve(corpus: TinyCorpus, tmp_path: Path) -> None:
    """A rate that somebody has set is told with the keys. Both curves end at one step."""
    before, now = (config(corpus, tmp_path, "train.steps=9", f"optim.learning_rate={rate}") for rate in (0.01, 0.02))
    assert other_curve(before, now, 4, []) == []


@pytest.mark.parametrize(
    ("key", "ends", "at"),
    [
        ("optim.decay_start=2000000000", (3_000_000_000, 3_500_000_000), None),
        ("optim.decay_start=500000000", (500_000_100, 500_000_200), 500_000_001),
        ("optim.decay=constant", (500_000_100, 500_000_200), None),
        ("optim.decay=cosine", (1000, 2000), None),
    ],
)
def test_steps_whose_rates_cannot_differ_are_not_compared_one_by_one(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, ends: tuple[int, int], at: int | None
) -> None:
    """There may be billions, and every rank looks before it goes on. Behind both ends none does."""
    asked = list[int]()

    def counted(*given: Any) -> Callable[[int], float]:
        rate = learning_rate_of(*given)

        def counting(step: int) -> float:
            asked.append(step)
            assert len(asked) < 100, "all are compared"
            return rate(step)

        return counting

    monkeypatch.setattr("colonnade.train.changes.learning_rate_of", counted)
    keys = ("train.steps=1000000000", "optim.warmup_steps=7", key)
    before, now = (config(corpus, tmp_path, *keys, f"optim.decay_steps={end}") for end in ends)
    found = other_curve(before, now, 5000, [])
    assert len(found) == (at is not None) and asked[:1] == ([] if at is None else [at])


def test_a_decay_behind_a_new_warm_up_within_the_first_one_is_compared(corpus: TinyCorpus, tmp_path: Path) -> None:
    keys = ("train.steps=60", "optim.warmup_steps=20", "optim.rewarm_at=2", "optim.rewarm_steps=1")
    before, now = (config(corpus, tmp_path, *keys, f"optim.decay_steps={end}") for end in (45, 80))
    (line,) = other_curve(before, now, 1, [])
    assert "from step 4 on" in line


@pytest.mark.parametrize("more", [[], ["train.global_batch_size=8"]])
def test_a_decay_by_tokens_ends_at_no_step(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """However long the run is, and though larger batches use them up sooner. No rate of so many steps is looked at."""
    monkeypatch.setattr("colonnade.train.changes.learning_rate_of", lambda *_: pytest.fail("rates are compared"))
    before = config(corpus, tmp_path, "optim.decay_tokens=640", "train.steps=10")
    now = config(corpus, tmp_path, "optim.decay_tokens=640", "train.steps=1000000000", *more)
    assert other_curve(before, now, 5, []) == []
    assert not any("decay_steps" in line for line in difference(before, now))
    by_steps = config(corpus, tmp_path, "optim.decay_steps=8", "train.steps=10")
    assert other_curve(before, by_steps, 5, []) == other_curve(by_steps, now, 5, []) == []


def test_another_rate_of_the_last_step_alone_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    before = config(corpus, tmp_path, "train.steps=9", "optim.decay_steps=20")
    now = config(corpus, tmp_path, "train.steps=9", "optim.decay_steps=30")
    ((line),) = other_curve(before, now, 8, [])
    assert line.startswith("The learning rate follows another curve from step 9 on")
    assert other_curve(before, now, 9, []) == [], "no step is left"


def test_rates_are_told_as_the_rollbacks_of_the_run_lower_them(corpus: TinyCorpus, tmp_path: Path) -> None:
    keys = ("optim.learning_rate=0.01", "optim.warmup_steps=0", "optim.decay=linear", "optim.min_learning_rate=0.0")
    before, now = (config(corpus, tmp_path, f"train.steps={steps}", *keys) for steps in (10, 20))
    ((line),) = other_curve(before, now, 5, [Rollback(to=4, rate_factor=0.5, rate_until=8)])
    assert "from step 6 on: its decay ends at step 20 instead of 10, so that step 6 has 0.0035 and not 0.002." in line
    assert line.endswith(" Set optim.decay_steps = 10 to keep the curve.")


def test_what_changed_since_a_checkpoint_is_a_line_a_key(finished: Finished, run: Path) -> None:
    """For the event of a run that goes on: nothing where its configuration cannot be read."""
    now = load(finished.config, [f"run.folder={run}", "train.steps=9", "checkpoint.keep=7"])
    newest = run / "checkpoints" / finished.newest.name
    found = changes(newest, now)
    assert [line for line in found if line.startswith("train.")] == ["train.steps: 6 -> 9"]
    assert any(line.startswith("checkpoint.keep: ") and line.endswith(" -> 7") for line in found)
    kept, curve = what_changed(newest, now, 6, [])
    assert kept.startswith("Changed since: train.steps: 6 -> 9; ") and kept.endswith(".")
    assert curve == "".join(other_curve(load(newest / "config.toml"), now, 6, [])) and "from step 7 on" in curve
    assert what_changed(newest, load(newest / "config.toml"), 6, []) == []
    (newest / "config.toml").unlink()
    assert changes(newest, now) == []
    assert what_changed(newest, now, 6, []) == [
        f"{newest} has no readable config.toml: whether keys have changed since is unknown."
    ]


@pytest.mark.slow
def test_the_value_that_was_in_effect_is_no_change(finished: Finished, run: Path) -> None:
    """What that line tells to set."""
    answer = go_on(finished, run, "train.steps=9", "optim.decay_steps=6")
    assert answer.status == 0 and "another curve" not in answer.out, answer
    assert rates(run)[6:] == [1e-3] * 3, "after the end of the decay, at the floor: a tenth of the highest"


def test_another_end_of_the_decay_is_another_run(finished: Finished, run: Path) -> None:
    answer = go_on(finished, run, "train.steps=9", "optim.decay_steps=8")
    assert answer.status == 2 and "  optim.decay_steps: 6 -> 8\n" in answer.err, answer


@pytest.mark.slow
def test_what_was_asked_for_and_never_computed_binds_nobody(finished: Finished, run: Path) -> None:
    """Lengthened, and stopped before the first step; then the curve is kept as it was."""
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("\nsteps = 6\n", "\nsteps = 9\n"))
    assert (run / "config.toml").read_text() != text
    answer = go_on(finished, run, "train.steps=9", "optim.decay_steps=6")
    assert answer.status == 0 and "another curve" not in answer.out, answer


def test_nothing_changed_and_nothing_said(finished: Finished, run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    answer = go_on(finished, run)
    assert answer.status == 0 and "optim." not in answer.out and "another curve" not in answer.out
