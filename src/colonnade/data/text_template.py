"""What stands around a text of a BERT or a T5, as a tokenizer.json says it to other programs."""

import tokenizers
from tokenizers import processors

from colonnade.data.t5_dataset import end_of_text
from colonnade.data.tokenizer import Tokenizer


def with_control_tokens(tokenizer: Tokenizer) -> str:
    """A tokenizer.json that puts [CLS] and [SEP] around a text and between two, as a BERT is trained on them."""
    found = {name: tokenizer.id_of(name) for name in ("[CLS]", "[SEP]")}
    known = [(name, token) for name, token in found.items() if token is not None]
    if len(known) < len(found):
        return tokenizer.published()
    return _with_template(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", known)


def with_end(tokenizer: Tokenizer) -> str:
    """A tokenizer.json that puts behind each text what a T5 is trained to read there."""
    end = end_of_text(tokenizer)
    if end is None:
        return tokenizer.published()
    name = tokenizer.names[end]
    return _with_template(tokenizer, f"$A {name}", f"$A {name} $B {name}", [(name, end)])


def _with_template(tokenizer: Tokenizer, single: str, pair: str, known: list[tuple[str, int]]) -> str:
    inner = tokenizers.Tokenizer.from_str(tokenizer.published())
    inner.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)
    return inner.to_str()
