"""Text to prompts, and tokens to text as they come: what a terminal or a server shows.

A token may hold a part of a character (byte-level BPE); its bytes are held back until the character is whole, so that
every delta is valid text and the deltas joined are the decoded whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.generation.sample import End, Generated


@dataclass(frozen=True)
class TextDelta:
    """What one new token adds to the text of a prompt."""

    prompt: int
    text: str
    """Often the token's own text; empty while a character is not whole, and for control tokens."""
    end: End | None
    """Why the text ends here; None where more follows."""


def prompt_tokens(tokenizer: Tokenizer, text: str, *, control: bool = False) -> list[int]:
    """Tokens of a prompt; `control`: names of control tokens in it are these. No text starts a new document: the
    end-of-document token, behind which documents start.
    """
    tokens = tokenizer.encode(text, control=control)
    if tokens:
        return tokens
    if tokenizer.end_of_document is None:
        raise DataError(
            "the prompt is empty, and the tokenizer has no end-of-document token to start a document with. Give some "
            "text."
        )
    return [tokenizer.end_of_document]


def stream_text(
    generated: Iterable[Generated],
    tokenizer: Tokenizer,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    skip_special: bool = True,
) -> Iterator[TextDelta]:
    """The text that each token of `generate` adds, at once; each prompt's tokens must come one after the other.

    `prompts`: the texts that are gone on with; None: each begins anew, as answers do. `skip_special` False: control
    tokens are shown (T5's sentinels), but that which ends the text.
    """
    decoder = None
    for new in generated:
        decoder = decoder or tokenizer.stream(behind=prompts[new.prompt] if prompts else (), skip_special=skip_special)
        text = "" if new.end == "stop" else decoder.push(new.token)
        if new.end is not None:
            text += decoder.finish()
            decoder = None
        yield TextDelta(new.prompt, text, new.end)


def end_note(end: End, *, seq_length: int) -> str | None:
    """What to tell the reader about the end of a text; None where it ended as asked."""
    if end != "full":
        return None
    return (
        f"stopped: the model has {seq_length:,} positions, and prompt and new text fill them. Give a shorter prompt, "
        "or train a model with a larger model.seq_length."
    )
