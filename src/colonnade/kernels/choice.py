"""Which kernel multiplies which matrices on a CPU: a `Products`, decided once for all ranks and handed to the layers.

    native    as they are: bf16 units where the processor has them
    blas      in fp32 by torch's BLAS library (MKL on x86); 16-bit operands are widened first
    onednn    in fp32 by oneDNN; 16-bit operands are widened first
    compiled  with an fp32 result, by kernels of our own (`compiled.py`); widened where 16 bits have no units

oneDNN gets fp32 products where `torch.backends.mkldnn.matmul.fp32_precision` is "bf16" (what
`torch.set_float32_matmul_precision("medium")` sets too), on x86 with AVX-512. That allows it to round operands to bf16,
and where bf16 has fast units with fp32 sums (AMX) it does: there it is the way from bf16 operands to an fp32 result,
and no kernel for fp32 operands. On processors without them it computes in fp32 all the same. Which of both is found out
by comparing a product with its float64 twin (`timing.py`), not by the processor's name.

What is not decided by measuring is decided by `usual`. fp64 and CUDA are multiplied as they are, whatever is decided.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

Kernel = Literal["native", "blas", "onednn", "compiled"]
Use = Literal["forward", "input_gradient", "weight_gradient", "output", "attention"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
USES: tuple[Use, ...] = get_args(Use)


@dataclass(frozen=True)
class Kernels:
    """The kernel of each use, for operands of one number format."""

    forward: Kernel = "blas"
    """Of linear layers; so are the next two."""
    input_gradient: Kernel = "blas"
    weight_gradient: Kernel = "blas"
    """Adds up in fp32: its operands are never multiplied with a 16-bit result, so it is "compiled", never "native".
    Where it is compiled, so are sums of 16-bit bias gradients, backward of norms, GELU, and AdamW."""
    output: Kernel = "blas"
    """All three products of the output layer, whose results are fp32 too; so it is never "native" either."""
    attention: Kernel = "blas"
    """torch's fused kernel, on operands as they are or widened: "native" or "blas". Where nothing is masked but what is
    to come, "compiled" is one of our own; elsewhere it is "native"."""

    def table(self) -> dict[str, str]:
        """Use -> kernel, for people and files."""
        return asdict(self)


AS_THEY_ARE = Kernels(forward="native", input_gradient="native", attention="native")
WIDENED = Kernels()
BF16_UNITS = replace(AS_THEY_ARE, weight_gradient="onednn", output="onednn")


@dataclass(frozen=True)
class Products:
    """The kernels of each number format in which there is a choice."""

    fp32: Kernels = WIDENED
    bf16: Kernels = WIDENED
    fp16: Kernels = WIDENED

    def of(self, x: Tensor) -> Kernels:
        """The kernels for products of tensors like `x`."""
        if x.is_cuda or x.dtype not in _NAMES:
            return AS_THEY_ARE
        kernels: Kernels = getattr(self, _NAMES[x.dtype])
        return kernels

    def having(self, precision: str, kernels: Kernels) -> "Products":
        """These, with `kernels` for one of the number formats."""
        return replace(self, **{precision: kernels})


_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
)


def usual() -> Products:
    """What holds where nothing was measured: bf16 as it is on processors with AMX; else all in fp32 by BLAS."""
    return Products(bf16=BF16_UNITS) if has_bf16_units() else Products()


def has_bf16_units() -> bool:
    """Whether this processor has AMX tiles. The question to torch is an internal function."""
    return bool(torch.cpu._is_amx_tile_supported())


def has_onednn() -> bool:
    """Whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
