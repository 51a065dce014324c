"""Tokens that a published folder adds to its vocabulary."""

from __future__ import annotations

import tokenizers

from colonnade.architecture.huggingface.keys import shown
from colonnade.data.sentencepiece import HIDDEN
from colonnade.data.tokenizer_config import TokenizerConfig
from colonnade.errors import DataError


def add_tokens(inner: tokenizers.Tokenizer, config: TokenizerConfig, *, only_control: bool = False) -> None:
    """Add the tokens that the files beside a vocabulary have. What is a control token already stays as it is.

    DataError where one gets another id than they say, or where text becomes one though there are to be `only_control`
    tokens.
    """
    tokens = config.tokens()
    there = {token.content.removeprefix(HIDDEN) for token in inner.get_added_tokens_decoder().values()}
    there |= {name for name in tokens if inner.token_to_id(HIDDEN + name) is not None}
    there.add(getattr(inner.model, "unk_token", None) or "")
    new = [token for name, (_, token) in tokens.items() if name not in there]
    text = next((token.content for token in new if not token.special), None)
    if only_control and text is not None:
        config.refuse(f"an added token {shown(text)} that text becomes, which SentencePiece finds in another way", "")
    inner.add_tokens(new)
    for name, (id_, _) in tokens.items():
        hidden = inner.token_to_id(HIDDEN + name)
        found = inner.token_to_id(name) if hidden is None else hidden
        if id_ is not None and found != id_:
            raise DataError(
                f"{config.folder} gives the added token {shown(name)} the id {id_:,}, and behind this vocabulary it "
                f"gets {found:,}: they do not belong together. Copy all files of the tokenizer from one source."
            )
