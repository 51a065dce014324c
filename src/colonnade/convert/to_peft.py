"""Adapters become a folder that Hugging Face's `peft` loads beside the same base: adapter_config.json and
adapter_model.safetensors.

Our weight may be several of theirs (rows of q, k and v in one): the adapter of each has a copy of A, and its own rows
of B, so that it adds the same numbers. Where theirs is one weight too (GPT-2's c_attn), so is the adapter.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.architecture.adapters import LORA_A, LORA_B, WEIGHT, is_adapter
from colonnade.architecture.huggingface.families import family_of
from colonnade.architecture.huggingface.keys import Refused, lines_of
from colonnade.architecture.huggingface.statement import Source
from colonnade.architecture.matching import is_map
from colonnade.checkpoint.manifest import verify
from colonnade.checkpoint.schema import clip
from colonnade.config.compare import as_now, model_metadata
from colonnade.config.numbers import amount, counted
from colonnade.convert.adapted import Adapted, model_at, open_adapted
from colonnade.convert.target import check_space, check_target, publish, workspace
from colonnade.convert.their_base import write_base
from colonnade.errors import CheckpointError
from colonnade.huggingface.order import to_theirs
from colonnade.huggingface.peft import CONFIG, NAMED, PREFIX, WEIGHTS
from colonnade.huggingface.write import Planned, PlannedFile, Writer

_COMPUTES = ("num_layers", "num_decoder_layers", "window", "rotary.")
"""Keys of [model], and how such begin, with which a run may go on otherwise than its base was trained (`init_from`),
and the same weights compute something else.
"""


def to_peft(checkpoint: Path, target: Path, *, dtype: torch.dtype | None, dry_run: bool) -> list[str]:
    """Convert, or only look; returns what is to be told. CheckpointError where something is wrong."""
    check_target(target)
    it = open_adapted(checkpoint, None, with_base=False)
    _check_only_adapters(it)
    notes = _compare_models(it)
    title, every = _sources(it)
    sources = {module: every[module + WEIGHT] for module in it.modules}
    planned = [Planned(name, tuple(x.shape), dtype or x.dtype) for name, x in _tensors(it, sources)]
    needed = sum(each.num_bytes for each in planned)
    told = [
        f"{it.path}: step {it.metadata.step:,}, adapters of rank {it.adapters.rank} beside {len(sources)} weights",
        f"  becomes    adapters of PEFT, of {title}",
        f"  tensors    {len(planned)}, {amount(needed)}",
        *(f"  note: {note}" for note in notes),
    ]
    if dry_run:
        return [*told, *(f"  {each.name} {list(each.shape)}" for each in planned), "Nothing was written (--dry-run)."]
    verify(it.path, lambda name: None)
    check_space(target, needed)
    with workspace(target) as folder:
        made = folder / "adapters"
        made.mkdir()
        Writer(made, [PlannedFile(WEIGHTS, tuple(planned))]).write(x for _, x in _tensors(it, sources))
        (made / CONFIG).write_text(json.dumps(_config(it, sources, every), indent=2) + "\n", encoding="utf-8")
        write_base(made, it.metadata.base)
        it.check_unchanged()
        publish(made, target)
    return [*told, f"Written: {target}"]


def _check_only_adapters(it: Adapted) -> None:
    """A checkpoint beside a base has all that the base does not have: trained, drawn, or of another size. Maps to a
    teacher's hidden states belong to training, and are left out.
    """
    own = [name for name in it.architecture.weights() if name in it.manifest.tensors]
    others = [name for name in own if not is_adapter(name) and not is_map(name)]
    if others:
        more = ", …" if len(others) > 1 else ""
        raise CheckpointError(
            f"{it.path} has {counted(len(others), 'weight')} besides its adapters that no base has "
            f"({others[0]}{more}), and a folder of PEFT would lose them. `colonnade merge {it.path} TARGET` keeps all "
            "of it; convert what that makes."
        )


def _compare_models(it: Adapted) -> list[str]:
    """Whoever loads a folder of PEFT builds the base's model: CheckpointError where the run's computes otherwise. What
    is to be told where the base's is not known comes back.
    """
    base = it.metadata.base
    if base is None:
        return []
    known = base.model or model_at(Path(base.path))
    if known is None:
        return ["the base is not there: whether its model is the run's is not known."]
    told = [as_now(known), model_metadata(it.config.model, it.metadata.model.vocab_size)]
    theirs, ours = ({key: value for key, value in each.items() if key.startswith(_COMPUTES)} for each in told)
    differing = [
        f"model.{key} is {clip(repr(theirs.get(key)))} there and {value!r} here"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{it.path} has another [model] than the base of its adapters ({', '.join(differing)}), and a folder of "
            "PEFT has nothing of that: whoever loads it would compute something else. `colonnade merge "
            f"{it.path} TARGET` keeps it; convert what that makes."
        )
    return []


def _sources(it: Adapted) -> tuple[str, dict[str, Source]]:
    """Title of the base's family, and each of its weights by our name."""
    try:
        family, _ = family_of(it.config.model, it.metadata.model.vocab_size)
    except Refused as refused:
        raise CheckpointError(
            f"{it.path} adapts a model that no family of transformers known here can say. "
            f"{lines_of(refused.lines).strip()}"
        ) from None
    return family.title, {each.ours: each for each in family.sources(it.config.model, it.metadata.model.vocab_size)}


def _tensors(it: Adapted, sources: dict[str, Source]) -> Iterator[tuple[str, Tensor]]:
    """Their names and numbers."""
    for module, source in sources.items():
        a, b = it.read(module + LORA_A), it.read(module + LORA_B)
        rows = to_theirs(source._replace(transposed=False), b, it.config.model.head_width)
        for theirs, part in zip(source.theirs, rows, strict=True):
            name = PREFIX + theirs.removesuffix(WEIGHT)
            yield f"{name}.lora_A.weight", a.contiguous()
            yield f"{name}.lora_B.weight", part


def _config(it: Adapted, sources: dict[str, Source], every: dict[str, Source]) -> dict[str, Any]:
    base, scale = it.metadata.base, it.adapters.scale
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if it.config.model.is_causal else None,
        NAMED: None if base is None else base.path,
        "r": it.adapters.rank,
        "lora_alpha": scale * it.adapters.rank,
        "lora_dropout": it.adapters.dropout,
        "target_modules": _targets(sources, every),
        "fan_in_fan_out": any(source.transposed for source in sources.values()),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _targets(sources: dict[str, Source], every: dict[str, Source]) -> list[str]:
    """Last parts of names, where these say which modules are meant; else whole names."""
    wanted = {theirs.removesuffix(WEIGHT) for source in sources.values() for theirs in source.theirs}
    modules = {theirs.removesuffix(WEIGHT) for source in every.values() for theirs in source.theirs}
    short = {name.rpartition(".")[2] for name in wanted}
    meant = {name for name in modules if name.rpartition(".")[2] in short}
    return sorted(short if meant == wanted else wanted)
