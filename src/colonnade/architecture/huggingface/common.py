"""What several families have in common in config.json: activations, rotary positions, widths."""

from collections.abc import Mapping
from typing import Any

from colonnade.architecture.huggingface.keys import Keys, shown
from colonnade.config.model import ModelConfig, RotaryConfig

GELUS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
UNGATED: Mapping[str, str] = {**GELUS, "relu": "relu"}
GATES: Mapping[str, str] = {"silu": "swiglu", "swish": "swiglu"}
_THEIRS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "swiglu": "silu", "relu": "relu", "geglu_tanh": "gelu_new"}
_WHOLE_HEADS = "rotary positions of this family turn whole heads here"
_FIXED_LENGTH = ("yarn", "llama3")


def activation(keys: Keys, name: str, default: str, known: Mapping[str, str]) -> str:
    """Ours for the activation that a key names."""
    theirs = keys.take(name, str, default)
    if theirs not in known:
        keys.refuse(f"{name} = {shown(theirs)}: this family can have {', '.join(known)} here")
    return known.get(theirs, next(iter(known.values())))


def their_activation(model: ModelConfig, known: Mapping[str, str]) -> str:
    """The name of a model's activation, or the first that is `known`, where the family cannot have it."""
    theirs = _THEIRS[model.activation]
    return theirs if theirs in known else next(iter(known))


def standard_deviation(keys: Keys) -> dict[str, Any]:
    """[standard deviation] Of initial weights, for who draws some."""
    std = keys.take("initializer_range", float, 0.02)
    return {"init_std": std} if std > 0 else {}


def rotary(keys: Keys, length: int, default_base: float = 10_000.0, *, share: float | None = None) -> dict[str, Any]:
    """[model.rotary] from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before).
    `share`: of a head, where the family may turn less than all of it; `partial_rotary_factor` takes precedence.
    """
    base = keys.take("rope_theta", float, default_base)
    scaling, parameters = keys.take("rope_scaling", dict, None), keys.take("rope_parameters", dict, None)
    inner = Keys({"rope_theta": base} | (scaling or parameters or {}), {"rope_type": "type"})
    kind = inner.take("rope_type", str, "default")
    found: dict[str, Any] = {"base": inner.take("rope_theta", float)}
    if share is None:
        for each in (keys, inner):
            each.fixed("partial_rotary_factor", 1.0, 1, why=_WHOLE_HEADS)
    else:
        outside = keys.take("partial_rotary_factor", float, share)
        found["share"] = inner.take("partial_rotary_factor", float, outside)
    if kind not in ("default", "linear", "yarn", "llama3"):
        keys.refuse(f"rope_type = {shown(kind)}: rotary positions are scaled as default, linear, yarn or llama3 here")
        return found
    if kind != "default":
        found |= {"scaling": kind, "factor": inner.take("factor", float)}
    if kind in _FIXED_LENGTH:
        length_outside = keys.take("original_max_position_embeddings", int, None)
        written = inner.take("original_max_position_embeddings", int, length)
        found["original_length"] = written if length_outside is None else length_outside
    if kind == "llama3":
        found["low_frequency_factor"] = inner.take("low_freq_factor", float)
        found["high_frequency_factor"] = inner.take("high_freq_factor", float)
    if kind == "yarn":
        found["beta_fast"] = inner.take("beta_fast", float, 32.0)
        found["beta_slow"] = inner.take("beta_slow", float, 1.0)
        inner.fixed("truncate", True, why="the ramp's ends are whole planes here")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            inner.fixed(name, why="attention is as sharp as YaRN's paper says here: 0.1 · ln(factor) + 1")
    keys.take_problems(inner, "rope_parameters" if scaling is None else "rope_scaling")
    return found


def their_rotary(rotary: RotaryConfig) -> dict[str, Any]:
    """`rope_parameters`, of which versions before 5 of transformers read the two others."""
    found: dict[str, Any] = {"rope_theta": rotary.base}
    scaling: dict[str, Any] = {"rope_type": "default" if rotary.scaling == "none" else rotary.scaling}
    if rotary.scaling != "none":
        scaling["factor"] = rotary.factor
    if rotary.scaling in _FIXED_LENGTH:
        scaling["original_max_position_embeddings"] = rotary.original_length
    if rotary.scaling == "llama3":
        scaling["low_freq_factor"] = rotary.low_frequency_factor
        scaling["high_freq_factor"] = rotary.high_frequency_factor
    if rotary.scaling == "yarn":
        scaling |= {"beta_fast": rotary.beta_fast, "beta_slow": rotary.beta_slow}
    before = {} if rotary.scaling == "none" else {"rope_scaling": scaling}
    return {**found, "rope_parameters": {**found, **scaling}, **before}
