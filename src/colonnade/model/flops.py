"""How much arithmetic a training token costs, and what share of a device's peak that is.

A weight of a matrix costs 2 operations forward and 4 backward a token; attention costs 2·2·h a token pair and layer
forward, of which a causal model needs half, and twice that backward. Looking an embedding up costs nothing; the
output layer is a matrix. Recomputed work does not count (model FLOPs, not hardware FLOPs).
"""

from colonnade.config.schema import ModelConfig

# bf16 dense matrix peak of one device, FLOP/s, from the makers' data sheets; matched as a part of the device's name.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "B200": 2250e12,
}


def flops_per_token(model: ModelConfig, vocab_size: int) -> float:
    """Floating-point operations of forward and backward for one token of a full-length sample."""
    h = model.hidden_size
    matrices = model.num_layers * (4 * h * h + 2 * h * model.ffn) + vocab_size * h
    attention = model.num_layers * 2 * h * model.seq_length  # both products, causal half
    return 6.0 * matrices + 3.0 * attention


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's peak in FLOP/s where it is known: bf16 on the GPUs listed above."""
    if precision != "bf16":
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)
