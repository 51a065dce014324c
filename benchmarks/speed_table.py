"""From the runs of `train_speed` to the tables people read."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.limits import best_rate, products_per_second, roofline
from benchmarks.peers.reference import Task

Run = Mapping[str, Any]

OURS = "colonnade"
BEFORE = "before"
"""The contestant that is another checkout of this project."""
CROWDED = 0.25
"""Cores kept busy by other programs from which on a run is marked: its number is not to be trusted."""
STEADY = 0.9
"""Share of the fastest pace of the cores (`pace.py`) below which a run is marked and repeated."""

CAUSE = re.compile(r"\w*(Error|Exception): |No module named")

READING = f"""
* **tokens/s**: of all ranks; the median over rounds of each run's median step. **low – high**: over rounds.
* **fastest**: tokens/s of the fastest step of all rounds.
* **CPU ms**: CPU time of a step, all threads of all ranks together; waiting threads that spin are in it.
* **MB**: the most resident memory a rank ever had (VmHWM: libraries, compilation and start-up included).
* **loss**: first and last step on one fixed batch. A run whose loss does not fall is thrown out.
* **others**: cores that other programs kept busy meanwhile. From {CROWDED} on the line is marked `!`: measure again.
* **pace**: of the slowest core just before or behind a run, as a share of the fastest that was seen: the host of a
  virtual machine may have others to serve. Below {STEADY} the line is marked `!`.
* **of the limit**: floating-point operations that the model needs (no more), as a share of what the cores of the row
  could do if all of them were products at the best rate measured here (`python -m benchmarks.hardware`): of a core that
  is alone at work, or of each while both are.
* **of the roofline**: the least time of a step's products at the same rate, and then of the bytes that AdamW must move
  at the best bandwidth measured here, as a share of the step (`limits.parts`). All else counts as nothing.
* bf16 is autocast over fp32 parameters, unless a note says otherwise.
"""


def progress(run: Run) -> str:
    """One line for the terminal as soon as a run ends."""
    start = f"{run['row']:<11} round {run['round'] + 1}  {run['contestant']:<13}"
    if problem := failure(run):
        return f"{start} FAILED: {problem}"
    others = f"  others {run['others']:.2f}" if run["others"] >= CROWDED else ""
    slow = f"  pace {run['pace']:.2f}" if run.get("pace", 1.0) < STEADY else ""
    return f"{start} {run['tokens_per_second']:>8.1f} tokens/s  {max(run['peak_rss_mb']):>5} MB{others}{slow}"


def failure(run: Run) -> str:
    """Why a run does not count; empty if it does."""
    if "error" in run:
        written = run["error"].splitlines()
        causes = [text for text in written if CAUSE.search(text) and "ChildFailedError" not in text]
        return f"exit code {run['exit_code']}: {(causes or written or ['no output'])[-1].strip()[:200]}"
    if not run["last_loss"] < run["first_loss"] - 0.1:
        return f"the loss did not fall ({run['first_loss']} -> {run['last_loss']})"
    return ""


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """The rounds of one contestant in one row as one line."""
    speeds = [run["tokens_per_second"] for run in runs]
    return {
        "name": runs[0]["peer"] + (f" ({BEFORE})" if runs[0]["contestant"] == BEFORE else ""),
        "tokens_per_second": statistics.median(speeds),
        "low": min(speeds),
        "high": max(speeds),
        "fastest": max(run.get("best_tokens_per_second", run["tokens_per_second"]) for run in runs),
        "step_ms": statistics.median(run["step_ms"] for run in runs),
        "cpu_ms": statistics.median(run["cpu_ms"] for run in runs),
        "peak_mb": round(statistics.median(max(run["peak_rss_mb"]) for run in runs)),
        "others": max(run["others"] for run in runs),
        "pace": min(run.get("pace", 1.0) for run in runs),  # results that are older have none
        "loss": f"{runs[0]['first_loss']:.3f} → {runs[0]['last_loss']:.3f}",
        "note": runs[0]["note"],
    }


def rows(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """row -> contestant -> its line; the runs that failed are left out."""
    good: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        contestants = good.setdefault(run["row"], {})
        if not failure(run):
            contestants.setdefault(run["contestant"], []).append(run)
    return {row: {name: summarise(them) for name, them in found.items()} for row, found in good.items()}


def write(report: Mapping[str, Any]) -> str:
    """The whole results file, in Markdown."""
    table = rows(report["runs"])
    parts = [heading(report), "## Against the best peer of each row\n\n" + verdict(table)]
    if report.get("before"):
        parts.append(f"## Against commit {report['before']}\n\n" + progress_made(table))
    parts.append("## All lines\n" + READING)
    limits = report.get("limits")
    parts += [
        f"### {row}\n\n{lines(contestants, limit_of(row, limits), least_of(row, limits))}"
        for row, contestants in table.items()
    ]
    failed = [progress(run) for run in report["runs"] if failure(run)]
    if failed:
        parts.append("## Runs that do not count\n\n```\n" + "\n".join(failed) + "\n```")
    if report["absent"]:
        parts.append("## Absent\n\n" + "\n".join(f"* {sentence}" for sentence in report["absent"]))
    return "\n\n".join(parts) + "\n"


def heading(report: Mapping[str, Any]) -> str:
    machine = report["hardware"]
    dropout = f"dropout {report['dropout']}" if report.get("dropout") else "no dropout"
    toy = "**A toy model: this tried the scripts, and measured nothing.**\n\n" if report["tiny"] else ""
    return f"""# Training speed, {report["date"][:10]}, {machine["cpu"]}, {machine["cores"]} cores

{toy}GPT-2 style, 6 layers, hidden 384, 6 heads, sequence 256, vocabulary 50,304, micro-batch 4, tied head, {dropout},
fused AdamW, clipping at 1.0. Rows: `one-2` and `one-1` are one process with 2 and 1 threads; `tp` and `dp` are two
ranks with one thread each. {report["rounds"]} round(s) in alternation, {report["warmup"]} + {report["steps"]} steps a
run.

* has {", ".join(machine["has"]) or "none of the flags asked for"}; has not {", ".join(machine["has_not"]) or "–"}
* {machine["memory_gb"]} GB memory, {machine["system"]}, Python {machine["python"]}, torch {machine["torch"]}
* {can_do(report.get("limits"))}
* commit {machine["commit"]}, {report["date"]}
* `{report["command"]}`"""


def can_do(limits: Mapping[str, Any] | None) -> str:
    """What the processor can do, in a line."""
    if limits is None:
        return "what the processor can do was not measured"
    alone = limits["gflops_per_core"]
    told = []
    for precision, rates in alone.items():
        together = best_rate(limits.get("gflops_per_core_together", alone)[precision])
        told.append(
            f"{best_rate(rates):.0f} GFLOP/s of a core in {precision} ({together:.0f} of each while all multiply)"
        )
    return f"products at up to {', '.join(told)}; memory {limits['memory_gb_per_second']} GB/s"


def limit_of(row: str, limits: Mapping[str, Any] | None) -> float | None:
    """[tokens/s] If all that the model needs ran at the best rate, on each core of the row."""
    return None if limits is None else products_per_second(_task(row), limits) / limits["flops_per_token"]


def least_of(row: str, limits: Mapping[str, Any] | None) -> float | None:
    """[ms] Of a step, by the roofline; None where results are older than it."""
    if limits is None or "best_memory_gb_per_second" not in limits:
        return None
    return 1e3 * sum(roofline(_task(row), limits).values())


def _task(row: str) -> Task:
    precision, mode, *threads = row.split("-")
    return Task(mode, "bf16" if precision == "bf16" else "fp32", int(threads[0]) if threads else 1)


def verdict(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Ours beside the fastest peer and the most frugal one, in the median, and by the fastest steps: a machine that is
    slow at times disturbs these least.
    """
    text = "| row | colonnade | best peer | its tokens/s | **ratio** | of fastest steps | MB | its MB | least MB |\n"
    text += "|---|---|---|---|---|---|---|---|---|\n"
    for row, contestants in table.items():
        peers = [line for name, line in contestants.items() if name not in (OURS, BEFORE)]
        ours = contestants.get(OURS)
        best = max(peers, key=lambda line: line["tokens_per_second"], default=None)
        if best is None:
            continue
        speed = f"{ours['tokens_per_second']:.0f}" if ours else "–"
        times = ours["tokens_per_second"] / best["tokens_per_second"] if ours else 0.0
        ratio = f"**{times:.2f}{' slower' if times < 1.0 else ''}**" if ours else "–"
        fastest = max(line["fastest"] for line in peers)
        bests = f"{ours['fastest']:.0f} / {fastest:.0f} = {ours['fastest'] / fastest:.2f}" if ours else "–"
        memory = f"{ours['peak_mb']}" if ours else "–"
        least = min(line["peak_mb"] for line in peers)
        text += f"| {row} | {speed} | {best['name']} | {best['tokens_per_second']:.0f} | {ratio} "
        text += f"| {bests} | {memory} | {best['peak_mb']} | {least} |\n"
    return text


def progress_made(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Ours beside the other checkout."""
    text = "| row | now | before | **ratio** | of fastest steps | now MB | before MB |\n|---|---|---|---|---|---|---|\n"
    for row, contestants in table.items():
        if not {OURS, BEFORE} <= contestants.keys():
            continue
        now, before = contestants[OURS], contestants[BEFORE]
        speeds = now["tokens_per_second"], before["tokens_per_second"]
        text += f"| {row} | {speeds[0]:.0f} | {speeds[1]:.0f} | **{speeds[0] / speeds[1]:.3f}** "
        text += f"| {now['fastest'] / before['fastest']:.3f} | {now['peak_mb']} | {before['peak_mb']} |\n"
    return text


def lines(contestants: Mapping[str, Mapping[str, Any]], limit: float | None = None, least: float | None = None) -> str:
    """The contestants of one row, the fastest first. `limit`: tokens/s that the processor allows, by products alone.
    `least`: ms that a step takes by the roofline.
    """
    heads = (
        "contestant, tokens/s, low – high, fastest, of the limit, of the roofline, step ms, CPU ms, MB, loss, others"
    )
    columns = [*heads.split(", "), "pace", "note"]
    text = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for line in sorted(contestants.values(), key=lambda line: -line["tokens_per_second"]):
        mark = " !" if line["others"] >= CROWDED else ""
        text += f"| {line['name']} | {line['tokens_per_second']:.0f} | {line['low']:.0f} – {line['high']:.0f} "
        text += f"| {line['fastest']:.0f} "
        text += "| – " if limit is None else f"| {line['tokens_per_second'] / limit:.0%} "
        text += "| – " if least is None else f"| {least / line['step_ms']:.0%} "
        text += f"| {line['step_ms']:.0f} | {line['cpu_ms']:.0f} | {line['peak_mb']} | {line['loss']} "
        slow = " !" if line["pace"] < STEADY else ""
        text += f"| {line['others']:.2f}{mark} | {line['pace']:.2f}{slow} "
        text += f"| {line['note']} |\n"
    return text
