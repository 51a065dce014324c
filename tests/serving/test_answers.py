"""What is asked of a model that stays."""

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.serving import answers, ranks
from colonnade.serving.answers import Writing
from colonnade.serving.ranks import RemoteModel


def test_prompt_and_text_fit_into_the_models_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token that is written is read by nobody."""
    trained: Any = SimpleNamespace(left_to_right=SimpleNamespace(longest=10))
    monkeypatch.setattr(answers, "_growing", lambda trained, wanted: iter(["a", "a text"]))
    assert answers._text(trained, Writing([1] * 5, tokens=6)) == "a text"
    with pytest.raises(
        ConfigError, match=r"7 new tokens behind a prompt of 5 do not fit into the model's 10 positions"
    ):
        answers._text(trained, Writing([1] * 5, tokens=7))


def test_what_ends_a_text_is_what_the_checkpoint_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(answers, "generate", lambda *_, stop, **__: asked.append(stop) or iter(()))
    tokenizer = Tokenizer.from_json(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    trained: Any = SimpleNamespace(stop=frozenset((7, 9)), stages=None, tokenizer=tokenizer)
    assert list(answers._growing(trained, Writing([1], tokens=6))) == [""] and asked == [{7, 9}]


def test_ranks_answer_however_long_nobody_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hear from rank 0 meanwhile, and end when it does."""
    monkeypatch.setattr(ranks, "IDLE_SECONDS", 0.01)
    shared, answered = list[str](), list[Any]()

    def asked() -> Iterator[str]:
        while len(shared) < 3:
            time.sleep(0.01)
        yield "[1]"

    def share(text: str) -> str:
        shared.append(text)
        return text

    def answer(request: Any) -> list[Any]:
        answered.append(request)
        return [request]

    ranks.serve(answer, share, asked=cast(Any, asked()), is_first=True)
    assert answered == [[1]] and shared[-1] == "end" and shared[0] == shared[1] == "idle"


def test_a_model_that_is_closed_has_ended() -> None:
    """Not only been told to."""
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    remote = RemoteModel.__new__(RemoteModel)
    remote._process = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    remote.close()
    assert remote._process.returncode == 0
