"""What a device computes at most, for the share of it that a run reaches (model FLOPs utilisation)."""

import re

# Dense matrix peak of one device in 16 bits, FLOP/s, from the makers' data sheets. The first whose name is among the
# words of the device's counts.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200": 989e12,
}
FP16_ALONE = ("V100",)
"""Those whose matrix units know fp16 and no bf16."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's peak in FLOP/s where it is known: in the 16-bit formats of the GPUs listed above, whole ones."""
    if precision not in ("bf16", "fp16") or re.search(r"\bMIG\b", device_name):  # a slice is named behind its GPU
        return None
    name = next((name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)), None)
    return None if name is None or (precision == "bf16" and name in FP16_ALONE) else PEAK_FLOPS[name]
