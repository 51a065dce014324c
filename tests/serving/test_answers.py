"""What is asked of a model that stays."""

import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.serving import answers, ranks
from colonnade.serving.answers import Writing
from colonnade.serving.ranks import RanksEnded, RemoteModel


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


def test_a_text_is_drawn_as_its_request_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with what the last token leaves of a character."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(answers, "generate", lambda *_, **how: asked.update(how) or iter([SimpleNamespace(token=3)]))
    stream = SimpleNamespace(push=lambda token: f"{token} ", finish=lambda: "end")
    trained: Any = SimpleNamespace(stop=frozenset(), stages=None, tokenizer=SimpleNamespace(stream=lambda: stream))
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
    assert list(answers._growing(trained, Writing([1], tokens=6, **drawn))) == ["3 ", "3 end"]  # type: ignore[arg-type]
    assert asked == {"max_new_tokens": 6, "stop": frozenset(), **drawn}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_write_by_turns_and_all_texts_are_in_the_order_of_the_requests(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, written = [Writing([number], tokens=1) for number in range(12)], list[list[int]]()
    monkeypatch.setattr(
        answers, "_text", lambda trained, each: written[-1].append(each.prompt[0]) or f"t{each.prompt[0]}"
    )
    said: list[str] = []
    nothing: Any = None

    def texts(rank: int) -> list[str]:
        written.append([])
        mesh: Any = SimpleNamespace(data=SimpleNamespace(rank=rank, size=num_ranks), world=None)
        return answers._texts(nothing, mesh, wanted)

    monkeypatch.setattr(answers, "gather_texts", lambda text, world: said.append(text) or ["{}"])
    for rank in range(num_ranks):
        with pytest.raises(KeyError):  # nobody has told the others' texts
            texts(rank)
    monkeypatch.setattr(answers, "gather_texts", lambda text, world: said)
    assert sorted(number for each in written for number in each) == list(range(12)), "each text by one rank"
    assert all(texts(rank) == [f"t{number}" for number in range(12)] for rank in range(num_ranks))


def test_what_ranks_say_beside_their_answers_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    remote = RemoteModel.__new__(RemoteModel)
    said = StringIO("reading\ncolonnade answer [1, 2]\nout of memory\n")
    process: Any = SimpleNamespace(stdin=None, stdout=said, wait=lambda: 3)
    remote._process = process
    assert remote._answer() == [1, 2] and capsys.readouterr().err == "reading\n"
    with pytest.raises(RanksEnded, match="have ended with status 3"):
        remote._answer()
    assert capsys.readouterr() == ("", "out of memory\n")


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
