"""What a teacher takes beside its student: its weights, and what it says of the micro-batches of a step."""

from dataclasses import replace
from math import prod
from pathlib import Path

from colonnade.architecture.families import architecture_of
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig
from colonnade.errors import ColonnadeError
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.planner.memory import Memory
from colonnade.planner.stand_in import Device
from colonnade.planner.step import BYTES
from colonnade.tensor_parallel.logits import CHUNK_LOGITS, CUDA_CHUNKS
from colonnade.train.teacher import teacher_model

_MATRICES = 3
"""Of a chunk of tokens and this rank's rows, besides the student's logits: these softened, what the teacher says, and
the gradient.
"""


def with_teacher(memory: Memory, config: Config, vocab_size: int, *, stage: int, device: Device) -> Memory:
    """`memory` with what distillation adds on a rank of this stage. A teacher that cannot be read adds no weights: the
    run itself says why.
    """
    chosen, train, parallel = config.distillation, config.train, config.parallel
    if chosen.teacher is None:
        return memory
    model = _model(Path(chosen.teacher)) if chosen.top_k is None else None
    weights = 0 if model is None else _weights(model, vocab_size, parallel, stage) * BYTES[train.precision]
    if stage + 1 < parallel.pp:
        return replace(memory, parameters=memory.parameters + weights)
    tokens, exact = train.micro_batch_size * config.model.seq_length, max(BYTES[train.precision], 4)
    said = tokens * (model.hidden_size * BYTES[train.precision] if model else (chosen.top_k or 0) * (8 + exact))
    microbatches = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    chunk = CHUNK_LOGITS * (CUDA_CHUNKS if device == "cuda" else 1)
    logits = min(chunk, tokens * -(-vocab_size // parallel.tp)) * exact
    return replace(
        memory,
        parameters=memory.parameters + weights,
        activations=memory.activations + said * microbatches,
        operators=memory.operators + _MATRICES * logits,
    )


def _model(path: Path) -> ModelConfig | None:
    try:
        return teacher_model(path)
    except ColonnadeError:
        return None


def _weights(model: ModelConfig, vocab_size: int, parallel: ParallelConfig, stage: int) -> int:
    """[elements] On a rank of this stage."""
    architecture = architecture_of(model, vocab_size)
    (units,) = chunks_of_stage(architecture, ParallelConfig(pp=parallel.pp), stage)
    buckets = dict.fromkeys(bucket for unit in units for bucket in unit.buckets)
    return sum(prod(each.local_shape(parallel.tp)) for bucket in buckets for each in architecture.buckets[bucket])
