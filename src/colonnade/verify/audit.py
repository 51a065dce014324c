"""`train --audit`: one training step of a configuration, and what its ledger saw beside what theory says.

Every rank holds its own ledger against its own theory (`planner/traffic.py`). Rank 0 prints the table of the first rank
of each pipeline stage, and of every rank where the two differ; below it the memory that the step took beside what was
predicted (`planner/memory.py`), of which no verdict is made: kernels of other devices keep other things. It is computed
by the kernels that a run would choose.
"""

from collections.abc import Mapping, Sequence

import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config
from colonnade.kernels.choice import Products
from colonnade.launch.agreement import settings
from colonnade.launch.join import joined
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Mesh
from colonnade.planner.predict import predict
from colonnade.planner.step import Step
from colonnade.planner.traffic import Flow, totals, traffic
from colonnade.train.beginning import course_of
from colonnade.train.corpus import Corpus, open_together
from colonnade.train.products import settle
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from colonnade.verify.memory import measure, memory_table

Totals = Mapping[tuple[str, str], tuple[int, int]]
"""(count, bytes) by (operation, axis)."""


def audit(config: Config) -> bool:
    """Run one step as one rank of the configuration's layout; rank 0 prints, and returns whether all ranks sent what
    theory says they would. The others return True.

    Every rank calls this. Nothing is saved.
    """
    parallel, train = config.parallel, config.train
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    properties = settings(config)
    with joined(layout, train.device, train.threads, timeout=train.timeout, properties=properties) as (mesh, device):
        corpus = open_together(config, mesh.world)
        course_of(config, corpus, mesh.world)  # refuses data that are too short, as the run's start does
        products = settle(config, corpus.vocab_size, mesh.world, device).products
        flows, seen, memory = one_step(config, mesh, device, corpus, products)
        agree = totals(flows) == seen
        shown = not agree or mesh.dp.rank == mesh.tp.rank == 0
        title = f"rank {mesh.rank} {mesh.coordinates}"
        tables = gather_texts(f"{table(title, flows, seen)}\n\n{memory}" if shown else "", mesh.world)
        all_agree = bool(all_reduce(torch.tensor(int(agree), device=device), mesh.world, "min"))
        if mesh.rank == 0:
            print("\n\n".join([_heading(layout), *filter(None, tables), _verdict(all_agree)]))
    return all_agree or mesh.rank > 0


def one_step(
    config: Config, mesh: Mesh, device: torch.device, corpus: Corpus, products: Products | None = None
) -> tuple[list[Flow], Totals, str]:
    """What theory says of a step of this rank, what its ledger saw, and the table of its memory. `products`: the
    kernels (None: the usual ones).

    The step is the first of those with the whole sequence: of the last phase, where [curriculum] has some. It is a
    measured one, where there are thermometers.
    """
    train, ledger = config.train, mesh.ledger
    every_step = config.thermometers.model_copy(update={"every": min(1, config.thermometers.every)})
    measured_one = config.model_copy(update={"thermometers": every_step})
    state = build_state(measured_one, mesh, corpus.vocab_size, device, products=products)
    loaded = corpus.batches(corpus.curriculum.phases[-1].begin, micro_batch_size=train.micro_batch_size, dp=mesh.data)
    batches = [batch.to(device) for batch in loaded]
    ledger.clear()
    ledger.begin_step(1)
    result, measured = measure(state, lambda: train_step(state, batches, mesh, train))
    seen = ledger_totals(ledger)
    step = Step(
        config.model,
        config.parallel,
        train,
        config.optim.name,
        corpus.vocab_size,
        mesh.rank,
        skipped=result.skipped,
        cuda=device.type == "cuda",
        measured=() if result.reading is None else result.reading.chosen,
        stated=trained_architecture(config, corpus.vocab_size),
    )
    without = config.distillation.model_copy(update={"teacher": None})  # as none has run beside this step
    alone = config.model_copy(update={"distillation": without})
    predicted = predict(alone, corpus.vocab_size, stage=mesh.pp.rank, device=device, products=products)
    return traffic(step), seen, memory_table(predicted, measured)


def ledger_totals(ledger: Ledger) -> Totals:
    return {key: (count, ledger.bytes[key]) for key, count in ledger.counts.items()}


def table(title: str, flows: Sequence[Flow], seen: Totals) -> str:
    """Each axis and operation on a line, and below it what theory says it is for."""
    expected = totals(flows)
    lines = [f"{title:28}{'ledger':>24}   {'theory':>24}"]
    for key in sorted({*expected, *seen}, key=lambda key: (key[1], key[0])):
        operation, axis = key
        theirs, ours = seen.get(key, (0, 0)), expected.get(key, (0, 0))
        mark = " " if theirs == ours else "≠"
        reasons = [flow for flow in flows if (flow.operation, flow.axis) == key]
        only = f"  {reasons[0].what}" if len(reasons) == 1 else ""
        name = f"{axis:7} {operation}"
        lines.append(f"{name:28}{_amount(*theirs)} {mark} {_amount(*ours)}{only}")
        if len(reasons) > 1:
            lines += [f"{'':55}{_amount(flow.count, flow.bytes)}  {flow.what}" for flow in reasons]
    return "\n".join(lines if len(lines) > 1 else [f"{title}: nothing is sent."])


def _amount(count: int, size: int) -> str:
    return f"{count:>7,} {size:>14,} B"


def _heading(layout: Layout) -> str:
    return f"One step on {layout}: how often a rank sends, and how many bytes it puts in (or receives)."


def _verdict(agree: bool) -> str:
    if agree:
        return "On every rank the ledger is what theory says."
    return "The ledger and theory differ (≠): the program sends what it need not, or does not send what it must."
