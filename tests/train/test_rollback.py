"""A run that diverges returns to a healthy checkpoint, on any layout and after any kill, as one that was told to."""

import errno
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.checkpoint.folders import discard_after
from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.names import folder_name
from colonnade.config.load import load
from colonnade.errors import ColonnadeError
from colonnade.launch import launch
from colonnade.lock import locked
from colonnade.mesh.mesh import Mesh
from colonnade.report.page import state_of
from colonnade.report.record import read_run
from colonnade.train import loop, rollbacks
from colonnade.train.change import in_force
from colonnade.train.corpus import curriculum_of, open_corpus
from colonnade.train.divergence import Divergence
from colonnade.train.metadata import metadata_of
from colonnade.train.monitor import set_aside
from colonnade.train.recovery import restore
from colonnade.train.rollback import Rollback
from colonnade.train.rollback_options import RollbackOptions
from colonnade.train.run_folder import ROLLBACKS, checkpoints
from colonnade.train.state import build_state, learning_rate_of
from colonnade.train.undo import _weighed, return_to_newest, roll_back
from tests.commands import Answer, colonnade, forked, here
from tests.runs import Finished, assert_same, events, metrics, samples_of, saved_steps, snapshot, tensors
from tests.slow import first_fast
from tests.tiny import TinyCorpus, write_config
from tests.told import Told

assert loop, "imported once, here, and not by every forked rank"

POISON = 9 * 4  # position of the batch of step 10
RUN = [
    "train.steps=12",
    "train.evaluate_every=8",
    "checkpoint.keep=3",
    "divergence.then=roll_back",
    "divergence.healthy_for=2",
    "divergence.patience=1",
]
LONGER = "train.steps=16"
LAYOUTS = {"serial": [], "tp=2": ["parallel.tp=2"], "dp=2 zero=3": ["parallel.dp=2", "parallel.zero=3"]}
LAYOUTS["dp=2 zero=1"] = ["parallel.dp=2", "parallel.zero=1", "checkpoint.asynchronous=true"]
LAYOUTS["pp=2"] = ["parallel.pp=2"]


def poisoned(rank: int, *, rate: float = math.nan, then: Callable[[Any], None] = lambda state: None) -> None:
    """The batch at POISON makes a step with another learning rate: nan corrupts all weights."""
    step = loop.train_step

    def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
        if state.samples != POISON:
            return step(state, *arguments, **more)
        before, state.learning_rate = state.learning_rate, lambda number: rate
        try:
            return step(state, *arguments, **more)
        finally:
            state.learning_rate = before
            then(state)

    loop.train_step = train_step  # type: ignore[assignment]


def clean(rank: int) -> None:
    """Nothing is poisoned."""


def train(config: Path, folder: Path, *more: str, first: Callable[[int], None] = poisoned) -> Answer:
    ranks = 2 if any(each.startswith("parallel.") and each.endswith("=2") for each in more) else 1
    return forked("train", config, f"run.folder={folder}", *RUN, *more, first=first, num_ranks=ranks)


@dataclass(frozen=True)
class Returned:
    """A run of one rank that has diverged and returned."""

    folder: Path
    answer: Answer


@pytest.fixture(scope="module")
def returned(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("returned")
    answer = train(write_config(corpus, folder), folder / "run")
    assert answer.status == 0, answer
    return Returned(folder / "run", answer)


@pytest.mark.slow
@pytest.mark.parametrize("layout", first_fast(["dp=2 zero=1", "serial", "tp=2", "dp=2 zero=3", "pp=2"]))
def test_it_returns_and_passes_over_the_batches(
    config: Path, tmp_path: Path, request: pytest.FixtureRequest, layout: str
) -> None:
    """The nan shows at step 11; step 8 has the newest checkpoint with two good steps behind it. It goes on with the
    batches that would have been those of step 12, as a run without poison that is told to.
    """
    run, by_hand = tmp_path / "run", tmp_path / "by hand"
    if layout == "serial":
        returned: Returned = request.getfixturevalue("returned")
        run, answer = returned.folder, returned.answer
    else:
        answer = train(config, run, *LAYOUTS[layout])
    assert answer.status == 0, answer
    assert (
        "Step 11 has loss nan and gradient norm nan: the run has diverged. It returns to step_00000008, to pass over "
    )
    assert "the batches of 3 steps." in answer.out and "Finished 12 steps" in answer.out
    told = [each for each in events(run) if each["event"] in ("diverged", "rolled back")]
    assert [(each["event"], each.get("first_sign"), each.get("to"), each.get("skip")) for each in told] == [
        ("diverged", 11, None, None),
        ("rolled back", None, 8, 3),
    ]
    assert [line["step"] for line in metrics(run)] == list(range(1, 13))
    undone = [json.loads(line)["step"] for line in (run / "undone.jsonl").read_text().splitlines()]
    assert undone == [9, 10], "and what the steps said that are not the run's any more is kept"

    assert (
        train(config, by_hand, *LAYOUTS[layout], "train.steps=8", "optim.decay_steps=12", first=lambda _: None).status
        == 0
    )
    assert here("rollback", by_hand, 8, "--skip", 3).status == 0
    assert train(config, by_hand, *LAYOUTS[layout], first=lambda _: None).status == 0
    assert_same(run, by_hand)


@pytest.mark.slow
def test_every_layout_decides_alike(config: Path, tmp_path: Path) -> None:
    """A spike this time, in float64, with a lowered learning rate: the same losses to rounding."""
    more = ["train.precision=fp64", "divergence.spike=4", "divergence.window=5", "divergence.rate_factor=0.5"]
    more += ["divergence.rate_steps=3", LONGER]

    def spiked(rank: int) -> None:
        poisoned(rank, rate=3.0)

    for name, layout in {"serial": [], "tp": ["parallel.tp=2"], "pp": ["parallel.pp=2"]}.items():
        answer = train(config, tmp_path / name, *more, *layout, first=spiked)
        assert answer.status == 0 and "exceeds" in answer.out, answer
        assert metrics(tmp_path / name) == [
            pytest.approx(line, rel=1e-9, abs=1e-9) for line in metrics(tmp_path / "serial")
        ]
        ours, theirs = rollbacks.read(tmp_path / name), rollbacks.read(tmp_path / "serial")
        assert [each.model_copy(update={"reason": "", "id": ""}) for each in ours] == [
            each.model_copy(update={"reason": "", "id": ""}) for each in theirs
        ]
        (rollback,) = ours
        assert (rollback.to, rollback.detected, rollback.skip, rollback.rate_until) == (8, 11, 3, 14)
        rate = learning_rate_of(load(config, [*RUN, *more, *layout]))
        expected = [rate(step) * (0.5 if 8 < step <= 14 else 1.0) for step in range(1, 17)]
        assert [line["learning_rate"] for line in metrics(tmp_path / name)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("moment", first_fast(["written", "discarded", "read"]))
def test_a_rollback_that_is_killed_goes_on(
    config: Path, returned: Returned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between its parts. Whoever starts again needs no poison: it is behind. A copy in memory of a later step, which
    the run has left behind, is not gone on from.
    """
    run = tmp_path / "run"
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(launch.MEMORY, str(tmp_path / "memory"))
    copies = "checkpoint.memory_every=1"

    def killed(rank: int) -> None:
        poisoned(rank)
        from colonnade.train import undo

        def die(*arguments: Any, **more: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "written":
            undo.discard_after = die
        elif moment == "discarded":
            undo.gather_texts = die
        else:
            undo.recovery.restore = lambda *arguments, real=undo.recovery.restore, **more: (
                real(*arguments, **more) if arguments[0].step < 9 else die()
            )

    assert train(config, run, copies, first=killed).status == -signal.SIGKILL
    assert (saved_steps(run) == [6, 8, 10]) == (moment == "written")
    assert train(config, run, copies).status == 0
    assert_same(run, returned.folder)
    (only,), (told,) = rollbacks.read(run), [event for event in events(run) if event["event"] == "rolled back"]
    assert told.items() >= only.model_dump().items(), "whenever it was killed, it is told once"


@pytest.mark.slow
def test_a_run_that_goes_on_later_knows_its_rollbacks(config: Path, tmp_path: Path) -> None:
    """Stopped behind one: the checkpoint has the place in the data, and the lowered rate."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    more = ["divergence.rate_factor=0.25", "divergence.rate_steps=4", "train.evaluate_every=4", LONGER]
    assert train(config, whole, *more).status == 0
    assert train(config, run, *more, "train.steps=12", "optim.decay_steps=16").status == 0
    answer = train(config, run, *more)
    assert answer.status == 0 and "(step 12, sample 60)" in answer.out, "what was done since is not done again"
    assert_same(run, whole)


@pytest.mark.slow
def test_a_restart_before_the_divergence_sees_it_alike(config: Path, tmp_path: Path) -> None:
    """The losses that a spike is held against are in the checkpoint: behind it there are too few for a window."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    more = ["divergence.spike=4", "divergence.window=5", "train.evaluate_every=4"]

    def spiked(rank: int) -> None:
        poisoned(rank, rate=3.0)

    assert train(config, whole, *more, first=spiked).status == 0
    assert train(config, run, *more, "train.steps=8", "optim.decay_steps=12", first=spiked).status == 0
    answer = train(config, run, *more, first=spiked)
    assert answer.status == 0 and "It returns to step_00000008" in answer.out, answer
    assert_same(run, whole)


@pytest.mark.slow
def test_moments_of_weights_that_were_frozen_in_the_checkpoint_begin_at_zero_again(
    config: Path, tmp_path: Path
) -> None:
    """It has none of them, and those of steps that are undone are nan."""
    frozen = 'parts.frozen=["embedding*", "blocks.0.*"]'
    assert forked("train", config, "train.steps=2", "optim.decay_steps=6", frozen).status == 0
    settings, monitor = load(config), SimpleNamespace(go_back=lambda step: None)
    corpus = open_corpus(settings)
    started, diverged = (build_state(settings, Mesh(), corpus.vocab_size, torch.device("cpu")) for _ in range(2))
    restore(started, settings, corpus)
    for kept in diverged.optimizer_state:
        for moment in kept.values():
            moment.fill_(math.nan)
    return_to_newest(diverged, settings, corpus, monitor)  # type: ignore[arg-type]
    assert diverged.step == 2
    for bucket, ours, theirs in zip(started.buckets, diverged.optimizer_state, started.optimizer_state, strict=True):
        assert all(torch.equal(ours[name], moment) for name, moment in theirs.items()), bucket.name


@pytest.mark.slow
def test_the_validation_loss_is_nearly_that_of_a_clean_run(config: Path, tmp_path: Path) -> None:
    seldom = ["train.steps=40", "train.evaluate_every=40", "checkpoint.every=8"]  # it returns to step 8 all the same
    assert train(config, tmp_path / "clean", *seldom, first=clean).status == 0
    assert train(config, tmp_path / "run", *seldom).status == 0
    expected, found = (metrics(tmp_path / name)[-1]["validation_loss"] for name in ("clean", "run"))
    assert found == pytest.approx(expected, rel=0.01) and found != expected


@pytest.mark.slow
@pytest.mark.parametrize(("retry_for", "status"), [(900, 0), (0, 2)])
def test_a_save_that_fails_beside_it_is_tried_again(
    config: Path, returned: Returned, tmp_path: Path, retry_for: int, status: int
) -> None:
    """That of step 10, in the background while step 11 diverges."""

    def full(rank: int) -> None:
        poisoned(rank)
        from colonnade.checkpoint import files

        write, left = files._HashingStream.write, [1]

        def refuse(stream: Any, data: Any) -> int:
            if left and "step_00000010" in stream.file.name:
                left.clear()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(stream, data)

        files._HashingStream.write = refuse  # type: ignore[method-assign]

    run = tmp_path / "run"
    answer = train(config, run, "checkpoint.asynchronous=true", f"checkpoint.retry_for={retry_for}", first=full)
    assert answer.status == status and ("The disk is full" in answer.err) == (status == 2), answer
    if status == 0:
        told = [each["event"] for each in events(run)]
        assert told.index("diverged") < told.index("save failed") < told.index("rolled back")
        assert_same(run, returned.folder)


@pytest.mark.slow
def test_tries_end(config: Path, tmp_path: Path) -> None:
    """Whatever is passed over, the same place in the run diverges: the poison follows the step, not the data."""

    def hopeless(rank: int) -> None:
        step = loop.train_step

        def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
            state.learning_rate = (lambda number: math.nan) if state.step == 9 else (lambda number: 1e-3)
            return step(state, *arguments, **more)

        loop.train_step = train_step  # type: ignore[assignment]

    answer = train(config, tmp_path / "run", "divergence.tries=2", first=hopeless)
    assert answer.status == 2 and "It has returned 2 times already, which is divergence.tries." in answer.err, answer
    assert [each["to"] for each in events(tmp_path / "run") if each["event"] == "rolled back"] == [8, 8]
    first, second = rollbacks.read(tmp_path / "run")
    assert first != second == first.model_copy(update={"id": second.id}), "equal, and not the same"
    assert saved_steps(tmp_path / "run") == [6, 8, 10], "the last time it was not taken away"


@pytest.mark.parametrize(("then", "more"), [("roll_back", ["no rollback"]), ("stop", [])])
def test_a_run_that_cannot_return_by_itself_says_so(config: Path, then: str, more: list[str]) -> None:
    """As long as nothing does, it may still: whoever watches the run waits."""
    settings, told = load(config, [*RUN, f"divergence.then={then}"]), Told()
    saving = SimpleNamespace(wait_out=lambda _: None)
    given: Any = {"config": settings, "mesh": Mesh(), "corpus": None, "monitor": told, "copies": None}
    with pytest.raises(ColonnadeError, match="step 3 has loss nan: the run has diverged"):
        roll_back(Divergence(3, 3, "has loss nan"), SimpleNamespace(changes=[]), saving, **given)  # type: ignore[arg-type]
    assert [event["then"] for event in told.of("diverged")] == [then]
    assert [event["reason"][:6] for event in told.of("no rollback")] == ["step 3"] * len(more)


def test_nothing_is_lost_where_a_run_cannot_return(config: Path, tmp_path: Path) -> None:
    """For want of data, or because what it would return to is damaged. Its checkpoints stay, and what is told begins
    with the divergence.
    """
    run, told = tmp_path / "run", Told()
    keys = ["data.order=all_epochs", "data.epochs=1", f"run.folder={run}", "checkpoint.keep=9", *RUN[3:]]
    corpus = open_corpus(load(config, ["data.order=all_epochs", "data.epochs=100"]))
    steps = len(corpus.datasets.train) // 4
    assert here("train", config, *keys, f"train.steps={steps}").status == 0
    before, settings = snapshot(run), load(config, [*keys, f"train.steps={steps}"])
    saving = SimpleNamespace(wait_out=lambda _: None)
    given: Any = {"config": settings, "mesh": Mesh(), "corpus": open_corpus(settings), "monitor": told, "copies": None}
    with pytest.raises(
        ColonnadeError,
        match=rf"^step {steps} has loss nan: the run has diverged\. It does not return to step_\d+: Up to "
        rf"train\.steps = {steps}, behind step .* Set train\.steps to ",
    ):
        roll_back(Divergence(steps, steps, "has loss nan"), SimpleNamespace(changes=[]), saving, **given)  # type: ignore[arg-type]
    assert snapshot(run) == before and len(told.of("no rollback")) == 1
    newest = max(step for step in saved_steps(run) if step + settings.divergence.healthy_for < steps)
    for file in ("__0_0.distcp", "manifest.json"):
        damaged = run / "checkpoints" / folder_name(newest) / file
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        before = snapshot(run)
        with pytest.raises(ColonnadeError, match=rf"It does not return to {folder_name(newest)}: .*{file} is damaged"):
            roll_back(Divergence(steps, steps, "has loss nan"), SimpleNamespace(changes=[]), saving, **given)  # type: ignore[arg-type]
        assert snapshot(run) == before


@pytest.mark.slow
def test_data_that_end_end_the_run_instead(config: Path, tmp_path: Path) -> None:
    """As many epochs as the run needs, and no batch more: none may be passed over."""
    samples = ["data.order=all_epochs", LONGER]
    answer = train(config, tmp_path / "run", *samples, "data.epochs=1")
    needed = int(answer.err.split("epochs of ")[1].split(" ")[0].replace(",", "")) if answer.status else 10**6
    epochs = max(1, -(-64 // needed))
    steps = epochs * needed // 4
    answer = train(config, tmp_path / "run", *samples, f"data.epochs={epochs}", f"train.steps={steps}")
    assert answer.status == 2 and "Traceback" not in answer.err and "samples" in answer.err, answer


def test_batches_that_an_earlier_rollback_passes_over_count_for_whether_data_last(config: Path, tmp_path: Path) -> None:
    """Of two to the same checkpoint: three batches may be passed over where the run has three to spare."""
    whole = [f"run.folder={tmp_path / 'run'}", "data.order=all_epochs", "data.epochs=1", "checkpoint.keep=9"]
    there = len(open_corpus(load(config, whole)).datasets.train)
    keys = [*whole, f"train.steps={there // 4 - 3}"]
    assert here("train", config, *keys).status == 0
    loaded = load(config, keys)
    corpus, first = open_corpus(loaded), Rollback(to=4, skip=2)
    assert _weighed(Rollback(to=4, skip=1), [first], loaded, corpus)[0] == ""
    assert _weighed(Rollback(to=4, skip=2), [], loaded, corpus)[0] == ""
    assert "Set train.steps to" in _weighed(Rollback(to=4, skip=2), [first], loaded, corpus)[0]


@pytest.fixture
def shortened(config: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A run of all of its data, which a change behind step 4 has made one of eight steps, and its options."""
    run = tmp_path / "run"
    keys = [f"run.folder={run}", "data.order=all_epochs", "data.epochs=1", "checkpoint.keep=9"]
    there = len(open_corpus(load(config, ["data.order=all_epochs", "data.epochs=100"])).datasets.train)
    keys.append(f"train.steps={there // 4}")
    run.mkdir()
    (run / "changes.jsonl").write_text('{"change": {"train.steps": 8}, "at": 4}\n')
    assert here("train", config, *keys).status == 0 and saved_steps(run) == [2, 4, 6, 8]
    return run, keys


def test_a_run_that_was_made_shorter_returns_by_itself_to_before_that(
    shortened: tuple[Path, list[str]], config: Path
) -> None:
    """The data need to last for what it is now alone, here and at each start."""
    run, keys = shortened
    began, told = load(config, [*keys, "divergence.then=roll_back", "divergence.healthy_for=2"]), Told()
    corpus = open_corpus(began)
    state = build_state(began, Mesh(), corpus.vocab_size, torch.device("cpu"))
    restore(state, began, corpus)
    saving: Any = SimpleNamespace(wait_out=lambda _: None)
    monitor: Any = SimpleNamespace(event=told.event, say=told.say, go_back=lambda step: set_aside(run, step))
    roll_back(
        Divergence(5, 5, "has loss nan"),
        state,
        saving,
        config=in_force(began, state.changes),
        mesh=Mesh(),
        corpus=corpus,
        monitor=monitor,
        copies=cast(Any, SimpleNamespace(forget=lambda: None)),
    )
    assert (state.step, state.samples, saved_steps(run)) == (2, (2 + 3) * 4, [2])
    assert here("train", config, *keys, "--dry-run").status == here("train", config, *keys).status == 0
    assert saved_steps(run) == [2, 4, 6, 8] and samples_of(run) == (8 + 3) * 4


def test_a_change_before_that_is_made_again_too(config: Path, tmp_path: Path) -> None:
    """Though the data do not last for the run as it is up to there."""
    run = tmp_path / "run"
    keys = [f"run.folder={run}", "data.order=all_epochs", "data.epochs=1", "checkpoint.keep=9"]
    there = len(open_corpus(load(config, ["data.order=all_epochs", "data.epochs=100"])).datasets.train)
    keys.append(f"train.steps={there // 4}")
    run.mkdir()
    asked = [{"change": {"optim.learning_rate": 1e-4}, "at": 3}, {"change": {"train.steps": 8}, "at": 4}]
    (run / "changes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    assert here("train", config, *keys).status == 0
    rates = [line["learning_rate"] for line in metrics(run)]
    assert here("rollback", run, 2, "--skip", 3).status == 0
    told = here("train", config, *keys, "--dry-run")
    assert told.status == 0 and "refuse" not in told.out, told
    assert here("train", config, *keys).status == 0
    assert [line["learning_rate"] for line in metrics(run)] == rates
    assert [each["step"] for each in events(run) if each["event"] == "changed"] == [3, 4] * 2


def test_a_run_that_was_made_shorter_returns_by_hand_to_before_that(
    shortened: tuple[Path, list[str]], config: Path
) -> None:
    run, keys = shortened
    longest = int(keys[-1].partition("=")[2]) - 8
    refused = here("rollback", run, 2, "--skip", longest + 1)
    assert refused.status == 2 and "Set train.steps to 7 or less" in refused.err, refused
    assert here("rollback", run, 2, "--skip", longest).status == 0
    assert here("train", config, *keys).status == 0 and saved_steps(run) == [2, 4, 6, 8]


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the run that has ended at step 6; steps 4 and 6 are saved."""
    shutil.copytree(finished.folder, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("option", ["--skip", "--rate-steps", "--rewarm"])
def test_a_number_of_steps_that_no_run_has(run: Path, option: str) -> None:
    answer = here("rollback", run, 4, option, 10**19)
    assert answer.status == 2 and f"{option} {10**19} is more steps than a run can have" in answer.err
    assert saved_steps(run) == [4, 6]


def test_nothing_is_lost_where_the_data_would_end_before_the_run(config: Path, tmp_path: Path) -> None:
    """As many epochs as the run needs: a batch may be passed over where the run has one to spare."""
    run = tmp_path / "run"
    keys = ["data.order=all_epochs", "data.epochs=1", f"run.folder={run}", "checkpoint.keep=9"]
    there = len(open_corpus(load(config, ["data.order=all_epochs", "data.epochs=100"])).datasets.train)
    steps = there // 4 - 1
    assert here("train", config, *keys, f"train.steps={steps}").status == 0
    before = snapshot(run)
    refused = here("rollback", run, 4, "--skip", 2)
    assert refused.status == 2 and f"Set train.steps to {steps - 1} or less" in refused.err, refused
    assert f"behind step 4 from sample {6 * 4 + 1} on, the run takes {steps * 4 + 8} samples" in refused.err
    assert snapshot(run) == before
    assert here("rollback", run, 4, "--skip", 1).status == 0 and saved_steps(run) == [4]
    again = here("train", config, *keys, f"train.steps={steps + 1}", "--dry-run")
    assert again.status == 2 and f"Set train.steps to {steps} or less" in again.err, again
    assert here("train", config, *keys, f"train.steps={steps}").status == 0
    longer = here("train", config, *keys, f"train.steps={steps + 1}")  # with a checkpoint behind the rollback
    assert longer.status == 2 and f"Set train.steps to {steps} or less" in longer.err, longer


def test_a_run_returns_though_its_data_are_not_here(config: Path, tmp_path: Path) -> None:
    """Then nobody knows here whether they last: the run will say."""
    run = tmp_path / "run"
    keys = ["data.order=all_epochs", "data.epochs=1", "train.steps=4"]
    assert here("train", config, *keys).status == 0
    written = run / "config.toml"
    written.write_text(re.sub(r"(?m)^train = .*$", 'train = "nowhere"', written.read_text()))
    assert here("rollback", run, 2, "--skip", 1).status == 0 and saved_steps(run) == [2]


def test_by_hand(finished: Finished, run: Path) -> None:
    answer = here("rollback", run, 4, "--skip", 2, "--rate-factor", 0.5, "--rate-steps", 1)
    assert answer.out == (
        f"{run} returns to step 4, to pass over the batches of 2 steps, with 0.5 × the learning rate to step 5. "
        "The checkpoints of steps 6 are deleted.\n"
    )
    assert saved_steps(run) == [4] and len(rollbacks.read(run)) == 1
    told = events(run)[-1]
    assert told["event"] == "rolled back" and {"to": 4, "skip": 2, "reason": "asked for"}.items() <= told.items()
    assert state_of(read_run(run)) == "finished", "nobody has started it since"
    undone = [json.loads(line)["step"] for line in (run / "undone.jsonl").read_text().splitlines()]
    assert undone == [5, 6] and [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert forked("train", finished.config, f"run.folder={run}").status == 0
    before, after = metrics(finished.folder), metrics(run)
    assert after[:4] == before[:4] and after[4]["loss"] != before[4]["loss"]
    assert [x["learning_rate"] for x in after[4:]] == [before[4]["learning_rate"] / 2, before[5]["learning_rate"]]
    assert after[-1]["tokens"] == before[-1]["tokens"] and samples_of(run) == samples_of(finished.folder) + 2 * 4


def spoil(checkpoint: Path, damage: str) -> None:
    tensors = checkpoint / "__0_0.distcp"
    if damage == "gone":
        tensors.unlink()
    else:
        content = tensors.read_bytes()
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(("damage", "step", "other"), [("flipped", 4, 6), ("gone", 4, 6), ("gone", 6, 4)])
def test_by_hand_a_run_does_not_return_to_a_checkpoint_that_is_damaged(
    run: Path, damage: str, step: int, other: int
) -> None:
    """The sound ones before it and behind it stay, and are named."""
    spoil(checkpoints(run) / folder_name(step), damage)
    before = snapshot(run)
    answer = here("rollback", run, step)
    assert answer.status == 2 and snapshot(run) == before, answer
    assert "is damaged" in answer.err and "Delete" not in answer.err and "delete" not in answer.err
    assert answer.err.endswith(f"is as it was. Other checkpoints are of these steps: {other}.\n")


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_rollback_that_was_killed_deletes_nothing_where_its_checkpoint_is_damaged(
    finished: Finished, run: Path, damage: str
) -> None:
    """Two faults at once. Somebody says where the run goes on, as from its newest."""
    rollbacks.write(run, [Rollback(to=4, id="it")])
    spoil(checkpoints(run) / folder_name(4), damage)
    before, command = snapshot(checkpoints(run)), ("train", finished.config, f"run.folder={run}", "train.steps=7")
    answer = here(*command)
    assert answer.status == 2 and snapshot(checkpoints(run)) == before, answer
    assert "The run was killed in its rollback to step 4, which cannot be finished: " in answer.err
    assert "is damaged" in answer.err and "Delete" not in answer.err
    assert answer.err.endswith(f"of these steps: 6. To return to one of them: `colonnade rollback {run} STEP`.\n")
    assert here("rollback", run, 6).status == here(*command).status == 0
    assert [line["step"] for line in metrics(run)] == [*range(1, 8)]


def test_a_run_that_is_at_work_is_left_alone(run: Path) -> None:
    before = snapshot(run)
    with locked(run, "colonnade train"):
        answer = here("rollback", run, 4)
    assert answer.status == 2 and f"{run} is in use by `colonnade train`" in answer.err, answer
    assert answer.err.endswith("Wait until it has ended, or stop it.\n") and snapshot(run) == before


@pytest.mark.slow
def test_a_change_comes_in_its_step_behind_other_batches(finished: Finished, run: Path) -> None:
    """Also when the run returns once more: at the same place in its data, and to the same bits."""
    assert here("rollback", run, 4, "--skip", 2).status == 0
    assert here("change", run, "train.global_batch_size=8", "--at", 5).status == 0
    assert forked("train", finished.config, f"run.folder={run}").status == 0
    assert [line["tokens"] for line in metrics(run)[4:]] == [5 * 4 * 16, 5 * 4 * 16 + 8 * 16]
    assert samples_of(run) == 7 * 4 + 8
    first = shutil.copytree(run, run.with_name("first"))
    assert here("rollback", run, 4, "--skip", 2).status == 0
    assert forked("train", finished.config, f"run.folder={run}").status == 0
    assert_same(run, first)


@pytest.fixture
def grown(config: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A run of six steps, whose batch was changed behind the fourth from 4 samples to 8, and its options."""
    run = tmp_path / "grown"
    options = [f"run.folder={run}", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "optim.decay_steps=9"]
    assert here("train", config, *options).status == 0
    assert here("change", run, "train.global_batch_size=8", "train.steps=6").status == 0
    assert here("train", config, *options).status == 0 and saved_steps(run) == [2, 4, 6]
    return run, options


def test_batches_of_a_changed_size_are_passed_over_as_they_were(
    grown: tuple[Path, list[str]], config: Path, tmp_path: Path
) -> None:
    """The checkpoint that the run returns to knows nothing of the change, which comes behind its step."""
    run, options = grown
    inside = Path(shutil.copytree(run, tmp_path / "inside"))
    assert here("rollback", run, 4, "--skip", 2).status == here("rollback", inside, 2, "--skip", 4).status == 0
    assert [rollbacks.read(folder)[0].passed for folder in (run, inside)] == [2 * 8, 2 * 4 + 2 * 8]
    assert here("train", config, *options).status == 0
    metadata = metadata_of(newest := checkpoints(run) / folder_name(6), read_manifest(newest))
    assert metadata.samples == 4 * 4 + 2 * 8 + 2 * 8, "no sample twice"
    elsewhere = [f"run.folder={inside}", *options[1:]]
    assert here("train", config, *elsewhere).status == here("rollback", inside, 2, "--skip", 4 + 3).status == 0
    assert rollbacks.read(inside)[0].passed == (2 * 4 + 2 * 8) + 2 * 4 + 8, "those of the first one, and three more"


@pytest.mark.slow
def test_a_batch_changes_behind_passed_over_batches_that_have_reached_the_last_phase(
    config: Path, tmp_path: Path
) -> None:
    """Where the run is in its data, with what it has passed over, and not where it would be without."""
    keys = ["curriculum.tokens=[0, 400]", "curriculum.seq_length=[16, 16]", "curriculum.global_batch_size=[4, 8]"]
    keys += [f"run.folder={tmp_path / 'run'}", "train.global_batch_size=8", "checkpoint.every=2", "checkpoint.keep=9"]
    assert here("train", config, *keys, "train.steps=4").status == 0
    assert here("rollback", tmp_path / "run", 2, "--skip", 10).status == 0
    assert here("change", tmp_path / "run", "train.global_batch_size=6", "--at", 3).status == 0
    told = here("train", config, *keys, "train.steps=4", "--dry-run")
    assert told.status == 0 and "refuse" not in told.out, told
    assert here("train", config, *keys, "train.steps=4").status == 0
    tokens = [line["tokens"] for line in metrics(tmp_path / "run")]
    assert tokens[3] - tokens[2] == 6 * 16


def test_a_batch_changes_in_its_step_behind_batches_that_are_no_multiple_of_it(finished: Finished, run: Path) -> None:
    """One of 6 samples is passed over where all before had 4; and it may change again in the step behind."""
    assert here("rollback", run, 4).status == 0
    rollbacks.write(run, [rollbacks.read(run)[0].model_copy(update={"skip": 1, "passed": 6})])
    for batch, at in ((6, 4), (10, 5)):
        assert here("change", run, f"train.global_batch_size={batch}", "--at", at).status == 0
    assert here("train", finished.config, f"run.folder={run}").status == 0
    assert [line["tokens"] // 16 for line in metrics(run)] == [4, 8, 12, 16, 16 + 6, 22 + 10]
    assert samples_of(run) == 32 + 6


def test_a_run_that_returns_by_itself_counts_them_so_too(grown: tuple[Path, list[str]], config: Path) -> None:
    loaded = load(config, grown[1])
    changes = metadata_of(newest := checkpoints(grown[0]) / folder_name(6), read_manifest(newest)).changes
    now = in_force(loaded, changes)
    corpus = replace(open_corpus(loaded), curriculum=curriculum_of(now))

    def passed(rollback: Rollback, before: list[Rollback]) -> list[list[int]]:
        reason, measured = _weighed(rollback, before, now, corpus)
        assert not reason and measured["passed"] == sum(count * size for count, size in measured["batches"])
        return measured["batches"]  # type: ignore[no-any-return]

    assert passed(Rollback(to=4, skip=2), []) == [[2, 8]]
    assert passed(Rollback(to=2, skip=3), []) == [[2, 4], [1, 8]]
    assert passed(Rollback(to=4, skip=1), [Rollback(to=4, skip=1, passed=8)]) == [[1, 8]]
    now = in_force(loaded, [changes[0].model_copy(update={"position": 4 * 4 + 2 * 8})])
    corpus = replace(corpus, curriculum=curriculum_of(now))
    before = [Rollback(to=4, skip=2, passed=2 * 8, batches=[[2, 8]])]
    assert passed(Rollback(to=2, skip=2 + 2 + 1), before) == [[2, 4], [3, 8]]


def test_a_second_one_takes_the_place_of_the_first(run: Path) -> None:
    assert here("rollback", run, 4, "--skip", 2).status == here("rollback", run, 4, "--skip", 5).status == 0
    (only,) = rollbacks.read(run)
    assert only == Rollback(to=4, skip=5, passed=5 * 4, batches=[[5, 4]], reason="asked for", id=only.id)


def test_a_second_one_with_the_same_options_is_another(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it has taken away the checkpoints that know the first one, it is finished by the next start."""
    asked = RollbackOptions(skip=2)
    first, _ = rollbacks.by_hand(Path(shutil.copytree(run, tmp_path / "before")), 4, asked)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rollbacks, "discard_after", killed)
        rollbacks.by_hand(run, 4, asked)
    monkeypatch.setattr(rollbacks, "metadata_of", lambda *_: SimpleNamespace(rollbacks=[first]))
    rollbacks.finish(run)
    assert saved_steps(run) == [4]


def test_one_to_a_later_step_is_left_behind_by_one_to_an_earlier_step(finished: Finished, run: Path) -> None:
    """The checkpoint of step 6 is of the new course then, which passes over nothing behind it."""
    config = load(finished.config, [f"run.folder={run}"])
    corpus = open_corpus(config)

    def position(recorded: list[Rollback]) -> int:
        rollbacks.write(run, recorded)
        state = build_state(config, Mesh(), corpus.vocab_size, torch.device("cpu"))
        restore(state, config, corpus)
        return state.samples

    later, earlier = Rollback(to=6, skip=3), Rollback(to=4, skip=1)
    assert position([later, earlier]) == position([earlier]) == position([]) == 6 * 4
    assert position([earlier, later]) == position([later]) == 9 * 4


def test_one_to_a_checkpoint_that_was_damaged_is_forgotten(finished: Finished, run: Path) -> None:
    """The run goes on from before it: what is saved from there on is not to be taken away for want of it."""
    rollbacks.write(run, [Rollback(to=6, skip=3)])
    (run / "checkpoints" / folder_name(6)).rename(run / "checkpoints" / f"damaged_{folder_name(6)}")
    config = load(finished.config, [f"run.folder={run}"])
    corpus = open_corpus(config)
    state = build_state(config, Mesh(), corpus.vocab_size, torch.device("cpu"))
    restore(state, config, corpus)
    assert (state.step, state.rollbacks, rollbacks.read(run)) == (4, [], [])


def test_a_list_of_before_there_were_names_is_read(run: Path) -> None:
    (run / ROLLBACKS).write_text('[{"to": 4, "skip": 2, "reason": "asked for"}]')
    assert rollbacks.read(run) == [Rollback(to=4, skip=2, reason="asked for")]


@pytest.mark.slow
def test_it_warms_up_again(finished: Finished, run: Path, tmp_path: Path) -> None:
    """A run that is killed meanwhile goes on with it, on another layout as well."""
    answer = here("rollback", run, 4, "--rewarm", 4)
    assert "to take the same batches, warming up again in 4 steps" in answer.out, answer
    keys, killed = ("train.steps=9", "checkpoint.keep=4"), tmp_path / "killed"
    assert forked("train", finished.config, f"run.folder={run}", *keys).status == 0
    shutil.copytree(run, killed)
    discard_after(checkpoints(killed), 6)
    assert forked("train", finished.config, f"run.folder={killed}", *keys, "parallel.tp=2", num_ranks=2).status == 0
    rate = learning_rate_of(load(finished.config, keys))
    rates = [line["learning_rate"] for line in metrics(run)[4:]]
    assert rates == [rate(step) * min(1.0, (step - 4) / 4) for step in range(5, 10)]
    assert [line["learning_rate"] for line in metrics(killed)[4:]] == rates
    assert metrics(killed)[-1]["loss"] == pytest.approx(metrics(run)[-1]["loss"], rel=1e-4)  # fp32


@pytest.mark.slow
def test_train_does_it_first(finished: Finished, run: Path) -> None:
    asked = ("--rollback", 4, "--skip", 1, "--rewarm", 3)
    answer = colonnade("train", finished.config, f"run.folder={run}", *asked, "parallel.dp=2")
    told = f"{run} returns to step 4, to pass over the batches of 1 steps, warming up again in 3 steps."
    assert answer.status == 0 and told in answer.out, answer
    assert metrics(run)[-1]["tokens"] == 6 * 4 * 16 and samples_of(run) == 7 * 4


def test_by_train_too_a_run_returns_though_a_checkpoint_was_put_back_behind_an_earlier_return(
    finished: Finished, run: Path
) -> None:
    """Without it the run would be refused: which of both courses goes on is not known. Whoever returns says it."""
    assert here("rollback", run, 4).status == 0
    shutil.copytree(checkpoints(finished.folder) / folder_name(6), checkpoints(run) / folder_name(6))
    command = ("train", finished.config, f"run.folder={run}")
    refused = forked(*command)
    assert refused.status == 2 and "is of the course that the run has left" in refused.err, refused
    answer = forked(*command, "--rollback", 4)
    assert answer.status == 0 and "The checkpoints of steps 6 are deleted." in answer.out, answer
    assert_same(run, finished.folder)


def test_what_cannot_be_returned_to(finished: Finished, run: Path, tmp_path: Path) -> None:
    for arguments, told in {
        (run, 5): "has no step_00000005: a run returns to a step that it has saved. There are checkpoints of these "
        "steps: 4, 6.",
        (tmp_path / "nowhere", 4): "is not the folder of a run",
        (run, 4, "--rate-factor", 0.5): "--rate-factor 0.5 and --rate-steps 0 go together",
        (run, 4, "--rate-steps", 3): "--rate-factor 1 and --rate-steps 3 go together",
        (run, 4, "--rate-factor", 0, "--rate-steps", 2): "--rate-factor 0 would leave no learning rate",
        (run, 4, "--rate-factor", "-1", "--rate-steps", 2): "--rate-factor -1 would leave no learning rate",
        (run, 4, "--rate-factor", "nan", "--rate-steps", 2): "--rate-factor",  # by typer, or behind it
    }.items():
        answer = here("rollback", *arguments)
        assert answer.status == 2 and told in answer.err and "Traceback" not in answer.err, answer
    answer = forked("train", finished.config, f"run.folder={run}", "--rollback", 4, "parallel.dp=2", num_ranks=2)
    assert answer.status == 2 and f"`colonnade rollback {run} 4`" in answer.err
    answer = here("train", finished.config, "--skip", 4, "--rewarm", 2)
    assert answer.status == 2 and "--skip 4 --rewarm 2 says how to go on behind a rollback. Give --roll" in answer.err
    assert saved_steps(run) == [4, 6] and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dry-run", "--rollback", 4), "--dry-run stops before step 1 and changes nothing: --rollback 4 would"),
        (("--dry-run", "--rollback", 4, "--skip", 2), ": --rollback 4 and --skip 2 would have no effect. Leave --dry"),
        (("--dry-run", "--profile", 5), "--profile 5 would have no effect. Leave --dry-run out, or the other."),
        (("--audit", "--rollback", 4), "--audit runs one step of its own: --rollback 4 would have no effect."),
        (("--audit", "--skip", 4), ": --skip 4 would have no effect."),
        (("--audit", "--dry-run", "--profile", 5), ": --dry-run and --profile 5 would have no effect."),
    ],
)
def test_options_of_train_that_would_have_no_effect(
    finished: Finished, run: Path, options: tuple[object, ...], said: str
) -> None:
    before = snapshot(run)
    answer = here("train", finished.config, f"run.folder={run}", *options)
    assert answer.status == 2 and said in answer.err and answer.err.count("\n") == 1, answer
    assert snapshot(run) == before


def test_a_damaged_list_is_told(finished: Finished, run: Path) -> None:
    (run / ROLLBACKS).write_text('[{"to": -4}]')
    answer = forked("train", finished.config, f"run.folder={run}", "train.steps=7")
    assert answer.status == 2 and "rollbacks.json cannot be read" in answer.err and "Traceback" not in answer.err


def test_what_does_not_go_together_is_told_before_anything_runs(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = write_config(corpus, tmp_path)
    for keys, told in {
        ("divergence.then=roll_back", "divergence.skip_batches=false"): "would go the same way again",
        ("divergence.rate_factor=0.5",): "has no effect with rate_steps = 0",
        ("divergence.then=roll_back", "checkpoint.every=0"): "has nothing to return to",
        ("divergence.then=roll_back",): "Set checkpoint.keep = 14",
        ("divergence.then=roll_back", "divergence.skip_batches=false", "divergence.rewarm_steps=5"): "1 problem",
    }.items():
        answer = here("train", config, *keys)
        assert answer.status == 2 and told in answer.err, answer


def test_weights_are_those_of_before(returned: Returned) -> None:
    """All tensors of the last checkpoint are finite, moments too."""
    assert all(x.isfinite().all() for x in tensors(returned.folder).values())
