"""How long ranks stand still for each other: shares of a step, as `colonnade train --profile` tells them.

    python -m benchmarks.waiting [--before ../parent] [--rounds 3] [--layouts tp sp dp …]

Two ranks on two cores train the reference model (fp32; pp with 8 micro-batches) on random tokens. `--before`: another
checkout runs beside this one, in turns. Shares are means over ranks and profiled steps, the median over rounds;
"moves" is copying and adding what crosses ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.hardware import ROOT, commit, cpu_name
from colonnade.data.writer import TokenFileWriter

VOCAB, LENGTH, SAMPLES = 50_304, 256, 256
FIRST, LAST = 3, 8
"""Steps that are profiled."""
MODEL = f"""
[model]
num_layers = 6
hidden_size = 384
num_heads = 6
seq_length = {LENGTH}
vocab_size = {VOCAB}
dropout = 0.0
attention_dropout = 0.0

[optim]
learning_rate = 1e-4

[train]
steps = {LAST}
micro_batch_size = 4
precision = "fp32"
device = "cpu"
threads = 1
"""
LAYOUTS: Mapping[str, tuple[str, int]] = {
    "tp": ("tp = 2", 4),
    "sp": ("tp = 2, sequence_parallel = true", 4),
    "pp": ('pp = 2, partition = "flops"', 32),
    "dp": ("dp = 2", 8),
    "zero1": ("dp = 2, zero = 1", 8),
    "zero2": ("dp = 2, zero = 2", 8),
    "zero3": ("dp = 2, zero = 3", 8),
}
"""[parallel], and samples of a step."""
Shares = dict[str, float]
"""Of a step: "wait", "moves", and the step itself in seconds."""


def profiled(layout: str, tokens: Path, root: Path) -> Shares:
    """A run of a checkout."""
    parallel, batch = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        data = f'data = {{ train = "{tokens}" }}\nrun = {{ folder = "{folder}/run" }}\nparallel = {{ {parallel} }}\n'
        config.write_text(data + MODEL + f"global_batch_size = {batch}\n")
        command = [sys.executable, "-m", "colonnade", "train", str(config), "--profile", f"{FIRST}:{LAST}"]
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=root)
        found = json.loads((Path(folder) / "run" / "profile.json").read_bytes())
    return shares(found["ranks"])


def shares(ranks: Sequence[Mapping[str, object]]) -> Shares:
    """Means over ranks."""

    def mean(begins: str, ends: str) -> float:
        every = []
        for rank in ranks:
            parts, seconds = rank["parts"], rank["seconds"]
            assert isinstance(parts, dict) and isinstance(seconds, float), "as train/profile_report.py writes them"
            named = (each for name, each in parts.items() if name.startswith(begins) and name.endswith(ends))
            every.append(sum(named) / seconds)
        return float(statistics.mean(every))

    longest = max(float(str(rank["seconds"])) for rank in ranks)
    return {"wait": mean("wait for", ""), "moves": mean("", " moves"), "seconds": longest}


def write_tokens(prefix: Path) -> None:
    generator = np.random.default_rng(0)
    with TokenFileWriter(prefix, np.dtype(np.uint16)) as writer:
        tokens = generator.integers(0, VOCAB, SAMPLES * (LENGTH + 1)).astype(np.uint16)
        writer.add_documents(tokens, np.full(SAMPLES, LENGTH + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    line = parser.parse_args()
    roots = {"now": ROOT} | ({"before": line.before.resolve()} if line.before else {})
    print(f"{cpu_name()}, two ranks, commit {commit()}" + (f" beside {commit(line.before)}" if line.before else ""))
    print("| layout | | wait | moves | s a step |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "tokens")
        for layout in line.layouts:
            found: dict[str, list[Shares]] = {name: [] for name in roots}
            for _ in range(line.rounds):
                for name, root in roots.items():
                    found[name].append(profiled(layout, Path(folder) / "tokens", root))
            for name, rounds in found.items():
                middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
                low, high = (pick(each["wait"] for each in rounds) for pick in (min, max))
                told = (
                    f"{middle['wait']:.1%} ({low:.1%} to {high:.1%}) | {middle['moves']:.1%} | {middle['seconds']:.3f}"
                )
                print(f"| {layout} | {name} | {told} |", flush=True)


if __name__ == "__main__":
    main()
