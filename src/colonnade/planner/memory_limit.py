"""Memory that is not there: what was asked for, what there is, what the run was expected to take, and what to set."""

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from colonnade.config.schema import Config
from colonnade.errors import MemoryShortError
from colonnade.mesh.mesh import Mesh
from colonnade.planner.memory import Memory
from colonnade.planner.predict import predict
from colonnade.planner.ranks import amount

_REFUSED = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator", "Cannot allocate memory")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")


@contextmanager
def within_memory(config: Config, vocab_size: int, mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Around what a run does: memory that is refused, by the system or by CUDA, is reported as a MemoryShortError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_refusal(error):
            raise
        torch_error = error.with_traceback(None)  # what its frames hold is needed for the message
        when = "before step 1" if mesh.ledger.step is None else f"in step {mesh.ledger.step}"
        planned = predict(config, vocab_size, stage=mesh.pp.rank, device=device)
        text = message(
            f"Rank {mesh.rank} has run out of memory {when}", torch_error, planned, remedies(config, planned), device
        )
    else:
        return
    raise MemoryShortError(text)


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


def message(head: str, error: BaseException, planned: Memory, settings: list[str], device: torch.device) -> str:
    """What is, with bytes; then what to set."""
    asked = asked_for(error)
    what = "memory was refused" if asked is None else f"{asked:,} bytes ({amount(asked)}) more were refused"
    kinds = ", ".join(
        f"{name} {amount(size)}"
        for name, size in (
            ("parameters", planned.parameters),
            ("gradients", planned.gradients),
            ("optimizer", planned.optimizer + planned.host),
            ("buffers", planned.buffers),
            ("activations", planned.activations),
            ("operators", planned.operators),
        )
        if size
    )
    return (
        f"{head}: {what}. {' '.join(there(device))} A rank of this layout is expected to take "
        f"{amount(planned.total + planned.host)} ({kinds}), beside what libraries need. To take less, "
        f"{'; or '.join(settings)}."
    )


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


def remedies(config: Config, planned: Memory) -> list[str]:
    """What to set, that which helps most first."""
    parallel, train = config.parallel, config.train
    activations, state = [], []
    if train.micro_batch_size > 1:
        activations.append(f"lower train.micro_batch_size (now {train.micro_batch_size})")
    if parallel.recompute != "full":
        activations.append(f'set parallel.recompute = "full" (now "{parallel.recompute}")')
    if parallel.zero < 3:
        state.append(f"raise parallel.zero (now {parallel.zero}) with parallel.dp (now {parallel.dp})")
    state.append(
        f"cut the model over more ranks of other machines: parallel.tp (now {parallel.tp}) or parallel.pp "
        f"(now {parallel.pp})"
    )
    smaller = ["make the model smaller; `colonnade plan` tells what a configuration takes"]
    half = 2 * planned.activations > planned.total
    return [*(activations + state if half else state + activations), *smaller]


def _allocated(device: torch.device) -> str:
    return amount(torch.cuda.memory_allocated(device))


def _table(path: Path) -> dict[str, int]:
    """Lines `Name:   123 kB` of a file of /proc, in bytes."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
