"""What was predicted of a run, and what came: prediction.json at its start, comparison.json at its end.

memory        of rank 0: its kinds as planned; measured is the most of the process above what it had before its
              state was built (on CUDA: the most that torch allocated)
time          by the machine's description: the GPU's bundled one, or the bundled one of a CPU, which is another
              processor's; measured is the median of the steps but the first
bytes sent    of a step, by axis; measured is the least of the steps, without what follows their update; in others
              thermometers are read

Steps of other batches than were predicted (of an earlier phase of a curriculum, or behind a change), and those that
fp16 skipped, are left out.
"""

import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from colonnade.atomic import write_new, write_whole
from colonnade.checkpoint.names import newest_step
from colonnade.config.numbers import amount
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Mesh
from colonnade.outputs import json_of
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import Hardware, hardware
from colonnade.planner.memory import Memory
from colonnade.planner.paper import walk
from colonnade.planner.predict import predict
from colonnade.planner.ranks import table
from colonnade.train.beginning import Course
from colonnade.train.change_requests import returns_of
from colonnade.train.corpus import Corpus, curriculum_of, position_at
from colonnade.train.lines import object_in, step_in
from colonnade.train.loop import Banner
from colonnade.train.monitor import METRICS
from colonnade.train.products import Decision
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import checkpoints

PREDICTION, COMPARISON = "prediction.json", "comparison.json"
DEVICES = {"H100": "h100", "H200": "h100", "A100": "a100-80gb", "V100": "v100-dgx2h"}
"""Bundled machines by a part of a GPU's name."""
WALKED = 32
"""Micro-batches of gpipe up to which a run's start predicts more than memory: 13 s for 64 of a model of 24 layers."""
Describe = Callable[[Course, Mesh, torch.device, Corpus, Decision, Memory], Banner]
Within = Callable[[Config, int, Mesh, torch.device], AbstractContextManager[None]]


@dataclass
class Watcher:
    """Predicts a run where it is described, and compares when it has ended. `active`: not in a dry run."""

    describe: Describe
    guard: Within
    active: bool = True
    _predicted: dict[str, Any] | None = None
    _before: int | None = 0
    """[bytes] Of the process, before its state was built; None: not known."""
    _tokens: int = 0
    """Of a step, as predicted."""
    _begun: int = 0
    """The step that this start goes on from."""
    _earlier: bytes | None = None
    """The comparison of an earlier start."""

    def banner(self, course: Course, mesh: Mesh, device: torch.device, corpus: Corpus, decision: Decision) -> Banner:
        """As `describe` says; rank 0 writes its prediction, of what is in force where the run goes on. One rank of each
        stage predicts what all of its ranks take; the others' descriptions, which nobody reads, tell of none.
        """
        config = course.now
        own, first = Memory(0, 0, 0, 0, 0, 0), mesh.tp.rank == mesh.dp.rank == 0
        if first:
            own = predict(config, corpus.vocab_size, stage=mesh.pp.rank, device=device, products=decision.products)
        found = self.describe(course, mesh, device, corpus, decision, own)
        if self.active and mesh.rank == 0:
            self._tokens = config.train.global_batch_size * config.model.sample_length
            self._predicted = prediction(config, corpus.vocab_size, device, decision, own)
            _write(config, PREDICTION, self._predicted)
            self._earlier = _taken(config, COMPARISON)
            self._before, self._begun = _resident(device), newest_step(checkpoints(Path(config.run.folder)))
        return found

    @contextmanager
    def within(self, config: Config, vocab_size: int, mesh: Mesh, device: torch.device) -> Iterator[None]:
        """As `guard` does; behind it, a run that came to its end is compared. A start that made no step leaves the
        comparison of the one before.
        """
        try:
            with self.guard(config, vocab_size, mesh, device):
                yield
        finally:
            steps = [] if self._predicted is None else self._steps(config)
            if not steps and self._earlier is not None:
                write_whole(Path(config.run.folder) / COMPARISON, self._earlier)
        if self._predicted is not None and steps:
            _write(
                config,
                COMPARISON,
                compared(self._predicted, self._measured(self._as_predicted(config, steps), mesh.ledger, device)),
            )

    def _steps(self, config: Config) -> list[dict[str, Any]]:
        """The lines of those of this start."""
        return [line for line in _metrics(config) if line["step"] > self._begun]

    def _as_predicted(self, config: Config, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of as many tokens, in sequences as long, with an update."""
        ends = {line["step"]: line.get("tokens", 0) for line in _metrics(config)}
        curriculum, model, returns = curriculum_of(config), config.model, _returns(config)

        def is_alike(step: int) -> bool:
            begin = ends.get(step - 1, 0)
            _, passed = position_at(curriculum, step - 1, returns)
            phase = curriculum.phase(begin // (curriculum.unit * model.sequences) + passed)
            return ends[step] - begin == self._tokens and phase.seq_length == model.seq_length

        return [line for line in steps if is_alike(line["step"]) and "grad_norm" in line]

    def _measured(self, steps: list[dict[str, Any]], ledger: Ledger, device: torch.device) -> dict[str, Any]:
        usual = steps[1:] or steps
        memory = {"memory": {"total_bytes": self._most_taken(device)}}
        if not usual:
            return memory
        return memory | {
            "tokens_per_second": statistics.median(each["tokens_per_second"] for each in usual),
            "seconds_per_step": statistics.median(each["seconds"] for each in usual),
            "bytes_sent": ledger.least_of_steps({each["step"] for each in steps}),
        }

    def _most_taken(self, device: torch.device) -> int | None:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        most = _most()
        return None if most is None or self._before is None else most - self._before


def prediction(
    config: Config, vocab_size: int, device: torch.device, decision: Decision, memory: Memory
) -> dict[str, Any]:
    """Of rank 0, which will take this memory: memory, time, and bytes sent by axis."""
    where, timed, sent = machine_of(device), None, None
    if _is_soon_walked(config):
        if where is not None:
            timed = estimate(config, vocab_size, where, products=decision.products, every_rank=False)
        walked = walk(config, vocab_size, 0, products=decision.products) if timed is None else timed.walks[0]
        sent = Counter[str]()
        for entry in walked.entries:
            sent[entry.axis] += entry.bytes if entry.operation != "receive" else 0
    kinds = {name: size for name, size in asdict(memory).items() if size}
    return {
        "memory": {"total_bytes": memory.total + memory.host, "by_kind": kinds, "rank": 0},
        "tokens_per_second": None if timed is None else timed.tokens_per_second,
        "seconds_per_step": None if timed is None else timed.seconds_per_step,
        "bytes_sent": None if sent is None else {axis: size for axis, size in sent.items() if size},
        "hardware": None if where is None else where.name,
    }


def _is_soon_walked(config: Config) -> bool:
    """Whether the start of a run has time to walk a step. Of gpipe every micro-batch is walked, of others a few."""
    return config.parallel.schedule != "gpipe" or config.train.num_microbatches(config.parallel.dp) <= WALKED


def machine_of(device: torch.device) -> Hardware | None:
    """The bundled description that comes nearest to where a run computes; None: there is none."""
    if device.type == "cpu":
        return hardware("cpu")
    name = torch.cuda.get_device_name(device)
    return next((hardware(file) for part, file in DEVICES.items() if part in name), None)


def compared(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Both side by side, under the same keys; what was not measured is null."""
    found: dict[str, Any] = {}
    for key, value in predicted.items():
        if isinstance(value, dict):
            theirs = measured.get(key)
            found[key] = compared(value, theirs if isinstance(theirs, dict) else {})
            for extra in (theirs or {}).keys() - value.keys():
                found[key][extra] = {"predicted": 0, "measured": theirs[extra]}  # type: ignore[index]
        elif key not in ("rank", "hardware"):
            found[key] = {"predicted": value, "measured": measured.get(key)}
    return found


def shown(run: Path, *, as_json: bool) -> str:
    """A run's comparison as a table; its prediction, where it has not ended. Raises ConfigError where there is none."""
    if not (run / PREDICTION).exists():
        raise ConfigError(
            f"--check {run}: there is no {PREDICTION}. Name the folder of a run; one that an earlier version has made "
            "has none."
        )
    predicted, ended = _object(run, PREDICTION), (run / COMPARISON).exists()
    found = _object(run, COMPARISON) if ended else compared(predicted, {})
    if not _is_comparison(found):
        raise _damaged(run, COMPARISON if ended else PREDICTION, "numbers are missing")
    if as_json:
        return json_of(found)
    rows = [["", "predicted", "measured", "predicted ÷ measured"], *_rows(found)]
    note = [] if ended else ["", "The run has not come to its end yet."]
    where = predicted.get("hardware")
    told = [] if where is None else ["", f"Times are those of {where}."]
    return "\n".join([*table(rows, left=(0,)), *told, *note])


def _object(run: Path, name: str) -> dict[str, Any]:
    """A file of a run. Raises ConfigError for one that holds no JSON object."""
    try:
        content = json.loads((run / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(run, name, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(run, name, "it is no JSON object")
    return content


def _damaged(run: Path, name: str, why: str) -> ConfigError:
    return ConfigError(f"--check {run}: its {name} cannot be read: {why}. Train again to write it.")


def _is_comparison(found: dict[str, Any]) -> bool:
    """Whether all is there that `_rows` shows."""
    memory, sent = found.get("memory"), found.get("bytes_sent")
    if not isinstance(memory, dict) or not isinstance(sent, dict):
        return False
    pairs = [found.get("tokens_per_second"), found.get("seconds_per_step"), memory.get("total_bytes")]
    return all(map(_is_pair, [*pairs, *(() if _is_unpredicted(sent) else sent.values())]))


def _is_unpredicted(sent: dict[str, Any]) -> bool:
    """Whether nothing was predicted of what is sent, by axis, whatever was measured."""
    return sent.get("predicted", 0) is None


def _is_pair(each: object) -> bool:
    return isinstance(each, dict) and all(_is_number(each.get(key, "")) for key in ("predicted", "measured"))


def _is_number(value: object) -> bool:
    """None stands for one that is not known."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300)


def _rows(found: dict[str, Any]) -> Iterator[list[str]]:
    memory, sent = found["memory"], found["bytes_sent"]
    yield _row("memory of rank 0", memory["total_bytes"], amount)
    yield _row("tokens/s", found["tokens_per_second"], lambda value: f"{value:,.0f}")
    yield _row("seconds a step", found["seconds_per_step"], lambda value: f"{value:.4g}")
    for axis, each in () if _is_unpredicted(sent) else sorted(sent.items()):
        yield _row(f"sent over {axis}, a step", each, amount)


def _row(name: str, each: dict[str, Any], text: Callable[[Any], str]) -> list[str]:
    predicted, measured = each["predicted"], each["measured"]
    both = predicted is not None and measured
    said = ["–" if value is None else text(value) for value in (predicted, measured)]
    return [name, *said, f"{predicted / measured:.3f}" if both else "–"]


# --- files ------------------------------------------------------------------------------------------------------------


def _write(config: Config, name: str, content: dict[str, Any]) -> None:
    write_new(Path(config.run.folder) / name, (json.dumps(content, indent=1) + "\n").encode())


def _taken(config: Config, name: str) -> bytes | None:
    """What a file holds, which is removed; None: there is none."""
    path = Path(config.run.folder) / name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink()
    return content


def _metrics(config: Config) -> list[dict[str, Any]]:
    """The lines of the steps so far; none of a file that cannot be read, which is for those who write it to tell."""
    try:
        text = (Path(config.run.folder) / METRICS).read_text(errors="replace")
    except OSError:
        return []
    lines = (object_in(line) or {} for line in text.splitlines())
    return [line for line in lines if step_in(line)]


def _returns(config: Config) -> list[Rollback]:
    """The rollbacks that the run is made of; none of a file that cannot be read."""
    with suppress(ColonnadeError):
        return returns_of(Path(config.run.folder))
    return []


def _resident(device: torch.device) -> int | None:
    """[bytes] That this process has now, if the system tells; the most that it had is forgotten, where it lets it."""
    if device.type != "cpu":
        return 0
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _most() -> int | None:
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
