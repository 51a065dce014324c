"""A run whose machine is lost goes on elsewhere from what it has uploaded, and ends in the same bits."""

import errno
import json
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade import storage
from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.stored import RECORD, Stored
from colonnade.config.load import load
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.launch import launch
from colonnade.train import fetched, metadata, start
from colonnade.train.monitor import Monitor
from colonnade.train.rollback import Rollback
from colonnade.train.rollback_options import RollbackOptions
from colonnade.train.rollbacks import by_hand, write
from colonnade.train.run_folder import CHANGES, COPIES, ROLLBACKS
from colonnade.train.run_record import pack, unpack
from colonnade.train.uploads import Uploads
from tests import tiny
from tests.commands import Answer, forked, here
from tests.runs import Finished, assert_same, assert_same_end, events, metrics, samples_of, saved_steps, snapshot
from tests.storages import FaultyStorage, MemoryFileSystem, emptied
from tests.tiny import TinyCorpus, write_config

SECRET = "s3cr3t/K+y"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSE", 0.0)
    with emptied(MemoryFileSystem, FaultyStorage):
        yield


@pytest.fixture(scope="session")
def uploaded(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of six steps has uploaded of steps 4 and 6. Not to be changed: copy it."""
    folder, run = tmp_path_factory.mktemp("uploaded"), finished.folder
    shutil.copytree(run, folder / "run")
    config = load(finished.config, [f"run.folder={folder}/run", "checkpoint.keep_every=2"])
    quiet = Monitor(folder, active=False, steps=1, log_every=1, tokens_per_step=1, flops_per_token=1.0, peak_flops=None)
    with Uploads(config, quiet, Stored(f"file://{folder}/store")):
        pass
    assert Stored(f"file://{folder}/store").steps() == {4: True, 6: True}
    return folder / "store"


@pytest.fixture
def store(uploaded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(uploaded, tmp_path / "store"))


def lose(store: Path, step: int = 6) -> None:
    shutil.rmtree(store / f"step_{step:08}")


def flip(store: Path, step: int = 6, name: str = "__0_0.distcp") -> None:
    file = store / f"step_{step:08}" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def trained(config: Path, store: Path, *more: str, num_ranks: int = 1) -> Answer:
    return forked("train", config, f"checkpoint.upload_to=file://{store}", *more, num_ranks=num_ranks)


def test_on_a_fresh_machine_the_run_goes_on(finished: Finished, config: Path, store: Path, tmp_path: Path) -> None:
    """To the same end, with its whole curve, and with what it uploads from there on."""
    lose(store)
    answer = trained(config, store)
    run = tmp_path / "run"
    assert (answer.status, answer.err) == (0, "")
    assert f"Fetched step_00000004 of file://{store}" in answer.out and "(step 4, sample 16)" in answer.out
    assert_same(run, finished.folder)
    told = [event["event"] for event in events(run)]
    assert told.index("fetched") < told.index("resumed") and told[0] == "started", "with the record so far"
    files = read_manifest(finished.folder / "checkpoints" / "step_00000004").files
    assert events(run)[told.index("fetched")]["bytes"] == sum(file.size for file in files.values())
    assert Stored(f"file://{store}").steps() == {4: True, 6: True}
    target = tmp_path / "record"
    unpack(store / "step_00000006" / RECORD, target)
    assert metrics(target) == metrics(run) and "finished" in [event["event"] for event in events(target)]
    shutil.rmtree(run)
    again = trained(config, store)
    assert again.status == 0 and "Nothing is left to do" in again.out
    assert_same_end(run, finished.folder)


@pytest.mark.slow
def test_on_several_ranks(config: Path, tmp_path: Path) -> None:
    """Files of both ranks go up and come back."""
    store, run, keys = tmp_path / "store", tmp_path / "run", ("parallel.dp=2", "parallel.zero=1")
    first = trained(config, store, *keys, num_ranks=2)
    assert first.status == 0 and (store / "step_00000004" / "__1_0.distcp").is_file(), first
    lose(store)
    run.rename(tmp_path / "whole")
    again = trained(config, store, *keys, num_ranks=2)
    assert again.status == 0 and "Fetched step_00000004" in again.out, again
    assert_same(run, tmp_path / "whole")


@pytest.mark.slow
def test_on_a_fresh_machine_the_run_returns_to_a_step_that_only_the_storage_has(
    config: Path, store: Path, tmp_path: Path
) -> None:
    lose(store)
    answer = trained(config, store, "--rollback", "4", "--skip", "1")
    told = [
        f"Fetched step_00000004 of file://{store}",
        f"{tmp_path / 'run'} returns to step 4, to pass over the batches",
    ]
    assert answer.status == 0 and all(each in answer.out for each in told), answer
    assert samples_of(tmp_path / "run") == 7 * 4


def killed_at(step: int) -> Callable[[int], None]:
    """The process is killed when all of this step but its manifest is uploaded."""

    def first(rank: int) -> None:
        seal = Stored.seal

        def before(self: Stored, number: int, manifest: bytes) -> None:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            seal(self, number, manifest)

        Stored.seal = before  # type: ignore[method-assign]

    return first


@pytest.mark.slow
def test_killed_within_an_upload(finished: Finished, config: Path, tmp_path: Path) -> None:
    """What is half is no checkpoint; the machine is gone, and the run goes on from the one before."""
    store = tmp_path / "store"
    url = f"checkpoint.upload_to=file://{store}"
    killed = forked("train", config, url, first=killed_at(4))
    assert killed.status == -signal.SIGKILL and (store / "step_00000004" / "__0_0.distcp").is_file()
    assert Stored(f"file://{store}").steps() == {2: True, 4: False}
    shutil.rmtree(tmp_path / "run")
    answer = forked("train", config, url)
    assert answer.status == 0 and "Fetched step_00000002" in answer.out, answer
    assert_same(tmp_path / "run", finished.folder)
    assert Stored(f"file://{store}").steps() == {4: True, 6: True}


@pytest.mark.slow
def test_the_disk_has_older_ones(finished: Finished, config: Path, store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    answer = trained(config, store)
    assert answer.status == 0 and "Fetched step_00000006" in answer.out and saved_steps(run) == [4, 6]
    lose(store)
    answer = trained(config, store)
    assert answer.status == 0 and "Fetched" not in answer.out, "the disk's is newer, and is uploaded"
    assert Stored(f"file://{store}").steps() == {4: True, 6: True}


@pytest.mark.parametrize("name", ["RANK", "PIPE"])
def test_a_rank_for_which_another_process_fetches_does_nothing(
    config: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RANK", "1" if name == "RANK" else "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if name == "PIPE":
        monkeypatch.setenv(launch.PIPE, "9")
    keys = [f"checkpoint.upload_to=file://{store}"]
    start.fetch(config, keys, load(config, keys))
    assert not (tmp_path / "run").exists()


def test_the_newest_alone_is_fetched(config: Path, store: Path, tmp_path: Path) -> None:
    settings = load(config, [f"checkpoint.upload_to=file://{store}"])
    fetched.fetch(settings, lambda record: settings, probe=False, dry_run=False)
    assert saved_steps(tmp_path / "run") == [6]
    assert [event["event"] for event in events(tmp_path / "run")].count("fetched") == 1


@pytest.mark.slow
def test_what_is_damaged_there_falls_back(finished: Finished, config: Path, store: Path, tmp_path: Path) -> None:
    flip(store)
    answer = trained(config, store)
    assert answer.status == 0, answer
    assert f"step_00000006 of file://{store} is damaged" in answer.out and "The one before it" in answer.out
    assert ".partial" not in answer.out and "Fetched step_00000004" in answer.out
    (told,) = [event for event in events(tmp_path / "run") if event["event"] == "damaged upload"]
    assert told["checkpoint"] == "step_00000006"
    assert_same(tmp_path / "run", finished.folder)
    flip(store, name=MANIFEST)
    (store / "step_00000004" / "config.toml").unlink()
    shutil.rmtree(tmp_path / "run")
    (store / "step_00000006" / MANIFEST).write_text("{")
    flip(store, 4)
    answer = trained(config, store)
    assert answer.status == 2 and "None of the checkpoints under" in answer.err, answer
    assert not (tmp_path / "run" / "checkpoints").exists() or saved_steps(tmp_path / "run") == []


def test_a_run_that_refuses_damage_does_not_go_on_from_an_older_upload(
    config: Path, store: Path, tmp_path: Path
) -> None:
    flip(store)
    answer = trained(config, store, "restarts.damaged=refuse")
    assert answer.status == 2 and "step_00000006 of file" in answer.err and "is damaged" in answer.err, answer
    assert "Fetched" not in answer.out and saved_steps(tmp_path / "run") == []


@pytest.mark.parametrize("damage", ["record", "missing", "manifest of another step", "all of another step"])
def test_other_damage_falls_back(config: Path, store: Path, tmp_path: Path, damage: str) -> None:
    if damage == "record":
        flip(store, name=RECORD)
    elif damage == "missing":
        (store / "step_00000006" / "__0_0.distcp").unlink()
    elif damage == "manifest of another step":
        shutil.copy(store / "step_00000004" / MANIFEST, store / "step_00000006" / MANIFEST)
    else:
        lose(store)
        shutil.copytree(store / "step_00000004", store / "step_00000006")
    settings = load(config, [f"checkpoint.upload_to=file://{store}"])
    fetched.fetch(settings, lambda record: settings, probe=False, dry_run=False)
    run = tmp_path / "run"
    assert saved_steps(run) == [4] and [event["event"] for event in events(run)][-2:] == ["fetched", "damaged upload"]
    assert not [path for path in run.rglob("*") if "partial" in path.name]


@pytest.mark.parametrize("damage", ["half a manifest", "no manifest"])
def test_where_the_run_has_returned_to_a_step_a_damaged_manifest_falls_back_too(
    finished: Finished, config: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Of the newest upload, which does not say then on which side of the rollback it is."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    write(run, [Rollback(to=4, skip=1, id="one")])
    manifest = store / "step_00000006" / MANIFEST
    if damage == "half a manifest":
        manifest.write_text('{"format')
    else:
        manifest.unlink()
        monkeypatch.setattr(Stored, "steps", lambda self: {4: True, 6: True})
    settings = load(config, [f"checkpoint.upload_to=file://{store}"])
    fetched.fetch(settings, lambda record: settings, probe=False, dry_run=False)
    assert saved_steps(run) == [4] and [event["event"] for event in events(run)][-2:] == ["fetched", "damaged upload"]


@pytest.mark.parametrize("content", [None, b"", b"\0" * 50], ids=["missing", "empty", "zeros"])
def test_a_damaged_configuration_in_the_newest_upload_falls_back(
    config: Path, store: Path, tmp_path: Path, content: bytes | None
) -> None:
    """Whether it is this run is told by the one before then; where none can be read the start is refused."""
    for step, is_here in ((6, [4]), (4, None)):
        file = store / f"step_0000000{step}" / "config.toml"
        file.unlink() if content is None else file.write_bytes(content)
        settings = load(config, [f"checkpoint.upload_to=file://{store}", f"run.folder={tmp_path}/run{step}"])
        with nullcontext() if is_here else pytest.raises(ColonnadeError, match=r"step_00000006/config\.toml"):
            fetched.fetch(settings, lambda record, began=settings: began, probe=False, dry_run=False)
        assert saved_steps(tmp_path / f"run{step}") == (is_here or [])


def damaged_here(finished: Finished, tmp_path: Path, step: int = 6) -> Path:
    """A run whose checkpoint of a step is damaged on the disk."""
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    flip(run / "checkpoints", step)
    return run


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_damaged_on_the_disk_is_fetched(
    finished: Finished, config: Path, store: Path, tmp_path: Path, num_ranks: int
) -> None:
    """Rather than that the steps since the one before it are made again."""
    run = damaged_here(finished, tmp_path)
    answer = trained(config, store, f"parallel.dp={num_ranks}", num_ranks=num_ranks)
    assert answer.status == 0 and "goes on from step_00000006, fetched from checkpoint.upload_to." in answer.out, answer
    assert "(step 6, sample 24)" in answer.out and saved_steps(run) == [4, 6]
    assert (run / "checkpoints" / "damaged_step_00000006").is_dir()
    (told,) = [event for event in events(run) if event["event"] == "damaged checkpoint"]
    assert (told["checkpoint"], told["to"], told["origin"]) == ("step_00000006", "step_00000006", "storage")
    assert events(run)[0] == events(finished.folder)[0], "the record on the disk stays"
    assert_same_end(run, finished.folder)


@pytest.mark.slow
def test_a_step_is_fetched_in_place_of_a_damaged_one_once(
    finished: Finished, config: Path, store: Path, tmp_path: Path
) -> None:
    """If it is damaged again, the disk is."""
    run = damaged_here(finished, tmp_path)
    assert trained(config, store).status == 0
    flip(run / "checkpoints")
    answer = trained(config, store)
    assert answer.status == 0 and "goes on from step_00000004." in answer.out and "Fetched" not in answer.out, answer
    assert_same(run, finished.folder)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "said"), [(flip, "The one before it is looked for"), (lose, "step_00000004.")])
def test_what_is_damaged_in_both_places_falls_back(
    finished: Finished, config: Path, store: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    """To the newest that is sound, which the disk has too: nothing is fetched."""
    run = damaged_here(finished, tmp_path)
    damage(store)
    answer = trained(config, store)
    assert answer.status == 0 and said in answer.out and "Fetched" not in answer.out, answer
    (told,) = [event for event in events(run) if event["event"] == "damaged checkpoint"]
    assert (told["to"], told["origin"]) == ("step_00000004", "disk")
    assert_same(run, finished.folder)


def test_what_the_disk_has_too_is_not_fetched(finished: Finished, config: Path, store: Path, tmp_path: Path) -> None:
    checkpoints = damaged_here(finished, tmp_path) / "checkpoints"
    shutil.copytree(checkpoints / "step_00000004", checkpoints / "step_00000002")
    lose(store)
    settings = load(config, [f"checkpoint.upload_to=file://{store}"])
    assert fetched.fetch_for_damaged(checkpoints / "step_00000006", settings) is None
    assert saved_steps(tmp_path / "run") == [2, 4, 6]


@pytest.mark.slow
def test_the_only_one_of_the_disk_is_replaced_by_an_older_one(
    finished: Finished, config: Path, store: Path, tmp_path: Path
) -> None:
    run = damaged_here(finished, tmp_path)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    lose(store)
    assert trained(config, store, "restarts.damaged=refuse").status == 2 and saved_steps(run) == [6]
    answer = trained(config, store)
    assert answer.status == 0 and "goes on from step_00000004, fetched from" in answer.out, answer
    assert "There is no older one" not in answer.out
    assert_same(run, finished.folder)


@pytest.mark.slow
def test_a_storage_that_fails_by_then_leaves_the_disk(
    finished: Finished, config: Path, tmp_path: Path, uploaded: Path
) -> None:
    run = damaged_here(finished, tmp_path)
    FaultyStorage().put(f"{uploaded}/step_00000006", "/bucket/run/step_00000006", recursive=True)

    def before(operation: str, path: str) -> None:
        if operation == "get":
            raise OSError(errno.ETIMEDOUT, "timed out")

    FaultyStorage.before = staticmethod(before)
    answer = forked("train", config, "checkpoint.upload_to=faulty://bucket/run", "checkpoint.upload_patience=0")
    assert answer.status == 0 and "Nothing can be fetched in place of" in answer.out, answer
    assert "Whether step_00000006 there is of this run's course is not known: timed out" in answer.out.replace(
        "[Errno 110] ", ""
    )
    assert "goes on from step_00000004." in answer.out
    assert_same(run, finished.folder)


def test_another_run_is_refused_before_anything_is_fetched(
    config: Path, store: Path, finished: Finished, tmp_path: Path
) -> None:
    before = snapshot(store)
    url = f"checkpoint.upload_to=file://{store}"
    other = here("train", config, url, "model.num_layers=4", "optim.learning_rate=0.5", "train.seed=7")
    assert other.status == 2 and "has checkpoints of a run with another configuration" in other.err
    assert "model.num_layers: 2 -> 4" in other.err and "train.seed" in other.err
    shutil.copytree(finished.folder, tmp_path / "run", ignore=shutil.ignore_patterns("step_*"))
    lines = json.dumps({"step": 9, "loss": 1.0}) + "\n"
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    anew = here("train", config, url, "checkpoint.resume=false", f"run.folder={tmp_path}/anew")
    assert anew.status == 2 and "already has step_00000006, and checkpoint.resume = false" in anew.err
    assert not (tmp_path / "anew").exists() and snapshot(store) == before


@pytest.mark.parametrize("damage", ["odd bytes", "missing"])
def test_another_configuration_is_told_where_the_record_cannot_be_read(config: Path, store: Path, damage: str) -> None:
    """What the run began with is not known then, and what its checkpoint says counts."""
    record = store / "step_00000006" / RECORD
    record.unlink()
    if damage == "odd bytes":
        record.write_bytes(b"odd")
    answer = here("train", config, f"checkpoint.upload_to=file://{store}", "model.num_layers=4")
    assert answer.status == 2 and "has checkpoints of a run with another configuration" in answer.err, answer


def test_what_the_run_began_with_counts(config: Path, store: Path, tmp_path: Path) -> None:
    """Defaults of then, and changes in mid-run, come with the record: of them the fresh machine knows nothing."""
    target = tmp_path / "record"
    record = store / "step_00000006" / RECORD
    unpack(record, target)
    for file in (target / "config.toml", store / "step_00000006" / "config.toml"):
        text = file.read_text()
        assert text.count("weight_decay = 0.1\n") == 1
        file.write_text(text.replace("weight_decay = 0.1\n", "weight_decay = 0.01\n"))
    pack(target, record)
    manifest = json.loads((store / "step_00000006" / MANIFEST).read_text())
    assert manifest["files"]["config.toml"]["size"]
    overrides = [f"checkpoint.upload_to=file://{store}"]
    settings = start.load_for_run(config, overrides)
    assert settings.optim.weight_decay == 0.1
    with pytest.raises(ConfigError, match=r"weight_decay: 0\.01 -> 0\.2"):
        start.fetch(
            config, [*overrides, "optim.weight_decay=0.2"], load(config, [*overrides, "optim.weight_decay=0.2"])
        )
    start.fetch(config, overrides, settings)  # its config.toml is not what the manifest says: the one before is taken
    assert saved_steps(tmp_path / "run") == [4]
    lose(store, 4)
    again = start.again(config, overrides, settings)
    assert again is not None and start.again(config, [], load(config)) is None
    unpack(record, tmp_path / "run")
    assert again().optim.weight_decay == 0.01


@pytest.mark.slow
def test_what_was_changed_in_mid_run_comes_along(config: Path, tmp_path: Path) -> None:
    """Whole, with the steps at which it was decided to hold: asked for anew it would be too late."""
    run, store = tmp_path / "run", tmp_path / "store"
    run.mkdir()
    (run / CHANGES).write_text(json.dumps({"change": {"optim.learning_rate": 3e-3}, "at": 2}) + "\n")
    assert trained(config, store).status == 0
    curve = metrics(run)
    lose(store)
    shutil.rmtree(run)
    assert trained(config, store).status == 0
    assert [(line["loss"], line["learning_rate"]) for line in metrics(run)] == [
        (line["loss"], line["learning_rate"]) for line in curve
    ]
    refused = [event for event in events(run) if event["event"] == "change refused"]
    assert not refused and "changed" in [event["event"] for event in events(run)]


@pytest.mark.slow
def test_a_rollback_made_here_is_not_undone(finished: Finished, config: Path, store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    write(run, [Rollback(to=4, skip=1, rate_factor=1.0, rate_until=0, reason="asked for")])
    answer = trained(config, store)
    assert answer.status == 0 and "Fetched" not in answer.out, answer
    target = tmp_path / "record"
    unpack(store / "step_00000006" / RECORD, target)
    assert json.loads((target / "rollbacks.json").read_text())[0]["to"] == 4
    assert metrics(target) == metrics(run) != metrics(finished.folder)


def test_checkpoints_of_a_course_that_was_left_elsewhere_go_when_its_record_comes(
    finished: Finished, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies in memory too. What cannot be read stays, to be set aside by who goes on from it."""
    run, record = Path(shutil.copytree(finished.folder, tmp_path / "run")), tmp_path / "record"
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000006").rename(checkpoints / "step_00000005")
    (checkpoints / "step_00000005" / MANIFEST).write_text("{")
    shutil.copytree(checkpoints / "step_00000004", checkpoints / "step_00000002")
    (run / COPIES).write_text("the start before")
    unpack(store / "step_00000006" / RECORD, record)
    write(record, [Rollback(to=2, skip=1, id="made elsewhere")])
    pack(record, store / "step_00000006" / RECORD)
    config = load(finished.config, [f"run.folder={run}", f"checkpoint.upload_to=file://{store}", "checkpoint.keep=9"])
    fetched.fetch(config, lambda record: config, probe=False, dry_run=False)
    assert saved_steps(run) == [2, 5, 6] and not (run / COPIES).exists()
    said = f"{checkpoints / 'step_00000004'} is of a course that a rollback elsewhere has left: it is deleted.\n"
    assert said in capsys.readouterr().out and sorted(path.name for path in checkpoints.iterdir())[0] == "step_00000002"


def test_copies_in_memory_go_where_a_newer_checkpoint_comes(finished: Finished, store: Path, tmp_path: Path) -> None:
    """Also of a run that has never returned: the run goes on from what has come."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    (run / COPIES).write_text("the start before")
    config = load(finished.config, [f"run.folder={run}", f"checkpoint.upload_to=file://{store}"])
    fetched.fetch(config, lambda record: config, probe=False, dry_run=False)
    assert saved_steps(run)[-1] == 6 and not (run / COPIES).exists() and not (run / ROLLBACKS).exists()


def test_nor_is_a_second_one_with_the_same_options(
    finished: Finished, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the storage has is from behind the first one."""
    first, second = (Path(shutil.copytree(finished.folder, tmp_path / name)) for name in ("first", "second"))
    known, _ = by_hand(first, 4, RollbackOptions(skip=1))
    by_hand(second, 4, RollbackOptions(skip=1))
    monkeypatch.setattr(metadata, "metadata_of", lambda *_: SimpleNamespace(rollbacks=[known]))
    url = Stored(f"file://{store}")
    assert not fetched.is_undone(url, 6, first) and fetched.is_undone(url, 6, second)
    assert not fetched.is_undone(url, 4, second), "it is what the run has returned to"
    write(second, [known, Rollback(to=5, skip=1, id="a later one")])
    assert fetched.is_undone(url, 6, second), "the storage knows the first of two alone"


@pytest.mark.parametrize(("uploaded_too", "told"), [({}, 6), ({8: "of step 6"}, 8), ({8: "{"}, 6), ({6: None}, 4)])
@pytest.mark.parametrize(
    ("recorded", "in_the_checkpoint", "is_refused"), [([], False, True), ([0], False, False), ([], True, False)]
)
def test_a_disk_on_a_course_that_was_left_elsewhere_is_refused(
    uploaded_too: dict[int, str | None],
    told: int,
    recorded: list[int],
    in_the_checkpoint: bool,
    is_refused: bool,
    finished: Finished,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has come as far as what is uploaded and sound. That, or what is damaged, says what it is from behind."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    (run / "checkpoints" / "step_00000006" / MANIFEST).write_bytes(
        b"\n" + (store / "step_00000006" / MANIFEST).read_bytes()
    )
    returns = [Rollback(to=2, id="made elsewhere")]
    write(run, [returns[each] for each in recorded])
    for step, manifest in uploaded_too.items():
        if manifest is None:
            lose(store, step)
            continue
        shutil.copytree(store / "step_00000006", store / f"step_{step:08}")
        if manifest == "{":
            (store / f"step_{step:08}" / MANIFEST).write_text(manifest)

    def of(checkpoint: Path, *_: object) -> SimpleNamespace:
        is_here = run in checkpoint.parents
        return SimpleNamespace(rollbacks=() if is_here and not in_the_checkpoint else tuple(returns))

    monkeypatch.setattr(metadata, "metadata_of", of)
    monkeypatch.setattr(fetched, "write_event", lambda *_, **__: None)
    before = snapshot(run)
    config = load(finished.config, [f"run.folder={run}", f"checkpoint.upload_to=file://{store}"])
    with pytest.raises(ConfigError) if is_refused else nullcontext() as refused:
        fetched.fetch(config, lambda record: config, probe=False, dry_run=False)
    assert snapshot(run) == before
    if refused is not None:
        assert str(refused.value) == (
            f"checkpoint.upload_to = 'file://{store}' has step_0000000{told} from behind a rollback to step 2, and "
            f"run.folder = '{run}' has step_00000006, which knows nothing of it: it is of the course that was left. To "
            "go on behind the rollback, move run.folder away: all is fetched. To go on without it, choose another "
            "upload_to."
        )


def test_a_rollback_that_a_later_one_has_left_behind_is_known(
    finished: Finished, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload is from behind the first of two made here, and the run has come as far behind the second."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    (first, _), (second, _) = (by_hand(run, 4, RollbackOptions()) for _ in range(2))
    again = run / "checkpoints" / "step_00000006"
    shutil.copytree(finished.folder / "checkpoints" / "step_00000006", again)
    (again / MANIFEST).write_bytes(b"\n" + (again / MANIFEST).read_bytes())

    def of(checkpoint: Path, *_: object) -> SimpleNamespace:
        return SimpleNamespace(rollbacks=(second if run in checkpoint.parents else first,))

    monkeypatch.setattr(metadata, "metadata_of", of)
    before = snapshot(run)
    config = load(finished.config, [f"run.folder={run}", f"checkpoint.upload_to=file://{store}"])
    fetched.fetch(config, lambda record: config, probe=False, dry_run=False)
    assert snapshot(run) == before


@pytest.mark.parametrize(
    ("recorded", "known", "is_undone"),
    [
        ([2, 6], [], True),
        ([2, 6], [2], False),
        ([2, 4], [2], True),
        ([2, 4], [2, 4], False),
        ([4, 2], [2], False),
        ([4, 2], [4], True),
    ],
)
def test_each_return_that_still_counts_undoes_what_does_not_know_it(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[int],
    known: list[int],
    is_undone: bool,
) -> None:
    """Also one before the last; not one to a step that a later one has left behind."""
    returns = {to: Rollback(to=to, id=f"to {to}") for to in recorded}
    write(tmp_path, list(returns.values()))
    monkeypatch.setattr(metadata, "metadata_of", lambda *_: SimpleNamespace(rollbacks=[returns[to] for to in known]))
    assert fetched.is_undone(Stored(f"file://{store}"), 6, tmp_path) == is_undone


def test_a_dry_run_leaves_all_as_it_is(config: Path, store: Path, tmp_path: Path) -> None:
    before = snapshot(store)
    answer = here("train", config, f"checkpoint.upload_to=file://{store}", "--dry-run")
    assert answer.status == 0 and "step_00000006 of file:" in answer.out and "would be fetched first" in answer.out
    assert snapshot(store) == before and not (tmp_path / "run").exists()


def test_a_full_disk(config: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(fetched.shutil, "disk_usage", lambda path: usage(1000))
    settings = load(config, [f"checkpoint.upload_to=file://{store}"])
    with pytest.raises(CheckpointError, match=r"too full to fetch step_00000006.*0\.0 MB free"):
        fetched.fetch(settings, lambda record: settings, probe=False, dry_run=False)
    assert saved_steps(tmp_path / "run") == []


def test_how_far_it_is_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(fetched, "Pace", lambda total: _pace(total, lambda: now[0]))
    advance = fetched._progress("Fetching step_00000004", 400_000_000)
    advance(1)
    now[0] = 10.0
    advance(99_999_999)
    assert capsys.readouterr().out == "Fetching step_00000004: 100 of 400 MB, 10 MB/s, 0:00:30 left\n"


def _pace(total: int, clock: Callable[[], float]) -> fetched.Pace:
    from colonnade.pace import Pace

    return Pace(total, clock)


def test_a_storage_that_cannot_be_read(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(operation: str, path: str) -> None:
        if operation == "ls":
            raise OSError(errno.ETIMEDOUT, "s3cr3t-K timed out")

    FaultyStorage.before = staticmethod(before)
    answer = here("train", config, "checkpoint.upload_to=faulty://user:s3cr3t-K@b/run")
    assert answer.status == 2 and "cannot be read" in answer.err and "s3cr3t" not in answer.err, answer


def test_bad_input(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one message before any rank starts, and no folder is left."""
    (tmp_path / "file").write_text("")
    for url, said in {
        **dict.fromkeys(("runs/books", "runs//books"), "is no URL"),
        **dict.fromkeys(("file://", "file:///", "s3://", "s3:///?x=1"), "names no folder behind ://"),
        "simplecache::s3://b/r": "chains several kinds",
        "nosuch://b/r": "Install the package of its kind of storage",
        "https://localhost:1/r": "cannot be used",
        f"file://{tmp_path}/file/r": "cannot be used",
        f"file://{tmp_path}/run": "is in the run's own folder",
        f"file://{tmp_path}/run/checkpoints": "is in the run's own folder",
    }.items():
        answer = here("train", config, f"checkpoint.upload_to={url}")
        assert answer.status == 2 and said in answer.err and "Traceback" not in answer.err, (url, answer)
        assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    answer = here("train", config, "run.folder=run", f"checkpoint.upload_to=file://{tmp_path}/run/checkpoints")
    assert answer.status == 2 and "is in the run's own folder" in answer.err, answer
    answer = here("train", config, "checkpoint.upload_keep=3")
    assert answer.status == 2 and "checkpoint.upload_to is not set" in answer.err


@pytest.mark.slow
def test_credentials_are_nowhere(corpus: TinyCorpus, uploaded: Path, tmp_path: Path) -> None:
    """In a storage whose URL has a key, what is fetched, trained, uploaded and said shows nothing of it."""
    memory = MemoryFileSystem()
    place = f"user:{SECRET}@bucket/run"
    memory.put(f"{uploaded}/step_00000004", f"/{place}/step_00000004", recursive=True)
    config = write_config(corpus, tmp_path / "made")
    keys = (f"checkpoint.upload_to=memory://{place}", f"run.folder={tmp_path}/run")
    answer = forked("train", config, *keys)
    assert answer.status == 0 and "memory://…@bucket/run" in answer.out, answer
    told = [event["event"] for event in events(tmp_path / "run")]
    assert told.count("fetched") == 1 and told.count("uploaded") == 1
    page = here("report", tmp_path / "run", "--output", tmp_path / "page.html")
    assert page.status == 0
    wrong = here("train", config, *keys, "model.num_layers=4")
    assert wrong.status == 2 and "another configuration" in wrong.err
    texts = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    texts |= {f"answer {n}": (a.out + a.err).encode() for n, a in enumerate((answer, page, wrong))}
    assert [name for name, text in texts.items() if b"s3cr3t" in text or b"K+y" in text] == []


def test_sweeps_give_each_point_a_place_of_its_own(tmp_path: Path, corpus: TinyCorpus) -> None:
    from colonnade.train.sweep import read_sweep

    path = tiny.write_config(corpus, tmp_path)
    path.write_text(path.read_text() + "\n[sweep]\ntrain.seed = [1, 2]\n")
    found = read_sweep(path, ["checkpoint.upload_to=s3://b/sweep/"])
    assert found is not None
    urls = [point.content["checkpoint"]["upload_to"] for point in found.points]
    assert urls == ["s3://b/sweep/seed-1", "s3://b/sweep/seed-2"]
