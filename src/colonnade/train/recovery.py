"""State to disk and back: saving, and going on from what was saved.

A checkpoint holds the serial run's tensors under their logical names, the moments of the optimizer under
`optimizer.exp_avg.<weight>` and `optimizer.exp_avg_sq.<weight>`, and the facts that a resumed run is held against.
"""

import time
from pathlib import Path
from typing import Any

import torch

from colonnade import __version__
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import newest, read_manifest
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import save as save_shards
from colonnade.config.load import to_toml
from colonnade.config.schema import Config, ModelConfig
from colonnade.data_parallel.buckets import named_slots
from colonnade.errors import CheckpointError
from colonnade.mesh.mesh import Mesh
from colonnade.tensor_parallel.placement import Placement
from colonnade.train.corpus import Corpus
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import checkpoints
from colonnade.train.state import TrainState

MOMENTS = "optimizer."


def shards_of(state: TrainState) -> list[Shard]:
    """Every box of weights and moments that this rank holds."""
    moments = {unit.name: moment for unit, moment in zip(state.units, state.moments, strict=True)}
    found: list[Shard] = []
    for name, unit, slot in named_slots(state.units):
        place = slot.placement
        for prefix, flat in (
            ("", unit.master),
            (f"{MOMENTS}exp_avg.", moments[unit.name].exp_avg),
            (f"{MOMENTS}exp_avg_sq.", moments[unit.name].exp_avg_sq),
        ):
            found += shard(prefix + name, place, slot.view(flat))
    return found


def shard(name: str, place: Placement, values: torch.Tensor) -> list[Shard]:
    """The real part of a weight, or nothing where this rank's shard is all padding."""
    return [Shard(name, place.shape, place.offsets, place.real(values))] if place.extent else []


def model_facts(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """What makes a model this model: two runs with equal facts have tensors of the same names, shapes and meaning."""
    facts = model.model_dump(exclude={"preset", "dropout", "attention_dropout", "init_std"})
    return {**facts, "ffn_hidden_size": model.ffn, "vocab_size": vocab_size}


def save(state: TrainState, config: Config, mesh: Mesh, corpus: Corpus, monitor: Monitor) -> Path:
    """Write a whole checkpoint of `state`; every rank calls this."""
    started = time.perf_counter()
    files = {"config.toml": to_toml(config).encode()}
    if corpus.tokenizer is not None:
        files["tokenizer.json"] = corpus.tokenizer.to_json().encode()
    facts = {
        "step": state.step,
        "samples": state.samples,
        "model": model_facts(config.model, corpus.vocab_size),
        "tokenizer_sha256": None if corpus.tokenizer is None else corpus.tokenizer.sha256,
        "layout": str(mesh.layout),
        "versions": {"colonnade": __version__, "torch": torch.__version__},
    }
    folder = checkpoints(Path(config.run.folder))
    monitor.sync()
    path = save_shards(folder, state.step, shards_of(state), facts, keep=config.checkpoint.keep, extra_files=files)
    monitor.event("saved", step=state.step, checkpoint=path.name, seconds=round(time.perf_counter() - started, 3))
    return path


def resume(state: TrainState, config: Config, corpus: Corpus, monitor: Monitor) -> None:
    """Go on from the run's newest whole checkpoint, where there is one; every rank calls this."""
    path = newest(checkpoints(Path(config.run.folder)))
    if path is None:
        monitor.resume(0)
        monitor.event("started", version=__version__)
        return
    _check_tokenizer(path, corpus)
    facts = load(path, shards_of(state), model=model_facts(config.model, corpus.vocab_size)).facts
    for unit in state.units:
        unit.publish()
    state.step, state.samples = facts["step"], facts["samples"]
    monitor.resume(state.step)
    monitor.event("resumed", step=state.step, checkpoint=path.name)
    monitor.say(f"Resumed from {path} (step {state.step}, sample {state.samples:,}).")


def _check_tokenizer(path: Path, corpus: Corpus) -> None:
    saved = read_manifest(path).facts.get("tokenizer_sha256")
    if saved is not None and corpus.tokenizer is not None and saved != corpus.tokenizer.sha256:
        raise CheckpointError(
            f"{path} was trained with another tokenizer (sha256 {saved[:12]}…) than data.tokenizer "
            f"({corpus.tokenizer.sha256[:12]}…): the same id would mean different text. Set data.tokenizer to "
            f"{path / 'tokenizer.json'}."
        )
