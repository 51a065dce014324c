"""Adapters that `peft` has saved, read together with their base: W + scale · B A in the place of each W.

    adapter_config.json          rank, alpha, what is adapted, and the name of the base
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [r, in] and lora_B.weight [out, r]

What comes of it is a published model as any other, in fp32 at least. A key of the configuration that says anything but
plain low-rank adapters, and is not known here, is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.architecture.huggingface.keys import lines_of, shown
from colonnade.architecture.huggingface.statement import Source
from colonnade.checkpoint.plan import names_in_words
from colonnade.checkpoint.schema import clip
from colonnade.config.numbers import is_number
from colonnade.errors import CheckpointError, ConfigError
from colonnade.huggingface.files import CODES, Stored, read_json, tensors_of_file
from colonnade.huggingface.folder import HUB_ID, MOST_LINES, Published, Readable, is_published, open_published

CONFIG = "adapter_config.json"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
NAMED = "base_model_name_or_path"
"""The key of the base's folder, or of its name on the hub."""
PREFIX = "base_model.model."
"""Before the names of the base's modules in their files."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OF_NO_EFFECT = frozenset(
    """r lora_alpha use_rslora rank_pattern alpha_pattern peft_type task_type base_model_name_or_path target_modules
    exclude_modules layers_to_transform layers_pattern lora_dropout fan_in_fan_out inference_mode init_lora_weights
    auto_mapping revision peft_version megatron_core runtime_config eva_config ensure_weight_tying bias
    qalora_group_size""".split()  # noqa: SIM905  a list of names
)
"""Keys that are read here, that only training asks, and that say what the names of the tensors say too."""
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Of `init_lora_weights`: those that leave the base as it was."""


@dataclass(frozen=True)
class Widened:
    """A tensor of the base, in fp32 at least, as all of a merged model is."""

    base: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.base.dtype, torch.float32)

    @property
    def kind(self) -> str:
        return CODES[self.dtype]

    def read(self) -> Tensor:
        """Its numbers, in memory of their own."""
        return self.base.read().to(self.dtype)


@dataclass(frozen=True)
class Merged(Widened):
    """A tensor of the base with its adapter added."""

    a: Stored
    b: Stored
    scale: float
    transposed: bool
    """Whether theirs is [in, out]."""

    def read(self) -> Tensor:
        """W + scale · B A, computed in float64."""
        a, b = self.a.read().double(), self.b.read().double()
        if self.transposed:
            a, b = b.t(), a.t()
        return self.base.read().double().addmm_(b, a, alpha=self.scale).to(self.dtype)


def is_peft(path: Path) -> bool:
    """Whether a path is a folder of adapters."""
    return (path / CONFIG).is_file()


def open_peft(folder: Path, base: Path | None) -> Published:
    """Adapters and their base as one model; all but the numbers is read. `base`: where it lies, None: where the
    adapters say. CheckpointError says what is wrong.
    """
    content = read_json(folder / CONFIG)
    _check_kind(folder, content)
    published = open_published(_base_path(folder, content, base))
    pairs, problems = _pairs(folder)
    spelled = {name.removesuffix(".weight"): name for name in published.stored}
    sources = {name: source for source in published.sources.values() for name in source.theirs}
    stored: dict[str, Readable] = {name: Widened(each) for name, each in published.stored.items()}
    for module, (a, b) in pairs.items():
        bare = module.removeprefix(published.family.base)
        name = next((spelled[each] for each in (module, published.family.base + module, bare) if each in spelled), None)
        if name is None or name not in sources:
            problems.append(f"{clip(module)} has an adapter, and is no weight of {published.folder}")
        elif (wrong := _misfit(sources[name], a, b)) is not None:
            problems.append(f"{clip(module)}: {wrong}")
        else:
            scale = _scale(content, module, a.shape[0])
            stored[name] = Merged(published.stored[name], a, b, scale, sources[name].transposed)
    if problems:
        raise CheckpointError(
            f"{folder} does not adapt the {published.family.title} in {published.folder}:\n"
            + lines_of(problems[:MOST_LINES])
            + "\nName the base that it was trained beside with --base."
        )
    name = f"{folder.absolute().name} on {published.folder.absolute().name}"
    return replace(published, stored=stored, facts={**published.facts, "name": name})


def _check_kind(folder: Path, content: Mapping[str, Any]) -> None:
    """Plain low-rank adapters, and nothing besides them."""
    problems = []
    if content.get("peft_type") != "LORA":
        problems.append(f"peft_type = {shown(content.get('peft_type'))}: LORA is read")
    if content.get("bias", "none") != "none":
        problems.append(f"bias = {shown(content['bias'])}: its biases were trained too, and are not in the adapters")
    if content.get("init_lora_weights") not in _BEGINNINGS:
        problems.append(
            f"init_lora_weights = {shown(content['init_lora_weights'])}: it has changed the base. Let peft write plain "
            "adapters (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if not is_number(content.get("lora_alpha")):
        problems.append(f"lora_alpha = {shown(content.get('lora_alpha'))} is no number")
    patterns = content.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(is_number, patterns.values())):
        problems.append(f"alpha_pattern = {shown(patterns)} is no table of numbers")
    for key in sorted(content.keys() - _OF_NO_EFFECT):
        if content[key]:
            problems.append(f"{clip(key)} = {shown(content[key])} is not known here: it may change what is computed")
    if problems:
        raise CheckpointError(
            f"{folder / CONFIG} describes adapters that cannot be read:\n{lines_of(problems[:MOST_LINES])}\n"
            "Merge them with peft (`merge_and_unload`, `save_pretrained`), and convert what that makes."
        )


def _base_path(folder: Path, content: Mapping[str, Any], given: Path | None) -> Path:
    named = content.get(NAMED)
    path = given or (Path(named) if isinstance(named, str) and named else None)
    if path is None:
        raise ConfigError(f"{folder} does not say what its adapters were trained beside. Name that with --base FOLDER.")
    if not path.is_dir():
        fetch = f" `hf download {path} --local-dir {path.name}` fetches it." if HUB_ID.fullmatch(str(path)) else ""
        raise CheckpointError(
            f"{folder} has adapters alone, and their base {clip(repr(str(path)))} is not there; nothing is downloaded."
            f"{fetch} Name where it lies with --base FOLDER."
        )
    if not is_published(path):
        raise CheckpointError(
            f"{path}, the base of the adapters in {folder}, is no folder of Hugging Face. `colonnade convert {path} "
            "FOLDER` makes one of a checkpoint; then name it with --base FOLDER."
        )
    return path


def _pairs(folder: Path) -> tuple[dict[str, tuple[Stored, Stored]], list[str]]:
    """A and B of each module, and what is wrong with the tensors of a folder."""
    file = next((folder / name for name in (WEIGHTS, PICKLED) if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} has no {WEIGHTS}. Copy the whole folder of the adapters.")
    found = {stored.name: stored for stored in tensors_of_file(file)}
    modules = {name.removesuffix(end): None for name in found for end in (_A, _B) if name.endswith(end)}
    whole = {name: (found[name + _A], found[name + _B]) for name in modules if {name + _A, name + _B} <= found.keys()}
    others = sorted(found.keys() - {name + end for name in whole for end in (_A, _B)})
    problems = [f"it has more than pairs of lora_A and lora_B: {names_in_words(map(clip, others))}"] if others else []
    if not whole:
        problems.append("it has no pair of lora_A and lora_B")
    return {name.removeprefix(PREFIX): pair for name, pair in whole.items()}, problems


def _misfit(source: Source, a: Stored, b: Stored) -> str | None:
    out, size = source.shape[::-1] if source.transposed else source.shape
    if len(a.shape) == 2 and b.shape == (out, a.shape[0]) and a.shape[1] == size and min(a.shape) > 0:
        kinds = [each.kind for each in (a, b) if each.kind not in CODES.values()]
        return f"its adapter is in {clip(kinds[0])}, which is not read" if kinds else None
    return f"its adapter is {list(b.shape)} times {list(a.shape)}, and the weight {[out, size]}"


def _scale(content: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, of `use_rslora` alpha / √rank; a pattern of `alpha_pattern` names the end of a module's name."""
    patterns: Iterator[tuple[str, Any]] = iter((content.get("alpha_pattern") or {}).items())
    own = (alpha for pattern, alpha in patterns if _ends_with(module, pattern))
    alpha = float(next(own, content["lora_alpha"]))
    return alpha / rank**0.5 if content.get("use_rslora") else alpha / rank


def _ends_with(module: str, pattern: str) -> bool:
    """As peft reads it: a regular expression for the last parts of a name."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        return False
