"""Every family by the name that config.json's `model_type` gives it, and which of them a model of ours is."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from colonnade.architecture.huggingface.bert import BERT, MEGATRON_BERT
from colonnade.architecture.huggingface.bloom import BLOOM
from colonnade.architecture.huggingface.gpt2 import GPT2
from colonnade.architecture.huggingface.keys import Keys, Refused, shown
from colonnade.architecture.huggingface.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from colonnade.architecture.huggingface.neox import NEOX
from colonnade.architecture.huggingface.statement import Family
from colonnade.architecture.huggingface.t5 import T5
from colonnade.config.compare import model_metadata
from colonnade.config.model import ModelConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BERT, MEGATRON_BERT, BLOOM, NEOX, T5)}
)
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "smollm3": "every fourth of its layers has no positions, and here all layers have the same",
        "mixtral": "its MLP is a mixture of experts, and there are none here",
        "qwen3_moe": "its MLP is a mixture of experts, and there are none here",
    }
)
"""Published families that cannot be built here yet, and why."""


def model_of(content: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the [model] that a config.json describes. Refused: all that cannot be here."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        why = f": {OTHERS[kind]}" if isinstance(kind, str) and kind in OTHERS else ""
        raise Refused(
            [f"model_type = {shown(kind)} is none that can be built here{why}. Known are {', '.join(FAMILIES)}"]
        )
    family = FAMILIES[kind]
    keys = Keys(content, family.also)
    _check_whole(keys, family)
    given = family.read(keys)
    keys.finish()
    try:
        model = ModelConfig.model_validate(given)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise Refused([f"as [model], {line}" for line in lines]) from None
    return family.with_head(model.head), model


def _check_whole(keys: Keys, family: Family) -> None:
    """What any config.json may say that makes it another model."""
    if keys.get("auto_map") is not None:
        keys.refuse("auto_map: the folder brings code of its own, and code from a folder is never run")
    if keys.get("quantization_config") is not None:
        keys.refuse("quantization_config: the weights are quantized, and only plain numbers are read")
    if family.has_decoder:
        keys.fixed("is_encoder_decoder", True, why=f"a {family.title} is an encoder and a decoder here")
    else:
        keys.fixed("is_encoder_decoder", False, why="a model with an encoder and a decoder is another family")
    keys.fixed("pruned_heads", {}, why="all layers have the same heads here")
    classes = keys.get("architectures") or []
    whole = list(dict.fromkeys((family.architecture, *family.others, *family.heads.values())))
    if isinstance(classes, list) and not any(each in whole for each in classes) and classes:
        keys.refuse(f"architectures = {shown(classes)}: only {' and '.join(whole)} have all of a model's tensors")


def family_of(model: ModelConfig, vocab_size: int) -> tuple[Family, dict[str, Any]]:
    """The first family that can say all of a model, with its config.json. Refused: what the nearest one cannot say.

    Nothing is listed that a family lacks: its config.json is written and read again, and must come back as this model.
    """
    model = model.model_copy(update={"vocab_size": vocab_size})
    tried = [(list(_lost(family, model)), family) for family in FAMILIES.values()]
    lost, family = min(tried, key=lambda each: len(each[0]))
    if lost:
        lines = [f"{family.title} ({family.architecture}) is nearest, and cannot say this:", *lost]
        raise Refused(lines)
    return family.with_head(model.head), family.write(model)


def _lost(family: Family, model: ModelConfig) -> Iterator[str]:
    """What a family's config.json makes of a model that it cannot say."""
    assert model.vocab_size is not None, "set by `family_of`"
    try:
        _, back = model_of({"model_type": family.model_type, **family.write(model)})
    except Refused as refused:
        yield from refused.lines
        return
    before, after = (model_metadata(each, model.vocab_size) for each in (model, back))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"model.{key} = {shown(before.get(key))}: it would become {shown(after.get(key))}"
