"""Two configurations of one run folder: what differs, and whether the run may go on."""

from collections.abc import Iterable, Mapping
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from colonnade.config.describe import all_keys, as_toml
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config
from colonnade.errors import hidden

# A preset is only a name for its values, which are compared themselves.
NOT_COMPARED = frozenset({"model.preset"})

COMPUTED: Mapping[str, str] = MappingProxyType(
    {
        "model.num_decoder_layers": "model.decoder_layers",
        "model.decoder_seq_length": "model.decoder_length",
        "model.ffn_hidden_size": "model.ffn",
        "model.num_key_value_heads": "model.key_value_heads",
        "model.head_dim": "model.head_width",
        "model.query_key_value_bias": "model.has_query_key_value_bias",
        "optim.min_learning_rate": "optim.floor",
        "optim.warmup_steps": "optim.warmup",
    }
)
"""Keys that may be unset, and where their value is then found."""

TOKEN_FILES = frozenset({"data.train", "data.validation", "data.test", "data.blend"})
"""Keys that name token files. Where these lie may change: a checkpoint knows their content."""
FILES = TOKEN_FILES | {"data.tokenizer", "train.init_from", "distillation.teacher"}
ENTRIES = 8
"""So many of a table's are told at most."""


def may_change_on_resume(key: str) -> bool:
    """Whether a run may go on with another value of `section.key`."""
    return all_keys()[key].may_change


def difference(before: Config, after: Config, *, only_what_forbids_resume: bool = False) -> list[str]:
    """A line for each key that differs, 'train.steps: 100 -> 200'; all of them, or those that make it another run."""
    if not only_what_forbids_resume:
        return _lines(before, after, [key for key in all_keys() if _shown(before, key) != _shown(after, key)])
    fixed = [key for key in all_keys() if not may_change_on_resume(key)]
    if _decays_to_its_end(before) and _decays_to_its_end(after):
        fixed.remove("optim.decay_steps")  # a longer run has a longer curve; whoever resumes is told
    return _lines(before, after, [key for key in fixed if meaning_at(before, key) != meaning_at(after, key)])


def model_metadata(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """What makes a model this model: where it is equal, tensors have the same names, shapes and meaning."""
    keys = [name.removeprefix("model.") for name, key in all_keys().items() if key.is_the_model]
    metadata = {key: attrgetter(key)(model) for key in keys}
    usual = {  # written as unset, as in checkpoints that are older than these keys
        **({"num_key_value_heads": None} if model.key_value_heads == model.num_heads else {}),
        **({"query_key_value_bias": None} if model.has_query_key_value_bias == model.bias else {}),
        **({"head_dim": None} if model.head_width * model.num_heads == model.hidden_size else {}),
    }
    head = "pretraining" if model.head == "preferences" else model.head  # the weights of a language model
    return _usual_decoder({**metadata, **usual, "head": head, "ffn_hidden_size": model.ffn, "vocab_size": vocab_size})


def before_it_was_saved() -> dict[str, Any]:
    """What `model_metadata` would have said of models of checkpoints that are older than some of its keys."""
    since = {name: key.since for name, key in all_keys().items() if key.is_the_model}
    return {name.removeprefix("model."): each.before for name, each in since.items() if each is not None}


def as_now(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's metadata says of its model, as `model_metadata` would say it now."""
    return _usual_decoder({**before_it_was_saved(), **saved})


def _usual_decoder(metadata: dict[str, Any]) -> dict[str, Any]:
    """With None where a decoder has as many layers as the encoder."""
    usual = metadata.get("num_decoder_layers") == metadata.get("num_layers")
    return {**metadata, "num_decoder_layers": None} if usual else metadata


def _decays_to_its_end(config: Config) -> bool:
    return config.optim.decay_end(config.train.steps) == config.train.steps


def moved_files(before: Config, after: Config) -> list[str]:
    """A line for each key that names other token files than before."""
    return _lines(before, after, [key for key in sorted(TOKEN_FILES) if _shown(before, key) != _shown(after, key)])


def _shown(config: Config, key: str) -> str:
    """A value as it is stored and shown."""
    return as_toml(_to_show(config, key))


def _to_show(config: Config, key: str) -> Any:
    return hidden(value_at(config, key))


def _lines(before: Config, after: Config, keys: Iterable[str]) -> list[str]:
    told = [(key, _to_show(before, key), _to_show(after, key)) for key in keys if key not in NOT_COMPARED]
    return [f"{key}: {_beside(one, other)} -> {_beside(other, one)}" for key, one, other in told]


def _beside(value: Any, other: Any) -> str:
    """As it is stored; of a long table entries that the other one has not, if there are such."""
    if not isinstance(value, dict) or len(value) <= ENTRIES:
        return as_toml(value)
    known = other.items() if isinstance(other, dict) else ()
    differing = {name: each for name, each in value.items() if (name, each) not in known}
    told = dict(islice((differing or value).items(), ENTRIES))
    return f"{as_toml(told).removesuffix('}')}, … {len(value) - len(told):,} more}}"


def meaning_at(config: Config, key: str) -> object:
    """As `value_at`, without the names of files: whether there is one, and of data.blend its numbers in their order.

    The same content may lie under other paths; whoever compares meanings compares contents too.
    """
    value = value_at(config, key)
    if key == "data.blend" and isinstance(value, dict):
        return list(value.values())
    return "a file" if key in FILES and value is not None else value


def value_at(config: Config, key: str) -> object:
    """The value of `section.key`; where it is unset and computed from others, the computed value."""
    if key == "optim.decay_steps":
        is_of_steps = config.optim.decay != "constant" and config.optim.decay_tokens is None
        return config.optim.decay_end(config.train.steps) if is_of_steps else None
    return attrgetter(COMPUTED.get(key, key))(config)
