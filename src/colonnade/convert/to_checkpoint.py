"""Weights of others become a checkpoint that any layout loads."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from colonnade import __version__
from colonnade.checkpoint.names import NAME, folder_name
from colonnade.checkpoint.save import Payload, Target, save_made
from colonnade.checkpoint.schema import clip
from colonnade.config.compare import model_metadata
from colonnade.config.load import to_toml
from colonnade.config.numbers import amount, counted
from colonnade.convert.progress import Progress
from colonnade.convert.target import check_space, check_target, publish, when_full, workspace
from colonnade.convert.their_tokenizer import OF_TOKENIZER, TheirTokenizer
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.tokenizer_config import read_templates
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import read_json
from colonnade.huggingface.folder import GENERATION_CONFIG, Published, stub
from colonnade.huggingface.write import narrowed
from colonnade.model.precision import DTYPES
from colonnade.serving.trained import described
from colonnade.tokenizer_files import CONFIG

OF_MODEL = (GENERATION_CONFIG,)
BESIDE = (*OF_TOKENIZER, *OF_MODEL)
"""Files of theirs that are kept for the way back."""
_HEADER = """\
# Made by `colonnade convert` from {name}: [model] and train.precision are those of the weights. The other
# sections are there because a configuration has them, and say nothing of how the weights were trained.

"""


class Foreign(NamedTuple):
    """What others wrote, opened."""

    published: Published
    known: TheirTokenizer
    folders: tuple[Path, ...]
    """Of the model; what the first one has goes before: of adapters, theirs and that of their base."""
    check_base: Callable[[], str | None] | None = None
    """Of adapters of which it is known: raises CheckpointError for another base than theirs, and gives what else is to
    be told of it. Reads all of its weights.
    """
    note: str | None = None
    """What is to be told of how its parts belong together."""

    @property
    def beside(self) -> dict[str, Path]:
        """By name, those of `BESIDE` that are there."""
        of_tokenizer = [path for path in self.known.beside if path.name in OF_TOKENIZER]
        of_model = [folder / name for folder in reversed(self.folders) for name in OF_MODEL]
        return {path.name: path for path in (*of_tokenizer, *of_model) if path.exists()}

    @property
    def templates(self) -> list[Path]:
        """The chat templates in files of their own, where newer folders have them."""
        return [path for path in self.known.beside if path.name not in OF_TOKENIZER]


def check_new(target: Path) -> None:
    """CheckpointError if there is something already, or the name is not that of converted weights."""
    check_target(target)
    _check_name(target)


def to_checkpoint(it: Foreign, target: Path, *, dtype: torch.dtype | None, dry_run: bool) -> list[str]:
    """Convert, or only look; returns what is to be told. CheckpointError where something is wrong."""
    published, known = it.published, it.known.tokenizer
    tokenizer = known if isinstance(known, Tokenizer) else None
    _check_tokenizer(it)
    wanted = {name: dtype or published.dtype_of(name) for name in published.sources}
    needed = sum(published.sources[name].weight.size * kind.itemsize for name, kind in wanted.items())
    told = _told(it, needed)
    if dry_run:
        unread = [] if it.check_base is None else ["  note: whether the base is theirs is not looked at (--dry-run)"]
        return [*told, *unread, *_listed(published, wanted)]
    check_space(target, needed)
    note = None if it.check_base is None else it.check_base()
    told += [] if note is None else [f"  note: {note}"]
    published.check_seconds()
    with workspace(target) as folder:
        progress = Progress("converted", needed)

        def make(name: str) -> torch.Tensor:
            x = narrowed(published.read(name), wanted[name], name).contiguous()
            progress.advance(x.nbytes)
            return x

        kinds = {name: (source.weight.shape, wanted[name]) for name, source in published.sources.items()}
        made = save_made(
            Target(folder, 1, when_full=partial(when_full, target)),
            Payload(0, _metadata(published, tokenizer), _files(it, dtype or published.dtype)),
            kinds,
            make,
        )
        described(made)
        publish(made, target)
    return [*told, f"Written: {target}"]


def _check_name(target: Path) -> None:
    if NAME.fullmatch(target.name) and target.name != folder_name(0):
        raise CheckpointError(
            f"{target} has the name of a checkpoint of another step, and converted weights are those of step 0. "
            f"Choose another name, or {folder_name(0)}."
        )


def _check_tokenizer(it: Foreign) -> None:
    published, tokenizer = it.published, it.known.tokenizer
    if isinstance(tokenizer, Tokenizer) and tokenizer.vocab_size > published.vocab_size:
        raise CheckpointError(
            f"The tokenizer of {it.known.folder or published.folder} has {tokenizer.vocab_size:,} ids, and the model "
            f"has rows for {published.vocab_size:,}: they do not belong together. Get both from one place."
        )


def _files(it: Foreign, dtype: torch.dtype) -> dict[str, bytes]:
    """What lies beside the tensors."""
    published = it.published
    precision = next(name for name, each in DTYPES.items() if each == dtype)
    config = stub(published.folder, published.model, precision)
    text = _HEADER.format(name=clip(published.folder.absolute().name)) + to_toml(config)
    files = {"config.toml": text.encode()}
    if isinstance(it.known.tokenizer, Tokenizer):
        files["tokenizer.json"] = it.known.tokenizer.to_json().encode()
    if it.known.config:
        files[CONFIG] = _json(dict(it.known.config))
    for name, path in it.beside.items():
        if "auto_map" not in (content := read_json(path)):
            files[name] = _json(content)
    templates = read_templates(it.templates)
    if templates:
        files[CONFIG] = _json({**json.loads(files.get(CONFIG, b"{}")), **templates})
    return files


def _json(content: dict[str, Any]) -> bytes:
    """Halves of surrogate pairs, which UTF-8 does not have, as JSON's own escapes."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _metadata(published: Published, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "step": 0,
        "samples": 0,
        "model": model_metadata(published.model, published.vocab_size),
        "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
        "labels": list(published.labels),
        "converted_from": {
            "name": published.folder.absolute().name,
            "family": published.family.title,
            **published.facts,
        },
        "versions": {"colonnade": __version__, "torch": torch.__version__},
    }


def _told(it: Foreign, num_bytes: int) -> list[str]:
    published, model, known = it.published, it.published.model, it.known.tokenizer
    parameters = sum(source.weight.size for source in published.sources.values())
    ids = known if isinstance(known, str) else f"{known.vocab_size:,} ids"
    return [
        f"{published.folder}: {published.family.title} ({published.family.architecture}), {parameters:,} parameters",
        f"  model      {counted(model.num_layers, 'layer')}, hidden {model.hidden_size}, {model.num_heads} heads, at "
        f"most {model.seq_length:,} positions, vocabulary {published.vocab_size:,}",
        f"  tokenizer  {ids}",
        f"  tensors    {len(published.sources)}, {amount(num_bytes)}",
        *(f"  left: {path} (the tokenizer beside it is another, or none)" for path in it.known.left),
        *([] if it.note is None else [f"  note: {it.note}"]),
    ]


def _listed(published: Published, wanted: dict[str, torch.dtype]) -> list[str]:
    lines = []
    for name, source in published.sources.items():
        before = str(published.dtype_of(name)).removeprefix("torch.")
        after = str(wanted[name]).removeprefix("torch.")
        change = before if before == after else f"{before} -> {after}"
        lines.append(f"  {' + '.join(source.theirs)} -> {name} {list(source.weight.shape)} {change}")
    return [*lines, "Nothing was written (--dry-run)."]
