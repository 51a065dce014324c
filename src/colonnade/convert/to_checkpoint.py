"""Weights of others become a checkpoint that any layout loads."""

import json
from pathlib import Path
from typing import Any

import torch

from colonnade import __version__
from colonnade.checkpoint.names import NAME, folder_name
from colonnade.checkpoint.save import Payload, Target, save_made
from colonnade.checkpoint.schema import clip
from colonnade.config.compare import model_metadata
from colonnade.config.load import to_toml
from colonnade.config.numbers import amount
from colonnade.convert.progress import Progress
from colonnade.convert.target import WHEN_FULL, check_space, check_target, publish, workspace
from colonnade.data.chat_template import JINJA
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.tokenizer_config import read_text
from colonnade.errors import CheckpointError, DataError
from colonnade.huggingface.files import read_json
from colonnade.huggingface.folder import Published, stub
from colonnade.huggingface.write import narrowed
from colonnade.model.precision import DTYPES
from colonnade.serving.trained import described
from colonnade.tokenizer_files import CONFIG, NAMES

BESIDE = (CONFIG, NAMES, "generation_config.json")
"""Files of theirs that are kept for the way back."""
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")
_HEADER = """\
# Made by `colonnade convert` from {name}: [model] and train.precision are those of the weights. The other
# sections are there because a configuration has them, and say nothing of how the weights were trained.

"""


def check_new(target: Path) -> None:
    """CheckpointError if there is something already, or the name is not that of converted weights."""
    check_target(target)
    _check_name(target)


def to_checkpoint(
    published: Published, known: Tokenizer | str, target: Path, *, dtype: torch.dtype | None, dry_run: bool
) -> list[str]:
    """Convert, or only look; returns what is to be told. `known`: the tokenizer, or in words why there is none.
    CheckpointError where something is wrong.
    """
    tokenizer = known if isinstance(known, Tokenizer) else None
    _check_tokenizer(published, tokenizer)
    wanted = {name: dtype or published.dtype_of(name) for name in published.sources}
    needed = sum(published.sources[name].weight.size * kind.itemsize for name, kind in wanted.items())
    told = _told(published, known, needed)
    if dry_run:
        return [*told, *_listed(published, wanted)]
    check_space(target, needed)
    published.check_seconds()
    with workspace(target) as folder:
        progress = Progress("converted", needed)

        def make(name: str) -> torch.Tensor:
            x = narrowed(published.read(name), wanted[name], name).contiguous()
            progress.advance(x.nbytes)
            return x

        kinds = {name: (source.weight.shape, wanted[name]) for name, source in published.sources.items()}
        made = save_made(
            Target(folder, 1, when_full=WHEN_FULL),
            Payload(0, _metadata(published, tokenizer), _files(published, tokenizer, dtype or published.dtype)),
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


def tokenizer_at(path: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where there is none. CheckpointError if it cannot be read."""
    if not any((path / name).exists() for name in _TOKENIZERS) and not any(path.glob("*.model")):
        return None
    try:
        return Tokenizer.load(path)
    except DataError as error:
        raise CheckpointError(
            f"The tokenizer of {path} cannot be read: {error} Or remove its files to convert the weights alone."
        ) from None


def _check_tokenizer(published: Published, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.vocab_size > published.vocab_size:
        raise CheckpointError(
            f"The tokenizer of {published.folder} has {tokenizer.vocab_size:,} ids, and the model has rows for "
            f"{published.vocab_size:,}: they do not belong together. Get both from one place."
        )


def _files(published: Published, tokenizer: Tokenizer | None, dtype: torch.dtype) -> dict[str, bytes]:
    """What lies beside the tensors."""
    precision = next(name for name, each in DTYPES.items() if each == dtype)
    config = stub(published.folder, published.model, precision)
    text = _HEADER.format(name=clip(published.folder.absolute().name)) + to_toml(config)
    files = {"config.toml": text.encode()}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_json().encode()
    for name in BESIDE if published.folder.is_dir() else ():
        path = published.folder / name
        if path.exists() and "auto_map" not in (content := read_json(path)):
            files[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    template = published.folder / JINJA  # where newer folders have it
    if template.is_file():
        files.setdefault(CONFIG, b"{}")
        content = {**json.loads(files[CONFIG]), "chat_template": read_text(template)}
        files[CONFIG] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return files


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


def _told(published: Published, known: Tokenizer | str, num_bytes: int) -> list[str]:
    model = published.model
    parameters = sum(source.weight.size for source in published.sources.values())
    ids = known if isinstance(known, str) else f"{known.vocab_size:,} ids"
    return [
        f"{published.folder}: {published.family.title} ({published.family.architecture}), {parameters:,} parameters",
        f"  model      {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, at most "
        f"{model.seq_length:,} positions, vocabulary {published.vocab_size:,}",
        f"  tokenizer  {ids}",
        f"  tensors    {len(published.sources)}, {amount(num_bytes)}",
    ]


def _listed(published: Published, wanted: dict[str, torch.dtype]) -> list[str]:
    lines = []
    for name, source in published.sources.items():
        before = str(published.dtype_of(name)).removeprefix("torch.")
        after = str(wanted[name]).removeprefix("torch.")
        change = before if before == after else f"{before} -> {after}"
        lines.append(f"  {' + '.join(source.theirs)} -> {name} {list(source.weight.shape)} {change}")
    return [*lines, "Nothing was written (--dry-run)."]
