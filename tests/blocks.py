"""Options of [model] that several tests build models of."""

from typing import Any

LLAMA_BLOCK: dict[str, Any] = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
"""LLaMA's block; its sizes, heads and head are the test's."""
