"""How long a teacher takes that runs beside its student: its forward pass, before the student's schedule.

    step    m · slowest stage + the others once, of forward passes through the units of the teacher

What comparing with it adds to the student's loss is not counted.
"""

from colonnade.architecture.families import architecture_of
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig
from colonnade.kernels.choice import Products
from colonnade.pipeline.partition import chunks
from colonnade.planner.cost import Cost
from colonnade.planner.stand_in import Device
from colonnade.planner.unit_times import Costs, unit_costs


def teacher_costs(
    config: Config, model: ModelConfig, vocab_size: int, cost: Cost, device: Device, *, products: Products | None = None
) -> Costs:
    """Of units of a teacher. It runs without dropout and sequence parallelism, on samples as long as the student's."""
    plain = {"dropout": 0.0, "attention_dropout": 0.0, "seq_length": config.model.seq_length}
    update = {"model": model.model_copy(update=plain), "parallel": ParallelConfig(tp=config.parallel.tp)}
    return unit_costs(config.model_copy(update=update), vocab_size, cost, device, products=products)


def teacher_seconds(config: Config, model: ModelConfig, vocab_size: int, costs: Costs) -> float:
    """[s] Of a step, given what the units cost. Micro-batches follow one another through the stages."""
    stages = chunks(architecture_of(model, vocab_size), ParallelConfig(pp=config.parallel.pp))
    times = [sum(costs.of(unit).forward for unit in units) for units in stages]
    return sum(times) + (config.train.num_microbatches(config.parallel.dp) - 1) * max(times)
