"""Does the suite notice? Each mutation breaks one line of the source in a copy of the tree and runs the tests on it.

    python -m tests.mutations                      all of them: a quarter of an hour on two cores
    python -m tests.mutations "g sends nothing"    those whose name contains one of the words given

Prints a table of mutation and failed tests, in Markdown. Exits 1 if a mutation survives, if one no longer matches the
source, or if the tests fail without any.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARITY = "tests/parity/test_parity.py"
AUDIT = "tests/parity/test_audit.py"
BF16 = "tests/parity/test_bf16.py"
STEP = "tests/train/test_step.py"
GPT = "tests/model/test_gpt.py"
COLLECTIVES = "tests/mesh/test_collectives.py"
LINEAR = "tests/tensor_parallel/test_linear.py"
LOSS = "tests/tensor_parallel/test_cross_entropy.py"
EMBEDDING = "tests/tensor_parallel/test_embedding.py"
DROPOUT = "tests/model/test_dropout.py"
ATTENTION = "tests/model/test_attention.py"
MLP = "tests/model/test_mlp.py"
INITIALIZE = "tests/model/test_initialize.py"
BUCKETS = "tests/data_parallel/test_buckets.py"
CLIP = "tests/data_parallel/test_clip.py"
REDUCE = "tests/data_parallel/test_reduce.py"
TIME_LIMIT = 900.0


@dataclass(frozen=True)
class Mutation:
    """One line broken, and the test files that should notice."""

    name: str
    file: str
    """Under src/colonnade."""
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    # --- a collective is missing
    Mutation(
        "f sends nothing backward",
        "mesh/collectives.py",
        "copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)",
        "copy_to = _operator(_identity, _identity)\nreduce_from = _operator(_all_reduce, _identity)",
        (PARITY, AUDIT, COLLECTIVES, LINEAR),
    ),
    Mutation(
        "g sends nothing forward",
        "mesh/collectives.py",
        "copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)",
        "copy_to = _operator(_identity, _all_reduce)\nreduce_from = _operator(_identity, _identity)",
        (PARITY, AUDIT, COLLECTIVES, LINEAR),
    ),
    Mutation(
        "g sums gradients as well",
        "mesh/collectives.py",
        "copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)",
        "copy_to = _operator(_identity, _all_reduce)\nreduce_from = _operator(_all_reduce, _all_reduce)",
        (PARITY, AUDIT, COLLECTIVES, LINEAR),
    ),
    Mutation(
        "one unit is not reduced over dp",
        "data_parallel/reduce.py",
        "self._pending[unit.name] = all_reduce_(unit.gradients, self.dp)",
        'self._pending[unit.name] = Pending(None) if unit.name == "blocks.1" else all_reduce_(unit.gradients, self.dp)',
        (PARITY, AUDIT, REDUCE),
    ),
    Mutation(
        "reduced after the first micro-batch, not the last",
        "train/step.py",
        "if batch is microbatches[-1]:",
        "if batch is microbatches[0]:",
        (PARITY,),
    ),
    Mutation(
        "the loss's all-gather is missing",
        "tensor_parallel/cross_entropy.py",
        "every = all_gather(torch.stack([local_lse, local_target])[None], tp)",
        "every = torch.stack([local_lse, local_target])[None]",
        (PARITY, AUDIT, LOSS),
    ),
    Mutation(
        "the head's f is missing",
        "tensor_parallel/cross_entropy.py",
        "apply(_OutputLoss, copy_to(hidden, tp),",
        "apply(_OutputLoss, hidden,",
        (PARITY, AUDIT, LOSS),
    ),
    # --- the gradient norm
    Mutation(
        "replicated weights are counted tp times in the norm",
        "data_parallel/clip.py",
        "return segment.cut or mesh.tp.rank == 0",
        "return True",
        (PARITY, CLIP),
    ),
    Mutation(
        "cut weights are counted on tp rank 0 alone",
        "data_parallel/clip.py",
        "return segment.cut or mesh.tp.rank == 0",
        "return mesh.tp.rank == 0",
        (PARITY, CLIP),
    ),
    Mutation(
        "gradients are not clipped",
        "train/step.py",
        "clip_factor(norm, train.gradient_clip)",
        "clip_factor(norm, 0.0)",
        (PARITY, STEP),
    ),
    # --- dropout
    Mutation(
        "hidden dropout differs between tp ranks",
        "train/step.py",
        "Masks(train.seed,",
        "Masks(train.seed + mesh.tp.rank,",
        (PARITY, STEP),
    ),
    Mutation(
        "every rank's heads drop with the masks of the first heads",
        "model/attention.py",
        "self.heads = range(tp.rank * mine, (tp.rank + 1) * mine)",
        "self.heads = range(mine)",
        (PARITY, GPT, ATTENTION),
    ),
    Mutation(
        "dropout depends on the place in the micro-batch",
        "model/dropout.py",
        "keys = stream_keys(self.seed, purpose, layer, last=self.samples)",
        "keys = stream_keys(self.seed, purpose, layer, last=range(len(self.samples)))",
        (PARITY, DROPOUT, STEP),
    ),
    # --- the loss and its labels
    Mutation(
        "the loss is normalised by the rank's own tokens",
        "train/step.py",
        "for batch in microbatches]).sum(), mesh.dp)",
        "for batch in microbatches]).sum(), mesh.pp)",
        (PARITY, AUDIT),
    ),
    Mutation(
        "the last micro-batch is skipped",
        "train/step.py",
        "for batch in microbatches:",
        "for batch in microbatches[:-1] or microbatches:",
        (PARITY, STEP),
    ),
    Mutation(
        "labels are shifted by real rows, not by rows",
        "tensor_parallel/cross_entropy.py",
        "local = labels - tp.rank * shard",
        "local = labels - tp.rank * rows",
        (PARITY, LOSS),
    ),
    Mutation(
        "padding rows take part in the softmax",
        "tensor_parallel/cross_entropy.py",
        "return max(0, min(weight.shape[0], vocab_size - tp.rank * weight.shape[0]))",
        "return weight.shape[0]",
        (PARITY, LOSS),
    ),
    # --- layers
    Mutation(
        "a linear layer's bias gets no gradient",
        "tensor_parallel/gemm.py",
        "gradient.add_(rows.sum(0, dtype=gradient.dtype))",
        "gradient.add_(0.0)",
        (PARITY, LINEAR, GPT),
    ),
    Mutation(
        "the row-parallel bias is added on every rank",
        "tensor_parallel/linear.py",
        "reduce_from(linear(x, self.weight), self.tp) + self.bias",
        "reduce_from(linear(x, self.weight) + self.bias, self.tp)",
        (PARITY, LINEAR),
    ),
    Mutation(
        "tokens of other ranks are looked up here too",
        "tensor_parallel/embedding.py",
        "return nn.functional.embedding(rows, weight).mul_(mine[..., None])",
        "return nn.functional.embedding(rows, weight)",
        (PARITY, EMBEDDING),
    ),
    Mutation(
        "tokens of other ranks send gradients here too",
        "tensor_parallel/embedding.py",
        "gradient.index_add_(0, rows[mine], grad[mine].to(gradient.dtype))",
        "gradient.index_add_(0, rows.flatten(), grad.flatten(0, 1).to(gradient.dtype))",
        (PARITY, EMBEDDING),
    ),
    Mutation(
        "initial weights are drawn by the rank's own row",
        "model/initialize.py",
        "rows = range(row + first, row + min(first + step, num_rows))",
        "rows = range(first, min(first + step, num_rows))",
        (PARITY, INITIALIZE),
    ),
    Mutation(
        "q and k are exchanged",
        "model/attention.py",
        "q, k, v = (part.permute",
        "k, q, v = (part.permute",
        (GPT, ATTENTION),
    ),
    Mutation(
        "gelu is the other gelu",
        "model/mlp.py",
        '{"gelu": "none", "gelu_tanh": "tanh"}',
        '{"gelu": "tanh", "gelu_tanh": "none"}',
        (GPT, MLP),
    ),
    # --- memory between steps
    Mutation(
        "gradients of the last step are kept",
        "train/step.py",
        "unit.gradients.zero_()",
        "unit.gradients.mul_(1.0)",
        (PARITY, STEP),
    ),
    Mutation(
        "norms and biases decay",
        "data_parallel/buckets.py",
        "return place.parameter.ndim < 2, place.dim is None",
        "return False, place.dim is None",
        (BUCKETS, STEP),
    ),
    Mutation(
        "bf16 parameters are not renewed from their masters",
        "train/step.py",
        "        unit.publish()\n",
        "",
        (BF16,),
    ),
]


def mutated(mutation: Mutation, tree: Path = ROOT) -> str:
    """The file with its line broken. Raises ValueError where the line does not stand exactly once."""
    text = (tree / "src" / "colonnade" / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.name}: {mutation.old!r} stands {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def copy_tree(source: Path, target: Path) -> None:
    """What the tests need of a tree."""
    for folder in ("src", "tests"):
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "pyproject.toml", target)


def failed_tests(tree: Path, tests: tuple[str, ...]) -> Counter[str]:
    """`file::test` -> how many of its cases failed, of these test files in a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import colonnade; print(colonnade.__file__)"]
    origin = subprocess.run(where, cwd=tree, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(origin.strip()).is_relative_to(tree), f"the tests would import {origin.strip()}"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run:\n{result.stdout}\n{result.stderr}")
    named = re.findall(r"^(?:FAILED|ERROR) tests/(\S+?)\.py::(\w+)", result.stdout, flags=re.MULTILINE)
    return Counter(f"{file}::{test}" for file, test in named)


def row(name: str, failed: Counter[str]) -> str:
    """A line of the table: tests of one file together."""
    by_file: dict[str, list[str]] = {}
    for test, count in failed.items():
        file, _, function = test.partition("::")
        by_file.setdefault(file, []).append(function + (f" ×{count}" if count > 1 else ""))
    caught = "<br>".join(f"`{file}`: {', '.join(functions)}" for file, functions in by_file.items())
    return f"| {name} | {caught or '**nothing: it survives**'} |"


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        print(f"no mutation is named {words}", file=sys.stderr)
        return 1
    for mutation in chosen:
        mutated(mutation)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder).resolve() / "whole"
        copy_tree(ROOT, whole)
        broken = failed_tests(whole, tuple(sorted({test for mutation in chosen for test in mutation.tests})))
        if broken:
            print(f"the tests fail without any mutation: {dict(broken)}", file=sys.stderr)
            return 1
        print("| mutation | tests that failed |\n|---|---|", flush=True)
        survivors = 0
        for number, mutation in enumerate(chosen):
            tree = whole.with_name(f"mutant{number}")
            copy_tree(whole, tree)
            (tree / "src" / "colonnade" / mutation.file).write_text(mutated(mutation, tree))
            failed = failed_tests(tree, mutation.tests)
            survivors += not failed
            print(row(mutation.name, failed), flush=True)
            shutil.rmtree(tree)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
