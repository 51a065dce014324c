"""GPT-2 as in the Megatron-LM paper, and its relatives: what `model/gpt.py` builds.

unit          buckets that it multiplies with
embedding     embedding.tokens, embedding (positions, embedding norm)
blocks.i      blocks.i
head          head (norm, untied output layer); embedding.tokens where tied
"""

from colonnade.architecture.stack import output_weights, stacked
from colonnade.architecture.statement import Architecture
from colonnade.config.model import ModelConfig


def gpt(model: ModelConfig, vocab_size: int) -> Architecture:
    """A left-to-right language model."""
    return stacked(
        model,
        vocab_size,
        head=output_weights(model, vocab_size),
        head_multiply_adds=vocab_size * model.hidden_size,
        losses=("preference" if model.head == "preferences" else "language_model",),
    )
