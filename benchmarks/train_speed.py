"""How fast is a training step, beside other programs that train the same model on the same machine in the same run?

Every row (precision × layout) runs its contestants in turn, A B C A B C …, each time in a fresh process, so that a
machine that slows down slows down all of them; a run before or behind which cores were slow is repeated. Writes
`results/<date>-<machine>.json` (every run that counts) and `.md`.

    python -m benchmarks.train_speed                          what this Python can import
    python -m benchmarks.train_speed --quick                  Colonnade and plain PyTorch, one round: a few minutes
    python -m benchmarks.train_speed --peer-python litgpt=/venvs/litgpt/bin/python --rows bf16-tp bf16-dp
    python -m benchmarks.train_speed --before ../parent --contestants colonnade     beside another checkout
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import hardware, limits, speed_table
from benchmarks.pace import pace
from benchmarks.peers.reference import MODES

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Row:
    """One line of the comparison: every contestant that can, runs it."""

    dtype: str
    mode: str
    threads: int

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.mode}" + (f"-{self.threads}" if self.mode == "one" else "")


@dataclass(frozen=True)
class Contestant:
    """A script that trains the reference model, and the Python that has what it imports."""

    name: str
    module: str
    imports: str
    modes: tuple[str, ...] = MODES
    options: tuple[str, ...] = field(default=())
    python: str = sys.executable
    drops: bool = False
    """Whether it has dropout."""
    root: Path = hardware.ROOT
    """The checkout whose `benchmarks` and `src` run."""

    def is_installed(self) -> bool:
        code = "import sys, importlib.util as u\ntry: sys.exit(u.find_spec(sys.argv[1]) is None)\n"
        code += "except ModuleNotFoundError: sys.exit(1)"
        command = [self.python, "-c", code, self.imports]
        return subprocess.run(command, cwd=hardware.ROOT, capture_output=True, check=False).returncode == 0


LAYOUTS = (("one", 2), ("one", 1), *((mode, 1) for mode in ("tp", "sp", "pp", "dp", "zero1", "zero2", "zero3")))
ROWS = tuple(Row(dtype, mode, threads) for dtype in ("fp32", "bf16") for mode, threads in LAYOUTS)
SWITCHED = "-onednn"
PEERS = (
    Contestant("plain", "benchmarks.plain_gpt", "torch", ("one", "tp", "dp", "zero3"), drops=True),
    Contestant("pipelining", "benchmarks.peers.torch_pipeline_step", "torch", ("pp",)),
    Contestant("compile", "benchmarks.plain_gpt", "torch", ("one", "dp"), ("--compile",), drops=True),
    Contestant("transformers", "benchmarks.peers.transformers_step", "transformers", ("one", "dp")),
    Contestant("deepspeed", "benchmarks.peers.deepspeed_step", "deepspeed", ("one", "dp", "zero1", "zero2", "zero3")),
    Contestant("megatron", "benchmarks.peers.megatron_step", "megatron.core", ("one", "tp", "pp", "dp", "zero1")),
    Contestant("litgpt", "benchmarks.peers.litgpt_step", "litgpt", ("one", "dp")),
)
CONTESTANTS = (
    Contestant("colonnade", "benchmarks.colonnade_step", "colonnade.train", drops=True),
    *PEERS,
    *(replace(peer, name=peer.name + SWITCHED, options=(*peer.options, "--onednn")) for peer in PEERS),
)
QUICK = ("colonnade", "plain", "compile", "pipelining")


def choose(line: argparse.Namespace) -> tuple[list[Contestant], list[str]]:
    """Who takes part, and one sentence for each who cannot."""
    pythons = dict(pair.split("=", 1) for pair in line.peer_python)
    unknown = set(pythons) - {contestant.name for contestant in CONTESTANTS}
    if unknown:
        raise SystemExit(f"--peer-python: no contestant {', '.join(sorted(unknown))}")
    present, absent = [], []
    for known in CONTESTANTS:
        contestant = replace(known, python=pythons.get(known.name.removesuffix(SWITCHED), known.python))
        if known.name not in line.contestants:
            continue
        if line.dropout and not contestant.drops:
            absent.append(f"{known.name}: has no dropout here")
        elif contestant.is_installed():
            present.append(contestant)
        else:
            absent.append(f"{known.name}: {known.imports} is not importable by {contestant.python}")
    if line.before:
        present.append(replace(CONTESTANTS[0], name=speed_table.BEFORE, root=line.before.resolve()))
    return present, absent


def run(contestant: Contestant, row: Row, line: argparse.Namespace) -> dict[str, object]:
    """One run in a fresh process: its `RESULT`, or `{"error": the last lines it wrote}`."""
    module = ["-m", contestant.module, "--mode", row.mode, "--dtype", row.dtype, "--threads", str(row.threads)]
    module += ["--steps", str(line.steps), "--warmup", str(line.warmup), *contestant.options]
    module += ["--tiny"] if line.tiny else []
    module += ["--dropout", str(line.dropout)] if line.dropout else []
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if row.mode != "one" else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(row.threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(contestant.root / "src")
    output, code = _finish([contestant.python, *launcher, *module], environment, contestant.root)
    for text in reversed(output.splitlines()):
        if text.startswith("RESULT ") and code == 0:
            return dict(json.loads(text.removeprefix("RESULT ")))
    return {"error": "\n".join(output.splitlines()[-80:]), "exit_code": code}


def _finish(command: list[str], environment: dict[str, str], folder: Path) -> tuple[str, int]:
    """Output and exit code of `command`, run in `folder`; it and all it started are stopped after `LIMIT_SECONDS`."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nstopped after {LIMIT_SECONDS} s"
    except BaseException:  # Ctrl-C must not leave two ranks training
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output, process.returncode


def wait_for_quiet(seconds: float) -> None:
    """Wait, at most so long, until other programs use less than a tenth of a core."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _busy_cores() > 0.1:
        pass


def _busy_cores() -> float:
    """Cores in use over the next second; 0 where /proc does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    used = []
    for pause in (1.0, 0.0):
        numbers = [int(word) for word in stat.read_text().split("\n")[0].split()[1:8]]
        used.append(sum(numbers) - numbers[3] - numbers[4])
        time.sleep(pause)
    return (used[1] - used[0]) / os.sysconf("SC_CLK_TCK")


def compare(contestants: list[Contestant], line: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every run of every row, as it ends. One before or behind which cores were slow is repeated, so often at most."""
    fastest = max(pace() for _ in range(5))
    for row in (row for row in ROWS if row.name in line.rows):
        for number in range(line.rounds):
            for contestant in (c for c in contestants if row.mode in c.modes):
                share = 0.0
                for _ in range(1 + line.repeat):
                    wait_for_quiet(line.wait_for_quiet)
                    before, result, behind = pace(), run(contestant, row, line), pace()
                    fastest = max(fastest, before, behind)
                    share = round(min(before, behind) / fastest, 2)
                    if share >= speed_table.STEADY:
                        break
                yield {"row": row.name, "round": number, "contestant": contestant.name, "pace": share, **result}


def save(report: dict[str, object], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".json", json.dumps(report, indent=1) + "\n"), (".md", speed_table.write(report))):
        output.with_name(output.name + ending).write_text(content)


def read_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training speed, side by side with other programs.")
    names = [contestant.name for contestant in CONTESTANTS]
    rows = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--contestants", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="Python of one peer, with and without the switch",
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout, as a contestant")
    parser.add_argument("--rounds", type=int, help="times each contestant runs a row (3; quick: 1)")
    parser.add_argument("--steps", type=int, help="timed steps a run (10; quick: 5)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--wait-for-quiet", type=float, default=0.0, metavar="SECONDS", help="longest, before a run")
    parser.add_argument("--repeat", type=int, default=2, help="times that a run is repeated while cores are slow")
    parser.add_argument("--quick", action="store_true", help="Colonnade and plain PyTorch only, one short round")
    parser.add_argument("--tiny", action="store_true", help="a toy model: tries the scripts, measures nothing")
    parser.add_argument("--dropout", type=float, default=0.0, help="of contestants that have it: 0.1 is GPT-2's")
    parser.add_argument("--output", type=Path, help="results file without its ending")
    line = parser.parse_args()
    line.contestants = line.contestants or (list(QUICK) if line.quick else names)
    line.rounds = line.rounds or (1 if line.quick else 3)
    line.steps = line.steps or (5 if line.quick else 10)
    ending = "-tiny" if line.tiny else "-quick" if line.quick else ""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    line.output = line.output or RESULTS / f"{day}-{hardware.machine_name()}{ending}"
    return line


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, the run in progress is stopped too
    line = read_line()
    contestants, absent = choose(line)
    for sentence in absent:
        print("absent:", sentence, flush=True)
    runs: list[dict[str, object]] = []
    report = {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware.describe(),
        "command": hardware.command_line(),
        "rounds": line.rounds,
        "steps": line.steps,
        "warmup": line.warmup,
        "tiny": line.tiny,
        "dropout": line.dropout,
        "absent": absent,
        "limits": None if line.tiny else limits.measured(),
        "before": hardware.commit(line.before) if line.before else None,
        "runs": runs,
    }
    for result in compare(contestants, line):
        runs.append(result)
        print(speed_table.progress(result), flush=True)
        save(report, line.output)  # after every run: an interrupted comparison keeps what it has
    print(speed_table.write(report))
    print(f"written: {line.output}.md and .json")


if __name__ == "__main__":
    main()
