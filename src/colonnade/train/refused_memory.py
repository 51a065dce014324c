"""Memory that is refused: how an error says so, how much was asked for, and what memory this process may have."""

import errno
import re
import resource
from pathlib import Path

import torch

from colonnade.config.numbers import amount

_REFUSED = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator", "Cannot allocate memory")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that memory was refused."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED)


def asked_for(error: BaseException) -> int | None:
    """Bytes that could not be had, where the error tells."""
    found = _ASKED.search(str(error))
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def there(device: torch.device) -> list[str]:
    """Sentences on what memory this process has and may have."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return [f"The GPU has {amount(free)} free of {amount(total)}; this process holds {_allocated(device)}."]
    said = []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    status = _table(Path("/proc/self/status"))
    if limit != resource.RLIM_INFINITY:
        size = f", and has {amount(status['VmSize'])}" if "VmSize" in status else ""
        said.append(f"This process may have {amount(limit)} of address space (ulimit -v){size}.")
    system = _table(Path("/proc/meminfo"))
    if "MemAvailable" in system:
        said.append(f"This machine has {amount(system['MemAvailable'])} free of {amount(system['MemTotal'])}.")
    return said


def _allocated(device: torch.device) -> str:
    return amount(torch.cuda.memory_allocated(device))


def _table(path: Path) -> dict[str, int]:
    """Lines `Name:   123 kB` of a file of /proc, in bytes."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
