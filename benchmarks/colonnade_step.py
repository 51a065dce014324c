"""Colonnade's own training step on the reference model: the objects `colonnade train` drives, on one fixed batch."""

from collections.abc import Callable

import torch

from benchmarks.peers.reference import Task, fixed_batch, measure, num_ranks, rank, read_task
from colonnade import __version__
from colonnade.config.model import ModelConfig
from colonnade.config.parts import LoraConfig
from colonnade.config.schema import Config, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from colonnade.data.loader import Batch
from colonnade.launch.launch import connect, disconnect
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh
from colonnade.train.products import settle
from colonnade.train.state import build_state
from colonnade.train.step import train_step


def reference_config(task: Task) -> Config:
    parallel = parallel_config(task)
    return Config(
        model=ModelConfig(
            num_layers=task.num_layers,
            hidden_size=task.hidden_size,
            num_heads=task.num_heads,
            seq_length=task.seq_length,
            vocab_size=task.vocab_size,
            dropout=task.dropout,
            attention_dropout=task.dropout,
        ),
        parallel=parallel,
        train=TrainConfig(
            steps=task.warmup + task.steps,
            global_batch_size=task.micro_batch_size * task.num_microbatches * parallel.dp,
            micro_batch_size=task.micro_batch_size,
            precision=task.dtype,
            gradient_clip=task.gradient_clip,
            threads=task.threads,
            device=task.device,
        ),
        optim=OptimConfig(
            learning_rate=task.learning_rate,
            warmup_steps=0,
            decay="constant",
            weight_decay=task.weight_decay,
            beta1=task.beta1,
            beta2=task.beta2,
        ),
        run=RunConfig(folder="unused"),
    )


def parallel_config(task: Task) -> ParallelConfig:
    ranks = num_ranks()
    if task.mode in ("tp", "sp"):
        return ParallelConfig(tp=ranks, sequence_parallel=task.mode == "sp")
    if task.mode == "pp":
        return ParallelConfig(pp=ranks, partition="flops")
    zero = {"zero1": 1, "zero2": 2, "zero3": 3}
    return ParallelConfig.model_validate({"dp": ranks, "zero": zero.get(task.mode, 0)})


def build_step(task: Task, lora: LoraConfig | None = None) -> Callable[[], float]:
    config = reference_config(task)
    if lora is not None:
        config = config.model_copy(update={"lora": lora})
    device = connect(num_ranks(), config.train.device, threads=config.train.threads)
    parallel = config.parallel
    mesh = build_mesh(Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), rank())
    products = settle(config, task.vocab_size, mesh.world, device).products
    state = build_state(config, mesh, task.vocab_size, device, products=products)
    tokens, labels = (part.T.contiguous() for part in fixed_batch(task))  # [s, b]
    samples = torch.arange(task.micro_batch_size) + mesh.dp.rank * task.micro_batch_size
    batch = Batch(tokens=tokens, labels=labels, loss_mask=torch.ones(tokens.shape), samples=samples)
    batches = [batch.to(device)] * task.num_microbatches

    def step() -> float:
        loss = train_step(state, batches, mesh, config.train).loss
        assert loss is not None, "every label counts"
        return loss

    return step


def main() -> None:
    task, _ = read_task()
    try:
        note = "bf16 parameters, fp32 master" if task.bf16 else ""
        measure(build_step(task), task, peer=f"colonnade {__version__}", note=note)
    finally:
        disconnect()


if __name__ == "__main__":
    main()
