"""Small models of every family, as others publish them: odd sizes, random weights that no two tensors share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCAB = 61
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    **NO_IDS,
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 4, **NO_IDS}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", {**GPT2, "n_inner": 50}),
    "gpt2, untied, exact gelu": (
        "GPT2LMHead",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "layer_norm_epsilon": 1e-6},
    ),
    "gpt2, relu": ("GPT2LMHead", {**GPT2, "activation_function": "relu"}),
    "llama": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama, grouped, tied, biases": (
        "LlamaForCausalLM",
        {**LLAMA, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, for three ranks": ("LlamaForCausalLM", {**LLAMA, "intermediate_size": 51, "num_key_value_heads": 3}),
    "smollm": (
        "LlamaForCausalLM",
        {**LLAMA, "num_key_value_heads": 3, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "mistral": ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 4, "head_dim": 10}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2, wide heads": ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2, "head_dim": 10}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "num_key_value_heads": 3, "head_dim": 10}),
    "qwen3, windows": (
        "Qwen3ForCausalLM",
        {
            **LLAMA,
            "num_key_value_heads": 6,
            "head_dim": 6,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    ),
    "bert": ("BertForPreTraining", LLAMA),
    "bert, untied": ("BertForPreTraining", {**LLAMA, "tie_word_embeddings": False, "type_vocab_size": 3}),
    "megatron-bert": ("MegatronBertForPreTraining", {**LLAMA, "hidden_act": "gelu_new"}),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": 24, "n_layer": 3, "n_head": 6, **NO_IDS}),
    "neox": ("GPTNeoXForCausalLM", {**LLAMA, "use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "relu"}),
    "pythia": ("GPTNeoXForCausalLM", {**LLAMA, "hidden_size": 48, "rotary_pct": 0.25}),
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 50,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 6,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 21,
}
MODELS |= {
    "t5": ("T5ForConditionalGeneration", {**T5, "tie_word_embeddings": True}),
    "t5, gated, untied": (
        "T5ForConditionalGeneration",
        {**T5, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
IDLE = {"cls.predictions.bias"}
"""What a model of theirs has and never reads."""


def classes(name: str) -> tuple[Any, Any]:
    """The model's class and its configuration's."""
    model = MODELS[name][0].removesuffix("Model").replace("GPT2LMHead", "GPT2LMHeadModel")
    for ending in ("LMHeadModel", "ForCausalLM", "ForPreTraining", "ForConditionalGeneration"):
        if model.endswith(ending):
            return getattr(transformers, model), getattr(transformers, model.removesuffix(ending) + "Config")
    raise AssertionError(model)


def random_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of `MODELS`, every number of which is random."""
    model_class, config_class = classes(name)
    model = model_class(config_class(**MODELS[name][1]))
    if name == "t5, gated, untied":  # their class ties it whatever is said; published files of version 1.1 have both
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 2 else 0.2)
        parameter.data = drawn + (parameter.ndim == 1)
    return model.to(dtype).eval()


def saved(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, size: str = "5GB") -> Any:
    """The model, which `transformers` has written into a folder."""
    model = random_model(name, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    return model


def tokenizer() -> tokenizers.Tokenizer:
    """Of words: as many as the models have rows."""
    words = {"[UNK]": 0, "<|endoftext|>": 1, **{f"w{number}": number for number in range(2, VOCAB)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|endoftext|>", "[UNK]"])
    return made


@contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What transformers says within the block, through either of its ways."""
    said: list[str] = []
    logger = transformers.utils.logging.get_logger("transformers")
    before, propagates = transformers.utils.logging.get_verbosity(), logger.propagate
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_propagation()
    caplog.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(each.message) for each in caught] + [record.getMessage() for record in caplog.records]
    finally:
        transformers.utils.logging.set_verbosity(before)
        logger.propagate = propagates


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x for name, x in model.state_dict().items() if name not in IDLE}
