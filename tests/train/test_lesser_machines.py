"""Runs on machines that have less than the one of the tests: a single core, no AVX-512, no compiler.

They choose among the kernels that they have, say which they took, and learn what others learn. Each machine is a
process, which trains the same small model in several ways; its products are large enough to be measured.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.kernels import compiled
from tests import tiny
from tests.commands import Answer, environment, forked
from tests.kernels.loaded import load, shared_folder
from tests.runs import events, metrics
from tests.slow import first_fast
from tests.tiny import TinyCorpus

ROOT = Path(__file__).parents[2]
MEASURED = (
    *("model.num_layers=1", "model.hidden_size=256", "model.num_heads=4", "model.seq_length=64"),
    *("train.micro_batch_size=4", "train.steps=3", "train.evaluate_every=0", "train.threads=0", "checkpoint.every=3"),
)
"""Products of 2²⁷ operations, and as many threads as the machine gives."""
RUNS = {
    "fp64": ("train.precision=fp64",),
    "fp64, two ranks": ("train.precision=fp64", "parallel.tp=2"),
    "fp32": ("train.precision=fp32",),
    "bf16": ("train.precision=bf16",),
    "bf16, compiled": ("train.precision=bf16", "train.products=compiled"),
}
CLOSE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 3e-3}
"""How far losses by other kernels may be, as a share: each format."""
MACHINE = """
import json, os, subprocess, sys
if sys.argv[2] == "one core":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from tests.commands import Answer, here

def run(*arguments):
    if "parallel.tp=2" not in arguments:
        return here("train", *arguments)
    command = [sys.executable, "-m", "colonnade", "train", *arguments]  # which starts ranks
    done = subprocess.run(command, capture_output=True, text=True)
    return Answer(done.returncode, done.stdout, done.stderr)

answers = [vars(run(*arguments)) for arguments in json.loads(sys.argv[1])]
print(json.dumps([torch.backends.cpu.get_cpu_capability(), answers]))
"""
COMPILER = """#!/bin/sh
# what -march=native is on a processor with AVX2
for word do
  shift
  [ "$word" = -march=native ] && word=-march=haswell
  set -- "$@" "$word"
done
exec {compiler} "$@" -include {header}
"""
HEADER = """
#ifdef __AVX512F__
#error this machine has no AVX-512
#endif
"""
NO_COMPILER = "kernels could not be compiled on this machine (there is no C++ compiler ("
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


class Trained:
    """What runs of one machine have left."""

    def __init__(self, folder: Path, capability: str, answers: Mapping[str, Answer]) -> None:
        self.folder, self.capability, self.answers = folder, capability, answers

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in metrics(self.folder / name)]

    def setup(self, name: str) -> dict[str, Any]:
        (found,) = [event for event in events(self.folder / name) if event["event"] == "setup"]
        return found


def trained(corpus: TinyCorpus, folder: Path, machine: str, **more: str) -> Trained:
    """All runs, on one machine; `more` stands in its environment. Its cache is empty, if that names no other."""
    config = tiny.write_config(corpus, folder)
    given = [[str(config), *MEASURED, *each, f"run.folder={folder / name}"] for name, each in RUNS.items()]
    unset = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    own = {"XDG_CACHE_HOME": str(folder / "cache"), **more}
    command = [sys.executable, "-c", MACHINE, json.dumps(given), machine]
    done = subprocess.run(command, capture_output=True, text=True, env=unset | own, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    capability, answers = json.loads(done.stdout.splitlines()[-1])
    found = {name: Answer(**answer) for name, answer in zip(RUNS, answers, strict=True)}
    assert all(answer.status == 0 for answer in found.values()), found
    return Trained(folder, capability, found)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with kernels that this processor's compiler has made; skips where there can be none."""
    load(shared_folder(tmp_path_factory))
    cache = tmp_path_factory.mktemp("kernels")
    return Path(shutil.copytree(shared_folder(tmp_path_factory), cache / "colonnade")).parent


@pytest.fixture(scope="module")
def whole(corpus: TinyCorpus, kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All that this machine has."""
    return trained(corpus, tmp_path_factory.mktemp("whole"), "", XDG_CACHE_HOME=str(kernels))


def assert_learns_the_same(here: Trained, there: Trained) -> None:
    for name in RUNS:
        allowed = CLOSE[name.partition(",")[0]]
        assert here.losses(name) == pytest.approx(there.losses(name), rel=allowed, abs=0), name


def assert_chooses_and_says_so(machine: Trained, precision: str, kernels: set[str]) -> None:
    """Among these, by what was measured there."""
    (line,) = [line for line in machine.answers[precision].out.splitlines() if line.startswith("  products ")]
    found = machine.setup(precision)["products"]
    assert found["gflops"].keys() >= {"forward", "input_gradient", "weight_gradient", "output"}
    for use, rates in found["gflops"].items():
        kernel = found["kernels"][use]
        assert kernel in rates.keys() <= kernels and f"{use.replace('_', ' ')} {kernel} " in line, line
    assert line.endswith("(GFLOP/s of a core, measured now)"), line


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let a process choose its cores")
def test_a_single_core_learns_the_same(corpus: TinyCorpus, whole: Trained, kernels: Path, tmp_path: Path) -> None:
    cache = shutil.copytree(kernels, tmp_path / "cache", ignore=shutil.ignore_patterns("*.json"))
    one = trained(corpus, tmp_path / "one", "one core", XDG_CACHE_HOME=str(cache))
    assert all("1 core, 1 thread for each rank" in answer.out for answer in one.answers.values())
    for precision in ("fp32", "bf16"):
        assert_chooses_and_says_so(one, precision, {"blas", "onednn", "native", "compiled"})
    assert_learns_the_same(one, whole)


@pytest.mark.slow
def test_a_processor_without_avx512_learns_the_same(corpus: TinyCorpus, whole: Trained, tmp_path: Path) -> None:
    """Its compiler makes kernels for AVX2, whose registers are shorter; torch, oneDNN and MKL have no more either."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    compiler = next(filter(None, map(shutil.which, compiled.COMPILERS)))
    bin, header = tmp_path / "bin", tmp_path / "header.h"
    bin.mkdir()
    header.write_text(HEADER)
    (bin / "c++").write_text(COMPILER.format(compiler=compiler, header=header))
    (bin / "c++").chmod(0o755)
    less = trained(corpus, tmp_path / "less", "", PATH=f"{bin}{os.pathsep}{os.environ['PATH']}", **AVX2)
    assert less.capability == "AVX2"
    for precision in ("fp32", "bf16"):
        assert less.setup(precision)["notes"] == []
        assert_chooses_and_says_so(less, precision, {"blas", "onednn", "native", "compiled"})
        assert "compiled" in less.setup(precision)["products"]["gflops"]["weight_gradient"]
    assert_learns_the_same(less, whole)


@pytest.mark.parametrize("precision", first_fast(["bf16", "fp32"]))
def test_a_run_without_a_compiler_begins_and_learns(precision: str, config: Path, tmp_path: Path) -> None:
    """Whatever kernels the process of the tests has."""
    (tmp_path / "bin").mkdir()

    def lack(rank: int) -> None:
        vars(compiled)["is_loaded"] = lambda: False
        os.environ |= {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    given = [*MEASURED, f"train.precision={precision}"]
    answer = forked("train", config, *given, first=lack)
    assert answer.status == 0, answer
    less = Trained(tmp_path, "", {"run": answer})
    (note,) = less.setup("run")["notes"]
    assert note.startswith(NO_COMPILER) and note in answer.out
    assert_chooses_and_says_so(less, "run", {"blas", "onednn", "native"})
    plain = forked("train", config, *given, "train.products=blas", f"run.folder={tmp_path / 'plain'}")
    assert plain.status == 0, plain
    assert less.losses("run") == pytest.approx(less.losses("plain"), rel=CLOSE[precision], abs=0)
