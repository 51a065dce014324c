"""Trackers beside training: the same numbers, a run that never waits, and what is said where something is lost."""

import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from colonnade.config.load import loads
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.train.monitor import Monitor
from colonnade.train.trackers import Mlflow, Prometheus, Wandb, trackers
from colonnade.train.tracking import PAUSE, Feed

TOML = """
[data]
train = "tokens"
[train]
steps = 4
global_batch_size = 4
micro_batch_size = 2
[optim]
learning_rate = 1e-3
[run]
folder = "{folder}"
[tracking]
{tracking}
"""


def config(folder: Path, tracking: str = "") -> Config:
    return loads(TOML.format(folder=folder, tracking=tracking))


class Recorded:
    """A tracker that keeps what it gets, and does what a test wants of it."""

    name = "Recorded"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.is_called, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def _got(self, what: str, *arguments: Any) -> None:
        self.is_called.set()
        self.goes_on.wait(20)
        if what in self.fails:
            raise ConnectionError("no route to https://me:topsecret@host/api?key=alsosecret\nsecond line")
        self.calls.append((what, *arguments))

    def open(self, first: int) -> None:
        self._got("open", first)

    def numbers(self, step: int, values: Any) -> None:
        self._got("numbers", step, dict(values))

    def event(self, step: int, kind: str, words: str) -> None:
        self._got("event", step, kind, words)

    def close(self) -> None:
        self._got("close")


def test_all_calls_come_in_order_from_a_thread() -> None:
    tracker, said = Recorded(), list[str]()
    feed = Feed(tracker, said.append)
    feed.numbers(1, {"loss": 9.0})  # before it begins: nobody takes it
    feed.begin(5)
    feed.numbers(5, {"loss": 2.0})
    feed.event(5, "saved", "step_5")
    feed.close(10)
    feed.begin(3)  # after a rollback
    feed.numbers(3, {"loss": 1.0})
    feed.close(10)
    feed.close(10)
    assert tracker.calls == [
        ("open", 5), ("numbers", 5, {"loss": 2.0}), ("event", 5, "saved", "step_5"), ("close",),
        ("open", 3), ("numbers", 3, {"loss": 1.0}), ("close",),
    ]  # fmt: skip
    assert said == []


def test_behind_a_rollback_a_run_goes_on_telling(tmp_path: Path) -> None:
    tracker = Recorded()
    told = Monitor(
        tmp_path,
        active=True,
        steps=9,
        log_every=9,
        tokens_per_step=64,
        flops_per_token=1e6,
        peak_flops=None,
        trackers=[tracker],
    )
    told.resume(0)
    line = {"loss": 1.0, "learning_rate": 0.1, "grad_norm": 1.0}
    for step in (1, 2):
        told.step({"step": step, **line}, 0.5)
    told.go_back(1)
    told.step({"step": 2, **line}, 0.5)
    told.close()
    before, after = [("open", 1), ("numbers", 1), ("numbers", 2), ("close",)], [("open", 2), ("numbers", 2), ("close",)]
    assert [call[:2] for call in tracker.calls] == before + after


def test_a_measured_step_is_told_by_its_extremes(tmp_path: Path) -> None:
    """At its step, beside the numbers of metrics.jsonl and not mistaken for them."""
    tracker, settings = Recorded(), {"steps": 9, "log_every": 9, "tokens_per_step": 64, "flops_per_token": 1e6}
    told = Monitor(tmp_path, active=True, peak_flops=None, trackers=[tracker], **settings)  # type: ignore[arg-type]
    told.resume(4)
    told.thermometers({"step": 5, "activations": {}}, {"largest_update": 0.5})
    told.close()
    assert tracker.calls == [("open", 5), ("numbers", 5, {"thermometers/largest_update": 0.5}), ("close",)]
    assert (tmp_path / "thermometers.jsonl").read_text() == '{"step": 5, "activations": {}}\n'


def test_a_tracker_that_stands_still_costs_a_run_nothing_and_what_is_lost_is_counted() -> None:
    tracker, said = Recorded(), list[str]()
    tracker.goes_on.clear()
    feed = Feed(tracker, said.append, longest=10)
    feed.begin(1)
    putting = threading.Thread(target=lambda: [feed.numbers(step, {"loss": 1.0}) for step in range(1000)], daemon=True)
    putting.start()
    putting.join(5)
    assert not putting.is_alive(), "putting waits for the tracker"
    began = time.perf_counter()
    feed.close(0.2)
    assert time.perf_counter() - began < 2.0
    tracker.goes_on.set()
    assert feed.dropped >= 999
    assert said == [
        f"Recorded has not got {feed.dropped:,} entries, or not said that it has the last. metrics.jsonl and "
        "events.jsonl have them all."
    ]


def test_a_tracker_that_stands_still_over_a_rollback_is_told_afterwards_what_came_since() -> None:
    """By one thread at a time, and opened again: what it had of later steps is superseded."""
    tracker, said = Recorded(), list[str]()
    tracker.goes_on.clear()
    feed = Feed(tracker, said.append)
    feed.begin(1)
    for step in (1, 2):
        feed.numbers(step, {"loss": 9.0})
    assert tracker.is_called.wait(20)
    feed.close(0.05)
    assert len(said) == 1 and said[0].startswith("Recorded has not got 1 entries"), "2 waits, and 1 is under way"
    feed.begin(2)
    feed.numbers(2, {"loss": 1.0})
    feed.event(2, "saved", "step_2")
    tracker.goes_on.set()
    feed.close(20)
    assert tracker.calls == [
        ("open", 1), ("numbers", 1, {"loss": 9.0}), ("close",),
        ("open", 2), ("numbers", 2, {"loss": 1.0}), ("event", 2, "saved", "step_2"), ("close",),
    ]  # fmt: skip
    assert len(said) == 1 and feed.dropped == 1


def test_what_was_lost_before_a_rollback_is_counted_with_what_is_lost_behind_it_and_said_once() -> None:
    tracker, said = Recorded(), list[str]()
    feed = Feed(tracker, said.append)
    for step, fails in ((1, {"numbers"}), (2, set[str]()), (3, {"numbers"})):
        tracker.fails = fails
        feed.begin(step)
        feed.numbers(step, {})
        feed.close(20)
    assert [line.partition(" entr")[0] for line in said[1:]] == [
        "Recorded has not got 1", "Recorded works again, without 1", "Recorded has not got 2"
    ]  # fmt: skip


def test_a_tracker_that_fails_again_after_it_has_worked_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an hour at most; one that goes on failing is told then."""
    tracker, said, now = Recorded(), list[str](), [0.0]
    feed = Feed(tracker, said.append)
    feed._is_open = True
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for minutes, fails in ((0, 1), (1, 1), (2, 0), (3, 1), (59, 1), (60, 1), (61, 1), (62, 0)):
        now[0] = 60.0 * minutes
        tracker.fails = {"numbers"} if fails else set()
        feed._try(lambda: tracker.numbers(1, {}), 1)
    told = ["ConnectionError", "works again, without 2 entries", "ConnectionError", "works again, without 2 entries"]
    assert len(said) == len(told) and all(words in line for words, line in zip(told, said, strict=True))
    assert feed.dropped == 6


def test_what_a_tracker_raises_is_said_once_without_credentials_and_it_is_tried_again() -> None:
    tracker, said = Recorded(), list[str]()
    tracker.fails = {"numbers"}
    feed = Feed(tracker, said.append)
    feed.begin(1)
    feed.numbers(1, {})
    feed.numbers(2, {})
    feed.event(2, "saved", "")
    feed.close(10)
    assert tracker.calls == [("open", 1), ("event", 2, "saved", ""), ("close",)]
    assert len(said) == 3 and said[0].startswith("Recorded: ConnectionError: no route to https://")
    assert "secret" not in said[0] and "second line" not in said[0]
    assert said[1].startswith("Recorded works again, without 2 entries")
    assert said[2].startswith("Recorded has not got 2 entries")


def test_one_that_cannot_be_opened_loses_its_numbers_alone() -> None:
    tracker, said = Recorded(), list[str]()
    tracker.fails = {"open"}
    feed = Feed(tracker, said.append)
    feed.begin(1)
    for step in range(50):
        feed.numbers(step, {})
    feed.close(10)
    assert tracker.calls == [] and feed.dropped == 50 and len(said) == 2


def test_one_that_can_be_opened_later_gets_what_comes_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again with each number, which may take long, but after a pause."""
    now, tries = [1000.0], list[int]()

    class Late(Recorded):
        def open(self, first: int) -> None:
            tries.append(first)
            if len(tries) == 1:
                raise ConnectionError("not yet")
            super().open(first)

    monkeypatch.setattr("colonnade.train.tracking.time.monotonic", lambda: now[0])
    tracker, said = Late(), list[str]()
    feed = Feed(tracker, said.append)
    for step, seconds in ((1, 0.0), (2, PAUSE - 0.1), (3, PAUSE), (4, PAUSE)):
        now[0] = 1000.0 + seconds
        feed._try(lambda step=step: tracker.numbers(step, {}), 1)  # type: ignore[misc]
    assert tries == [1, 1] and tracker.calls == [("open", 1), ("numbers", 3, {}), ("numbers", 4, {})]
    assert feed.dropped == 2 and said[1:] == [
        "Recorded works again, without 2 entries, which metrics.jsonl and events.jsonl have."
    ]


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ('wandb = "offline"', "wandb"),
        ('mlflow = "http://nowhere:1"', "mlflow"),
        ('prometheus = "9105"', "prometheus_client"),
    ],
)
def test_a_missing_package_is_one_message(
    line: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"tracking\..* needs the package {package}.*pip install 'colonnade\[track\]'"
    ):
        trackers(config(tmp_path, line))


@pytest.mark.parametrize("port", ["0", "00", "65536", "99999", "9" * 5000])
def test_a_port_that_there_is_not_is_one_message(port: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf'tracking.prometheus = "{port[:50]}" is no port: they are 1 to 65535'):
        Prometheus(port, "r")
    for target in ("1", "65535", "²", "9105.prom"):
        Prometheus(target, "r")


@pytest.mark.parametrize("uri", ["sqlite:///runs/mlflow.db", "mysql+pymysql://me:s3cr3t@host/base"])
def test_a_database_of_mlflow_without_what_writes_to_it_is_one_message(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the extra alone; it has all that is needed for a server."""
    for package, found in (("mlflow", ModuleType("mlflow")), ("alembic", None)):
        monkeypatch.setitem(sys.modules, package, found)
    monkeypatch.setattr(sys.modules["mlflow"], "__spec__", ModuleSpec("mlflow", None))
    with pytest.raises(
        ConfigError, match=r"tracking\.mlflow = .* needs the package alembic.*pip install mlflow"
    ) as told:
        trackers(config(tmp_path, f'mlflow = "{uri}"'))
    assert "s3cr3t" not in str(told.value)
    assert len(trackers(config(tmp_path, 'mlflow = "http://tracking:5000"'))) == 1


def test_a_run_is_called_as_was_asked_for_or_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is started in its own folder."""
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setattr(sys.modules["mlflow"], "__spec__", ModuleSpec("mlflow", None))
    (tmp_path / "seven").mkdir()
    monkeypatch.chdir(tmp_path / "seven")
    server = 'mlflow = "http://tracking:5000"\nproject = "stories"'
    for folder, more, name in ((Path("."), "", "seven"), (tmp_path / "a/run", "", "run"), (tmp_path, "x", "x")):
        named = f'\nname = "{more}"' if more else ""
        (found,) = trackers(config(folder, server + named))
        assert isinstance(found, Mlflow) and (found._experiment, found._name) == ("stories", name)
        assert found._uri == "http://tracking:5000"


def test_nothing_is_tracked_unless_asked(tmp_path: Path) -> None:
    assert trackers(config(tmp_path)) == []


# --- the programs themselves, or what stands for them -----------------------------------------------------------------


class FakeWandb(ModuleType):
    """As much of wandb as is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.id, self.finished = "abc123", 0

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **how: Any) -> "FakeWandb":
        self.inits.append(how)
        return self

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_knows_a_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        tracker = Wandb(tmp_path, "project", "name", "online")
        tracker.open(1)
        tracker.numbers(7, {"loss": 1.0})
        tracker.event(7, "saved", "step_7")
        tracker.close()
    assert [(how["id"], how["resume"]) for how in fake.inits] == [(None, None), ("abc123", "allow")]
    assert fake.inits[0]["mode"] == "online" and fake.inits[0]["dir"] == str(tmp_path)
    assert (fake.inits[0]["project"], fake.inits[0]["name"]) == ("project", "name")
    quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
    assert fake.inits[0]["settings"] == quiet, "a run's lines and code are its own"
    assert fake.logged[:2] == [({"loss": 1.0}, 7), ({"event/saved": 7}, 7)] and fake.finished == 2


def test_wandb_offline_resumes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no server that could: what is synchronized later goes by the name alone."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        Wandb(tmp_path, "project", "name", "offline").open(1)
    assert [(how["id"], how["resume"]) for how in fake.inits] == [(None, None), ("abc123", None)]


def test_prometheus_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = tmp_path / "metrics.prom"
    tracker = Prometheus(str(path), 'a "run"')
    tracker.open(1)
    tracker.numbers(1, {"loss": 3.0, "tokens_per_second": 10.0})
    tracker.numbers(2, {"loss": 2.5})
    tracker.event(2, "rolled back", "")
    tracker.close()
    lines = path.read_text().splitlines()
    assert 'colonnade_loss{run="a \\"run\\""} 2.5' in lines
    assert 'colonnade_tokens_per_second{run="a \\"run\\""} 10.0' in lines
    assert 'colonnade_event_rolled_back_step{run="a \\"run\\""} 2.0' in lines


def test_prometheus_that_is_opened_again_has_what_is_seen_from_then_on(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = tmp_path / "metrics.prom"
    tracker = Prometheus(str(path), "r")
    for first in (3, 2):  # as behind a rollback
        tracker.open(first)
        tracker.numbers(first, {"loss": float(first)})
        tracker.event(first, "saved", "")
        tracker.close()
    lines = path.read_text().splitlines()
    assert 'colonnade_loss{run="r"} 2.0' in lines
    assert 'colonnade_event_saved_step{run="r"} 2.0' in lines


def test_prometheus_over_http_on_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in no file."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("prometheus_client")
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tracker = Prometheus(str(port), "r")
    tracker.open(1)
    tracker.numbers(1, {"loss": 3.0})
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b'colonnade_loss{run="r"} 3.0' in answer.read()
    tracker.close()
    with pytest.raises(OSError):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    for first in (1, 3):
        tracker = Mlflow(tmp_path, uri, "experiment", "run")
        tracker.open(first)
        for step in (first, first + 1):
            tracker.numbers(step, {"loss": 1.0 / step})
        tracker.event(first, "saved", "x")
        tracker.close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("experiment")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert run.info.status == "FINISHED" and run.data.tags["event.1.saved"] == "x"


class FakeMlflow(ModuleType):
    """As much of mlflow as is used: a client that keeps what it is asked."""

    def __init__(self, experiments: dict[str, str]) -> None:
        super().__init__("mlflow")
        self.experiments, self.calls = experiments, list[tuple[Any, ...]]()

    def MlflowClient(self, tracking_uri: str) -> "FakeMlflow":
        self.calls.append(("client", tracking_uri))
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("create_experiment", name))
        return self.experiments.setdefault(name, "77")

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.calls.append(("create_run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r5"))

    def update_run(self, run: str, status: str) -> None:
        self.calls.append(("update_run", run, status))

    def set_tag(self, run: str, key: str, words: str) -> None:
        self.calls.append(("set_tag", run, key, words))

    def set_terminated(self, run: str) -> None:
        self.calls.append(("set_terminated", run))


@pytest.mark.parametrize("experiments", [{}, {"stories": "3", "seven": "4"}], ids=["first", "known"])
def test_mlflow_knows_a_run_again_in_its_experiment(
    experiments: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = (
        [("create_run", "3", "seven")]
        if experiments
        else [("create_experiment", "stories"), ("create_run", "77", "seven")]
    )
    fake = FakeMlflow(experiments)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for step in (7, 9):
        tracker = Mlflow(tmp_path, "http://tracking:5000", "stories", "seven")
        tracker.open(step)
        tracker.event(step, "saved", "x" * 501)
        tracker.close()
    events = [
        [("update_run", "r5", "RUNNING"), ("set_tag", "r5", f"event.{step}.saved", "x" * 500), ("set_terminated", "r5")]
        for step in (7, 9)
    ]
    client = ("client", "http://tracking:5000")
    assert fake.calls == [client, *begun, *events[0], client, *events[1]]


def test_mlflow_is_told_the_time_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entities = ModuleType("mlflow.entities")
    entities.Metric = lambda *what: what  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracker, sent = Mlflow(tmp_path, "uri", "experiment", "run"), list[Any]()
    tracker._client = SimpleNamespace(log_batch=lambda run, metrics: sent.extend(metrics))
    before = time.time()
    tracker.numbers(3, {"loss": 1.5})
    ((name, value, milliseconds, step),) = sent
    assert (name, value, step) == ("loss", 1.5, 3) and before - 1 <= milliseconds / 1000 <= time.time()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tracker = Wandb(tmp_path, "project", "name", "offline")
    tracker.open(1)
    tracker.numbers(1, {"loss": 1.0})
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
