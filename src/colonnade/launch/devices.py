"""Which device ranks compute on: a GPU each, or the CPU. Counts GPUs without torch, for a word before ranks start."""

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

from colonnade.errors import ConfigError, LayoutError

THREADS_A_CORE = 64  # at most: a rank with more gains nothing, and a system does not start just any number
ANSWER = 60.0  # seconds that a process has to count GPUs: a broken one may hold the driver up


def choose_device(device: str, num_gpus: int, num_ranks: int, *, by_option: bool = False) -> Literal["cpu", "cuda"]:
    """The kind of device for `num_ranks` ranks of one machine that has `num_gpus` GPUs.

    `device` is "cpu", "cuda", or "auto": CUDA where there are GPUs, the CPU where there is none. LayoutError if there
    are GPUs, or must be, and they are too few: a run that computes elsewhere than expected is worse than none.
    `by_option`: whether --device, --tp and so on say it, and no configuration.
    """
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus >= num_ranks:
        return "cuda"
    key, axes = ("--device ", "--") if by_option else ("train.device = ", "parallel.")
    fewer = f", or lower {' × '.join(axes + axis for axis in ('tp', 'pp', 'dp'))} to {num_gpus}" if num_gpus else ""
    raise LayoutError(
        f"{key}{device!r}, but this machine has {num_gpus} CUDA {'GPU' if num_gpus == 1 else 'GPUs'} for "
        f"{num_ranks} local {'rank' if num_ranks == 1 else 'ranks'}: each rank needs a GPU of its own. Set "
        f"{key}'cpu'{fewer}."
    )


def check_threads(threads: int, named_by: str) -> None:
    """ConfigError for more CPU threads of a rank than a machine can be asked to start: the library that starts them
    ends the process where it cannot.
    """
    most = THREADS_A_CORE * (os.cpu_count() or 1)
    if threads > most:
        raise ConfigError(
            f"{threads:,} CPU threads of a rank ({named_by}) are more than {THREADS_A_CORE} for each core of this "
            f"machine. Use {most:,} or fewer; as many as the machine has cores are fastest."
        )


def count_gpus() -> int | None:
    """CUDA GPUs that torch will find, by the driver's own count, without importing torch; None if that is unknown.
    In one process the driver says the same for ever: `gpus_now` asks anew.
    """
    built = _built_for()
    if built is None:
        return None
    if not built:
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    found = ctypes.c_int(0)
    if driver.cuInit(0) != 0:
        return 0
    return found.value if driver.cuDeviceGetCount(ctypes.byref(found)) == 0 else None


def gpus_now() -> int | None:
    """`count_gpus` of a process of its own; None also where it cannot be started, or does not answer."""
    command = [sys.executable, "-m", "colonnade.launch.devices"]
    try:
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(said) if said.strip().isdecimal() else None


def _built_for() -> bool | None:
    """Whether torch was built with CUDA, by the file that says so; None if another driver counts, or none says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    says: dict[str, str] = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text, re.MULTILINE))
    if says.get("hip", "None") != "None" or "cuda" not in says:
        return None
    return says["cuda"] != "None"


if __name__ == "__main__":
    print(count_gpus())
