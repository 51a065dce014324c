"""A checkpoint becomes a folder that `transformers` loads as its own."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.architecture.huggingface.families import family_of
from colonnade.architecture.huggingface.keys import Refused, lines_of
from colonnade.architecture.huggingface.statement import Family, Source
from colonnade.checkpoint.manifest import Manifest, check_unchanged, verify
from colonnade.checkpoint.plan import names_in_words
from colonnade.checkpoint.whole import read_whole
from colonnade.config.numbers import amount, counted
from colonnade.config.schema import Config
from colonnade.convert.card import card
from colonnade.convert.progress import Progress
from colonnade.convert.target import check_space, check_target, publish, workspace
from colonnade.convert.to_checkpoint import BESIDE
from colonnade.data.conversation import Chat
from colonnade.data.t5_dataset import end_and_start, end_of_text
from colonnade.data.text_template import with_control_tokens, with_end
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import INDEX
from colonnade.huggingface.folder import CONFIG, GENERATION_CONFIG, START, TOKEN_IDS, ids_in, open_published
from colonnade.huggingface.order import to_theirs
from colonnade.huggingface.write import Planned, PlannedFile, Writer, index_of, plan_files
from colonnade.serving.trained import described, template_of, tokenizer_of
from colonnade.tokenizer_files import CONFIG as TOKENIZER_CONFIG
from colonnade.train.metadata import RunMetadata
from colonnade.train.published import object_of, start_of, text_of, unsaid_end
from colonnade.train.recovery import OPTIMIZER

_BEGIN, _END, _PAD = TOKEN_IDS
_SPECIAL = {
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>"),
    "mask_token": ("[MASK]",),
}
"""Names by which tokenizers of transformers know their control tokens."""


class Opened(NamedTuple):
    """A checkpoint, understood."""

    path: Path
    manifest: Manifest
    config: Config
    metadata: RunMetadata
    family: Family
    their_config: dict[str, Any]
    sources: dict[str, Source]
    tokenizer: Tokenizer | None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The narrowest that loses nothing of any weight."""
        return reduce(torch.promote_types, (self.manifest.tensors[name].dtype for name in self.sources))


def to_huggingface(
    checkpoint: Path, target: Path, *, dtype: torch.dtype | None, most_bytes: int, dry_run: bool
) -> list[str]:
    """Convert, or only look; returns what is to be told. CheckpointError where something is wrong."""
    check_target(target)
    it = _open(checkpoint)
    dtype = dtype or it.stored_dtype
    files = plan_files(list(_planned(it, dtype)), most_bytes)
    needed = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    told = _told(it, files, needed)
    if dry_run:
        return [*told, *_listed(it, dtype)]
    check_space(target, needed)
    _verify(it)
    with workspace(target) as folder:
        made = folder / "model"
        made.mkdir()
        Writer(made, files).write(_numbers(it, Progress("converted", needed), dtype))
        for name, text in _beside(it, files, dtype).items():
            (made / name).write_text(text, encoding="utf-8")
        open_published(made)
        check_unchanged(it.path, it.manifest)
        publish(made, target)
    return [*told, f"Written: {target}"]


def _open(path: Path) -> Opened:
    manifest, config, metadata = described(path)
    try:
        family, their_config = family_of(config.model, metadata.model.vocab_size)
    except Refused as refused:
        raise CheckpointError(
            f"{path} holds a model that no family of transformers known here can say. {lines_of(refused.lines).strip()}"
        ) from None
    sources = {source.ours: source for source in family.sources(config.model, metadata.model.vocab_size)}
    has_tokenizer = "tokenizer.json" in manifest.files or (path / "tokenizer.json").exists()
    tokenizer = tokenizer_of(path, manifest) if has_tokenizer else None
    return Opened(path, manifest, config, metadata, family, their_config, sources, tokenizer)


def _verify(it: Opened) -> None:
    """Every byte that is read, and the moments beside the weights: a file is damaged or it is not."""
    progress = Progress("checked", sum(file.size for file in it.manifest.files.values()))
    before = [0]

    def next_file(name: str) -> None:
        progress.advance(before[0])
        before[0] = it.manifest.files[name].size

    verify(it.path, next_file)


def _planned(it: Opened, dtype: torch.dtype) -> Iterator[Planned]:
    for source in it.sources.values():
        yield from (Planned(name, source.shape, dtype) for name in source.theirs)
        yield from (Planned(name, source.shape, dtype) for name in _written_again(it, source))


def _written_again(it: Opened, source: Source) -> list[str]:
    seconds = it.family.seconds(it.config.model)
    return [second.name for second in seconds if second.is_written and second.ours == source.ours]


def _numbers(it: Opened, progress: Progress, dtype: torch.dtype) -> Iterator[Tensor]:
    """In the order of `_planned`; nothing is held that has been taken."""
    for name, source in it.sources.items():
        parts = to_theirs(source, read_whole(it.path, it.manifest, name), it.config.model.head_width)
        parts += parts[:1] * len(_written_again(it, source))
        while parts:
            part = parts.pop(0)
            progress.advance(part.numel() * dtype.itemsize)
            yield part
            del part


def _beside(it: Opened, files: list[PlannedFile], dtype: torch.dtype) -> dict[str, str]:
    """Every other file of the folder."""
    kind = str(dtype).removeprefix("torch.")
    ids = _ids(it)
    config = {"architectures": [it.family.architecture], "model_type": it.family.model_type, "torch_dtype": kind}
    first = start_of(it.manifest, it.metadata.model.vocab_size)
    start = {START: ids[_PAD] if first is None else first} if it.family.has_decoder else {}
    texts = {CONFIG: _json(config | it.their_config | _labels(it) | ids | start)}
    if it.tokenizer is not None:
        texts["tokenizer.json"] = _tokenizer_json(it, it.tokenizer)
        texts[TOKENIZER_CONFIG] = _json(_tokenizer_config(it, it.tokenizer, ids))
    if it.config.model.is_causal or it.family.has_decoder:
        texts[GENERATION_CONFIG] = _json(_generation(it, ids | start))
    for name in BESIDE:
        if name in it.manifest.files:
            text = text_of(it.path, it.manifest, name)
            if name == TOKENIZER_CONFIG and name in texts:
                kept = object_of(it.path, it.manifest, name)
                text = text if "tokenizer_class" in kept else _json(_with_template(json.loads(texts[name]), kept))
            texts[name] = text
    index = index_of(files)
    if index is not None:
        texts[INDEX] = index
    texts["README.md"] = card(it.config, it.metadata, it.manifest, it.family, kind, texts)
    return texts


def _labels(it: Opened) -> dict[str, Any]:
    """The names of a classifier's labels, where they are known."""
    names = it.metadata.labels
    if it.config.model.head != "classification" or len(names) != it.config.model.num_labels:
        return {}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _ids(it: Opened) -> dict[str, Any]:
    """Control tokens, all of them said: what is left out has a default that is an id of another vocabulary."""
    came = it.manifest.metadata.get("converted_from")
    if isinstance(came, dict):
        return {key: came[key] if ids_in(came.get(key)) else None for key in TOKEN_IDS}
    end = None if it.tokenizer is None else it.tokenizer.end_of_document
    pad = None if it.tokenizer is None or it.config.model.is_causal else it.tokenizer.id_of("[PAD]")
    if it.tokenizer is not None and it.family.has_decoder:
        end, pad = end_and_start(it.tokenizer)
    begin, published, ends = end, it.metadata.published, _ends(it, end)
    if published is not None:
        begin = published.begin
        pad = published.pad if pad is None else pad
    return {_BEGIN: begin, _END: ends if len(ends) > 1 else next(iter(ends), None), _PAD: pad}


def _ends(it: Opened, end: int | None) -> list[int]:
    """What ends a text: as was published with the weights that the run began from, then what ended its documents, then
    what ends an answer.
    """
    published, turn = it.metadata.published, None
    if it.tokenizer is not None and it.config.model.is_causal and (template := template_of(it.path, it.manifest)):
        turn = Chat(template, it.tokenizer).end_of_turn
    found = (*(() if published is None else published.ends), end, turn)
    return list(dict.fromkeys(each for each in found if each is not None))


def _generation(it: Opened, ids: dict[str, Any]) -> dict[str, Any]:
    """How text is sampled, as it was published with the weights that the run began from."""
    published = it.metadata.published
    return {**published.sampling, **ids} if published and published.sampling else {"_from_model_config": True, **ids}


def _with_template(ours: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """A run's own tokenizer_config.json has a chat template, and the tokens that it may write. Another that it names
    wrote nothing in training, and is left out.
    """
    named = set(re.findall(r"\w+_token\b", str(kept.get("chat_template"))))
    return {**{key: value for key, value in ours.items() if key not in named}, **kept}


def _tokenizer_json(it: Opened, tokenizer: Tokenizer) -> str:
    """With what the model was trained to read around a text."""
    if it.family.has_decoder:
        return with_end(tokenizer)
    return tokenizer.published() if it.config.model.is_causal else with_control_tokens(tokenizer)


def _tokenizer_config(it: Opened, tokenizer: Tokenizer, ids: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": it.config.model.seq_length,
    }
    content["clean_up_tokenization_spaces"] = False
    end = end_of_text(tokenizer) if it.family.has_decoder else tokenizer.end_of_document
    numbers, published = {"bos_token": end, "eos_token": end}, it.metadata.published
    if published is not None:
        numbers = {"bos_token": ids[_BEGIN], "eos_token": next(iter(published.ends), end), "pad_token": ids[_PAD]}
    for key, number in numbers.items():
        if number is not None and number < len(tokenizer.names):  # the model may have more tokens than its tokenizer
            content[key] = tokenizer.names[number]
    if it.config.model.kind == "bert":
        content["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    for key, names in _SPECIAL.items():
        found = next((name for name in names if tokenizer.id_of(name) is not None), None)
        content = content if found is None else {key: found, **content}
    return content


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _told(it: Opened, files: list[PlannedFile], num_bytes: int) -> list[str]:
    parameters = sum(source.weight.size for source in it.sources.values())
    number = sum(len(file.tensors) for file in files)
    known = "none in the checkpoint" if it.tokenizer is None else f"{it.tokenizer.vocab_size:,} ids"
    note = None if it.tokenizer is None else unsaid_end(it.tokenizer, it.path, it.manifest)
    return [
        f"{it.path}: step {it.metadata.step:,} of a {it.config.model.kind}, {parameters:,} parameters",
        f"  becomes    {it.family.title} ({it.family.architecture})",
        f"  tokenizer  {known}",
        f"  tensors    {number}, {amount(num_bytes)} in {counted(len(files), 'file')}",
        *([] if note is None else [note]),
    ]


def _listed(it: Opened, dtype: torch.dtype) -> list[str]:
    after = str(dtype).removeprefix("torch.")
    lines = []
    for name, source in it.sources.items():
        before = str(it.manifest.tensors[name].dtype).removeprefix("torch.")
        change = before if before == after else f"{before} -> {after}"
        lines.append(f"  {name} -> {' + '.join(source.theirs)} {list(source.shape)} {change}")
    left = it.manifest.tensors.keys() - it.sources.keys()
    moments = {name for name in left if name.startswith(OPTIMIZER)}
    if moments:
        lines.append(f"  left: {counted(len(moments), 'tensor')} of the optimizer")
    if left - moments:
        lines.append(f"  left: {names_in_words(left - moments)}")
    return [*lines, "Nothing was written (--dry-run)."]
