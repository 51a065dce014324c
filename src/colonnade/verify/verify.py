"""The same run on any layout: a few steps of a configuration, serially and cut up, number against number.

    layouts   which layouts: from text, or chosen for the configuration      (pure)
    shrink    a smaller model of the same structure, on request              (pure)
    verify    the runs, one after the other, each on processes of its own
    trace     a rank of a run: writes down what it computes
    compare   every box of every rank beside the serial run's tensor         (pure)
    table     the verdicts, as a table or as JSON                            (pure)

In fp64 two orders of summation differ by 1e-15 and a wrong sum by 1e-3, so equal is what is closer than 1e-10. In
formats of fewer bits both a layout and the serial run are off by their rounding. There a second serial run, in that
format, tells by how much, and a layout may be off a few times as much (`compare.near`).
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from colonnade.config.check import Problem
from colonnade.config.load import TomlTable, load, to_toml
from colonnade.config.schema import Config, ParallelConfig, TrainConfig
from colonnade.errors import ColonnadeError, ConfigError, without_credentials
from colonnade.launch import launch
from colonnade.launch.process import PASSED_ON
from colonnade.mesh.layout import Layout
from colonnade.outputs import json_of
from colonnade.train.start import complete
from colonnade.verify import layouts
from colonnade.verify.layouts import Capacity, LeftOut, Variant
from colonnade.verify.shrink import shrunk, sizes_changed
from colonnade.verify.table import Report, as_json, as_text, drawn_lines, shrunk_lines

if TYPE_CHECKING:
    from torch import Tensor

    from colonnade.verify.compare import Bound, Number, Verdict

CONFIGURED = "configured"
PRECISIONS = (*get_args(TrainConfig.model_fields["precision"].annotation), CONFIGURED)
MOST_RANKS = 16
"""More processes than this are not started on one machine's CPU unless a layout that needs them is named."""

HIGHEST_LOSS_SCALE = 2.0**16
"""With which fp16 runs are compared: a higher one would come down by skipping steps."""


@dataclass(frozen=True)
class Plan:
    """The runs to make."""

    base: Config
    """As it is compared, up to the layout: shrunk, on the device that is used."""
    variants: Sequence[Variant]
    left_out: Sequence[LeftOut]
    precision: str
    shrunk: Mapping[str, Sequence[int]]

    def with_loss_scale(self, scale: float) -> "Plan":
        """The same with another train.loss_scale in all runs."""
        base = _with_train(self.base, loss_scale=scale)
        again = [replace(each, config=_with_train(each.config, loss_scale=scale)) for each in self.variants]
        return replace(self, base=base, variants=again)


@dataclass(frozen=True)
class Yardstick:
    """What a layout is held against."""

    serial: "dict[Number, Tensor]"
    bound: "Bound"
    in_words: str


def verify(
    config: Path,
    overrides: Sequence[str],
    texts: Sequence[str],
    *,
    steps: int,
    shrink: bool = False,
    precision: str = "fp64",
    json_only: bool = False,
) -> bool:
    """Compare layouts (`texts`; none: a set that suits `config`) with the serial run and print what was found.

    Returns whether all are equal. Raises ConfigError, before anything runs, for layouts that cannot be, and
    ColonnadeError where the serial run itself fails.
    """
    base = load(config, overrides, complete=_without_layout if texts else complete)
    plan = make_plan(base, texts, shrink=shrink, precision=precision, steps=steps)
    init_from = None if base.train.init_from is None else without_credentials(base.train.init_from)
    for line in [*shrunk_lines(plan.shrunk), *drawn_lines(init_from)]:
        _say(line)
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as folder:
        plan, yardstick = _yardstick(plan, steps, Path(folder))
        verdicts = [_verdict(variant, yardstick, steps, Path(folder)) for variant in plan.variants]
    report = Report(steps, plan.precision, yardstick.in_words, plan.shrunk, verdicts, plan.left_out, init_from)
    print(json_of(as_json(report)) if json_only else as_text(report))
    return report.ok


# --- what will run ----------------------------------------------------------------------------------------------------


def make_plan(base: Config, texts: Sequence[str], *, shrink: bool, precision: str, steps: int) -> Plan:
    """Decide all of it. Raises ConfigError with the reasons where a named layout cannot be, or none can."""
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision} is not one of the choices. Use {', '.join(PRECISIONS)}.")
    precision = base.train.precision if precision == CONFIGURED else precision
    variants, left_out = layouts.named(base, texts, precision=precision), list[LeftOut]()
    capacity = _capacity(base, variants)
    if not texts:
        variants, left_out = layouts.default_set(base, precision=precision, capacity=capacity)
    if not variants:
        reasons = "\n".join(f"  - {each.layout}: {each.reason}" for each in left_out)
        raise ConfigError(f"no layout fits this configuration and this machine. Name one with --layout.\n{reasons}")
    small = shrunk(base, [variant.config.parallel for variant in variants]) if shrink else base
    small = _with_train(small, device=capacity.device, steps=max(steps, base.train.steps))
    variants = [layouts.variant(small, each.layout, each.chosen, precision=precision) for each in variants]
    return Plan(small, variants, left_out, precision, sizes_changed(base.model, small.model))


def _without_layout(content: TomlTable) -> list[Problem]:
    """`complete`, and the file's own layout is as if it were not there: none of the layouts that are named has it."""
    problems = complete(content)
    parallel = content.get("parallel")
    if isinstance(parallel, dict):  # keys that there are not are told as ever
        content["parallel"] = {key: parallel[key] for key in parallel if key not in ParallelConfig.model_fields}
    return problems


def _with_train(config: Config, **values: object) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=values)})


def _capacity(base: Config, variants: Sequence[Variant]) -> Capacity:
    """The device for all runs, as train.device asks. On GPUs each rank needs one of its own."""
    on_cpu = Capacity("cpu", MOST_RANKS, f"more than {MOST_RANKS} are not started unasked: name it with --layout.")
    if base.train.device == "cpu":
        return on_cpu
    import torch

    gpus, wanted = torch.cuda.device_count(), max((each.config.parallel.num_ranks for each in variants), default=1)
    if base.train.device == "auto" and gpus < wanted:
        return on_cpu
    if gpus < wanted:
        raise ConfigError(
            f'train.device = "cuda", but this machine has {gpus} GPUs for up to {wanted} ranks: each needs one of its '
            "own. Set train.device=cpu, or name layouts of fewer ranks."
        )
    return Capacity(
        "cuda", gpus, f"each needs a GPU, and this machine has {gpus}: train.device=cpu compares it without."
    )


# --- the runs ---------------------------------------------------------------------------------------------------------


def _yardstick(plan: Plan, steps: int, folder: Path) -> tuple[Plan, Yardstick]:
    """The serial run in fp64, and what is as good as equal to it. Of the plan, fp16's loss scale may become lower."""
    from colonnade.verify import compare as comparing

    exact = _serial(plan, "fp64", steps, folder)
    if plan.precision == "fp64":
        return plan, Yardstick(exact, comparing.exact, f"up to {comparing.TOLERANCE:.0e} of a tensor's largest element")
    plan, rounded = _without_skipped_steps(plan, steps, folder)
    shards = [comparing.LocalShard(number, tuple(x.shape), (0,) * x.ndim, x) for number, x in rounded.items()]
    own = comparing.compare(exact, [shards], _per_gradient(plan.base))
    words = (
        f"up to {comparing.TIMES:g} times as far from the serial fp64 run as the serial {plan.precision} run is "
        f"(after step 1: {comparing.LATER_TIMES:g} times), and {comparing.ROUNDINGS:g} roundings"
    )
    return plan, Yardstick(exact, comparing.near(own, plan.precision), words)


def _per_gradient(config: Config) -> float:
    """How far a step of AdamW moves a weight at most, in units of its gradient: one divided by epsilon alone."""
    return config.optim.learning_rate / max(config.optim.epsilon, layouts.LEAST_EPSILON)


def _without_skipped_steps(plan: Plan, steps: int, folder: Path) -> "tuple[Plan, dict[Number, Tensor]]":
    """The serial run in the plan's precision, with a loss scale at which no step of it overflows: one that is skipped
    has no gradients to compare.
    """
    train = plan.base.train
    scale = max(train.min_loss_scale, min(train.loss_scale, HIGHEST_LOSS_SCALE))
    while True:
        plan = plan.with_loss_scale(scale)
        numbers = _serial(plan, plan.precision, steps, folder)
        if not any(float(x) for number, x in numbers.items() if number.what == "overflow"):
            return plan, numbers
        if scale == train.min_loss_scale:
            raise ColonnadeError(
                f"the serial run in {plan.precision} overflows even at the lowest loss scale, train.min_loss_scale = "
                f"{scale:g}: there is nothing to compare. Use --precision bf16."
            )
        scale = max(train.min_loss_scale, scale / 16)
        _say(f"a step overflowed, and what is skipped cannot be compared: again with train.loss_scale={scale:g}")


def _serial(plan: Plan, precision: str, steps: int, folder: Path) -> "dict[Number, Tensor]":
    from colonnade.verify import compare as comparing
    from colonnade.verify.trace import read

    output, name = folder / f"serial_{precision}", f"serial in {precision}"
    status = _run(layouts.serial(plan.base, precision=precision), name, steps, output)
    if status != 0:
        raise ColonnadeError(f"the serial run in {precision} failed (exit status {status}); its error is above.")
    numbers = comparing.of_serial_run(read(output, 0))
    for number, x in numbers.items():
        if not x.isfinite().all():
            raise ColonnadeError(
                f"the serial run in {precision} has a {number} that is no finite number: there is nothing to hold "
                "layouts against. Lower optim.learning_rate, or lengthen optim.warmup_steps."
            )
    return numbers


def _verdict(variant: Variant, yardstick: Yardstick, steps: int, folder: Path) -> "Verdict":
    from colonnade.verify import compare as comparing
    from colonnade.verify.trace import read

    output, parallel = folder / "layout", variant.config.parallel
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    status = _run(variant.config, variant.layout, steps, output)
    if status != 0:
        return comparing.failed(variant.layout, layout, status)
    ranks = (read(output, rank) for rank in range(layout.num_ranks))
    found = comparing.compare(yardstick.serial, ranks, _per_gradient(variant.config))
    shutil.rmtree(output)
    return comparing.judge(variant.layout, layout, found, yardstick.bound)


def _run(config: Config, name: str, steps: int, output: Path) -> int:
    """Run a configuration on its ranks, which write to `output`. Returns the exit status; ends as a signal asks."""
    num_ranks, started = config.parallel.num_ranks, time.perf_counter()
    _say(f"{name}: {num_ranks} {'rank' if num_ranks == 1 else 'ranks'} on {config.train.device} …")
    file = output.with_suffix(".toml")
    file.write_text(to_toml(config, credentials=True), encoding="utf-8")  # for its ranks, and removed with this folder
    command = [sys.executable, "-m", "colonnade", "rank-of-verify", str(file)]
    status = launch.run_ranks(num_ranks, [*command, "--output", str(output), "--steps", str(steps)])
    if status - 128 in PASSED_ON:
        raise SystemExit(status)  # asked to end, as by Ctrl-C; a rank that the system killed is a failure
    _say(f"{name}: {'done' if status == 0 else 'failed'} after {time.perf_counter() - started:.1f} s")
    return status


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)
