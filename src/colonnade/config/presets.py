"""Published shapes, by name: what `model.preset` stands for.

Sources: GPT-2 (124M and 355M are the published weights' shapes); "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism" (arXiv 1909.08053), the table of weak scaling; Turing-NLG (Microsoft, 2020);
"BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" (arXiv 2211.05100).

The paper has two shapes of 8.3B parameters: 32 heads in the scaling study, 24 heads in the model that was trained and
evaluated. `gpt2-8.3b` is the trained one; add `num_heads = 32` for the scaling study. The paper's 2.5B is the same in
both. A preset is a shape, so it holds no dropout and no rate: those are the run's.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Shape = Mapping[str, int | str | bool]

GPT2_VOCABULARY = 50_257


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


PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        # 2 layers of 64: trains in seconds on one core. Its vocabulary is the tokenizer's.
        "tiny": MappingProxyType({"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 64}),
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
    }
)


def with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of [model] with those that are not given, or None, from the preset. An unknown preset adds none."""
    name = given.get("preset")
    shape = PRESETS.get(name, {}) if isinstance(name, str) else {}
    return {**shape, **{key: value for key, value in given.items() if value is not None}}
