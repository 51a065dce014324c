"""The papers' tables in small, run on ranks of this machine's cores beside what the planner says of them.

Times are of the fastest of some steps, and rates those of a core, so that more ranks than cores lose nothing by that
alone. Efficiencies are relative to one rank. The machine's description is measured first, as `colonnade hardware` does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

from benchmarks.configs import gpt
from benchmarks.hardware import describe
from benchmarks.paper.tables import header, line
from benchmarks.planner_time import VOCAB, case, measured
from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config
from colonnade.data_parallel.zero import Ownership
from colonnade.kernels.choice import Products
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import Hardware, parsed
from colonnade.planner.measure_hardware import measured_file
from colonnade.planner.measure_operators import products_here

LENGTH, BATCH = 128, 8
"""Tokens of a sample, and samples of a copy of the model a step."""
SHAPES: Mapping[int, tuple[int, int]] = MappingProxyType({1: (4, 256), 2: (8, 256), 4: (8, 384)})
"""Ranks of a model: its (layers, hidden); parameters of the layers grow as the ranks do, about."""
HEADS = (4, 8, 16, 32)
PREFETCHED = ((4, 256), (12, 768))
"""(layers, hidden)"""


class Took(NamedTuple):
    """[s] A step."""

    planned: float
    measured: float


class Here:
    """This machine, by its own description."""

    @cached_property
    def machine(self) -> Hardware:
        """Whose steps read nothing: there is one batch."""
        return parsed(measured_file(), "what was measured").having(host__token_seconds=0.0)

    @cached_property
    def products(self) -> Products:
        return products_here()

    def seconds(self, config: Config) -> Took:
        planned = estimate(config, VOCAB, self.machine, products=self.products).seconds_per_step
        return Took(planned, measured(config, self.products))

    def rates(self, config: Config) -> Took:
        """[FLOP/s] Of a core, by model FLOPs."""
        cores = min(config.parallel.num_ranks, self.machine.cores)
        tokens = config.train.global_batch_size * LENGTH
        flops = trained_architecture(config, VOCAB).flops_per_token * tokens / cores
        return Took(*(flops / seconds for seconds in self.seconds(config)))


def cells(found: Took, first: Took) -> tuple[str, str, str]:
    """Efficiencies in percent, planned and measured, and by how many points the first is off."""
    planned, took = (100 * each / one for each, one in zip(found, first, strict=True))
    return f"{planned:.0f} %", f"{took:.0f} %", f"{round(planned - took):+d}"


def weak_scaling(here: Here) -> Iterator[str]:
    yield from ("### In small, on CPU ranks", "")
    yield from header("layers, hidden", "tp × dp", "planned", "measured", "off by")
    first = None
    for tp, dp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        layers, hidden = SHAPES[tp]
        found = here.rates(case(layers, hidden, LENGTH, heads=8, batch=BATCH * dp, parallel={"tp": tp, "dp": dp}))
        first = first or found
        yield line(f"{layers}, {hidden}", f"{tp} × {dp}", *cells(found, first))
    yield ""


def attention_heads(here: Here) -> Iterator[str]:
    """Relative to the fewest heads."""
    yield from ("### In small, on CPU ranks (4 layers of width 256 on two)", "")
    yield from header("heads", "planned", "measured", "off by")
    first = None
    for heads in HEADS:
        found = here.rates(case(4, 256, LENGTH, heads=heads, batch=BATCH, parallel={"tp": 2}))
        first = first or found
        yield line(heads, *cells(found, first))
    yield ""


def strong_scaling(here: Here) -> Iterator[str]:
    yield from ("### In small, on CPU ranks (8 layers of width 256)", "")
    yield from header("ranks", "planned", "measured", "off by")
    first = None
    for tp in (1, 2, 4):
        found = here.seconds(case(8, 256, LENGTH, heads=8, batch=BATCH, parallel={"tp": tp}))
        first = first or found
        planned, took = (one / each for one, each in zip(first, found, strict=True))
        yield line(tp, f"{planned:.2f}", f"{took:.2f}", f"{round(100 * (planned / took - 1)):+d} %")
    yield ""


def bloom(here: Here) -> Iterator[str]:
    """BLOOM's block, cut into equal parts."""
    yield from ("### In small, on CPU ranks (6 layers of width 256, ALiBi, a norm behind the embedding)", "")
    yield from header("tp × pp × dp", "planned", "measured", "off by")
    first = None
    model = {"num_layers": 6, "hidden_size": 256, "num_heads": 8, "seq_length": LENGTH, "vocab_size": VOCAB}
    for tp, pp, dp in ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)):
        parallel = {"tp": tp, "pp": pp, "dp": dp, "zero": int(dp > 1), "partition": "parameters"}
        train = {"global_batch_size": BATCH * dp, "micro_batch_size": 2, "precision": "fp32", "device": "cpu"}
        found = here.rates(gpt({**model, "position": "alibi", "embedding_norm": True}, parallel, train))
        first = first or found
        yield line(f"{tp} × {pp} × {dp}", *cells(found, first))
    yield ""


@contextmanager
def gathered_at_need() -> Iterator[None]:
    """Within: a unit's weights are asked for when it runs, and no unit sooner."""
    acquire = Ownership.acquire

    def at_need(self: Ownership, unit: str, *, gradients: bool) -> None:
        vars(self)["_next"] = list  # an empty one, in place of the method; patching at each call would take time
        acquire(self, unit, gradients=gradients)
        del vars(self)["_next"]

    with mock.patch.object(Ownership, "acquire", at_need):
        yield


def prefetch(here: Here) -> Iterator[str]:
    yield from ("### In small, on two CPU ranks", "")
    yield from header("layers, hidden", "planned", "measured")
    for layers, hidden in PREFETCHED:
        config = case(layers, hidden, LENGTH, heads=4, batch=2 * BATCH, parallel={"dp": 2, "zero": 3})
        ahead = here.seconds(config)
        with gathered_at_need():
            late = here.seconds(config)
        gains = (f"{round(100 * (slow / fast - 1)):+d} %" for slow, fast in zip(late, ahead, strict=True))
        yield line(f"{layers}, {hidden}", *gains)
    yield from (
        "",
        "Ranks of one machine copy what they gather themselves, at once: nothing goes on behind their computing.",
        "",
    )


def where() -> tuple[str, ...]:
    made = describe()
    return (
        f"They ran in fp32, {LENGTH} tokens a sample, {BATCH} samples a copy of the model, micro-batches of 2,",
        f"vocabulary {VOCAB}, on {made['cpu']} with {made['cores']} cores, torch {made['torch']},",
        f"commit {made['commit']}.",
        "",
    )
