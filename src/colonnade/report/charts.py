"""Which lines of a run, or of several beside each other, stand on which chart. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from colonnade.drawing.chart import Chart, Series
from colonnade.drawing.thin import Floats
from colonnade.report.record import Record

_SHOWN = frozenset({"step", "tokens", "seconds", "loss", "tokens_per_second", "mfu", "learning_rate", "grad_norm"})


def places(run: Record) -> dict[str, Floats]:
    """Where a run's steps are, by horizontal axis."""
    found = {"step": run.steps, "hours": run.hours}
    return found | ({"tokens": run.columns["tokens"]} if "tokens" in run.columns else {})


def charts(runs: Sequence[Record]) -> list[Chart]:
    """Every chart for which one of the runs has numbers; the loss first."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns if name not in _SHOWN))
    losses = [name for name in names if name.endswith("_loss") and not name.startswith("validation_")]
    scores = [name for name in names if name.startswith("validation_") and name != "validation_loss"]
    rest = [name for name in names if name not in losses and name not in scores and name != "validation_loss"]
    training, validation = _lines(runs, "loss", "training"), _lines(runs, "validation_loss", "validation", 1)
    parts = [line for number, name in enumerate(losses) for line in _lines(runs, name, name, number)]
    together = len(runs) == 1
    found = [
        Chart("Loss", [*training, *(validation if together else [])], "nats per token"),
        *([] if together else [Chart("Validation loss", validation, "nats per token")]),
        *(
            [Chart("Losses", parts)]
            if together and losses
            else [Chart(_title(name), _lines(runs, name)) for name in losses]
        ),
        Chart("Throughput", _lines(runs, "tokens_per_second"), "tokens per second"),
        Chart("MFU", _lines(runs, "mfu"), "of the devices' peak", is_share=True),
        Chart("Learning rate", _lines(runs, "learning_rate"), may_be_log=False),
        Chart("Gradient norm", _lines(runs, "grad_norm"), "before clipping"),
        *(Chart(_title(name), _lines(runs, name)) for name in [*scores, *rest]),
    ]
    return [chart for chart in found if chart.series or chart.title == "Loss"]


def _title(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _lines(runs: Sequence[Record], name: str, role: str = "", colour: int = 0) -> list[Series]:
    """A line of each run that has such numbers. `role`: what to call it where there is one run alone, in `colour`."""
    found = []
    for number, run in enumerate(runs):
        values = run.columns.get(name)
        if values is not None and np.isfinite(values).any():
            is_alone, is_validation = len(runs) == 1, name.startswith("validation_")
            called = role or name.replace("_", " ") if is_alone else run.name
            found.append(Series(called, values, places(run), colour if is_alone else number, dots=is_validation))
    return found


def final(run: Record) -> Mapping[str, float]:
    """Last numbers, and the best of validation."""
    found = {}
    for name in ("loss", "tokens_per_second", "mfu", "tokens"):
        there = run.columns.get(name, np.array([]))
        there = there[np.isfinite(there)]
        if len(there):
            found[name] = float(np.median(there[-50:])) if name in ("tokens_per_second", "mfu") else float(there[-1])
    validation = run.columns.get("validation_loss", np.array([]))
    if np.isfinite(validation).any():
        best = int(np.nanargmin(validation))
        found |= {"validation_loss": float(validation[best]), "best_step": float(run.steps[best])}
    return found
