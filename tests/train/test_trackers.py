"""Which trackers a configuration asks for, what they are told of the run, and numbers that wait for a slow one."""

import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.train.trackers import Mlflow, Prometheus, Wandb, trackers
from colonnade.train.tracking import Feed
from tests.train.test_tracking import FakeWandb, Recorded, config

ALL = 'wandb = "offline"\nmlflow = "http://tracking:5000"\nprometheus = "m.prom"\nproject = "stories"\nname = "seven"'


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of all trackers, of which no more is there than their names."""
    for package in ("wandb", "mlflow", "prometheus_client"):
        module = ModuleType(package)
        module.__spec__ = ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, module)
    board = SimpleNamespace(SummaryWriter=lambda folder, purge_step: (folder, purge_step))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)  # type: ignore[arg-type]


def with_board(settings: Config) -> Config:
    return settings.model_copy(update={"run": settings.run.model_copy(update={"tensorboard": True})})


def test_each_tracker_is_told_of_which_run_its_numbers_are(installed: None, tmp_path: Path) -> None:
    found = {each.name: vars(each) for each in trackers(with_board(config(tmp_path, ALL)))}
    assert list(found) == ["TensorBoard", "Weights & Biases", "MLflow", "Prometheus"]
    wandb, prometheus = found["Weights & Biases"], found["Prometheus"]
    assert [wandb[f"_{key}"] for key in ("folder", "project", "name", "mode")] == [
        tmp_path, "stories", "seven", "offline",
    ]  # fmt: skip
    assert (prometheus["_name"], prometheus["_target"], prometheus["_port"]) == ("seven", "m.prom", None)
    assert [each.name for each in trackers(config(tmp_path, ALL))] == list(found)[1:]


@pytest.mark.parametrize("content", [b"\xff", b"\n", None])
def test_a_run_whose_number_is_lost_is_a_new_one_to_its_tracker(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, kept = FakeWandb(), tmp_path / "tracking" / "wandb"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if content is not None:
        kept.parent.mkdir()
        kept.write_bytes(content)
    Wandb(tmp_path, "project", "name", "online").open(1)
    assert [(how["id"], how["resume"]) for how in fake.inits] == [(None, None)] and kept.read_text() == "abc123\n"


def test_a_name_that_no_metric_may_have_is_written_with_what_it_may(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    tracker = Prometheus(str(tmp_path / "metrics.prom"), "r")
    tracker.open(1)
    tracker.numbers(1, {"validation_loss/data-b": 3.0})
    assert 'colonnade_validation_loss_data_b{run="r",set="data-b"} 3.0' in (tmp_path / "metrics.prom").read_text()


def test_data_sets_that_a_gauge_cannot_be_named_after_are_kept_apart(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    names = ("книги", "песни", "en-1", "en_1", 'a"b\\c')
    tracker = Prometheus(str(tmp_path / "metrics.prom"), "r")
    tracker.open(1)
    values = {f"validation_loss/{name}": float(number) for number, name in enumerate(names)}
    tracker.numbers(1, {"loss": 9.0, "thermometers/largest_x": 8.0, **values})
    lines = [line for line in (tmp_path / "metrics.prom").read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        'colonnade_loss{run="r"} 9.0',
        'colonnade_thermometers_largest_x{run="r"} 8.0',
        'colonnade_validation_loss______{run="r",set="книги"} 0.0',
        'colonnade_validation_loss______{run="r",set="песни"} 1.0',
        'colonnade_validation_loss_en_1{run="r",set="en-1"} 2.0',
        'colonnade_validation_loss_en_1{run="r",set="en_1"} 3.0',
        'colonnade_validation_loss_a_b_c{run="r",set="a\\"b\\\\c"} 4.0',
    ]


def test_mlflow_gets_names_that_it_takes_one_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that it refuses would keep from it all numbers of the step."""
    entities = ModuleType("mlflow.entities")
    entities.Metric = lambda name, *_: name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracker, sent = Mlflow(tmp_path, "uri", "experiment", "run"), list[list[str]]()
    tracker._client = SimpleNamespace(log_batch=lambda run, metrics: sent.append(metrics))
    sets = {
        "en 1:2.b-c": "en 1:2.b-c",
        "книги": "книги",
        "/data/en/tokens": "data/en/tokens",
        "../en//./x": "en/x",
        "s3://bucket/en": "s3:/bucket/en",
        "c++": "c__",
        "c,+": "c___2",
        "c__": "c___3",
        "x" * 300: "x" * 224,
    }
    for _ in range(2):
        tracker.numbers(1, {"loss": 1.0, **{f"validation_loss/{name}": 2.0 for name in sets}})
    assert sent == [["loss", *(f"validation_loss/{name}" for name in sets.values())]] * 2


def full(said: list[str]) -> tuple[Recorded, Feed]:
    """A tracker that stands still with the first entry, and a queue with as many more as it holds."""
    tracker = Recorded()
    tracker.goes_on.clear()
    feed = Feed(tracker, said.append, longest=2)
    feed.begin(1)
    feed.numbers(1, {})
    assert tracker.is_called.wait(20)
    for step in (2, 3):
        feed.numbers(step, {})
    assert feed._queue.full()
    return tracker, feed


@pytest.mark.parametrize("patience", [20, 1e10])
def test_a_full_queue_is_written_to_its_end_by_a_tracker_that_is_slow(patience: float) -> None:
    """As long as there is patience: a run that ends waits for it, and no longer than clocks can count."""
    tracker, feed = full(said := [])
    threading.Timer(0.05, tracker.goes_on.set).start()
    feed.close(patience)
    assert tracker.calls == [("open", 1), *(("numbers", step, {}) for step in (1, 2, 3)), ("close",)]
    assert said == [] and feed.dropped == 0


def test_what_a_tracker_has_not_got_is_counted_though_it_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, feed = full(said := [])
    join = threading.Thread.join

    def late(thread: threading.Thread, patience: float) -> None:
        tracker.goes_on.set()
        join(thread, 20)

    monkeypatch.setattr(threading.Thread, "join", late)
    feed.close(0.05)
    assert tracker.calls == [("open", 1), ("numbers", 1, {}), ("close",)]
    assert said[0].startswith("Recorded has not got 2 entries")


def test_a_long_error_is_told_by_its_beginning() -> None:
    def long(first: int) -> None:
        raise OSError("x" * 10_000)

    tracker, said = Recorded(), list[str]()
    tracker.open = long  # type: ignore[method-assign]
    feed = Feed(tracker, said.append)
    feed.begin(1)
    feed.numbers(1, {})
    feed.close(20)
    assert said[0] == f"Recorded: OSError: {'x' * 200}. The run goes on, and tries again."


def test_a_package_of_which_only_the_name_is_there_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a module that some program has put in its place."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(ConfigError, match=r"tracking\.wandb = \"offline\" needs the package wandb, which is not"):
        trackers(config(tmp_path, 'wandb = "offline"'))
