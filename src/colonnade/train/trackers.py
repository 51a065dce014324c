"""The programs that numbers can go to, each behind `tracking.Tracker`. Their packages are imported by their threads.

Runs are known again after a restart: what a program calls the run is kept in the run's folder, in tracking/.
"""

import json
import re
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from wsgiref.simple_server import WSGIServer

from colonnade.atomic import write_whole
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, not_installed
from colonnade.train.tracking import Numbers, Tracker

KNOWN = "tracking"
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""How MLflow's URIs of databases begin: mlflow-skinny brings nothing along that writes to one."""
_METRIC = re.compile(r"[^a-zA-Z0-9_]")
_OF_SET = re.compile("validation_[^/]*/(.*)", re.DOTALL)
"""The name of what an evaluation finds on one data set of a blend."""
_NOT_MLFLOW = re.compile(r"[^/\w.\- :]")
_LONGEST = 240  # characters of a name that MLflow takes, which are 250, less a number behind it


def trackers(config: Config) -> list[Tracker]:
    """Those that [tracking] and run.tensorboard ask for. ConfigError where a package is missing."""
    tracking, folder = config.tracking, Path(config.run.folder)
    name = tracking.name or folder.resolve().name
    found: list[Tracker] = [TensorBoard(folder)] if config.run.tensorboard else []
    if tracking.wandb != "off":
        _needs("wandb", "tracking.wandb", tracking.wandb)
        found.append(Wandb(folder, tracking.project, name, tracking.wandb))
    if tracking.mlflow is not None:
        _needs("mlflow", "tracking.mlflow", tracking.mlflow)
        if tracking.mlflow.partition(":")[0].partition("+")[0] in DATABASES:
            _needs("alembic", "tracking.mlflow", tracking.mlflow, of="mlflow")
        found.append(Mlflow(folder, tracking.mlflow, tracking.project, name))
    if tracking.prometheus is not None:
        _needs("prometheus_client", "tracking.prometheus", tracking.prometheus)
        found.append(Prometheus(tracking.prometheus, name))
    return found


def _needs(package: str, key: str, value: str, of: str = "colonnade[track]") -> None:
    """ConfigError where a package is missing. `of`: with which it is installed."""
    try:
        missing = find_spec(package) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise ConfigError(not_installed(f"{key} = {json.dumps(value)}", package, of, f"leave {key} out"))


class TensorBoard:
    """Files in the run's folder."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        """ConfigError where the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            instead = "set run.tensorboard = false"
            raise ConfigError(
                not_installed("run.tensorboard = true", "tensorboard", "colonnade[track]", instead)
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._board: Any = None

    def open(self, first: int) -> None:
        self._board = self._make(str(self._folder / "tensorboard"), purge_step=first)

    def numbers(self, step: int, values: Numbers) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def event(self, step: int, kind: str, words: str) -> None:
        self._board.add_text(f"event/{kind}", words, step)

    def close(self) -> None:
        self._board.close()


class Wandb:
    """Weights & Biases."""

    name = "Weights & Biases"

    def __init__(self, folder: Path, project: str, run: str, mode: Literal["offline", "online"]) -> None:
        self._folder, self._project, self._name, self._mode = folder, project, run, mode
        self._run: Any = None

    def open(self, first: int) -> None:
        import wandb

        known = _known(self._folder, "wandb")
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            dir=str(self._folder),
            mode=self._mode,
            id=known,
            resume="allow" if known and self._mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        _keep(self._folder, "wandb", self._run.id)

    def numbers(self, step: int, values: Numbers) -> None:
        self._run.log(dict(values), step=step)

    def event(self, step: int, kind: str, words: str) -> None:
        self._run.log({f"event/{kind}": step}, step=step)  # without a step it would take the next one

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow, by its client: no state of the process is touched."""

    name = "MLflow"

    def __init__(self, folder: Path, uri: str, experiment: str, run: str) -> None:
        self._folder, self._uri, self._experiment, self._name = folder, uri, experiment, run
        self._client: Any = None
        self._id = ""
        self._known_as: dict[str, str] = {}

    def open(self, first: int) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self._uri)
        known = _known(self._folder, "mlflow")
        if known is None:
            experiment = client.get_experiment_by_name(self._experiment)
            number = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
            known = client.create_run(number, run_name=self._name).info.run_id
            _keep(self._folder, "mlflow", known)
        client.update_run(known, status="RUNNING")
        self._client, self._id = client, known

    def numbers(self, step: int, values: Numbers) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(self._name_of(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _name_of(self, name: str) -> str:
        """Of a number: one that MLflow takes, which no other has. Else it would refuse all numbers of the step."""
        if name not in self._known_as:
            parts = [part for part in _NOT_MLFLOW.sub("_", name).split("/") if part not in ("", ".", "..")]
            valid, taken = "/".join(parts)[:_LONGEST], self._known_as.values()
            each = (valid if number == 1 else f"{valid}_{number}" for number in count(1))
            self._known_as[name] = next(found for found in each if found not in taken)
        return self._known_as[name]

    def event(self, step: int, kind: str, words: str) -> None:
        self._client.set_tag(self._id, f"event.{step}.{kind}", words[:500])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Prometheus:
    """Gauges with the newest numbers, in a file or over HTTP on this machine."""

    name = "Prometheus"

    def __init__(self, target: str, run: str) -> None:
        """`target`: a file, or a port. ConfigError for one that there is not."""
        self._target, self._port, self._name = target, _port(target), run
        self._registry: Any = None
        self._gauges: dict[str, Any] = {}
        self._stop: Callable[[], None] = lambda: None

    def open(self, first: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._gauges = CollectorRegistry(), {}
        if self._port is not None:
            server, thread = start_http_server(self._port, addr="127.0.0.1", registry=self._registry)
            self._stop = partial(_end, server, thread)

    def numbers(self, step: int, values: Numbers) -> None:
        for name, value in values.items():
            self._gauge(name, "of the newest step that has one").set(value)
        self._write()

    def event(self, step: int, kind: str, words: str) -> None:
        self._gauge(f"event_{kind}_step", "step of the newest event of this kind").set(step)
        self._write()

    def _gauge(self, name: str, about: str) -> Any:
        from prometheus_client import Gauge

        key, of_set = "colonnade_" + _METRIC.sub("_", name), _OF_SET.fullmatch(name)
        labels = {"run": self._name} if of_set is None else {"run": self._name, "set": of_set[1]}
        if key not in self._gauges:
            self._gauges[key] = Gauge(key, about, list(labels), registry=self._registry)
        return self._gauges[key].labels(**labels)

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        if self._port is None:
            write_to_textfile(self._target, self._registry)

    def close(self) -> None:
        self._stop()


def _port(target: str) -> int | None:
    """The port that tracking.prometheus names; None where it names a file."""
    if not (target.isascii() and target.isdigit()):
        return None
    if len(target) > 5 or not 0 < int(target) < 1 << 16:
        raise ConfigError(
            f'tracking.prometheus = "{target[:50]}" is no port: they are 1 to 65535. Use one that is free, like '
            '"9105", or name a file, like "metrics.prom".'
        )
    return int(target)


def _end(server: WSGIServer, thread: Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


def _known(folder: Path, program: str) -> str | None:
    """What a program called the run when it was last open."""
    try:
        return (folder / KNOWN / program).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _keep(folder: Path, program: str, number: str) -> None:
    write_whole(folder / KNOWN / program, f"{number}\n".encode())
