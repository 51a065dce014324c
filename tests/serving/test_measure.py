"""What is told of a measurement on a text: how it was made, and every number by its name."""

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.evaluation.perplexity import Perplexity
from colonnade.mesh.mesh import Mesh
from colonnade.serving import measure
from colonnade.serving.measurement import Measurement

FOUND = Perplexity(loss=1.5, perplexity=4.5, bits_per_byte=2.25, tokens=30, bytes=60, words=10, word_perplexity=99.5)
TRAINED: Any = SimpleNamespace(
    config=SimpleNamespace(model=SimpleNamespace(seq_length=24), data=None),
    left_to_right=SimpleNamespace(seq_length=24),
    tokenizer=None,
    hidden=None,
)


@pytest.mark.parametrize(
    ("asked", "parameters"),
    [
        (Measurement(), {"window": 24, "stride": 24, "batch_size": measure.BATCH_SIZE}),
        (Measurement(window=16, batch_size=3), {"window": 16, "stride": 16, "batch_size": 3}),
        (Measurement(stride=8), {"window": 24, "stride": 8, "batch_size": measure.BATCH_SIZE}),
    ],
)
def test_windows_are_told_as_they_were_read(
    monkeypatch: pytest.MonkeyPatch, asked: Measurement, parameters: dict[str, int]
) -> None:
    """Beside each other where nothing else was asked for."""
    monkeypatch.setattr(measure, "cut_of", lambda data: None)
    monkeypatch.setattr(measure, "perplexity_of_file", lambda *_, **__: FOUND)
    assert measure._perplexity(TRAINED, Mesh(), asked, "text.txt").parameters == parameters


@pytest.mark.parametrize("bits", [2.25, None])
def test_perplexities_of_words_and_of_tokens_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, bits: float | None
) -> None:
    found = Perplexity(**{**FOUND.__dict__, "bits_per_byte": bits})
    monkeypatch.setattr(measure, "read_wikitext", lambda *_: SimpleNamespace(original_tokens=10))
    monkeypatch.setattr(measure, "perplexity_of_wikitext", lambda *_, **__: found)
    told = measure._wikitext(TRAINED, Mesh(), Measurement(), "test.tokens")
    names = ("perplexity", "token_perplexity", "original_tokens", "tokens")
    assert [told.numbers[name] for name in names] == [99.5, 4.5, 10, 30] and "words" not in told.numbers
    assert "perplexity 99.50 (10 original tokens, 30 scored; " in told.line and "), 4.50 a token" in told.line
    assert told.line.endswith(", 2.2500 bits per byte") is (bits is not None)
