"""What the planner says of the papers' tables, beside the papers' figures, and what runs in small take.

    python -m benchmarks.paper [--output FILE] [--planned-only] [--books FILE --folder FOLDER]

The tables of speed are also run in small on CPU ranks of this machine, which takes some minutes and wants nothing else
at work (`benchmarks.paper.measured`). With books to read, so are those of what models learn, by training in FOLDER: an
hour or two (`benchmarks.paper.trained`).

Planned with the bundled machines as they are, and beside that with constants that were fitted to weak scaling
(`benchmarks.paper.fit`). Misses are part of the page. The program planned is this one, which draws a mask of dropout by
one kernel where there is Triton; in the first table also as it does without, by integer operators, one by one.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.configs import gpt
from benchmarks.paper import measured, trained
from benchmarks.paper.measured import Here, gathered_at_need
from benchmarks.paper.tables import header, line
from colonnade import randomness
from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config
from colonnade.pipeline.partition import chunks
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import Hardware, hardware
from colonnade.planner.paper import Walk, walk
from colonnade.planner.timeline import play
from colonnade.train.start import load_for_plan

VOCAB = 51_200
PAGE = Path("benchmarks/results/paper.md")


class Row(NamedTuple):
    """A row of Megatron-LM's table 1."""

    name: str
    hidden: int
    heads: int
    layers: int
    tp: int
    alone: float
    """[%] Weak scaling by model parallelism."""
    with_copies: float
    """[%] With 64-way data parallelism."""

    def published(self, dp: int) -> float:
        """[%]"""
        return self.with_copies if dp > 1 else self.alone


WEAK = (
    Row("1.2B", 1536, 16, 40, 1, 100, 96),
    Row("2.5B", 1920, 20, 54, 2, 95, 83),
    Row("4.2B", 2304, 24, 64, 4, 82, 79),
    Row("8.3B", 3072, 32, 72, 8, 77, 74),
)
HEADS = ((16, 82), (24, 80), (32, 77))
BITS = ("bitwise_right_shift", "bitwise_xor_", "bitwise_and_")
LEFT_OUT = "2.5B", 64
"""The row of weak scaling (name, dp) to which nothing was fitted."""
FITTED: Mapping[str, float] = MappingProxyType(
    {
        "products.efficiency": 0.647,
        "products.half_area": 3.35e6,
        "products.half_depth": 23.1,
        "products.memory": 1.0,
        "device.kernel_seconds": 1.25e-5,
        "island.bandwidth": 1.07e11,
        "island.latency": 1.74e-6,
        "network.bandwidth": 2.36e10,
    }
)
"""What `benchmarks.paper.fit` found, one set for all tables: see there."""


class Published(NamedTuple):
    """A model of which Megatron-LM publishes the utilisation on H100, and the layout that is assumed for it."""

    name: str
    layers: int
    hidden: int
    layout: Mapping[str, int]
    batch: int
    micro_batch: int
    mfu: float
    """[%]"""


H100 = (
    Published("1.7B", 24, 2048, {"dp": 96}, 768, 4, 41),
    Published("7.1B", 30, 4096, {"tp": 2, "dp": 48}, 768, 4, 47),
    Published("16B", 32, 6144, {"tp": 4, "dp": 24}, 768, 2, 49),
    Published("177B", 96, 12288, {"tp": 8, "pp": 8, "virtual_stages": 6, "dp": 16}, 1536, 1, 44),
    Published("462B", 112, 18432, {"tp": 8, "pp": 16, "virtual_stages": 7, "dp": 48}, 1536, 1, 47),
)
"""Sizes are those that give the published numbers of parameters with its vocabulary; layouts are assumed."""
H100_VOCAB, H100_LENGTH, HEAD = 131_072, 4096, 128


class Prefetched(NamedTuple):
    """A model that ZeRO 3 trains on A100s in machines of eight."""

    name: str
    layers: int
    hidden: int
    heads: int
    devices: int
    batch: int
    """Samples of a device a step."""
    published: str


PREFETCHED = (
    *(Prefetched("100M", 12, 768, 12, 16, batch, "+40 to +50 %") for batch in (1, 2, 4, 8)),
    *(Prefetched("100B", 80, 10240, 128, 800, batch, "+80 %") for batch in (1, 2, 4, 8)),
)
"""Shapes and batches are assumed."""
STRONG = ((1, 1.0), (2, 1.64), (4, 2.34), (8, 2.98))


def megatron(row: Row, *, tp: int, dp: int = 1, heads: int | None = None) -> Config:
    """GPT-2 as the paper trained it: batches of 8 a copy, fp16, activations recomputed in every layer."""
    model = {
        "num_layers": row.layers,
        "hidden_size": row.hidden,
        "num_heads": heads or row.heads,
        "seq_length": 1024,
        "vocab_size": VOCAB,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    }
    train = {"global_batch_size": 8 * dp, "micro_batch_size": 8, "precision": "fp16", "reduce_precision": "16-bit"}
    return gpt(model, {"tp": tp, "dp": dp, "recompute": "full"}, train)


@cache
def _walked(row: Row, tp: int, dp: int, heads: int) -> Walk:
    return walk(megatron(row, tp=tp, dp=dp, heads=heads), VOCAB, 0, device="cuda")


def walked(config: Config) -> Walk:
    """Each once."""
    row = next(row for row in WEAK if row.layers == config.model.num_layers)
    return _walked(row, config.parallel.tp, config.parallel.dp, config.model.num_heads)


def seconds(config: Config, machine: Hardware) -> float:
    """[s] Of a step on one stage."""
    return play(walked(config).sections, Cost(machine, config.parallel.num_ranks)).total


def rate(config: Config, machine: Hardware) -> float:
    """[FLOP/s] Of a device, by model FLOPs."""
    flops = trained_architecture(config, VOCAB).flops_per_token * config.train.global_batch_size * 1024
    return flops / config.parallel.num_ranks / seconds(config, machine)


def efficiency(config: Config, machine: Hardware) -> float:
    """[%] Of the rate of 1.2B on one device."""
    return 100 * rate(config, machine) / rate(megatron(WEAK[0], tp=1), machine)


def fitted(machine: Hardware) -> Hardware:
    return machine.having(**{key.replace(".", "__"): value for key, value in FITTED.items()})


def weak_scaling(machine: Hardware) -> Iterator[str]:
    yield from ("## Megatron-LM: weak scaling (table 1, figure 5)", "")
    yield from header("model", "tp × dp", "planned", "off by", "with fitted constants", "off by", "published")
    for dp in (1, 64):
        for row in WEAK:
            config, published = megatron(row, tp=row.tp, dp=dp), row.published(dp)
            cells = []
            for each in (machine, fitted(machine)):
                found = efficiency(config, each)
                cells += [f"{found:.1f} %", f"{found - published:+.1f}"]
            note = " (not fitted)" if (row.name, dp) == LEFT_OUT else ""
            yield line(row.name, f"{row.tp} × {dp}", *cells, f"{published:g} %{note}")
    first = megatron(WEAK[0], tp=1)
    reached = walked(first).flops / seconds(first, fitted(machine)) / 1e12
    yield from (
        "",
        "Fitted, one set for all tables of Megatron-LM, to these rows but 2.5B on 128 devices, and to the first row's",
        f"39 TFLOP/s with recomputed work ({reached:.1f} so). The row that is left out is published 12 points below",
        "the same model on two devices, where its neighbours lose 3 and 4: **a miss**, of the plan or of the figure.",
        "",
    )
    yield from header("constant", "bundled", "fitted")
    for key, value in FITTED.items():
        yield line(f"`{key}`", f"{machine[key]:g}", f"{value:g}")
    yield from ("", "Made by `python -m benchmarks.paper.fit`; what links and memory can do was the limit.", "")


def first_row(machine: Hardware) -> Iterator[str]:
    """What one device takes, with masks by torch's operators and by one kernel."""
    config = megatron(WEAK[0], tp=1)
    flops = trained_architecture(config, VOCAB).flops_per_token * config.train.global_batch_size * 1024
    yield from ("## The first row: 1.2B on one device", "")
    yield from header("masks of dropout", "step", "memory", "products", "TFLOP/s", "with recomputed work", "published")
    with mock.patch("colonnade.kernels.dropout.keep_mask", randomness.keep_mask):
        own = walk(config, VOCAB, 0, device="cuda")
    for name, each in (("torch's operators", own), ("one kernel", walked(config))):
        played = play(each.sections, Cost(machine, 1))
        rates = (f"{count / played.total / 1e12:.1f}" for count in (flops, each.flops))
        waits = (f"{played.spent[what]:.2f} s" for what in ("memory", "products"))
        yield line(name, f"{played.total:.2f} s", *waits, *rates, 39)
    masks = sum(Cost(machine, 1).operator(each) for each in own.operators if each.name in BITS)
    yield from (
        "",
        f"Shifts, ands and exclusive ors of masks alone take {masks:.2f} s, "
        "in forward and again in recomputation. With",
        "one kernel for a mask half of the miss is gone. What is left are this program's other element-wise operators:",
        "softmax, scaling and dropout one by one, and sums of gradients in fp32. That the paper's 39 TFLOP/s count",
        "recomputed work would close the rest; whether they do is not known here, so both are shown.",
        "",
    )


def attention_heads(machine: Hardware) -> Iterator[str]:
    yield from ("## Megatron-LM: attention heads (8.3B on 8 devices, table 7)", "")
    yield from header("heads", "planned", "off by", "with fitted constants", "off by", "published")
    for heads, published in HEADS:
        config, cells = megatron(WEAK[-1], tp=8, heads=heads), list[str]()
        for each in (machine, fitted(machine)):
            found = efficiency(config, each)
            cells += [f"{found:.1f} %", f"{found - published:+.1f}"]
        yield line(heads, *cells, f"{published} %")
    yield from ("", "Nothing was fitted to this table but its last row, which is one of weak scaling.", "")


def strong_scaling(machine: Hardware) -> Iterator[str]:
    yield from ("## Megatron-LM: strong scaling (1.2B, batch 8, table 8)", "")
    yield from header("devices", "planned", "off by", "with fitted constants", "off by", "published")
    for tp, published in STRONG:
        cells = []
        for each in (machine, fitted(machine)):
            found = seconds(megatron(WEAK[0], tp=1), each) / seconds(megatron(WEAK[0], tp=tp), each)
            cells += [f"{found:.2f}", f"{100 * (found / published - 1):+.1f} %"]
        yield line(tp, *cells, f"{published:g}")
    yield from ("", "Nothing was fitted to this table.", "")


def utilisation() -> Iterator[str]:
    """Of H100s, to which nothing was fitted."""
    yield from ("## Megatron-LM on H100: utilisation (MFU)", "")
    yield from header("model", "devices", "assumed layout", "samples a step", "planned", "published", "off by")
    for each in H100:
        found = estimate(on_h100(each), H100_VOCAB, hardware("h100"), every_rank=False)
        layout = ", ".join(f"{key} {value}" for key, value in each.layout.items())
        off = f"{100 * found.mfu - each.mfu:+.0f}"
        cells = (f"{each.batch:,} of {each.micro_batch}", f"{100 * found.mfu:.0f} %", f"{each.mfu:g} %", off)
        yield line(each.name, found.layout.num_ranks, layout, *cells)
    yield from (
        "",
        "bf16, 4,096 positions, no dropout, ZeRO 1, sequence parallelism where there is tp; nothing was fitted. Shapes",
        "and layouts are assumptions: published are parameters, vocabulary, positions and utilisation.",
        "",
    )


def on_h100(each: Published) -> Config:
    pipelined = {"schedule": "interleaved"} if "pp" in each.layout else {}
    model = {
        "num_layers": each.layers,
        "hidden_size": each.hidden,
        "num_heads": each.hidden // HEAD,
        "seq_length": H100_LENGTH,
        "vocab_size": H100_VOCAB,
        "tie_embeddings": False,
    }
    parallel = {**each.layout, **pipelined, "zero": 1, "sequence_parallel": "tp" in each.layout}
    return gpt(model, parallel, on_gpus(each.batch, each.micro_batch))


def on_gpus(batch: int, micro_batch: int) -> dict[str, object]:
    """[train] in bf16."""
    return {"global_batch_size": batch, "micro_batch_size": micro_batch, "precision": "bf16", "device": "cuda"}


def bloom() -> Iterator[str]:
    config = load_for_plan(Path("examples/bloom-176b.toml"))
    machine = hardware("a100-80gb").having(network__bandwidth=50e9)
    architecture = architecture_of(config.model, 250_880)
    parts = [sum(map(architecture.parameters_of, units)) for units in chunks(architecture, config.parallel)]
    found = estimate(config, 250_880, machine)
    yield from ("## BLOOM-176B: 72 equal parts, and its layout on 384 A100 (tp 4, pp 12, dp 8)", "")
    yield from header("", "planned", "published")
    yield line("parts (70 blocks, embedding, head)", len(architecture.units), 72)
    yield line("largest stage ÷ smallest, by parameters", f"{max(parts) / min(parts):.3f}", "equal parts")
    yield line("embedding in bf16", f"{2 * 250_880 * 14_336 / 1e9:.1f} GB", "7.2 GB")
    yield line("step of 2,048 samples", f"{found.seconds_per_step:.0f} s", "about 105 s (100 steps in 3 h)")
    yield line("memory of the rank that takes most", f"{found.memory / 1e9:.0f} GB", "fits into 80 GB")
    yield line("run of 87,000 steps", f"{found.days:.0f} days", "about 3.5 months")
    yield from ("", "Planned with machines of four 100 Gb/s adapters (50 GB/s), as those had.", "")


def prefetch() -> Iterator[str]:
    yield from ("## YaLM: ZeRO 3 that gathers the next layer's weights while one computes", "")
    yield from header("model", "devices", "samples a device", "gathered at need", "gathered ahead", "gain", "published")
    for each in PREFETCHED:
        config = with_zero(each)
        ahead = estimate(config, VOCAB, hardware("a100-80gb"), every_rank=False).seconds_per_step
        with gathered_at_need():
            late = estimate(config, VOCAB, hardware("a100-80gb"), every_rank=False).seconds_per_step
        gain = f"{100 * (late / ahead - 1):+.0f} %"
        yield line(each.name, each.devices, each.batch, f"{late:.3g} s", f"{ahead:.3g} s", gain, each.published)
    yield from (
        "",
        "bf16, 1,024 positions, activations recomputed. Published are the gains and that 16 devices trained 100M",
        "weights and 800 A100 the model of 100B; how large the batch of a device was is not, and decides: a gather",
        "takes as long for one sample as for eight.",
        "",
    )


def with_zero(each: Prefetched) -> Config:
    model = {
        "num_layers": each.layers,
        "hidden_size": each.hidden,
        "num_heads": each.heads,
        "seq_length": 1024,
        "vocab_size": VOCAB,
    }
    parallel = {"dp": each.devices, "zero": 3, "recompute": "full"}
    return gpt(model, parallel, on_gpus(each.batch * each.devices, each.batch))


def page(machine: Hardware, here: Here | None) -> Sequence[str]:
    """`here`: where the measured parts are run; None leaves them out."""

    def run(part: Callable[[Here], Iterator[str]]) -> Iterator[str]:
        return iter(()) if here is None else part(here)

    return [
        "# The papers' tables, planned, and run in small",
        "",
        "Made by `python -m benchmarks.paper`. The machines are the bundled `v100-dgx2h` and `a100-80gb`, in which",
        "nothing is fitted to these tables; columns of fitted constants say what they were fitted to. Planned is",
        "this program. Efficiencies are relative to the first row of their table. What is measured are smaller models",
        "on CPU ranks.",
        *(() if here is None else measured.where()),
        "",
        *first_row(machine),
        *weak_scaling(machine),
        *run(measured.weak_scaling),
        *attention_heads(machine),
        *run(measured.attention_heads),
        *strong_scaling(machine),
        *run(measured.strong_scaling),
        *utilisation(),
        *bloom(),
        *run(measured.bloom),
        *prefetch(),
        *run(measured.prefetch),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--planned-only", action="store_true", help="run nothing")
    parser.add_argument("--books", type=Path, help="that models read: .jsonl of documents, also compressed")
    parser.add_argument("--folder", type=Path, help="of their runs")
    arguments = parser.parse_args()
    if (arguments.books is None) != (arguments.folder is None):
        parser.error("--books and --folder belong together")
    output, here = arguments.output, None if arguments.planned_only else Here()
    torch.set_num_threads(1)
    lines = [*page(hardware("v100-dgx2h"), here)]
    if arguments.books is not None:
        tokens = {name: table.tokens for name, table in trained.TABLES.items()}
        lines += trained.sections(trained.train_all(arguments.folder, arguments.books, tokens), tokens)
    text = "\n".join(lines).rstrip() + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
