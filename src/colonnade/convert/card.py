"""The model card of a converted checkpoint: README.md, with what is known of the run, and nothing that is not."""

from collections.abc import Collection
from pathlib import Path

from colonnade import __version__
from colonnade.architecture.families import architecture_of
from colonnade.architecture.huggingface.statement import Family
from colonnade.checkpoint.manifest import Manifest
from colonnade.checkpoint.schema import clip
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.errors import without_credentials
from colonnade.train.metadata import RunMetadata


def card(
    config: Config, metadata: RunMetadata, manifest: Manifest, family: Family, dtype: str, files: Collection[str]
) -> str:
    """Markdown, with the header that the hub reads."""
    came = manifest.metadata.get("converted_from")
    name = clip(Path(config.run.folder).name)
    head = ["---", "library_name: transformers", "tags:", "- colonnade", f"- {family.model_type}", "---", ""]
    if isinstance(came, dict):
        name = clip(str(came.get("name", "?")))
        history = [f"Converted from `{name}` ({family.title}) without training in between."]
    else:
        history = _history(config, metadata, name, manifest.metadata.get("merged_from"))
    model = config.model
    parameters = architecture_of(model, metadata.model.vocab_size).num_parameters
    lines = [
        *head,
        f"# {name}",
        "",
        *history,
        "",
        "| | |",
        "|---|---|",
        f"| class | `{family.architecture}` |",
        f"| parameters | {parameters:,} |",
        f"| shape | {counted(model.num_layers, 'layer')}, hidden {model.hidden_size}, {model.num_heads} heads |",
        f"| positions | {model.seq_length:,} ({model.position}) |",
        f"| vocabulary | {metadata.model.vocab_size:,} |",
        f"| number format | {dtype} |",
        f"| written by | Colonnade {__version__}, `colonnade convert` |",
        "",
        *_use(family, model.is_causal, "tokenizer.json" in files),
        "",
        "License, intended use and limits are for its makers to add.",
        "",
    ]
    return "\n".join(lines)


def _history(config: Config, metadata: RunMetadata, name: str, merged: object = None) -> list[str]:
    """What the checkpoint knows of its run; `merged`: of that of its adapters, which a merge was made of."""
    step, samples = _reached(metadata, merged)
    of_samples = (
        "" if samples is None else f": {samples:,} samples, up to {samples * config.model.sample_length:,} tokens"
    )
    optimizer = f"{config.optim.name}, learning rate {config.optim.learning_rate:g}, {config.optim.decay} decay"
    lines = [
        f"Trained by the run `{name}` with Colonnade, step {step:,} of {config.train.steps:,}{of_samples}.",
        "",
        f"- optimizer: {optimizer}, {config.train.global_batch_size:,} samples a step, computed in "
        f"{config.train.precision}",
    ]
    data = config.data.blend or ([config.data.train] if config.data.train else [])
    if data:
        names = ", ".join(f"`{clip(Path(without_credentials(each)).name)}`" for each in data)
        lines.append(f"- token files: {names}")
    return lines


def _reached(metadata: RunMetadata, merged: object) -> tuple[int, int | None]:
    """Step and samples; None: nobody wrote them down."""
    if not isinstance(merged, dict):
        return metadata.step, metadata.samples
    step, samples = (
        each if type(each := merged.get(key)) is int and each >= 0 else None for key in ("step", "samples")
    )
    return metadata.step if step is None else step, samples


def _use(family: Family, is_causal: bool, has_tokenizer: bool) -> list[str]:
    known = is_causal and has_tokenizer
    imported = f"{family.architecture}, AutoTokenizer" if known else family.architecture
    lines = ["```python", f"from transformers import {imported}", ""]
    lines.append(f'model = {family.architecture}.from_pretrained("this folder")')
    if known:
        lines.append('tokenizer = AutoTokenizer.from_pretrained("this folder")')
    return [*lines, "```"]
