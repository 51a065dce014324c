"""What a teacher takes beside its student: its weights, and what it says of the micro-batches of a step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig
from colonnade.errors import ColonnadeError
from colonnade.model.precision import DTYPES
from colonnade.model.transformer import residual_dtype
from colonnade.pipeline.partition import chunks, chunks_of_stage
from colonnade.planner.memory import Memory
from colonnade.planner.stand_in import Device
from colonnade.planner.step import BYTES
from colonnade.tensor_parallel.logits import CHUNK_LOGITS, CUDA_CHUNKS
from colonnade.train.teacher import cut_problems, teacher_model

_MATRICES = 3
"""Of a chunk of tokens and this rank's rows, besides the student's logits: these softened, what the teacher says, and
the gradient.
"""


def with_teacher(memory: Memory, config: Config, vocab_size: int, *, stage: int, device: Device) -> Memory:
    """`memory` with what distillation adds on a rank of this stage. A teacher that cannot be read adds no weights."""
    held = chunks_of_stage(trained_architecture(config, vocab_size), config.parallel, stage)
    units = [unit for chunk in held for unit in chunk]
    return with_model(memory, config, live_teacher(config), vocab_size, units=units, stage=stage, device=device)


def has_live_teacher(config: Config) -> bool:
    """Whether a teacher runs beside the student in each step."""
    return config.distillation.teacher is not None and config.distillation.top_k is None


def live_teacher(config: Config) -> ModelConfig | None:
    """The model that runs beside the student. None: there is none, or it cannot be read, or not be cut as the run is:
    the run itself says why.
    """
    model = readable_teacher(config)
    return None if model is None or cut_problems(model, config) else model


def readable_teacher(config: Config) -> ModelConfig | None:
    """As `live_teacher`, for whatever layout."""
    if not has_live_teacher(config):
        return None
    try:
        return teacher_model(Path(str(config.distillation.teacher)))
    except (ColonnadeError, OSError):
        return None


def with_model(
    memory: Memory,
    config: Config,
    model: ModelConfig | None,
    vocab_size: int,
    *,
    units: Sequence[Unit],
    stage: int,
    device: Device,
) -> Memory:
    """As `with_teacher`, of a known teacher (None: it adds no weights). `units`: the student's of this stage."""
    train, parallel = config.train, config.parallel
    if config.distillation.teacher is None:
        return memory
    each = (0,) * parallel.pp if model is None else _weights(model, vocab_size, parallel.tp, parallel.pp)
    microbatches = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    is_last = stage + 1 == parallel.pp
    said = _said(config, model) if is_last else 0
    logits = _logits(config, vocab_size, device) if is_last and config.model.head == "pretraining" else 0
    return replace(
        memory,
        parameters=memory.parameters + each[stage] * BYTES[train.precision],
        activations=memory.activations + (said + _states(config, model, units)) * microbatches,
        operators=memory.operators + _MATRICES * logits,
    )


def _said(config: Config, model: ModelConfig | None) -> int:
    """[bytes] What the last stage has of a micro-batch: what the teacher's output layer reads, its likeliest tokens, or
    its logits of labels.
    """
    train, exact = config.train, max(BYTES[config.train.precision], 4)
    if config.model.head != "pretraining":
        return train.micro_batch_size * (config.model.num_labels or 1) * exact
    tokens = train.micro_batch_size * config.model.seq_length
    a_token = model.hidden_size * BYTES[train.precision] if model else (config.distillation.top_k or 0) * (8 + exact)
    return tokens * a_token


def _logits(config: Config, vocab_size: int, device: Device) -> int:
    """[bytes] Of a chunk of tokens and this rank's rows."""
    chunk = CHUNK_LOGITS * (CUDA_CHUNKS if device == "cuda" else 1)
    tokens, rows = config.train.micro_batch_size * config.model.seq_length, -(-vocab_size // config.parallel.tp)
    return min(chunk, tokens * rows) * max(BYTES[config.train.precision], 4)


def _states(config: Config, model: ModelConfig | None, units: Sequence[Unit]) -> int:
    """[bytes] Hidden states of a micro-batch that blocks among these units are compared with."""
    if model is None:
        return 0
    layers = sum(unit.layer in config.distillation.student_layers for unit in units)
    sequences = config.train.micro_batch_size * config.model.sequences
    width = residual_dtype(DTYPES[config.train.precision], model.fp32_residual).itemsize
    return layers * sequences * config.model.seq_length * model.hidden_size * width


@cache
def _weights(model: ModelConfig, vocab_size: int, tp: int, pp: int) -> tuple[int, ...]:
    """[elements] On a rank of each stage."""
    architecture = architecture_of(model, vocab_size)
    held = (
        dict.fromkeys(bucket for unit in units for bucket in unit.buckets)
        for units in chunks(architecture, ParallelConfig(pp=pp))
    )
    return tuple(
        sum(prod(each.local_shape(tp)) for bucket in buckets for each in architecture.buckets[bucket])
        for buckets in held
    )
