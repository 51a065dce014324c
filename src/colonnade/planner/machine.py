"""What a prediction of memory has to know of the device that a run will compute on."""

from colonnade.architecture.activations import Precision
from colonnade.planner.memory import GPU, Machine


def machine_of(device: str, precision: Precision) -> Machine:
    """`device`: as in train.device. A CPU is one of this machine's kind; anything else is a GPU."""
    if device != "cpu":
        return GPU
    if precision not in ("bf16", "fp16"):
        return Machine(cpu=True)
    from colonnade.model.precision import DTYPES
    from colonnade.tensor_parallel.gemm import multiplies_natively  # imports torch

    return Machine(cpu=True, widened=not multiplies_natively(DTYPES[precision], "cpu"))
