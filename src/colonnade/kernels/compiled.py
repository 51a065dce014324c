"""Kernels for CPUs in C++ (`compiled.cpp`): compiled on the machine that runs them, where there is a compiler.

They are never needed: what they compute is computed without them too, more slowly. On a CPU torch has no product of
16-bit matrices with an fp32 result, so all that is summed in fp32 (weight gradients, the output layer) is otherwise
multiplied in fp32: with AMX or avx512_bf16 half as fast as the processor can, or less. Its fused attention takes
several times as long as its products should, and drops nothing by masks that it is given; random numbers take a pass
over memory for each operation; its softmax of an output layer's logits reads them from memory, backward of its
LayerNorm wants copies in fp32, its GELU by tanh is slow, and its AdamW writes scaled gradients back and leaves the
rounding of weights to another pass.
Where there are no units for 16 bits, these are widened a block at a time, and no copy of a matrix is made.

    prepare(folder, processor)    once in a process: compile them, or find them compiled, and load them
    is_loaded()                   whether the rest may be called
    product_, products_           a b, and aᵀ b of an a in blocks, with an fp32 result
    output_exponentials_          of an output layer's logits, which are nowhere whole, and their product with its table
    keep_mask, normal_            random numbers, in the bits of `randomness`
    kept                          what dropout leaves
    attend, attend_backward       fused attention, with and without dropout
    norm_backward                 backward of a LayerNorm or an RMSNorm
    gelu, gelu_backward           exact, or by tanh
    adamw_                        one pass of the optimizer, which rounds the new weights too

Loaded kernels are operators of torch (`torch.ops.colonnade`), so torch alone knows whether a process has them.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade.atomic import written
from colonnade.errors import REFUSED_BY_THE_DISK
from colonnade.randomness import NORMAL_RATIOS, check_range, kept_scale, least_kept, offset_and_gamma, words_of

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared", "-std=c++20")
ATTENTION = (torch.bfloat16, torch.float32)
"""What there is attention for."""
NUMBERS = (torch.bfloat16, torch.float16, torch.float32)
"""What `kept` multiplies."""
NORMAL = (torch.float32, torch.float64)
"""What `normal_` fills."""
BLOCK = 1 << 18
"""[bytes] Of an output layer's table, that are multiplied at a time: of two packed copies of them, an L2 cache of a
megabyte is half full."""
NARROWEST, WIDEST = 64, 512
"""[columns] Of such a block, however wide a layer is."""
TIME_LIMIT = 300.0
"""[seconds] Compiling takes about 20."""
ELSEWHERE = "set XDG_CACHE_HOME to a folder that can be written"
"""What to do about the folder for kernels."""


class _Missing(Exception):
    """Why there are no compiled kernels."""


def is_loaded() -> bool:
    """Whether this process has the kernels."""
    return hasattr(torch.ops.colonnade, "product_")


def version() -> str:
    """What the kernels are made of: another after a change of them, of how they are compiled, or of torch."""
    return sha256("\0".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, torch.__version__)).encode()).hexdigest()[:16]


def prepare(folder: Path | None, processor: str) -> str:
    """Load the kernels into this process, compiled now or before, into `folder`: '' or why there are none.

    They fit one `processor` and one torch: a home directory may be shared by machines that differ in both.
    """
    if is_loaded():
        return ""
    try:
        file = _file(folder, processor)
        found = file.exists()
        if not found:
            _compile(file)
        try:
            _load(file)
        except OSError:
            if not found:
                raise
            _compile(file)  # what lay there was damaged
            _load(file)
    except (_Missing, OSError) as error:
        instead = f"; {ELSEWHERE}" if isinstance(error, OSError) and error.errno in REFUSED_BY_THE_DISK else ""
        return f"{str(error).strip().splitlines()[0]}{instead}"
    return ""


def _load(file: Path) -> None:
    try:
        torch.ops.load_library(file)  # type: ignore[no-untyped-call]
    except OSError:
        if os.statvfs(file.parent).f_flag & os.ST_NOEXEC:
            instead = "set XDG_CACHE_HOME to a folder on another file system"
            raise _Missing(f"{file.parent} is mounted noexec, and no code is loaded from there; {instead}") from None
        raise


def product_(total: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """total = a b, or total += a b: a [m, k] and b [k, n] in bf16, fp16 or fp32, total [m, n] in fp32, sums in fp32."""
    torch.ops.colonnade.product_(total, _in_one_piece(a), _in_one_piece(b), add)


def products_(total: Tensor, blocks: Sequence[Tensor], b: Tensor, *, add: bool) -> None:
    """total = aᵀ b, or total += aᵀ b, of a matrix a [k, m] that lies in blocks of columns, side by side: all as wide as
    the first but the last, which may be narrower. The rest is as in `product_`.
    """
    torch.ops.colonnade.products_(total, list(blocks), _in_one_piece(b), add)


def output_blocks(tokens: int, table: Tensor) -> list[Tensor]:
    """Memory for exponentials of the logits of `tokens` tokens: blocks of columns, side by side, in the order of the
    rows of `table` [v, h]. All are as wide as the first but the last, which may be narrower.
    """
    rows, depth = table.shape
    width = min(max(BLOCK // (depth * table.itemsize) // NARROWEST, 1) * NARROWEST, WIDEST)
    if table.is_meta:
        width = rows  # as many bytes, in one
    return [table.new_empty(tokens, min(width, rows - first)) for first in range(0, rows, width)]


def output_exponentials_(
    out: Sequence[Tensor], product: Tensor, x: Tensor, table: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out = exp(x tableᵀ − shift), rounded once, and 0 at each token's label, and product = out table: x [c, h] and
    table [v, h] in bf16, fp16 or fp32, labels [c] in int64 (−1: none of these rows), `out` as `output_blocks` makes it,
    product [c, h] in fp32 -> (shift, sum of the exponentials before they are rounded, the label's logit or 0), [c] in
    fp32 each.

    log(sum) + shift is the log-sum-exp of the other rows. The shift is at most a token's largest logit among these, and
    at most 60 below it (fp16: 11). What is below 1e-38 is 0. Of fp32 logits one block is in memory at a time.
    """
    x, table = _in_one_piece(x), _in_one_piece(table)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.colonnade.output_exponentials_(
        list(out), product, x, table, labels
    )
    return found


def attends(q: Tensor) -> bool:
    """Whether there is a kernel of attention for heads like these: with an even number of features."""
    return q.dtype in ATTENTION and q.shape[-1] % 2 == 0 and q.numel() > 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, streams: np.ndarray | None = None, drop: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v, and the log-sum-exp: [b, n, s, d] each -> [b, n, s, d], and [b, n, s] in fp32.

    Scores and sums are fp32; probabilities are rounded to the type of `q` before they are multiplied, as in torch's
    fused kernel. They are dropped as `randomness.keep_mask` says, by a stream for each head of each sample, uint64
    [b · n], in which query i and key j are element i · s + j (None: nothing is dropped). No mask is in memory.
    """
    out, lse = torch.ops.colonnade.attend(
        *map(_by_features, (q, k, v)), scale, causal, *_dropped(streams, drop, q.shape[2])
    )
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool,
    streams: np.ndarray | None = None,
    drop: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of `out`: [b, n, s, d] each. The probabilities are computed again."""
    heads = map(_by_features, (grad, q, k, v, out))
    dq, dk, dv = torch.ops.colonnade.attend_backward(*heads, lse, scale, causal, *_dropped(streams, drop, q.shape[2]))
    return dq, dk, dv


def keep_mask(keys: np.ndarray, start: int, count: int, drop: float) -> Tensor:
    """As `randomness.keep_mask`."""
    first, _ = words_of(start, count)
    streams, skipped = _streams(keys, first), start - 2 * first
    keep: Tensor = torch.ops.colonnade.keep_mask(streams, skipped, count, least_kept(drop))
    return keep


def kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """x, times `scale` where `keep`, else times 0: [s, b, h] in bf16, fp16 or fp32, and bool -> as x. Rounded once."""
    found: Tensor = torch.ops.colonnade.kept(_by_features(x), _by_features(keep), scale)
    return found


def normal_(to: Tensor, keys: np.ndarray, start: int, std: float) -> None:
    """to = `randomness.normal` · std, rounded once: [len(keys), count] of a type in NORMAL, a row in one piece."""
    check_range(2 * start, 2 * to.shape[1])
    torch.ops.colonnade.normal_(to, _streams(keys, 2 * start), torch.tensor(NORMAL_RATIOS, dtype=torch.float64), std)


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    *,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
) -> Tensor:
    """The gradient of x, given that of y = (x − mean) · scale · weight + bias (mean None: an RMSNorm's): grad and x
    [..., h] in bf16, fp16 or fp32, weight [h], mean and scale [..., 1] in fp32 -> [..., h] in their type.

    Those of weight and bias, summed in fp32, are added to `of_weight` and `of_bias` [h] in fp32 (None: nowhere).
    """
    found: Tensor = torch.ops.colonnade.norm_backward(
        of_weight, of_bias, grad.contiguous(), x.contiguous(), weight, mean, scale
    )
    return found


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """x Φ(x), or by tanh: [...] in bf16, fp16 or fp32 -> the same. Computed in fp32 and rounded once."""
    found: Tensor = torch.ops.colonnade.gelu(x.contiguous(), tanh)
    return found


def gelu_backward(grad: Tensor, x: Tensor, *, tanh: bool) -> Tensor:
    """The gradient of x, given that of its GELU: [...] each, in one type."""
    found: Tensor = torch.ops.colonnade.gelu_backward(grad.contiguous(), x.contiguous(), tanh)
    return found


def adamw_(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    *,
    factor: float,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    step: int,
) -> None:
    """Step `step` (from 1) of AdamW on fp32 weights [n], from gradients times `factor`, and the new weights in
    `rounded` [n], in bf16 or fp16 (None: nowhere). Gradients are only read.
    """
    numbers = factor, learning_rate, *betas, epsilon, weight_decay, step
    torch.ops.colonnade.adamw_(weights, gradients, exp_avg, exp_avg_sq, rounded, *numbers)


def _dropped(streams: np.ndarray | None, drop: float, positions: int) -> tuple[Tensor | None, int, float]:
    if streams is None:
        return None, 0, 1.0
    first, _ = words_of(0, positions**2)
    return _streams(streams, first), least_kept(drop), kept_scale(drop)


def _streams(keys: np.ndarray, word: int) -> Tensor:
    """What kernels know of streams, each from a word of it on: int32 [2, len(keys)]."""
    return torch.from_numpy(np.stack(offset_and_gamma(keys, word)))


def _by_features(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _in_one_piece(x: Tensor) -> Tensor:
    # of a single number torch's `contiguous` leaves strides as they are, whatever they are
    return x if 1 in x.stride() and 0 not in x.stride() else x.clone(memory_format=torch.contiguous_format)


def _file(folder: Path | None, processor: str) -> Path:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise _Missing(f"torch has no kernel that they could use on {sys.platform} {platform.machine()}")
    if folder is None:
        raise _Missing(f"there is no folder to keep them in: the environment names no home; {ELSEWHERE}")
    return folder / f"compiled-{version()}-{sha256(processor.encode()).hexdigest()[:8]}.so"


def _compile(file: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _Missing(f"there is no C++ compiler (none of {', '.join(COMPILERS)})")
    torch_folder = Path(torch.__file__).parent
    headers = [f"-I{torch_folder / 'include' / more}" for more in ("", "torch/csrc/api/include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    with written(file) as stream:
        command = [compiler, *FLAGS, abi, *headers, str(SOURCE), "-o", stream.name, *libraries]
        _run(command)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise _Missing(f"{command[0]} did not end within {TIME_LIMIT:.0f} seconds") from None
    if done.returncode != 0:
        faults = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise _Missing(f"{command[0]} failed: {faults[0]}")
