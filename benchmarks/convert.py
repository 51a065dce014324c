"""What a conversion takes: time, and memory at its peak, of a model that is large without being there.

The folder of Hugging Face is one sparse file, which the file system reads as zeros; what is written is real. Each
direction is a process of its own, and so is a model of one layer, whose memory is that of Python and torch. Beside
them `from_pretrained` and `save_pretrained` of transformers, which read and write the same numbers once, without
hashes.

python -m benchmarks.convert [--preset llama3.2-1b] [--rounds 3] [--folder /tmp]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import hardware
from colonnade.architecture.huggingface.families import family_of
from colonnade.config.model import ModelConfig
from colonnade.huggingface.files import WHOLE
from colonnade.huggingface.write import Planned, PlannedFile, header_of

_STARTER = """
import os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), time.perf_counter() - start, usage.ru_maxrss)
"""


_TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""
WAYS = ("to a checkpoint", "to Hugging Face", "transformers")


class Taken(NamedTuple):
    """What a process took."""

    seconds: float
    peak_bytes: int


def sparse_folder(folder: Path, model: ModelConfig, dtype: torch.dtype) -> int:
    """A folder as others publish it, whose numbers are all zero and take no space. Returns their bytes."""
    assert model.vocab_size is not None, "a preset has one"
    family, config = family_of(model, model.vocab_size)
    tensors = [
        Planned(name, source.shape, dtype)
        for source in family.sources(model, model.vocab_size)
        for name in source.theirs
    ]
    header = header_of(PlannedFile(WHOLE, tuple(tensors)))
    size = sum(tensor.num_bytes for tensor in tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family.model_type, **config}))
    (folder / WHOLE).write_bytes(header)
    os.truncate(folder / WHOLE, len(header) + size)
    return size


def taken_by(*arguments: object) -> Taken:
    """`colonnade arguments` in a process of its own."""
    return taken_by_command([sys.executable, "-m", "colonnade", *map(str, arguments)])


def taken_by_command(command: list[str]) -> Taken:
    """A command, started by a small process: Linux counts the peak of whoever starts a process as its own."""
    done = subprocess.run([sys.executable, "-S", "-c", _STARTER, *command], stdout=subprocess.PIPE, check=True)
    status, seconds, kilobytes = done.stdout.split()
    if int(status):
        raise SystemExit(f"{' '.join(command)} ended with {int(status)}")
    return Taken(float(seconds), int(kilobytes) * 1024)


def both_ways(folder: Path, model: ModelConfig, dtype: torch.dtype) -> tuple[int, Taken, Taken]:
    """Bytes of the weights, and what each direction takes. Nothing stays in `folder`."""
    size = sparse_folder(folder / "theirs", model, dtype)
    there = taken_by("convert", folder / "theirs", folder / "ours")
    back = taken_by("convert", folder / "ours", folder / "back")
    for path in folder.iterdir():
        shutil.rmtree(path)
    return size, there, back


def by_transformers(folder: Path, model: ModelConfig, dtype: torch.dtype) -> Taken:
    """What transformers takes for the same folder. Nothing stays in `folder`."""
    sparse_folder(folder / "theirs", model, dtype)
    found = taken_by_command([sys.executable, "-c", _TRANSFORMERS, str(folder / "theirs"), str(folder / "again")])
    for path in folder.iterdir():
        shutil.rmtree(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the system's own)")
    given = parser.parse_args()
    model = ModelConfig(preset=given.preset)
    table = (model.vocab_size or 0) * model.hidden_size * torch.bfloat16.itemsize
    print(f"{hardware.cpu_name()}, commit {hardware.commit()}", flush=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        small = model.model_copy(update={"num_layers": 1})
        _, *least = both_ways(Path(name), small, torch.bfloat16)
        least.append(by_transformers(Path(name), small, torch.bfloat16))
        for number in range(1, given.rounds + 1):
            size, *found = both_ways(Path(name), model, torch.bfloat16)
            found.append(by_transformers(Path(name), model, torch.bfloat16))
            print(f"round {number}: {given.preset}, {size / 1e9:.2f} GB, largest tensor {table / 1e9:.2f} GB (bf16)")
            for way, it, one_layer in zip(WAYS, found, least, strict=True):
                print(
                    f"{way:>16}: {it.seconds:6.1f} s, peak {it.peak_bytes / 1e6:,.0f} MB "
                    f"({one_layer.peak_bytes / 1e6:,.0f} MB with one layer)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
