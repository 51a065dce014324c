"""A published model in a local folder: its [model], and each of our weights, made of its tensors when asked for."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from colonnade.architecture.families import architecture_of
from colonnade.architecture.huggingface.families import model_of
from colonnade.architecture.huggingface.keys import Refused, lines_of
from colonnade.architecture.huggingface.statement import Family, Source
from colonnade.checkpoint.plan import names_in_words
from colonnade.checkpoint.schema import clip
from colonnade.config.check import check
from colonnade.config.model import ModelConfig
from colonnade.config.numbers import counted
from colonnade.config.schema import Config, DataConfig, OptimConfig, RunConfig, TrainConfig
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import DTYPES, read_json, tensors_in
from colonnade.huggingface.order import to_ours

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that change nothing of the model. A checkpoint keeps them: text ends where they say, and they go
back."""
START = "decoder_start_token_id"
"""Another: what a decoder beside an encoder begins with."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_OLD = re.compile(r"LayerNorm\.(gamma|beta)$")
_NEW = {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}
MOST_LINES = 20  # of a message
_OF_HEAD = (
    "Or begin a run from these weights (train.init_from): what is missing is of the head alone, and is drawn there."
)


class Readable(Protocol):
    """One of their tensors, wherever it lies: read when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """Its number format, as safetensors calls it. Only those of `DTYPES` can be read."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> Tensor:
        """Its numbers, in memory of their own."""


@dataclass(frozen=True)
class Published:
    """A model of others, understood: everything of it has been looked at but the numbers."""

    folder: Path
    """Or the one file that it is."""
    family: Family
    model: ModelConfig
    vocab_size: int
    sources: Mapping[str, Source]
    """By our name, in the order of the model."""
    stored: Mapping[str, Readable]
    """By their name, as the family spells it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint made of it keeps: where it comes from, and ids of control tokens."""
    tied_by: str = (
        f"its {CONFIG} says (or leaves at its default) tie_word_embeddings = true, which makes them one. Set it to "
        "false there if the model has an output layer of its own"
    )
    """Why a second name of a weight must have the same numbers, and what to do where it has not."""
    labels: tuple[str, ...] = ()
    """Names of what a classifier tells apart, where the folder says them."""

    @property
    def dtype(self) -> torch.dtype:
        """That of most of its numbers."""
        sizes: dict[torch.dtype, int] = {}
        for name in self.sources:
            dtype = self.dtype_of(name)
            sizes[dtype] = sizes.get(dtype, 0) + self.sources[name].weight.size
        return max(sizes, key=lambda dtype: sizes[dtype])

    def dtype_of(self, name: str) -> torch.dtype:
        """Of our weight: that of its parts."""
        return self.stored[self.sources[name].theirs[0]].dtype

    def read(self, name: str) -> Tensor:
        """Our weight `name`, in memory of its own."""
        source = self.sources[name]
        return to_ours(source, [self.stored[each].read() for each in source.theirs], self.model.head_width)

    def check_seconds(self) -> None:
        """CheckpointError if a second name of a tied weight has other numbers than the first. Reads both."""
        for second in self.family.seconds(self.model):
            if second.ours not in self.sources:
                continue
            (first,) = self.sources[second.ours].theirs
            if not second.is_equal or second.name not in self.stored or self.stored[second.name] == self.stored[first]:
                continue
            if not torch.equal(self.stored[second.name].read(), self.stored[first].read()):
                raise CheckpointError(
                    f"{self.folder} has {second.name} and {first} with different numbers, and {self.tied_by}."
                )


def is_published(path: Path) -> bool:
    """Whether a path looks like a folder of Hugging Face."""
    return (path / CONFIG).exists() or any(path.glob("[!.]*.safetensors"))


def open_published(folder: Path, *, whole: bool = True) -> Published:
    """Read all of a folder but its numbers. CheckpointError says everything that is wrong with it. Not `whole`: the
    weights of its last unit may be missing, as an encoder's are that was published without a head.
    """
    if not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so what its tensors mean is unknown. Copy the model's whole folder."
        )
    content = read_json(folder / CONFIG)
    try:
        family, model = model_of(content)
    except Refused as refused:
        raise CheckpointError(
            f"{folder / CONFIG} describes a model that cannot be read:\n{lines_of(refused.lines)}\n"
            "A key that changes nothing of what the model computes can be removed from it."
        ) from None
    found = _with_output(tensors_in(folder), content, family, model)
    model = family.as_published(model, found)
    family = family.with_head(model.head)
    assert model.vocab_size is not None, "every family reads it"
    stub(folder, model, "fp32")
    described = f"its {CONFIG}"
    lacks = set[str]() if whole else architecture_of(model, model.vocab_size).weights_of_loss()
    sources, stored = matched(folder, family, model, found, described=described, lacks=lacks)
    facts = {
        "config_sha256": hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(),
        **{key: content[key] for key in (*TOKEN_IDS, START) if key in content},
    }
    return Published(folder, family, model, model.vocab_size, sources, stored, facts, labels=labels_of(content, model))


def _with_output(
    found: Mapping[str, Readable], content: Mapping[str, Any], family: Family, model: ModelConfig
) -> Mapping[str, Readable]:
    """With the token table for an output layer that a folder leaves out as tied, where the two are apart in our model:
    a T5 1.1, as transformers 5 writes it.
    """
    output, table = (f"{family.places[module].names[0]}.weight" for module in ("head.output", "embedding.tokens"))
    is_left_out = content.get("tie_word_embeddings") is True and not model.tie_embeddings and output not in found
    return {**found, output: found[table]} if is_left_out and table in found else found


def labels_of(content: Mapping[str, Any], model: ModelConfig) -> tuple[str, ...]:
    """`id2label` of a config.json, in the order of the ids; none where it does not name each of them."""
    named = content.get("id2label")
    if model.head != "classification" or not isinstance(named, dict):
        return ()
    found = tuple(named.get(str(number)) for number in range(model.num_labels or 0))
    return tuple(map(str, found)) if all(isinstance(name, str) for name in found) else ()


def ids_in(value: object) -> list[int]:
    """The value of one of `TOKEN_IDS`: one token, or several that end a text; none where it says none."""
    ids: list[Any] = value if isinstance(value, list) else [value]
    return ids if all(type(each) is int for each in ids) else []


def stub(source: Path, model: ModelConfig, precision: str) -> Config:
    """A configuration in which [model] alone means something. CheckpointError where its values do not go together."""
    train = {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "precision": precision}
    config = Config(
        model=model,
        data=DataConfig(train="unknown"),
        train=TrainConfig.model_validate(train),
        optim=OptimConfig(learning_rate=1e-4),
        run=RunConfig(folder="runs/converted"),
    )
    wrong = [each.message for each in check(config) if any(key.startswith("model.") for key in each.keys)]
    if wrong:
        raise CheckpointError(f"{source} describes a model that cannot be:\n{lines_of(wrong)}")
    return config


def matched(
    folder: Path,
    family: Family,
    model: ModelConfig,
    found: Mapping[str, Readable],
    *,
    described: str,
    lacks: Collection[str] = (),
) -> tuple[dict[str, Source], dict[str, Readable]]:
    """What each weight is made of, and the tensors that the model wants under the family's names. `described`: what
    says so. `lacks`: weights of ours that may be missing. CheckpointError for surplus, missing and odd ones.
    """
    if model.num_layers > len(found):
        raise CheckpointError(
            f"{folder} has {counted(len(found), 'tensor')}, and {described} says that the model has "
            f"{model.num_layers:,} layers: they do not belong together. Get both from one place."
        )
    assert model.vocab_size is not None, "every family reads it"
    sources = {source.ours: source for source in family.sources(model, model.vocab_size)}
    wanted = {name: source for source in sources.values() for name in source.theirs}
    seconds = {second.name: second for second in family.seconds(model)}
    stored: dict[str, Readable] = {}
    spelled: dict[str, str] = {}
    surplus, twice = [], []
    for written, each in found.items():
        new = _OLD.sub(lambda old: _NEW[old[1]], written)
        spellings = (new, family.base + new, new.removeprefix(family.base))
        name = next((name for name in spellings if name in wanted or name in seconds), None)
        if name is not None:
            if stored.setdefault(name, each) != each:
                twice.append(f"{clip(spelled[name])} and {clip(written)} are two spellings of one tensor")
            spelled[name] = written
        elif not any(family.constants.fullmatch(name) for name in (written, family.base + written)):
            surplus.append(written)
    for second in seconds.values():  # some files hold the second name alone
        (first,) = sources[second.ours].theirs
        if second.is_equal and first not in stored and second.name in stored:
            stored[first] = stored[second.name]
    there = {ours: each for ours, each in sources.items() if ours not in lacks or stored.keys() >= {*each.theirs}}
    sources, wanted = there, {name: source for source in there.values() for name in source.theirs}
    missing = wanted.keys() - stored.keys()
    read = [*wanted, *(name for name, second in seconds.items() if second.is_equal)]
    problems = [*_surplus(surplus), *twice, *_missing(missing), *_odd(wanted, stored, read)]
    if problems:
        of_head = architecture_of(model, model.vocab_size).weights_of_loss()
        of_head_alone = len(problems) == len(_missing(missing)) and all(
            wanted[each].ours in of_head for each in missing
        )
        raise CheckpointError(
            f"{folder} is not the {family.title} ({family.architecture}) that {described} describes:\n"
            + lines_of(problems[:MOST_LINES])
            + "\nGet config and weights from one place, and all of them."
            + (f" {_OF_HEAD}" if of_head_alone else "")
        )
    return sources, stored


def _surplus(names: Sequence[str]) -> list[str]:
    return [f"{_are(len(names))} there that it does not have: {names_in_words(map(clip, names))}"] if names else []


def _missing(names: set[str]) -> list[str]:
    return [f"{_are(len(names))} missing: {names_in_words(names)}"] if names else []


def _are(number: int) -> str:
    return f"{counted(number, 'tensor')} {'is' if number == 1 else 'are'}"


def _odd(wanted: Mapping[str, Source], stored: Mapping[str, Readable], read: Sequence[str]) -> list[str]:
    """`read`: names of which numbers are read."""
    shapes = [
        f"{name} is {list(stored[name].shape)}, and should be {list(source.shape)}"
        for name, source in wanted.items()
        if name in stored and stored[name].shape != source.shape
    ]
    unread = [
        f"{name} is in {clip(stored[name].kind)}: weights are read in {', '.join(DTYPES)}, not quantized ones"
        for name in read
        if name in stored and stored[name].kind not in DTYPES
    ]
    kinds = [
        f"{' and '.join(source.theirs)} are one weight here, and have different number formats"
        for source in dict.fromkeys(wanted.values())
        if len({stored[name].kind for name in source.theirs if name in stored}) > 1
    ]
    return shapes + unread + kinds
