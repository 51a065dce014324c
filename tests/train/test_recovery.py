"""A run that is killed at any moment and started again is the run that was not: weights and metrics, bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint.manifest import read_manifest, to_json, verify
from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.saver import Saved
from colonnade.checkpoint.snapshot import Snapshot
from colonnade.config.defaults import BEFORE
from colonnade.config.load import load
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import CheckpointError, CopiesError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.optim.loss_scale import LossScale
from colonnade.train import recovery, state
from colonnade.train.change import Change, in_force
from colonnade.train.corpus import open_corpus
from colonnade.train.divergence import LossWatch
from colonnade.train.recovery import Checkpoints, restore, saving
from colonnade.train.save_retries import SaveRetries
from tests.commands import after_banner, environment, forked, start
from tests.distributed import run_on_ranks
from tests.runs import Finished, assert_same, events, metrics, saved_steps, tensors, whole_tensors
from tests.slow import first_fast
from tests.tiny import VOCAB_SIZE, TinyCorpus, made_up, write_config
from tests.tiny import config as config_of_tiny
from tests.told import Told
from tests.train.test_monitor import monitor, numbers

LAYOUTS = {"serial": [], "tp=2": ["parallel.tp=2"], "dp=2": ["parallel.dp=2"]}


def num_ranks(layout: Sequence[str]) -> int:
    return 2 if any(argument.startswith("parallel.") for argument in layout) else 1


def watch(run: Path, act: Callable[[int, str], None]) -> None:
    """Call `act(number, event)` before each thing that this process does with files of the run."""
    count, inside = 0, os.path.join(run, "")

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event.startswith(("open", "os.", "shutil.")) and arguments and inside in str(arguments[0]):
            act(count, f"{event} {str(arguments[0]).removeprefix(inside)} {arguments[1:2]}")
            count += 1

    sys.addaudithook(hook)


def killed_at(run: Path, moment: int) -> Callable[[int], None]:
    """Makes rank 0, which writes most, kill itself; the others follow it as under a launcher."""

    def die(number: int, event: str) -> None:
        if number == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda rank: None if rank else watch(run, die)


def moments(config: Path, run: Path, layout: Sequence[str], log: Path) -> list[str]:
    """Make an uninterrupted run, and tell all that rank 0 did with the files of it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)

    def note(number: int, event: str) -> None:
        os.write(descriptor, f"{event}\n".encode())

    answer = forked(
        "train",
        config,
        f"run.folder={run}",
        *layout,
        num_ranks=num_ranks(layout),
        first=lambda rank: None if rank else watch(run, note),
    )
    os.close(descriptor)
    assert answer.status == 0, answer
    return log.read_text().splitlines()


def live(config: Path, run: Path, layout: Sequence[str], *, until: int | None = None) -> None:
    """Run once: to the end, or until it is killed."""
    first = (lambda rank: None) if until is None else killed_at(run, until)
    answer = forked("train", config, f"run.folder={run}", *layout, num_ranks=num_ranks(layout), first=first)
    assert answer.status == (0 if until is None else -signal.SIGKILL), answer


Undisturbed = Callable[[str], tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def undisturbed(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """An uninterrupted run of a layout, not to be changed, and all that its rank 0 did with files: `moments`."""

    @cache
    def made(name: str) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("undisturbed")
        whole = folder / "whole"
        return whole, moments(write_config(corpus, folder), whole, LAYOUTS[name], folder / "log")

    return made


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(
    config: Path, undisturbed: Undisturbed, tmp_path: Path, name: str
) -> None:
    layout, (whole, done) = LAYOUTS[name], undisturbed(name)
    metric, publish, second = (
        next(number for number, event in enumerate(done) if word in event)
        for word in (
            "open metrics.jsonl ('a+',",
            "os.rename checkpoints/.step_00000002",
            "os.rename checkpoints/.step_00000004",
        )
    )
    chosen = [publish, second + 1] if layout else [metric + 1, publish - 3, publish, publish + 1, second, second + 1]
    for moment in chosen:
        live(config, tmp_path / "run", layout, until=moment)
    live(config, tmp_path / "run", layout)
    assert_same(tmp_path / "run", whole)
    told = [event["event"] for event in events(tmp_path / "run")]
    assert told[0] == "started" and "resumed" in told and told[-1] == "finished"
    assert not list((tmp_path / "run").rglob("*.partial")) and not list((tmp_path / "run").rglob("*.deleted"))


@pytest.mark.slow
def test_initial_weights_are_not_drawn_where_others_are_loaded(
    config: Path, finished: Finished, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))

    def refuse(*_: object) -> None:
        raise AssertionError("weights are drawn")

    def first(rank: int) -> None:
        state.initialize_ = refuse  # type: ignore[attr-defined]

    for folder, drawn in ((run, False), (tmp_path / "new", True)):
        answer = forked("train", config, f"run.folder={folder}", num_ranks=1, first=first)
        assert ("weights are drawn" in answer.err) == drawn and (answer.status == 0) != drawn, answer
    assert [event["event"] for event in events(run)].count("resumed") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("serial", 11), ("dp=2", 23)])
def test_a_run_that_is_killed_at_any_moment(
    config: Path, undisturbed: Undisturbed, tmp_path: Path, name: str, every: int
) -> None:
    """Before what rank 0 does with a file, every so many times, and then to the end; `make drills` does the others."""
    layout, (whole, done) = LAYOUTS[name], undisturbed(name)
    assert len(done) > 60
    for moment in range(0, len(done), every):
        live(config, tmp_path / "run", layout, until=moment)
        live(config, tmp_path / "run", layout)
        assert_same(tmp_path / "run", whole)
        shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_command_that_is_killed_by_the_clock(config: Path, tmp_path: Path) -> None:
    """The whole process group at once, at a random time of its training, three times; as tests/drills on others."""
    layout = [*LAYOUTS["tp=2"], "train.steps=40"]
    whole = forked("train", config, f"run.folder={tmp_path / 'whole'}", *layout, num_ranks=2)
    assert whole.status == 0, whole
    run, chance = tmp_path / "run", random.Random("tp=2")
    command = [sys.executable, "-m", "colonnade", "train", str(config), f"run.folder={run}", *layout]
    for _ in range(3):
        before = (run / "metrics.jsonl").read_bytes() if run.exists() else b""
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while process.poll() is None and (
            not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes() == before
        ):
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.3))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks of a layout see their supervisor go, and follow
        process.wait(30)
    assert subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, timeout=120).returncode == 0
    assert_same(run, tmp_path / "whole")


EXACT = ["train.precision=fp64", "optim.decay_steps=6", "checkpoint.every=0"]


@pytest.fixture(scope="module")
def exact(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one rank in float64."""
    folder = tmp_path_factory.mktemp("exact")
    assert forked("train", write_config(corpus, folder), *EXACT).status == 0
    return folder / "run"


@pytest.mark.parametrize(("before", "after"), first_fast([("dp=2", "tp=2"), ("tp=2", "serial"), ("serial", "dp=2")]))
def test_a_run_goes_on_under_another_layout(config: Path, exact: Path, tmp_path: Path, before: str, after: str) -> None:
    whole, run = exact, tmp_path / "run"
    for layout, steps in ((LAYOUTS[before], 4), (LAYOUTS[after], 6)):
        arguments = [f"run.folder={run}", *EXACT, *layout, f"train.steps={steps}", "train.evaluate_every=3"]
        assert forked("train", config, *arguments, num_ranks=num_ranks(layout)).status == 0
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        assert ours == pytest.approx({**theirs, **{k: v for k, v in ours.items() if k not in theirs}}, rel=1e-9)
    expected = tensors(whole)
    for name, x in tensors(run).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.slow
def test_a_longer_run_keeps_its_past(config: Path, tmp_path: Path) -> None:
    constant = ["optim.decay=constant", "checkpoint.every=0"]
    assert forked("train", config, f"run.folder={tmp_path / 'whole'}", *constant, "train.steps=9").status == 0
    for steps in (6, 9):
        assert forked("train", config, *constant, f"train.steps={steps}", "train.evaluate_every=9").status == 0
    assert [line["loss"] for line in metrics(tmp_path / "run")] == [
        line["loss"] for line in metrics(tmp_path / "whole")
    ]
    ours, theirs = tensors(tmp_path / "run"), tensors(tmp_path / "whole")
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_a_finished_run_stays_as_it_is(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    answer = forked("train", finished.config, f"run.folder={tmp_path / 'run'}")
    assert answer.status == 0 and "Finished 6 steps" in answer.out
    assert_same(tmp_path / "run", finished.folder)


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(finished: Finished, config: Path, tmp_path: Path) -> None:
    assert saved_steps(finished.folder) == [4, 6]
    assert forked("train", config, "checkpoint.every=1", "checkpoint.keep=3").status == 0
    assert saved_steps(tmp_path / "run") == [4, 5, 6]
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "saved"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_only_the_end_is_saved_by_default(config: Path, tmp_path: Path) -> None:
    assert forked("train", config, "checkpoint.every=0").status == 0
    assert saved_steps(tmp_path / "run") == [6]


@pytest.mark.slow
def test_a_run_goes_on_with_the_defaults_that_it_began_with(corpus: TinyCorpus, tmp_path: Path) -> None:
    """A folder of a version with other defaults, and a file that never spelled them out."""
    path, run = write_config(corpus, tmp_path), tmp_path / "run"
    spelled_out = ("dropout", "attention_dropout", "warmup_steps", "evaluate_every", "every")
    lines = [line for line in path.read_text().splitlines() if not line.startswith(spelled_out)]
    path.write_text("\n".join(lines))
    same, before = ("optim.decay_steps=6", "checkpoint.keep=1"), [f"{k}={json.dumps(v)}" for k, v in BEFORE.items()]
    assert forked("train", path, *same, *before, f"run.folder={tmp_path}/whole").status == 0
    assert forked("train", path, *same, *before, "train.steps=3").status == 0
    answer = forked("train", path, *same)
    assert answer.status == 0, answer
    told = f"Kept from {run}/config.toml, as the defaults were when the run began: model.dropout = 0.1, "
    assert answer.out.startswith(told)
    assert_same(run, tmp_path / "whole")
    assert load(run / "config.toml").model.dropout == 0.1
    assert forked("train", path, f"run.folder={tmp_path}/new").status == 0
    assert load(tmp_path / "new" / "config.toml").model.dropout == 0.0


def test_a_finished_run_says_how_it_goes_on(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    answer = forked("train", finished.config, f"run.folder={tmp_path}/run")
    assert answer.status == 0 and "Nothing is left to do: train.steps = 6. To train on, raise it." in answer.out


def test_going_on_from_an_older_checkpoint(finished: Finished, tmp_path: Path) -> None:
    """What the message about a damaged checkpoint tells the user to do."""
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    answer = forked("train", finished.config, f"run.folder={run}")
    assert after_banner(answer.out).startswith(f"Resumed from {run}/checkpoints/step_00000004 (step 4, sample 16).")
    assert_same(run, finished.folder)


@pytest.mark.slow
def test_a_tokenizer_that_is_another_than_the_runs(corpus: TinyCorpus, finished: Finished, tmp_path: Path) -> None:
    """The path is the same, its content is not: the comparison of configurations cannot see it."""
    tokenizer = tmp_path / "tokenizer.json"
    shutil.copy(corpus.tokenizer, tokenizer)
    bare = tmp_path / "tokens"
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus.prefix}{ending}", f"{bare}{ending}")
    config = write_config(TinyCorpus(tmp_path), tmp_path)
    assert forked("train", config, "train.steps=2").status == 0
    train_bpe(made_up(24, seed=5), VOCAB_SIZE).save(tokenizer)
    answer = forked("train", config)
    assert answer.status == 2 and "was trained with another tokenizer" in answer.err, answer


def test_a_checkpoint_gets_its_name_behind_the_numbers_of_its_step(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk, too: a machine that loses its power has no checkpoint whose step's numbers are lost."""
    fsync, rename, synced, named = os.fsync, Path.rename, dict[int, int](), list[str]()
    settings = config_of_tiny(corpus, tmp_path)
    opened, told = open_corpus(settings), monitor(tmp_path / "run")
    (tmp_path / "run").mkdir()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    def publish(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            for name in ("metrics.jsonl", "thermometers.jsonl"):
                about = (tmp_path / "run" / name).stat()
                assert synced.get(about.st_ino) == about.st_size > 0, name
            named.append(target.name)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", publish)
    trained = state.build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"))
    with saving(trained, settings, Mesh(), opened, told) as checkpoints:
        for step in (1, 2):
            told.step(numbers(step), 0.5)
            told.thermometers({"step": step}, {})
            trained.step = step
            checkpoints.save(trained, must=True)
    assert named == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_beside_the_weights_lies_what_is_needed_to_use_them(
    corpus: TinyCorpus, tmp_path: Path, with_tokenizer: bool
) -> None:
    """The tokenizer, where the run has one, and the configuration."""
    settings = config_of_tiny(corpus, tmp_path)
    opened, told = open_corpus(settings), monitor(tmp_path / "run")
    if not with_tokenizer:
        opened = replace(opened, tokenizer=None)
    trained = state.build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"))
    with saving(trained, settings, Mesh(), opened, told) as checkpoints:
        checkpoints.save(trained, must=True)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert load(folder / "config.toml") == settings
    assert (folder / "tokenizer.json").exists() == with_tokenizer
    if with_tokenizer:
        assert opened.tokenizer is not None
        assert Tokenizer.load(folder / "tokenizer.json").sha256 == opened.tokenizer.sha256


# --- saving in the background -----------------------------------------------------------------------------------------


ASYNCHRONOUS = ["checkpoint.asynchronous=true"]


def slow_disk(seconds: float) -> Callable[[int], None]:
    """Makes each write to a checkpoint's files take so long."""

    def slow(rank: int) -> None:
        from colonnade.checkpoint import files

        write = files._HashingStream.write

        def wait_and_write(stream: Any, data: Any) -> int:
            time.sleep(seconds)
            return write(stream, data)

        files._HashingStream.write = wait_and_write  # type: ignore[method-assign]

    return slow


def slow_copy(rank: int) -> None:
    """The copy that is written begins late: what the next step changes too early gets into it."""
    from colonnade.checkpoint.snapshot import Snapshot

    take = Snapshot.take

    def wait_and_take(snapshot: Any, parts: Any) -> None:
        time.sleep(0.1)
        take(snapshot, parts)

    Snapshot.take = wait_and_take  # type: ignore[method-assign]


def test_what_waits_for_the_copy_does_not_get_into_the_checkpoint(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the step that was saved, though the next step changes them while they are written."""
    monkeypatch.setattr(Snapshot, "take", Snapshot.take)  # which `slow_copy` replaces
    slow_copy(0)
    settings = config_of_tiny(corpus, tmp_path, *ASYNCHRONOUS)
    opened, told = open_corpus(settings), monitor(tmp_path / "run")
    trained = state.build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"))
    with saving(trained, settings, Mesh(), opened, told, overlap=True) as checkpoints:
        before = [bucket.master.clone() for bucket in trained.buckets]
        checkpoints.save(trained)
        checkpoints.copied()
        for bucket in trained.buckets:
            bucket.master.add_(1.0)
    restored = state.build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"), draw=False)
    assert restore(restored, settings, opened) is not None
    assert all(torch.equal(bucket.master, x) for bucket, x in zip(restored.buckets, before, strict=True))


def saved(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["event"] == "saved"]


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(["dp=2", "serial"]))
def test_saving_in_the_background_saves_the_same(config: Path, tmp_path: Path, name: str) -> None:
    """To the bit, though training has gone on when it is written."""
    layout = LAYOUTS[name]
    for folder, more in (("whole", []), ("run", ASYNCHRONOUS)):
        arguments = [f"run.folder={tmp_path / folder}", "checkpoint.every=1", "checkpoint.keep=6", *layout, *more]
        assert forked("train", config, *arguments, num_ranks=num_ranks(layout), first=slow_copy).status == 0
    assert_same(tmp_path / "run", tmp_path / "whole")
    for step in (1, 3, 5):
        name = f"step_{step:08}"
        ours, theirs = (whole_tensors(tmp_path / run / "checkpoints" / name) for run in ("run", "whole"))
        assert [name for name, x in theirs.items() if not torch.equal(x, ours[name])] == []
    for run in ("run", "whole"):
        assert [event["step"] for event in saved(tmp_path / run)] == [1, 2, 3, 4, 5, 6]
        assert all(event["blocked_seconds"] <= event["seconds"] for event in saved(tmp_path / run))
    assert all(event["blocked_seconds"] == event["seconds"] for event in saved(tmp_path / "whole"))


@pytest.mark.slow
def test_a_slow_disk_is_waited_for_and_told(config: Path, tmp_path: Path) -> None:
    """Two saves are never under way at once; the run's end waits for the last."""
    answer = forked("train", config, *ASYNCHRONOUS, "parallel.dp=2", num_ranks=2, first=slow_disk(0.001))
    assert answer.status == 0
    run = tmp_path / "run"
    assert "Saving step 4 waits: the checkpoint before it is still being written." in answer.out
    assert "A larger checkpoint.every (now 2) or a faster disk" in answer.out
    first, second, last = saved(run)
    assert first["blocked_seconds"] < 0.5 * first["seconds"] and second["blocked_seconds"] > first["blocked_seconds"]
    told = [event["event"] for event in events(run)]
    assert told[-1] == "finished" and told.count("saved") == 3 and saved_steps(run) == [4, 6] and last["step"] == 6


@pytest.mark.parametrize("name", ["tp=2", "serial"])
@pytest.mark.slow
def test_killed_while_saving_in_the_background(config: Path, tmp_path: Path, name: str) -> None:
    layout, chance = [*LAYOUTS[name], *ASYNCHRONOUS], random.Random(name)
    log = moments(config, tmp_path / "whole", layout, tmp_path / "log")
    renames = [number for number, event in enumerate(log) if "os.rename checkpoints/.step_" in event]
    for moment in (renames[0], renames[1] + 1, chance.randrange(renames[0], renames[1])):
        first = killed_at(tmp_path / "run", moment)  # the threads' order varies, and with it what happens just then
        answer = forked("train", config, *layout, num_ranks=num_ranks(layout), first=first)
        assert answer.status in (0, -signal.SIGKILL), answer
    live(config, tmp_path / "run", layout)
    assert_same(tmp_path / "run", tmp_path / "whole")
    assert saved_steps(tmp_path / "run") == [4, 6]
    assert not list((tmp_path / "run").rglob("*.partial")) and not list((tmp_path / "run").rglob("*.deleted"))


@pytest.mark.slow
def test_an_interrupt_waits_for_the_save_under_way(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*ASYNCHRONOUS, "train.steps=1000", "checkpoint.every=1", "parallel.dp=2"]
    ranks = start("train", config, *arguments, num_ranks=2, first=slow_disk(0.0005))
    while not saved(run) if (run / "events.jsonl").exists() else True:
        time.sleep(0.01)
    ranks.signal(signal.SIGTERM)
    answers = ranks.answers()
    assert {answer.status for answer in answers} == {128 + signal.SIGTERM} and answers[0].err == "", answers
    stopped = events(run)[-1]
    assert stopped["event"] == "interrupted" and saved_steps(run)[-1] == stopped["step"]
    verify(run / "checkpoints" / f"step_{stopped['step']:08}")


def full_disk(rank: int) -> None:
    """From the second save on, rank 1 cannot write."""
    from colonnade.checkpoint import files

    write = files._HashingStream.write

    def refuse(stream: Any, data: Any) -> int:
        if rank == 1 and "step_00000004" in stream.file.name:
            raise OSError(28, "No space left on device")
        return write(stream, data)

    files._HashingStream.write = refuse  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("steps", first_fast([4, 1000]))
def test_a_failure_in_the_background_ends_the_run(config: Path, tmp_path: Path, steps: int) -> None:
    """At the next step, or at the end where there is none; on all ranks, with the same words."""
    ranks = start(
        "train",
        config,
        *ASYNCHRONOUS,
        f"train.steps={steps}",
        "parallel.dp=2",
        "checkpoint.retry_for=0",
        num_ranks=2,
        first=full_disk,
    )
    answers = ranks.answers()
    assert {answer.status for answer in answers} == {2}, answers
    assert all("The disk is full: " in answer.err and "saving step 4 needed" in answer.err for answer in answers)
    run = tmp_path / "run"
    assert saved_steps(run) == [2] and metrics(run)[-1]["step"] < 60
    verify(run / "checkpoints" / "step_00000002")
    assert not list((run / "checkpoints").glob(".*"))
    live(config, run, ["parallel.dp=2", *ASYNCHRONOUS])
    assert saved_steps(run) == [4, 6]


# --- what a run goes on from ------------------------------------------------------------------------------------------


def test_what_a_killed_run_has_left_is_tidied(finished: Finished, tmp_path: Path) -> None:
    """Killed right after the last rename: one checkpoint more than checkpoint.keep, and half of an older one."""
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.copytree(run / "checkpoints" / "step_00000004", run / "checkpoints" / "step_00000002")
    (run / "checkpoints" / ".step_00000001.deleted").mkdir()
    answer = forked("train", finished.config, f"run.folder={run}")
    assert answer.status == 0 and saved_steps(run) == [4, 6]
    assert not list((run / "checkpoints").glob(".*"))


def test_a_run_never_goes_on_from_nothing(finished: Finished, tmp_path: Path) -> None:
    """Its checkpoints are gone: perhaps a disk is not mounted. Nothing is begun anew over what it has done, whatever
    else stands among its events: lines that were cut off in a crash, and what a disk made of them."""
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.rmtree(run / "checkpoints")
    torn = [b'{"time": 1.0, "eve', b"\xff\xfe\0", b"[3]", b"3", b'{"event": "saved"}']
    said = (run / "events.jsonl").read_bytes().splitlines()
    last = b'{"event": "best", "checkpoint": "step_00000002"}'  # said of it, but not when it was saved
    (run / "events.jsonl").write_bytes(b"\n".join([*torn, *said, last, b""]))
    before = (run / "metrics.jsonl").read_bytes()
    answer = forked("train", finished.config, f"run.folder={run}")
    assert answer.status == 2, answer
    assert "has no checkpoint, but this run has saved step_00000006 there" in answer.err
    assert f"delete {run} to start again from step 0" in answer.err and (run / "metrics.jsonl").read_bytes() == before


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's metadata, as if it had been saved with them."""
    contents = read_manifest(path)
    change(contents.metadata)
    (path / MANIFEST).write_text(to_json(contents))


def test_a_checkpoint_of_another_optimizer(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    rewritten(run / "checkpoints" / "step_00000006", lambda metadata: metadata.update(optimizer="lamb"))
    answer = forked("train", finished.config, f"run.folder={run}")
    assert (
        answer.status == 2
        and "was written with optim.name = 'lamb', and the run is to go on with 'adamw'" in answer.err
    )
    assert 'Set optim.name = "lamb", or choose another run.folder' in answer.err


def test_a_checkpoint_of_other_batches(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    rewritten(run / "checkpoints" / "step_00000006", lambda metadata: metadata.update(global_batch_size=8))
    answer = forked("train", finished.config, f"run.folder={run}")
    assert (
        answer.status == 2
        and "was written with train.global_batch_size = 8, and the run is to go on with 4" in answer.err
    )


def test_behind_a_change_its_optimizer_goes_on(finished: Finished, tmp_path: Path) -> None:
    """At once: a rollback and a repair, which return to it in mid-run, follow no change anew."""
    path = Path(shutil.copytree(finished.newest, tmp_path / "run" / "checkpoints" / finished.newest.name))
    values, was = {"optim.weight_decay": 0.3}, {"optim.weight_decay": 0.1}
    change = Change(at=3, values=values, was=was, line="1", position=12)
    rewritten(path, lambda metadata: metadata.update(changes=[change.model_dump()]))
    config = load(finished.config, [f"run.folder={tmp_path / 'run'}"])
    corpus = open_corpus(config)
    began = state.build_state(config, Mesh(), corpus.vocab_size, torch.device("cpu"), draw=False)
    restore(began, config, corpus)
    assert began.changes == [change] and began.optimizer == state.optimizer_of(in_force(config, [change]))
    assert began.optimizer != state.optimizer_of(config)


def test_what_a_run_remembers_beside_its_numbers_comes_back(finished: Finished, tmp_path: Path) -> None:
    """Steps that were skipped, the loss scale with its good steps, and the losses that a spike is held against."""
    path = Path(shutil.copytree(finished.newest, tmp_path / "run" / "checkpoints" / finished.newest.name))
    watched = {"losses": [5.0, 4.5], "signs": 1}
    scale = {"value": 512.0, "good_steps": 2}
    rewritten(path, lambda metadata: metadata.update(skipped_steps=2, loss_scale=scale, watch=watched))
    config = load(finished.config, [f"run.folder={tmp_path / 'run'}"])
    corpus = open_corpus(config)
    began = state.build_state(config, Mesh(), corpus.vocab_size, torch.device("cpu"), draw=False)
    began.loss_scale = LossScale(64.0, window=10)
    restore(began, config, corpus)
    assert (began.step, began.skipped, began.loss_scale) == (6, 2, LossScale(512.0, window=10, good_steps=2))
    assert began.watch == LossWatch(**watched)


def test_a_checkpoint_from_before_this_metadata(finished: Finished, tmp_path: Path) -> None:
    """Written by the first version: it is gone on from, to the bit."""

    def forget(metadata: dict[str, Any]) -> None:
        for key in ("skipped_steps", "global_batch_size", "optimizer", "loss_scale"):
            del metadata[key]
        for key in ("position", "embedding_norm", "norm_position"):
            del metadata["model"][key]

    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    rewritten(run / "checkpoints" / "step_00000004", forget)
    assert forked("train", finished.config, f"run.folder={run}").status == 0
    assert_same(run, finished.folder)


# --- what is said and kept, in parts ----------------------------------------------------------------------------------


def test_what_is_saved_is_told_and_what_waits_for_it_is_woken(corpus: TinyCorpus, tmp_path: Path) -> None:
    """A checkpoint that is the best of those that are there is told as that."""
    settings, told, woken = config_of_tiny(corpus, tmp_path), Told(), list[str]()
    uploads: Any = SimpleNamespace(wake=lambda: woken.append("woken"))
    retries = SaveRetries(60.0)
    retries.failed()
    run = Path(settings.run.folder)
    for step in (2, 4):
        (run / "checkpoints" / f"step_0000000{step}").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 2, "validation_loss": 1.0}\n{"step": 4, "validation_loss": 2.0}\n')
    for step in (2, 4):
        path = run / "checkpoints" / f"step_0000000{step}"
        recovery._tell(settings, told, retries, uploads, Saved(path, step, 0.12345, 2.00049))  # type: ignore[arg-type]
    assert told.of("saved") == [
        {"step": step, "checkpoint": f"step_0000000{step}", "blocked_seconds": 0.123, "seconds": 2.0} for step in (2, 4)
    ]
    assert told.of("best") == [{"step": 2, "checkpoint": "step_00000002", "validation_loss": 1.0}]
    assert woken == ["woken"] * 2 and retries.failures == 0
    kept = settings.checkpoint.model_copy(update={"keep_best": False})
    assert recovery.best(settings) is not None
    assert recovery.best(settings.model_copy(update={"checkpoint": kept})) is None


def test_what_is_being_uploaded_stays_beside_what_stays_for_ever(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings = config_of_tiny(corpus, tmp_path, "checkpoint.keep=1", "checkpoint.keep_every=4")
    uploads: Any = SimpleNamespace(in_use=lambda: (6,))
    target = recovery._target(settings, monitor(tmp_path), uploads)
    assert target.keep == 1 and {*target.spared([2, 4, 6, 8, 9])} == {4, 6, 8}


def test_a_rank_without_weights_of_its_own_does_not_begin_without_a_checkpoint(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    """It was there when the rank started; else the run begins, and says by which version."""

    class Monitor(Told):
        def resume(self, step: int) -> None:
            assert step == 0

    settings, told, nobody = config_of_tiny(corpus, tmp_path), Monitor(), SimpleNamespace()
    for drawn in (False, True):
        began: Any = SimpleNamespace(drawn=drawn)
        if drawn:
            recovery.resume(began, settings, nobody, told, lambda *_: None)  # type: ignore[arg-type]
        else:
            with pytest.raises(CheckpointError, match="had a checkpoint when this rank started, and has none now"):
                recovery.resume(began, settings, nobody, told, lambda *_: None)  # type: ignore[arg-type]
    assert told.events == [("started", {"version": recovery.__version__})]


def frozen(*names: str) -> Any:
    """A state of three weights, of which these are frozen."""
    weights = {name: SimpleNamespace(is_frozen=name in names) for name in ("a", "b", "c")}
    model = SimpleNamespace(architecture=SimpleNamespace(weights=lambda: weights))
    return SimpleNamespace(model=model, optimizer_state=[{"exp_avg": 0, "exp_avg_sq": 0}, {}])


def test_weights_that_were_frozen_have_no_moments_in_a_checkpoint_and_that_is_said() -> None:
    """Nor are weights of the base in it."""
    manifest: Any = SimpleNamespace(metadata={"frozen": ["a"], "base": {"weights": ["b"]}})
    assert recovery._lacks(frozen(), manifest) == {"optimizer.exp_avg.a", "optimizer.exp_avg_sq.a", "b"}
    assert recovery._lacks(frozen(), SimpleNamespace(metadata={})) == set()  # type: ignore[arg-type]
    for was, now, said in (
        (["a", "b", "c"], ["c"], "2 weights that were frozen (a, b)"),
        (["a", "b"], ["b", "c"], "1 weight that was frozen (a)"),
    ):
        (line,) = recovery._thawed(frozen(*now), SimpleNamespace(frozen=was))  # type: ignore[arg-type]
        assert line == f"Trained from now on: {said}. Their moments begin at zero."
    assert list(recovery._thawed(frozen("a"), SimpleNamespace(frozen=["a"]))) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (None, None, ""),
        ("base", "base", ""),
        (None, "base", "has all weights, and the run would go on with adapters alone"),
        ("base", None, "has adapters alone, and the run would go on with all weights"),
    ],
)
def test_a_run_goes_on_with_adapters_alone_where_it_began_so(
    monkeypatch: pytest.MonkeyPatch, there: str | None, here: str | None, said: str
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(recovery, "check_metadata", lambda *_: checked.append("metadata"))
    monkeypatch.setattr(recovery, "check_base", lambda path, wanted, *_: checked.append(wanted))
    monkeypatch.setattr(recovery, "metadata_of", lambda *_: SimpleNamespace(base=there))
    base = here and SimpleNamespace(path=Path("base"), files={})
    given: Any = (SimpleNamespace(base=base), None, None, Path("checkpoint"), None)
    if said:
        with pytest.raises(CheckpointError, match=f"checkpoint {said}: leave lora.rank and train.init_from as they"):
            recovery._check_all(*given)
    else:
        recovery._check_all(*given)
    assert checked == ["metadata", *(["base"] if there and here else [])]


def checkpoints_of(mesh: Mesh, told: Told, retries: SaveRetries, **saver: Any) -> Checkpoints:
    settings: Any = SimpleNamespace(checkpoint=SimpleNamespace(every=5))
    nobody: Any = None
    return Checkpoints(
        SimpleNamespace(**saver), {}, settings, mesh, nobody, told, retries=retries,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_save_that_fails_is_told_with_its_tries_and_the_age_of_the_last_good_one() -> None:
    now, told = [100.0], Told()
    retries = SaveRetries(60.0, clock=lambda: now[0])
    checkpoints, error = checkpoints_of(Mesh(), told, retries), CheckpointError("The disk is full.")
    now[0] += 12.34
    assert checkpoints._failed(error, 7) == 10.0
    now[0] += 10.0
    assert checkpoints._failed(error, 8) == 15.0
    assert told.of("save failed") == [
        {"step": 7, "reason": "The disk is full.", "tries": 1, "age": 12.3},
        {"step": 8, "reason": "The disk is full.", "tries": 2, "age": 22.3},
    ]
    assert told.said[0].startswith(
        "Saving at step 7 has failed: The disk is full.\nThe run goes on, and saves again in 10 s"
    )
    now[0] += 50.5
    with pytest.raises(CheckpointError, match="The disk is full"):
        checkpoints._failed(error, 9)


def test_what_is_too_old_for_one_rank_ends_all() -> None:
    """Their clocks differ."""

    def failed(rank: int, num_ranks: int) -> bool:
        retries = SaveRetries(60.0 if rank else 0.0)
        try:
            checkpoints_of(build_mesh(Layout(dp=2), rank), Told(), retries)._failed(CheckpointError("full"), 7)
        except CheckpointError:
            return True
        return False

    assert run_on_ranks(failed, 2) == [True, True]


def test_a_save_behind_one_that_is_not_done_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "payload", lambda self, state: None)
    for is_busy in (True, False):
        told = Told()
        checkpoints_of(Mesh(), told, SaveRetries(0.0), is_busy=is_busy, save=lambda *_: None)._save(
            SimpleNamespace(step=10)  # type: ignore[arg-type]
        )
        assert [line.startswith("Saving step 10 waits: ") for line in told.said] == [True] * is_busy
        assert all("checkpoint.every (now 5)" in line for line in told.said)


def test_copies_are_compared_with_all_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, object]]] = []
    copies = SimpleNamespace(check=lambda what, counts: seen.append((what, counts)))
    monkeypatch.setattr(Checkpoints, "copies", lambda self, state: copies)
    counted: Any = SimpleNamespace(step=7, samples=28, skipped=2, loss_scale=LossScale(64.0))
    checkpoints_of(Mesh(), Told(), SaveRetries(0.0)).compare(counted)
    assert seen == [("Step 7", {"step": 7, "samples": 28, "skipped steps": 2, "loss scale": 64.0})]


def test_nothing_is_saved_of_copies_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared when the state is copied, behind what waits for the save before."""

    def check(what: str, counts: dict[str, object]) -> None:
        raise CopiesError("they differ", [])

    monkeypatch.setattr(Checkpoints, "payload", lambda self, state: None)
    monkeypatch.setattr(Checkpoints, "copies", lambda self, state: SimpleNamespace(check=check))
    monkeypatch.setattr(recovery, "shards_of", lambda state: [])
    counted: Any = SimpleNamespace(step=7, samples=28, skipped=2, loss_scale=LossScale(64.0))
    checkpoints = checkpoints_of(
        Mesh(), Told(), SaveRetries(0.0), is_busy=False, save=lambda payload, shards: shards(), wait=lambda: None
    )
    with pytest.raises(CopiesError, match="they differ"):
        checkpoints._save(counted)


def test_a_checkpoint_says_what_a_run_that_goes_on_is_held_against(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings = config_of_tiny(
        corpus, tmp_path, "optim.name=lamb", 'parts.frozen=["embedding.*"]', "train.precision=fp16"
    )
    opened = open_corpus(settings)
    began = state.build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"))
    began.step, began.samples, began.skipped = 3, 12, 1
    found = recovery._metadata(began, settings, Mesh(), opened)
    assert (found["step"], found["samples"], found["skipped_steps"]) == (3, 12, 1)
    assert (found["optimizer"], found["global_batch_size"]) == ("lamb", 4)
    assert found["frozen"] == ["embedding.tokens.weight", "embedding.positions.weight"] and "base" not in found
    assert found["loss_scale"]["value"] == settings.train.loss_scale and found["labels"] == []
    assert opened.tokenizer is not None and found["tokenizer_sha256"] == opened.tokenizer.sha256
    assert found["end_of_document"] == opened.tokenizer.end_of_document
    began.end_of_document, silent = 3, replace(opened, end_of_document=None)
    assert recovery._metadata(began, settings, Mesh(), silent)["end_of_document"] == 3
    assert found["versions"] == {"colonnade": recovery.__version__, "torch": torch.__version__}
    assert found["layout"] == str(Layout()) and found["model"]["vocab_size"] == VOCAB_SIZE


def test_a_run_without_a_tokenizer_goes_on_from_a_checkpoint_that_had_one(finished: Finished) -> None:
    """What its ids mean is not known then."""
    config = load(finished.config)
    data = config.data.model_copy(update={"tokenizer": None})
    config = config.model_copy(update={"data": data})
    recovery.check_metadata(config, open_corpus(config), finished.newest, read_manifest(finished.newest))
