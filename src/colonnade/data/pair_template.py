"""BERT's control tokens, as a tokenizer.json says them to other programs."""

import tokenizers
from tokenizers import processors

from colonnade.data.tokenizer import Tokenizer


def with_control_tokens(tokenizer: Tokenizer) -> str:
    """A tokenizer.json that puts [CLS] and [SEP] around a text and between two, as examples are trained on."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    found = {name: tokenizer.id_of(name) for name in ("[CLS]", "[SEP]")}
    known = [(name, token) for name, token in found.items() if token is not None]
    if len(known) == len(found):
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=known
        )
    return inner.to_str()
