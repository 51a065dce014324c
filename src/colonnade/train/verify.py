"""The same run on any layout: a few steps of a configuration in float64, serially and cut up, number against number.

Every layout is a run of its own on its own processes, that writes down its losses, the gradients
of every step and the weights at the end. Every box of every rank is then held against the serial run's tensor of that
name.
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data.loader import load_batches, rank_positions
from colonnade.data_parallel.buckets import named_slots
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.mesh import launch
from colonnade.mesh.layout import AXES, Layout
from colonnade.tensor_parallel.placement import Placement
from colonnade.train.corpus import open_corpus
from colonnade.train.join import joined
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step

TOLERANCE = 1e-10
"""Largest difference that is no difference, relative to the tensor's largest element."""


@dataclass(frozen=True)
class Box:
    """One rank's part of a tensor of the run."""

    name: str
    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Verdict:
    """How far one layout is from the serial run."""

    layout: str
    max_relative_difference: float | None
    """None where a number is none (NaN) or infinite."""
    first_difference: str | None
    """The first number in the order of the run that differs by more than the tolerance, and by how much."""
    ok: bool


def verify(config: Path, overrides: list[str], layouts: list[str], *, steps: int, as_json: bool) -> bool:
    """Compare `layouts` ("tp=2,dp=2") with the serial run of `config`, print the table, and tell whether all are
    equal.
    """
    base, sizes = load(config, overrides), {text: _parse(text) for text in layouts}
    for layout in sizes.values():
        load(config, [*overrides, *_changes(base, layout)])  # what cannot be is refused before anything runs
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as folder:
        traces = {
            text: _traced(config, [*overrides, *_changes(base, layout)], layout, steps, Path(folder) / text)
            for text, layout in {"serial": Layout(), **sizes}.items()
        }
        verdicts = [_compare(text, traces["serial"], traces[text]) for text in sizes]
    if as_json:
        print(json.dumps({"layouts": [asdict(verdict) for verdict in verdicts]}))
    else:
        print(
            f"{steps} steps in float64, largest difference from the serial run (relative), equal up to {TOLERANCE:.0e}:"
        )
        print("\n".join(_line(verdict) for verdict in verdicts))
    return all(verdict.ok for verdict in verdicts)


def trace(config: Config, output: Path, steps: int) -> None:
    """Run `steps` steps as one rank of the configuration's layout, and write this rank's numbers to `output`."""
    parallel, train = config.parallel, config.train
    corpus = open_corpus(config)
    boxes: list[Box] = []
    with joined(Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), train.device, train.threads) as (mesh, device):
        state = build_state(config, mesh, corpus.vocab_size, device)
        for _ in range(steps):
            chunks = rank_positions(
                state.samples,
                global_batch_size=train.global_batch_size,
                micro_batch_size=train.micro_batch_size,
                dp_rank=mesh.dp.rank,
                dp_size=mesh.dp.size,
            )
            batches = [batch.to(device) for batch in load_batches(corpus.datasets.train, chunks)]
            result = train_step(state, batches, mesh, train)
            boxes += list(_boxes_of_step(state, result.loss, result.grad_norm))
        boxes += [
            Box(f"weight {name} after step {steps}", *_values(slot.placement, slot.view(unit.master)))
            for name, unit, slot in named_slots(state.units)
        ]
        output.mkdir(parents=True, exist_ok=True)
        torch.save([asdict(box) for box in boxes], output / f"rank_{mesh.rank}.pt")


def _boxes_of_step(state: TrainState, loss: float, norm: float) -> Iterator[Box]:
    yield Box(f"loss of step {state.step}", (), torch.tensor(loss, dtype=torch.float64))
    yield Box(f"gradient norm of step {state.step}", (), torch.tensor(norm, dtype=torch.float64))
    for name, unit, slot in named_slots(state.units):
        yield Box(f"gradient of {name} in step {state.step}", *_values(slot.placement, slot.view(unit.gradients)))


def _values(placement: Placement, shard: Tensor) -> tuple[tuple[int, ...], Tensor]:
    return placement.offsets, placement.real(shard).detach().cpu().clone()


def _traced(config: Path, overrides: list[str], layout: Layout, steps: int, output: Path) -> dict[int, list[Box]]:
    """Every rank's boxes of one layout's run."""
    command = [sys.executable, "-m", "colonnade", "rank-of-verify", str(config), *overrides]
    status = launch.run_ranks(layout.num_ranks, [*command, "--output", str(output), "--steps", str(steps)])
    if status > 128:
        raise SystemExit(status)  # ended by a signal, like Ctrl-C
    if status != 0:
        raise ColonnadeError(f"the run under the layout {layout} failed (exit status {status}); its error is above.")
    return {rank: [Box(**box) for box in torch.load(output / f"rank_{rank}.pt")] for rank in range(layout.num_ranks)}


def _changes(config: Config, layout: Layout) -> list[str]:
    """What the compared runs have different from the user's: the layout, float64, and no epsilon below 1e-6.

    A key's bias changes no softmax, so its gradient is rounding alone; AdamW divides it by its own size plus epsilon,
    and a smaller epsilon would make numbers of it that mean nothing and differ everywhere.
    """
    sizes = [f"parallel.{name}={layout.size(name)}" for name in AXES]
    return [*sizes, "train.precision=fp64", f"optim.epsilon={max(config.optim.epsilon, 1e-6)}"]


def _compare(text: str, serial: dict[int, list[Box]], cut: dict[int, list[Box]]) -> Verdict:
    whole = {box.name: box.values for box in serial[0]}
    differences = dict.fromkeys(whole, 0.0)  # in the order of the run; of each number the largest of all ranks
    for box in (box for boxes in cut.values() for box in boxes):
        differences[box.name] = max(differences[box.name], _difference(box, whole[box.name]))
    worst = max(differences.values())
    first = next((f"{name} by {each:.1e}" for name, each in differences.items() if each > TOLERANCE), None)
    return Verdict(text, worst if math.isfinite(worst) else None, first, first is None)


def _difference(box: Box, whole: Tensor) -> float:
    """Largest difference in the box, relative to the whole tensor's largest element; infinite where one is NaN."""
    if box.values.numel() == 0:
        return 0.0
    part = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))]
    scale = whole.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    difference = float((box.values - part).abs().max() / scale)
    return math.inf if math.isnan(difference) else difference


def _parse(text: str) -> Layout:
    """ "tp=2,dp=2" -> Layout(tp=2, dp=2)."""
    try:
        sizes = {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
        return Layout(**sizes)
    except (ValueError, TypeError):
        raise ConfigError(
            f"--layout {text!r} is no layout. Write sizes of tp, pp and dp, like tp=2 or tp=2,dp=2."
        ) from None


def _line(verdict: Verdict) -> str:
    outcome = "equal" if verdict.ok else f"DIFFERS, first in the {verdict.first_difference}"
    worst = math.inf if verdict.max_relative_difference is None else verdict.max_relative_difference
    return f"  {verdict.layout:16} {worst:.1e}  {outcome}"
