"""What a run is, said before its first step: on the terminal in one block, and as numbers in events.jsonl."""

import dataclasses
from collections.abc import Iterator
from math import lcm

import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Architecture
from colonnade.config.describe import first_line
from colonnade.config.numbers import amount, counted
from colonnade.config.schema import Config, ParallelConfig
from colonnade.data.datasets import SplitDataset
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.sidecar import not_checked
from colonnade.launch import launch
from colonnade.mesh.collectives import all_gather
from colonnade.mesh.mesh import Mesh
from colonnade.mesh.shared_memory import SharedMemoryTransport
from colonnade.planner.memory import Memory
from colonnade.storage import is_remote
from colonnade.train.beginning import Course
from colonnade.train.corpus import Corpus, curriculum_of, tokens_of
from colonnade.train.loop import Banner
from colonnade.train.machine import Free, cpu_cores, device_name, free_memory
from colonnade.train.products import Decision

_INDENT = 11


def banner(course: Course, mesh: Mesh, device: torch.device, corpus: Corpus, decision: Decision, own: Memory) -> Banner:
    """Every rank calls this: stages of a pipeline tell each other what they will take. `own`: what this rank's stage
    will take.
    """
    config = course.now
    memory = _largest(own, mesh)
    free, ranks_here = free_memory(device), 1 if device.type == "cuda" else launch.num_local_ranks()
    notes = [*_notes(course, corpus), *decision.notes, *_too_much(memory, free, ranks_here)]
    architecture = trained_architecture(config, corpus.vocab_size)
    rows = {
        "model": _model(config, corpus, architecture),
        "layout": _layout(config.parallel, transport(mesh, device)),
        "device": _device(device, config.train.device),
        "precision": config.train.precision,
        **({"products": line} if (line := decision.line()) else {}),
        "data": _data(corpus),
        "steps": _steps(course, corpus),
        "memory": _memory(memory),
        "free": _free(free, device, ranks_here),
    }
    lines = [] if launch.is_rank() else [first_line(config)]  # where ranks were started, that was said before
    lines += [f"  {name:<{_INDENT}}{row}" for name, row in rows.items()]
    fields = {
        "parameters": architecture.num_parameters,
        "trained_parameters": architecture.num_trained,
        "layout": str(mesh.layout),
        "ranks": mesh.layout.num_ranks,
        "device": device.type,
        "device_name": device_name(device),
        "transport": transport(mesh, device),
        "precision": config.train.precision,
        "products": decision.event(),
        "vocab_size": corpus.vocab_size,
        "train_documents": _documents(corpus.datasets.train),
        "train_tokens": _tokens(corpus.datasets.train),
        "train_samples": len(corpus.datasets.train),
        "memory_predicted": memory.total,
        "memory_free": None if free is None else free[0],
        "notes": notes,
    }
    text = "\n".join([*lines, *(f"  {'note':<{_INDENT}}{note}." for note in notes)])
    return Banner(text, fields, "" if device.type != "cuda" or free is None else _impossible(own, free))


def transport(mesh: Mesh, device: torch.device) -> str:
    """What carries numbers between ranks: '' for one process, 'shared memory', 'gloo' or 'NCCL'."""
    axes = [axis for axis in (mesh.tp, mesh.pp, mesh.dp) if axis.transport is not None]
    if not axes:
        return ""
    if device.type == "cuda":
        return "NCCL"
    carried = {"shared memory" if isinstance(axis.transport, SharedMemoryTransport) else "gloo" for axis in axes}
    return " and ".join(sorted(carried, reverse=True))


def _model(config: Config, corpus: Corpus, architecture: Architecture) -> str:
    model, every, trained = config.model, architecture.num_parameters, architecture.num_trained
    parameters = f"{every:,} parameters" if trained == every else f"{trained:,} of {every:,} parameters trained"
    layers, lengths = counted(model.num_layers, "layer"), f"{model.seq_length:,}"
    if model.decoder_layers:
        layers = f"{model.num_layers:,} encoder and {model.decoder_layers:,} decoder layers"
        lengths = f"{model.seq_length:,} tokens to read and {model.decoder_length:,} to write"
    return (
        f"{model.kind}, {parameters}: {layers}, hidden {model.hidden_size:,}, "
        f"{counted(model.num_heads, 'head')}, sequences of {lengths}, vocabulary {corpus.vocab_size:,}"
    )


def _layout(parallel: ParallelConfig, carried_by: str) -> str:
    kinds = [f"tp {parallel.tp} × pp {parallel.pp} × dp {parallel.dp}"]
    if parallel.pp > 1:
        virtual = f" with {parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else ""
        kinds.append(f"{parallel.schedule} pipeline{virtual}")
    if parallel.zero:
        kinds.append(f"ZeRO {parallel.zero}")
    if parallel.sequence_parallel:
        kinds.append("sequence parallelism")
    if parallel.recompute != "none":
        kinds.append(f"{parallel.recompute} recomputation")
    if parallel.offload:
        kinds.append("offload")
    return ", ".join(kinds) + (f"; ranks talk through {carried_by}" if carried_by else "")


def _device(device: torch.device, asked: str) -> str:
    """cpu, its name, its cores, and why it is that."""
    parts = [device.type, device_name(device), cpu_cores() if device.type == "cpu" else ""]
    fallen = device.type == "cpu" and asked == "auto"
    why = f' (train.device = "auto", and torch {torch.__version__} finds no GPU here)' if fallen else ""
    return ", ".join(filter(None, parts)) + why


def _data(corpus: Corpus) -> str:
    datasets = corpus.datasets
    parts = [
        f"{name}: {counted(_documents(part), 'document')}, {counted(_tokens(part), 'token')}, "
        f"{counted(len(part), 'sample')}"
        for name, part in (("train", datasets.train), ("validation", datasets.validation))
        if part is not None
    ]
    return "; ".join(parts)


def _steps(course: Course, corpus: Corpus) -> str:
    """Of the run in all."""
    whole, train = course.whole, course.whole.train
    curriculum, tokens = curriculum_of(whole), tokens_of(whole, rollbacks=course.returns)
    step, epoch = (count * whole.model.sample_length for count in (train.global_batch_size, len(corpus.datasets.train)))
    sizes = f"{train.global_batch_size:,} × {whole.model.sample_length:,} tokens"
    growing = " at the end" if len(curriculum.phases) > 1 else ""
    an_epoch = "" if growing else f" of {epoch / step:,.1f} steps"
    return f"{train.steps:,} of {sizes}{growing}, {tokens:,} tokens in all: {tokens / epoch:.3g} epochs{an_epoch}"


def _memory(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer + memory.host,
        "buffers": memory.buffers,
        "activations": memory.activations,
        "operators": memory.operators,
    }
    each = ", ".join(f"{name} {amount(size)}" for name, size in parts.items() if size)
    return f"{amount(memory.total + memory.host)} predicted for a rank ({each}), and what libraries need"


def _free(free: Free | None, device: torch.device, ranks_here: int) -> str:
    if free is None:
        return "memory of this machine unknown"
    of = "the GPU" if device.type == "cuda" else f"this machine, for {counted(ranks_here, 'rank')}"
    return f"{amount(free[0])} of {amount(free[1])} of memory on {of}"


def _too_much(memory: Memory, free: Free | None, ranks_here: int) -> Iterator[str]:
    wanted = memory.total + memory.host
    if free is not None and wanted * ranks_here > free[0]:
        yield (
            f"{counted(ranks_here, 'rank')} here will take {amount(wanted * ranks_here)} by prediction, more than is "
            "free: lower train.micro_batch_size, or use parallel.recompute, parallel.zero or more parallel.tp or pp"
        )


def _impossible(memory: Memory, free: Free) -> str:
    """Where what lives from step to step, and is known to the byte, is more than a GPU has. (A CPU may swap.)"""
    if memory.state <= free[1]:
        return ""
    return (
        f"this rank needs {amount(memory.state)} for parameters, gradients and optimizer alone, and the GPU has "
        f"{amount(free[1])}: use parallel.zero with more parallel.dp, parallel.offload, or more parallel.tp or pp"
    )


def _largest(own: Memory, mesh: Mesh) -> Memory:
    """Of the pipeline's stages, the memory of the one that takes the most."""
    numbers = dataclasses.astuple(own)
    stages = all_gather(torch.tensor([numbers], dtype=torch.int64), mesh.pp).tolist()
    return max((Memory(*stage) for stage in stages), key=lambda memory: memory.total + memory.host)


def _documents(dataset: SplitDataset) -> int:
    return sum(len(part.documents) for part in dataset.parts)


def _tokens(dataset: SplitDataset) -> int:
    return sum(part.num_tokens for part in dataset.parts)


def _notes(course: Course, corpus: Corpus) -> Iterator[str]:
    """What could not be checked, and what is left out."""
    config, last_step, datasets = course.now, course.whole.train.steps, corpus.datasets
    data, warmup = config.data, course.whole.optim.warmup
    if corpus.tokenizer is None:
        yield "data.tokenizer is not set: no bits per byte, and checkpoints that cannot write text"
    else:
        if config.model.is_causal and not corpus.tokenizer.is_byte_level:
            yield "the tokenizer is not byte-level: no bits per byte"
        yield from (not_checked(prefix, "data.tokenizer") for prefix in corpus.unchecked)
    yield from corpus.other_labels
    if data.blend is not None and data.validation is None and data.shares[1]:
        there = 0 if datasets.validation is None else len(datasets.validation.parts)
        if there < len(data.blend):
            yield (
                f"{len(data.blend) - there} of {len(data.blend)} files of data.blend have too little text for a "
                "validation sample, and are not in the validation part"
            )
    if data.cache is not None and not any(is_remote(file.prefix) for file in corpus.files.values()):
        yield f'data.cache = "{data.cache}" has no effect: no token file is named by a URL'
    dropped = sum(part.num_dropped for part in datasets.train.parts if isinstance(part, GPTDataset))
    if dropped:
        yield (
            f"{counted(dropped, 'document')} of {_documents(datasets.train):,} to train on longer than "
            'model.seq_length and left out: data.too_long = "drop"'
        )
    if last_step < warmup:
        yield (
            f"the run ends after {last_step:,} of optim.warmup_steps = {warmup:,}: it is "
            "the beginning of a longer one, and its learning rate stays below optim.learning_rate"
        )
    yield from _not_kept(config, last_step)
    if datasets.validation is not None:
        yield from _not_evaluated(config, last_step)
    if config.train.evaluate_every != 0 and datasets.validation is None:
        yield "there is no validation part, so that nothing is evaluated: data.split or data.validation makes one"


def _not_kept(config: Config, last_step: int) -> Iterator[str]:
    """Where some steps that are to be kept have no checkpoint."""
    saves, kept = config.checkpoint.every, config.checkpoint.keep_every
    if 0 < saves < last_step and kept % saves:
        yield (
            f"checkpoints are saved every {counted(saves, 'step')}, and of these checkpoint.keep_every = {kept:,} "
            f"keeps those at multiples of {lcm(saves, kept):,} alone. With a checkpoint.keep_every that is a multiple "
            "of checkpoint.every, each multiple of it is kept"
        )


def _not_evaluated(config: Config, last_step: int) -> Iterator[str]:
    """Where some checkpoints are saved at steps without an evaluation, so that they cannot be the best."""
    saves, evaluations = config.checkpoint.every, config.train.evaluation_interval
    if not config.checkpoint.keep_best or not evaluations or not 0 < saves < last_step:
        return
    if saves % evaluations:
        both = lcm(saves, evaluations)
        known = "knows the last only"
        if both < last_step:
            known = f"chooses among those at multiples of {both:,} and the last"
        yield (
            f"checkpoints are saved every {counted(saves, 'step')} and evaluated every {evaluations:,} "
            f"(train.evaluate_every): checkpoint.keep_best {known}. With a checkpoint.every that is a multiple of "
            "train.evaluate_every, it chooses among all of them"
        )
