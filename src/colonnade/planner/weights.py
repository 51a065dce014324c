"""How many numbers each part of the model has on one rank: what its flat buffers are made of. Pure.

The shapes are those of `model/` and `tensor_parallel/`, the buffers those of `data_parallel/buckets.py`; tests hold
them together.
"""

from collections.abc import Iterable, Sequence

from colonnade.config.schema import ModelConfig

TABLE = "embedding.tokens"
ALIGNMENT = 16  # elements: every weight, and every dp rank's slice, starts at a multiple


def table_rows(vocab_size: int, tp: int) -> int:
    """Rows of a rank's part of a table of the vocabulary: v/tp rounded up, from 1024 on to a multiple of 128."""
    rows = -(-vocab_size // tp)
    return rows if rows < 1024 else _up(rows, 128)


def parts_of(model: ModelConfig, units: Iterable[str]) -> list[str]:
    """The parts whose weights these units multiply with, each once."""
    return list(dict.fromkeys(part for unit in units for part in needs(model, unit)))


def needs(model: ModelConfig, unit: str) -> list[str]:
    """The parts whose weights one unit multiplies with: itself, where it has weights, and maybe the token table."""
    reads_table = unit == "embedding" or (unit == "head" and model.tie_embeddings)
    own = [unit] if weights_of(model, unit, vocab_size=1, tp=1) else []
    return [TABLE, *own] if reads_table else own


def weights_of(model: ModelConfig, part: str, *, vocab_size: int, tp: int) -> list[int]:
    """The number of elements of each weight of a part, on one of `tp` ranks, padding of the vocabulary included."""
    h, f = model.hidden_size, model.ffn
    norm, table = [h, h], table_rows(vocab_size, tp) * h
    if part == TABLE:
        return [table]
    if part == "embedding":
        positions = [model.seq_length * h] if model.position == "learned" else []
        return positions + (norm if model.embedding_norm else [])
    if part == "head":
        return (norm if model.norm_position == "pre" else []) + ([] if model.tie_embeddings else [table])
    attention = [3 * h * h // tp, 3 * h // tp, h * h // tp, h]  # q, k, v: weight, bias; output: weight, bias
    mlp = [h * f // tp, f // tp, h * f // tp, h]
    return [*norm, *attention, *norm, *mlp]


def buffer_length(weights: Sequence[int], dp: int) -> int:
    """Elements of a part's flat buffer: weights at multiples of 16, and 1/dp of it a multiple of 16 too."""
    return _up(sum(_up(weight, ALIGNMENT) for weight in weights), ALIGNMENT * dp)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
