"""Published shapes, by name: what `model.preset` stands for.

Sources: GPT-2 (124M and 355M are the published weights' shapes); "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism" (arXiv 1909.08053), the table of weak scaling; Turing-NLG (Microsoft, 2020);
"BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" (arXiv 2211.05100); "Llama 2" (arXiv 2307.09288);
"The Llama 3 Herd of Models" (arXiv 2407.21783); "Pythia" (arXiv 2304.01373);
the published configurations of SmolLM, Qwen 2.5 and Qwen 3; "BERT: Pre-training
of Deep Bidirectional Transformers for Language Understanding" (arXiv 1810.04805) and its small relatives ("Well-Read
Students Learn Better", arXiv 1908.08962); "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (arXiv 1910.10683) and the published configurations of T5 1.1.

The paper has two shapes of 8.3B parameters: 32 heads in the scaling study, 24 heads in the model that was trained and
evaluated. `gpt2-8.3b` is the trained one; add `num_heads = 32` for the scaling study. The paper's 2.5B is the same in
both. A preset is a shape, so it holds no dropout and no rate: those are the run's.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Shape = Mapping[str, Any]

GPT2_VOCABULARY = 50_257
BERT_VOCABULARY = 30_522
T5_VOCABULARY = 32_128  # 32,000 pieces, 100 sentinels, and rows up to a multiple of 128
T5: Mapping[str, Any] = MappingProxyType(
    {
        "position": "relative",
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "bias": False,
        "activation": "relu",
        "init_std": 1.0,
    }
)
"""What keys are that are unset with model.kind = "t5"."""


def _shape(num_layers: int, hidden_size: int, num_heads: int, activation: str = "gelu") -> Shape:
    return MappingProxyType(
        {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "seq_length": 1024,
            "vocab_size": GPT2_VOCABULARY,
            "activation": activation,
        }
    )


def _llama(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_key_value_heads: int,
    ffn_hidden_size: int,
    *,
    seq_length: int,
    vocab_size: int,
    base: float,
    **more: Any,
) -> Shape:
    """The LLaMA block (Touvron et al., 2023), with what a family does otherwise in `more`."""
    return MappingProxyType(
        {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_key_value_heads": num_key_value_heads,
            "ffn_hidden_size": ffn_hidden_size,
            "seq_length": seq_length,
            "vocab_size": vocab_size,
            "position": "rotary",
            "norm": "rmsnorm",
            "activation": "swiglu",
            "bias": False,
            "tie_embeddings": False,
            **more,
            "rotary": {"base": base, **more.get("rotary", {})},
        }
    )


def _neox(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int = 50_304) -> Shape:
    """GPT-NeoX (Black et al., 2022) as Pythia has it; its vocabulary is counted with the padding of its training."""
    return MappingProxyType(
        {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "seq_length": 2048,
            "vocab_size": vocab_size,
            "position": "rotary",
            "rotary": {"share": 0.25},
            "parallel_residual": True,
            "tie_embeddings": False,
        }
    )


def _bert(num_layers: int, hidden_size: int, num_heads: int, **more: Any) -> Shape:
    """As trained with Megatron-LM: figure 7b."""
    return MappingProxyType(
        {
            "kind": "bert",
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "seq_length": 512,
            "vocab_size": BERT_VOCABULARY,
            **more,
        }
    )


def _t5(num_layers: int, hidden_size: int, num_heads: int, head_dim: int, ffn_hidden_size: int, **more: Any) -> Shape:
    """As published first: ReLU, and an output layer that is the token table."""
    return MappingProxyType(
        {
            "kind": "t5",
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "ffn_hidden_size": ffn_hidden_size,
            "seq_length": 512,
            "vocab_size": T5_VOCABULARY,
            **more,
        }
    )


T5_1_1: Mapping[str, Any] = {"activation": "geglu_tanh", "tie_embeddings": False}
"""T5 version 1.1 (Shazeer: "GLU Variants Improve Transformer", 2020)."""
PUBLISHED_BERT: Mapping[str, Any] = {"norm_position": "post", "embedding_norm": True, "norm_epsilon": 1e-12}
"""As first published (Devlin et al., 2019): figure 7a."""
LLAMA2: Mapping[str, Any] = {"seq_length": 4096, "vocab_size": 32_000, "base": 10_000.0}
LLAMA3: Mapping[str, Any] = {"seq_length": 8192, "vocab_size": 128_256, "base": 500_000.0}
SMOLLM: Mapping[str, Any] = {"seq_length": 2048, "vocab_size": 49_152, "base": 10_000.0, "tie_embeddings": True}
QWEN2: Mapping[str, Any] = {
    "seq_length": 32_768,
    "vocab_size": 151_936,
    "base": 1_000_000.0,
    "query_key_value_bias": True,
    "norm_epsilon": 1e-6,
}
QWEN3: Mapping[str, Any] = {
    "seq_length": 40_960,
    "vocab_size": 151_936,
    "base": 1_000_000.0,
    "head_dim": 128,
    "query_key_norm": True,
    "norm_epsilon": 1e-6,
}


def _scaled(factor: float) -> dict[str, Any]:
    """LLaMA 3.1's longer context."""
    return {"rotary": {"scaling": "llama3", "factor": factor, "original_length": 8192}}


PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        # 2 layers of 64: trains in seconds on one core. Its vocabulary is the tokenizer's.
        "tiny": MappingProxyType({"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 256}),
        "gpt2-124m": _shape(12, 768, 12, "gelu_tanh"),
        "gpt2-355m": _shape(24, 1024, 16, "gelu_tanh"),
        "gpt2-1.2b": _shape(40, 1536, 16),
        "gpt2-2.5b": _shape(54, 1920, 20),
        "gpt2-4.2b": _shape(64, 2304, 24),
        "gpt2-8.3b": _shape(72, 3072, 24),
        "turing-nlg-17b": _shape(78, 4256, 28),
        "bloom-176b": MappingProxyType(
            {
                "num_layers": 70,
                "hidden_size": 14336,
                "num_heads": 112,
                "seq_length": 2048,
                "vocab_size": 250_880,
                "activation": "gelu_tanh",
                "position": "alibi",
                "embedding_norm": True,
            }
        ),
        "bert-tiny": _bert(2, 128, 2, **PUBLISHED_BERT),
        "bert-base": _bert(12, 768, 12, **PUBLISHED_BERT),
        "bert-large": _bert(24, 1024, 16, **PUBLISHED_BERT),
        "bert-336m": _bert(24, 1024, 16),
        "bert-1.3b": _bert(24, 2048, 32),
        "bert-3.9b": _bert(48, 2560, 40),
        "t5-small": _t5(6, 512, 8, 64, 2048),
        "t5-base": _t5(12, 768, 12, 64, 3072),
        "t5-large": _t5(24, 1024, 16, 64, 4096),
        "t5-3b": _t5(24, 1024, 32, 128, 16_384),
        "t5-11b": _t5(24, 1024, 128, 128, 65_536),
        "t5-v1.1-small": _t5(8, 512, 6, 64, 1024, **T5_1_1),
        "t5-v1.1-base": _t5(12, 768, 12, 64, 2048, **T5_1_1),
        "t5-v1.1-large": _t5(24, 1024, 16, 64, 2816, **T5_1_1),
        "t5-v1.1-xl": _t5(24, 2048, 32, 64, 5120, **T5_1_1),
        "t5-v1.1-xxl": _t5(24, 4096, 64, 64, 10_240, **T5_1_1),
        "llama2-7b": _llama(32, 4096, 32, 32, 11_008, **LLAMA2),
        "llama2-13b": _llama(40, 5120, 40, 40, 13_824, **LLAMA2),
        "llama2-70b": _llama(80, 8192, 64, 8, 28_672, **LLAMA2),
        "llama3-8b": _llama(32, 4096, 32, 8, 14_336, **LLAMA3),
        "llama3-70b": _llama(80, 8192, 64, 8, 28_672, **LLAMA3),
        "llama3.1-8b": _llama(32, 4096, 32, 8, 14_336, **{**LLAMA3, "seq_length": 131_072}, **_scaled(8.0)),
        "llama3.2-1b": _llama(
            16, 2048, 32, 8, 8192, **{**LLAMA3, "seq_length": 131_072}, **_scaled(32.0), tie_embeddings=True
        ),
        "smollm-135m": _llama(30, 576, 9, 3, 1536, **SMOLLM),
        "smollm-360m": _llama(32, 960, 15, 5, 2560, **SMOLLM),
        "smollm-1.7b": _llama(24, 2048, 32, 32, 8192, **SMOLLM),
        "pythia-160m": _neox(12, 768, 12),
        "pythia-410m": _neox(24, 1024, 16),
        "pythia-1b": _neox(16, 2048, 8),
        "pythia-1.4b": _neox(24, 2048, 16),
        "pythia-2.8b": _neox(32, 2560, 32),
        "pythia-6.9b": _neox(32, 4096, 32, 50_432),
        "pythia-12b": _neox(36, 5120, 40, 50_688),
        "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, **QWEN2, tie_embeddings=True),
        "qwen2.5-1.5b": _llama(28, 1536, 12, 2, 8960, **QWEN2, tie_embeddings=True),
        "qwen2.5-3b": _llama(36, 2048, 16, 2, 11_008, **QWEN2, tie_embeddings=True),
        "qwen2.5-7b": _llama(28, 3584, 28, 4, 18_944, **{**QWEN2, "vocab_size": 152_064, "seq_length": 131_072}),
        "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, **QWEN3, tie_embeddings=True),
        "qwen3-8b": _llama(36, 4096, 32, 8, 12_288, **QWEN3),
    }
)


def with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of [model] with those that are not given, or None, from the preset, and from what the kind of model
    has in place of the defaults. An unknown preset adds none.
    """
    name = given.get("preset")
    shape = PRESETS.get(name, {}) if isinstance(name, str) else {}
    merged = _over(shape, given)
    return _over(T5, merged) if merged.get("kind") == "t5" else merged


def _over(shape: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `shape`, section by section within it."""
    merged = dict(shape)
    for key, value in given.items():
        inner = shape.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[key] = _over(inner, value)
        elif value is not None:
            merged[key] = value
    return merged
