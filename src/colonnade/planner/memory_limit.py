"""Memory that is not there: what was asked for, what there is, what the run was expected to take, and what to set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colonnade.config.numbers import amount
from colonnade.config.schema import Config
from colonnade.errors import MemoryShortError
from colonnade.mesh.mesh import Mesh
from colonnade.planner.memory import Memory
from colonnade.planner.predict import predict
from colonnade.train.refused_memory import asked_for, is_refusal, there


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
