"""What is asked of a model that stays."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.serving import answers
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


def test_a_model_that_is_closed_has_ended() -> None:
    """Not only been told to."""
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    remote = RemoteModel.__new__(RemoteModel)
    remote._process = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    remote.close()
    assert remote._process.returncode == 0
