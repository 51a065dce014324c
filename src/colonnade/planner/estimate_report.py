"""An estimate in words, and for JSON."""

from typing import Any

from colonnade.config.numbers import amount, counted
from colonnade.planner.estimate import Estimate
from colonnade.planner.ranks import NOT_COUNTED

WORDS = {
    "products": "matrix products",
    "memory": "operators that wait for memory",
    "launches": "waiting for the host to ask for operators",
    "tp": "collectives over tp that nothing hides",
    "dp": "collectives over dp that nothing hides",
    "optimizer": "the optimizer",
    "teacher": "the teacher's forward",
    "pipeline": "waiting for other stages",
    "checkpoints": "checkpoints",
    "data": "reading data",
}

OF_A_GPU = "worked out from the figures of its file, published or assumed ([sources]), not measured"
"""The times of a plan: `colonnade hardware` measures CPUs alone."""


def as_text(found: Estimate) -> str:
    """Whether it fits, how fast it is, what for, and what it costs."""
    hardware, failures = found.hardware, found.failures
    return "\n".join(
        [
            f"on {hardware.name}, {counted(found.layout.num_ranks, 'rank')}:",
            "",
            f"  memory   {_fit(found)}",
            f"  step     {duration(found.seconds_per_step)}, {found.tokens_per_second:,.0f} tokens/s, "
            f"MFU {found.mfu:.1%} of {found.peak / 1e12:,.4g} TFLOP/s",
            *([f"  times    {OF_A_GPU}"] * (hardware.kind == "cuda")),
            f"  run      {found.steps:,} steps, {found.tokens:,} tokens: {duration(found.days * 86400)}",
            f"  failures one every {duration(failures.between)}, {failures.lost:.1%} of the time is lost; a checkpoint "
            f"every {duration(failures.interval)} is best: checkpoint.every = {failures.best}",
            f"  in all   {duration(found.days_with_failures * 86400)}, ${found.dollars:,.0f} at "
            f"${hardware['cost.device_hour']:g} a device and hour",
            f"  bound by {in_words(found.bound)}; of a step, on the stage that works longest:",
            *(
                f"    {seconds / sum(found.spent.values()):>6.1%}  {in_words(what)}"
                for what, seconds in sorted(found.spent.items(), key=lambda each: -each[1])
                if seconds > 0
            ),
        ]
    )


def in_words(what: str) -> str:
    """What time goes to; an axis that WORDS has not is one of collectives."""
    return WORDS.get(what, f"collectives over {what}")


def _fit(found: Estimate) -> str:
    has = f"{amount(int(found.hardware['device.memory']))} of a device"
    if found.room >= 0:
        without = NOT_COUNTED if found.ranks is None else found.ranks.not_counted
        return f"fits: {amount(found.memory)} of {has}, {amount(int(found.room))} are left, {without}"
    return f"does not fit: {amount(found.memory)}, {amount(int(-found.room))} more than the {has}"


def as_json(found: Estimate) -> dict[str, Any]:
    """Bytes, seconds, shares 0 … 1."""
    return {
        "hardware": found.hardware.name,
        "num_ranks": found.layout.num_ranks,
        "fits": found.room >= 0,
        "memory_bytes": found.memory,
        "room_bytes": int(found.room),
        "without_teacher": found.ranks is not None and found.ranks.without_teacher,
        "seconds_per_step": found.seconds_per_step,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "flops_per_token": found.flops_per_token,
        "steps": found.steps,
        "days": found.days,
        "days_with_failures": found.days_with_failures if found.failures.lost < 1 else None,
        "dollars": found.dollars if found.failures.lost < 1 else None,
        "bound_by": found.bound,
        "spent": dict(found.spent),
        "failures": {
            "seconds_between": found.failures.between,
            "checkpoint_interval": found.failures.interval,
            "best_checkpoint_every": found.failures.best,
            "lost": found.failures.lost,
        },
        "walks": [
            {
                "stage": stage,
                "rank": walk.rank,
                "peak_bytes": walk.peak.bytes,
                "peak_at": str(walk.peak.action) if walk.peak.action else "behind the schedule",
                "launches": walk.launches,
                "flops": walk.flops,
                "flops_by_operator": walk.flops_by_operator(),
            }
            for stage, walk in found.walks.items()
        ],
    }


def duration(seconds: float) -> str:
    """Two digits' worth of a unit that fits: '94.2 ms', '3.1 days'."""
    if seconds == float("inf"):
        return "for ever"
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 0.9995):  # 0.9995 s are 1,000 ms in three digits
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds * 1e3:.3g} ms"
