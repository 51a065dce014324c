"""A forward pass and an optimizer step on CUDA as far as a machine without one can tell: every operator exists there,
takes these types, and gets operands of one device; and the host waits for nothing.

Backward does not run on a CPU build of torch; its branches run in `tests/parity/test_cuda_branches.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._decomp import decompositions
from torch.utils.cpp_extension import include_paths

from tests.parity.runs import BLOCKS

HERE = Path(__file__).parent
MODEL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 16}


def case(precision: str = "bf16", tp: int = 1, *, documents: bool = False, **model: Any) -> dict[str, Any]:
    return {"model": MODEL | model, "precision": precision, "tp": tp, "documents": documents}


def undropped(block: str, *, documents: bool = False) -> dict[str, Any]:
    return case(documents=documents, dropout=0.0, attention_dropout=0.0, **BLOCKS[block])


BATCH = 3  # tokens, labels, loss mask
CASES = {
    "dropout": (
        case(dropout=0.1, attention_dropout=0.1),
        BATCH + 1 + 2 * 3,
    ),  # embedding, and in each block attention and two residuals
    "fp16": (case("fp16", dropout=0.1, attention_dropout=0.1), BATCH + 1 + 2 * 3),
    "fp32": (case("fp32", dropout=0.1, attention_dropout=0.1), BATCH + 1 + 2 * 3),
    "none dropped": (case(dropout=0.0, attention_dropout=0.0), BATCH),
    "ALiBi": (case(dropout=0.0, attention_dropout=0.0, position="alibi"), BATCH + 2),  # slopes of each block
    "documents": (case(dropout=0.0, attention_dropout=0.0, documents=True), BATCH + 2),  # and positions
    "tp 2": (case(tp=2, dropout=0.0, attention_dropout=0.0), BATCH),
    "fp32 residual": (case(dropout=0.0, attention_dropout=0.0, fp32_residual=True), BATCH),
    **{block: (undropped(block), BATCH + 2) for block in ("llama", "grouped", "neox")},  # wavelengths of each block
    "llama, documents": (undropped("llama", documents=True), BATCH + 2 + 2),
    "window": (undropped("window"), BATCH),
    "bert": (undropped("bert"), BATCH + 4),  # types, padding, pairs' labels and mask
    "labels": (undropped("labels"), 5),
    "spans": (undropped("spans"), 5),
    "t5": (undropped("t5"), BATCH + 1 + 5),  # the decoder's tokens, and the ranges of distances of each block
}


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`guard.cpp`, compiled."""
    if "addmm_dtype" not in vars(decompositions):
        pytest.skip(f"in torch {torch.__version__} fake tensors do not know addmm with out_dtype")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: a CUDA device cannot be invented")
    out = tmp_path_factory.mktemp("guard") / "guard.so"
    includes = [f"-I{path}" for path in include_paths()]
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    source = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", *includes, str(HERE / "guard.cpp")]
    subprocess.run([*source, "-o", str(out), libraries, "-lc10"], check=True, timeout=300)
    return out


@pytest.fixture(scope="session")
def walked(guard: Path) -> dict[str, dict[str, Any]]:
    """What crossed between host and device in each case."""
    told = json.dumps([given for given, _ in CASES.values()])
    command = [sys.executable, "-m", "tests.cuda.walk", str(guard), told]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_nothing(name: str, walked: dict[str, dict[str, Any]]) -> None:
    assert walked[name]["waits"] == {}


@pytest.mark.parametrize("name", CASES)
def test_no_more_is_uploaded_than_batch_and_keys(name: str, walked: dict[str, dict[str, Any]]) -> None:
    """One pinned copy for each mask, each tensor of the batch, and what each block knows of positions."""
    assert walked[name]["uploads"] == CASES[name][1]
