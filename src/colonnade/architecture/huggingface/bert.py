"""BERT as first published (Devlin et al., 2019; figure 7a of the Megatron-LM paper), and as NVIDIA trained it (7b)."""

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from colonnade.architecture.huggingface.common import GELUS, activation, standard_deviation, their_activation
from colonnade.architecture.huggingface.keys import Keys
from colonnade.architecture.huggingface.statement import Family, Place, Second, at
from colonnade.config.model import ModelConfig

_BLOCK = "bert.encoder.layer.{i}"
_SELF = f"{_BLOCK}.attention.self"
_BOTH: Mapping[str, Place] = {
    "embedding.tokens": at("bert.embeddings.word_embeddings"),
    "embedding.positions": at("bert.embeddings.position_embeddings"),
    "embedding.types": at("bert.embeddings.token_type_embeddings"),
    "blocks.{i}.attention.qkv": at(f"{_SELF}.query", f"{_SELF}.key", f"{_SELF}.value"),
    "blocks.{i}.attention.output": at(f"{_BLOCK}.attention.output.dense"),
    "blocks.{i}.mlp.up": at(f"{_BLOCK}.intermediate.dense"),
    "blocks.{i}.mlp.down": at(f"{_BLOCK}.output.dense"),
    "head": at("cls.predictions"),
    "head.dense": at("cls.predictions.transform.dense"),
    "head.dense_norm": at("cls.predictions.transform.LayerNorm"),
    "head.output": at("cls.predictions.decoder"),
    "head.pooler": at("bert.pooler.dense"),
    "head.order": at("cls.seq_relationship"),
    "head.classifier": at("classifier"),
    "head.spans": at("qa_outputs"),
}
POST: Mapping[str, Place] = {
    **_BOTH,
    "embedding.norm": at("bert.embeddings.LayerNorm"),
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.attention.output.LayerNorm"),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.output.LayerNorm"),
}
PRE: Mapping[str, Place] = {
    **_BOTH,
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.attention.ln"),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.ln"),
    "head.norm": at("bert.encoder.ln"),
}
HEADS: Mapping[str, str] = MappingProxyType(
    {
        "classification": "ForSequenceClassification",
        "choice": "ForMultipleChoice",
        "spans": "ForQuestionAnswering",
        "none": "Model",
    }
)
"""How the names of their classes end, by model.head."""
CHOICES = 4
"""Of a folder for multiple choice that does not say, as theirs do not: RACE's and SWAG's number."""
_POOLER = tuple(f"pooler_{key}" for key in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"))


def _read(norms: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    keys.fixed("position_embedding_type", "absolute", why="positions are learned vectors here")
    keys.fixed("is_decoder", False, why="a BERT reads a text from both sides here")
    keys.fixed("add_cross_attention", False, why="a decoder with an encoder is another model")
    keys.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "directionality", "language", *_POOLER)
    return {
        "kind": "bert",
        "num_layers": keys.take("num_hidden_layers", int),
        "hidden_size": keys.take("hidden_size", int),
        "num_heads": keys.take("num_attention_heads", int),
        "ffn_hidden_size": keys.take("intermediate_size", int),
        "seq_length": keys.take("max_position_embeddings", int, 512),
        "vocab_size": keys.take("vocab_size", int),
        "token_types": keys.take("type_vocab_size", int, 2),
        "activation": activation(keys, "hidden_act", "gelu", GELUS),
        "norm_epsilon": keys.take("layer_norm_eps", float, 1e-12),
        "tie_embeddings": keys.take("tie_word_embeddings", bool, True),
        **_read_head(keys),
        **norms,
        **standard_deviation(keys),
    }


def _read_head(keys: Keys) -> dict[str, Any]:
    """Which head a folder has, by its class; how many labels, by their names or their number."""
    named = keys.get("architectures")
    classes = named if isinstance(named, list) else []
    head = next((head for head, end in HEADS.items() for each in classes if str(each).endswith(end)), None)
    names, number = keys.get("id2label"), keys.get("num_labels")
    choices = keys.take("num_choices", int, CHOICES)
    if head is None or head == "none":
        return {} if head is None else {"head": head}
    if head == "choice":
        return {"head": head, "num_labels": choices}
    if head == "spans":
        if isinstance(names, dict) and len(names) != 2:
            keys.refuse(f"id2label has {len(names)} labels: an answer has a beginning and an end, 2")
        return {"head": head}
    counted = len(names) if isinstance(names, dict) else number if type(number) is int else 2  # their default
    if counted > 1:
        keys.fixed("problem_type", "single_label_classification", why="a text has one label here")
    else:
        keys.fixed("problem_type", "regression", why="one output is a score here")
    return {"head": head, "num_labels": counted}


def _write_head(name: str, model: ModelConfig) -> dict[str, Any]:
    if model.head not in HEADS:
        return {}
    named = {"architectures": [f"{name}{HEADS[model.head]}"]}
    if model.head == "choice":
        return {**named, "num_choices": model.num_labels}
    if model.head in ("spans", "none"):
        return named
    labels = [f"LABEL_{number}" for number in range(model.num_labels or 0)]
    return {
        **named,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "regression" if len(labels) == 1 else "single_label_classification",
    }


def _write(name: str, model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn,
        "hidden_act": their_activation(model, GELUS),
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.seq_length,
        "type_vocab_size": model.token_types,
        "initializer_range": model.init_std,
        "layer_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        **_write_head(name, model),
    }


def _seconds(model: ModelConfig) -> tuple[Second, ...]:
    """Tied, the decoder's weight and bias are second names; untied, it has both, and the other bias lies idle."""
    if model.head != "pretraining":
        return ()
    if not model.tie_embeddings:
        return (Second("cls.predictions.bias", "head.bias", False, True),)
    return (
        Second("cls.predictions.decoder.weight", "embedding.tokens.weight", True, False),
        Second("cls.predictions.decoder.bias", "head.bias", True, False),
    )


def _family(model_type: str, title: str, name: str, places: Mapping[str, Place], norms: Mapping[str, Any]) -> Family:
    return Family(
        model_type=model_type,
        title=title,
        architecture=f"{name}ForPreTraining",
        others=(f"{name}ForMaskedLM", f"{name}ForNextSentencePrediction", f"{name}Model"),
        heads={"pretraining": f"{name}ForPreTraining"} | {head: f"{name}{end}" for head, end in HEADS.items()},
        base="bert.",
        places=places,
        untied_places={"head": at("cls.predictions.decoder")},
        read=partial(_read, norms),
        write=partial(_write, name),
        seconds=_seconds,
        constants=re.compile(r"bert\.embeddings\.position_ids"),
    )


BERT = _family("bert", "BERT", "Bert", POST, {"norm_position": "post", "embedding_norm": True})
MEGATRON_BERT = _family("megatron-bert", "Megatron-BERT", "MegatronBert", PRE, {"norm_position": "pre"})
