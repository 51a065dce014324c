"""What this machine is and has: names and free memory, for the lines at the start of a run."""

import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from colonnade.config.numbers import counted
from colonnade.control_groups import core_quota, memory_limits, num_cores
from colonnade.proc import lines_in

_UNITS = ("avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm")  # beginnings of flags in /proc/cpuinfo
Free = tuple[int, int]
"""[bytes] (free, in all)."""


def device_name(device: torch.device) -> str:
    """A GPU's or CPU's name, as its maker or the system has it; of a CPU that has none there its kind, as `aarch64`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in lines_in(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return _name_on_macos() or platform.processor() or platform.machine()


def processor() -> str:
    """What decides how fast this machine multiplies, and how it rounds: its name; what its vector units can do."""
    lines = [line.partition(":")[::2] for line in lines_in(Path("/proc/cpuinfo"))]
    written = next((value for name, value in lines if name.strip() in ("flags", "Features")), "")
    units = sorted(flag for flag in written.split() if flag.startswith(_UNITS))
    return f"{device_name(torch.device('cpu'))}; {' '.join(units) or torch.backends.cpu.get_cpu_capability()}"


def _name_on_macos() -> str:
    """As `Apple M2`; empty elsewhere."""
    if sys.platform != "darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    with suppress(OSError):
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
    return ""


def cpu_cores() -> str:
    """'2 cores, 1 thread for each rank'; '2 cores (a quota of 1.5), …' where the process is given less time."""
    quota = core_quota()
    given = "" if quota is None else f" (a quota of {quota:.3g})"
    return f"{counted(num_cores(), 'core')}{given}, {counted(torch.get_num_threads(), 'thread')} for each rank"


def free_memory(device: torch.device) -> Free | None:
    """Of the GPU, or what this machine's processes and their control group may still take. None: not known here."""
    if device.type == "cuda":
        free, there = torch.cuda.mem_get_info(device)
        return int(free), int(there)
    table = {line.split(":")[0]: line.split()[1] for line in lines_in(Path("/proc/meminfo")) if len(line.split()) > 1}
    if "MemAvailable" not in table:
        return None
    machine = int(table["MemAvailable"]) * 1024, int(table["MemTotal"]) * 1024
    return min([machine, *memory_limits()])
