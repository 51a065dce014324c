"""Walks through a CUDA program on fake tensors and tells what crossed between host and device. Runs as a process of
its own, because torch keeps the device that `guard.cpp` invents:

    python -m tests.cuda.walk GUARD.so '[{"model": {…}, "precision": "bf16", "tp": 1, "documents": false}, …]'

Prints a JSON list: {"uploads": pinned copies to the device, "waits": what the host would have waited for, by operator}.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.config.model import ModelConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.model.model import Transformer
from colonnade.model.precision import DTYPES
from colonnade.optim.adamw import AdamW
from colonnade.optim.param_slice import ParamSlice
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.parallel import Parallel

CUDA = torch.device("cuda", 0)
VOCAB, SAMPLES = 1100, 2


class Crossings(TorchDispatchMode):
    """Counts copies between host and device; operators whose result the host must read raise by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads, self.waits = 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function is torch.ops.aten._to_copy.default:
            self._copied(args[0], out, non_blocking=kwargs.get("non_blocking", False), name="_to_copy")
        elif function is torch.ops.aten.copy_.default:
            self._copied(args[1], args[0], non_blocking=len(args) > 2 and args[2], name="copy_")
        return out

    def _copied(self, source: Tensor, out: Tensor, *, non_blocking: bool, name: str) -> None:
        way = source.device.type, out.device.type
        if way == ("cpu", "cuda") and non_blocking:
            self.uploads += 1
        elif way[0] != way[1]:
            self.waits[f"{name} {way[0]} to {way[1]}"] += 1


def model_on_device(model: ModelConfig, precision: str, tp: int) -> Transformer:
    """With its weights on the device, and what else it has made where the program makes it: on the CPU."""
    axis = paper_mesh(Layout(tp=tp), tp - 1).tp
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[precision])
    made = TASKS[model.kind_and_head].build(model, VOCAB, Parallel(axis, sequence_parallel=tp > 1), None)
    torch.set_default_dtype(before)
    for module in made.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device=CUDA)))
    return made


def forward(model: ModelConfig, precision: str, tp: int, *, documents: bool) -> None:
    """Forward of all units, with the losses' own gradients; every dtype and device on the way is checked by torch."""
    task = TASKS[model.kind_and_head]
    with unset_fake_temporarily():  # dropout reads the numbers of samples
        batch = task.random_batch(model, SAMPLES, VOCAB, separate_documents=documents)
        masks = task.inputs(batch, None, 1).masks
    given, made = batch.to(CUDA), model_on_device(model, precision, tp)
    inputs = replace(task.inputs(given, torch.ones_like(task.counts(given)), None), masks=masks)
    carry: tuple[Tensor, ...] = ()
    for unit in made.units():
        carry = made.run(unit, carry, inputs)
    assert all(loss.is_cuda for loss in carry)


def update() -> None:
    """An optimizer step on two slices."""
    rule, slices = AdamW(0.9, 0.999, 1e-8, 0.01), []
    for decayed in (True, False):
        weights, gradients = (torch.zeros(64, device=CUDA) for _ in range(2))
        slices.append(ParamSlice(weights, gradients, rule.init(weights), decayed=decayed))
    factor = torch.ones((), dtype=torch.float64, device=CUDA)
    rule.update_(slices, step=2, learning_rate=0.1, factor=factor)


def pinned(x: Tensor) -> Tensor:
    """As torch does: no fake tensor is pinned, but what lies on a device is refused."""
    if x.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{x.type()}' only dense CPU tensors can be pinned")
    return x


def main(guard: str, told: str) -> None:
    torch.ops.load_library(guard)
    torch.Tensor.pin_memory = pinned  # type: ignore[method-assign,assignment]
    found = []
    for case in json.loads(told):
        crossings = Crossings()
        with FakeTensorMode(allow_non_fake_inputs=True), crossings:
            forward(ModelConfig(**case["model"]), case["precision"], case["tp"], documents=case["documents"])
            update()
        found.append({"uploads": crossings.uploads, "waits": crossings.waits})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
