"""What is asked of a model that stays."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tokenizers

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.generation.sample import Generated
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


def test_a_text_ends_before_the_first_of_its_ends_and_nothing_more_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes first in the text, whatever their order."""

    def growing(*_: Any) -> Iterator[str]:
        yield from ("one", "one two", "one two. Q: three\n")
        raise AssertionError("it goes on")

    trained: Any = SimpleNamespace(left_to_right=SimpleNamespace(longest=None))
    monkeypatch.setattr(answers, "_growing", growing)
    for ends in (["\n", ". ", "Q:"], ["Q:", ". "], ["", ". "]):
        assert answers._text(trained, Writing([1], tokens=6, until=ends)) == "one two"
    assert answers.cut_at_first("ab", []) == answers.cut_at_first("ab", ["c", ""]) == "ab"
    assert answers.cut_at_first("ab", ["b", "a"]) == ""


def test_a_request_is_scored_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain data, both ways."""
    asked = list[Any]()

    def scored(model: str, continuations: Any, **how: Any) -> Any:
        asked.append((model, [(each.context, each.target) for each in continuations], how))
        return SimpleNamespace(losses=np.array([0.5, 2.0]), greedy=np.array([True, False]))

    monkeypatch.setattr(answers, "score", scored)
    monkeypatch.setattr(answers, "_texts", lambda trained, mesh, wanted: wanted)
    trained: Any = SimpleNamespace(left_to_right="model", hidden="stages")
    mesh: Any = "ranks"
    found = answers.answer(trained, mesh, {"score": [[[1], [2, 3]], [[], [4]]], "batch_size": 7})
    assert json.loads(json.dumps(found)) == [[0.5, True], [2.0, False]]
    assert asked == [
        ("model", [([1], [2, 3]), ([], [4])], {"mesh": "ranks", "hidden": "stages", "batch_size": 7}),
    ]
    wanted = [Writing([1], tokens=3, until=["\n"], temperature=0.5, top_k=2, top_p=0.9, seed=4), Writing([], tokens=1)]
    assert answers.answer(trained, mesh, {"write": [each.as_json() for each in wanted]}) == wanted


def test_what_ends_a_text_is_what_the_checkpoint_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(answers, "generate", lambda *_, stop, **__: asked.append(stop) or iter(()))
    tokenizer = Tokenizer.from_json(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    trained: Any = SimpleNamespace(stop=frozenset((7, 9)), stages=None, tokenizer=tokenizer)
    assert list(answers._growing(trained, Writing([1], tokens=6))) == [] and asked == [{7, 9}]


def test_a_text_is_drawn_as_its_request_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with what the last token leaves of a character, without the token that says that it ends."""
    asked: dict[str, Any] = {}
    made = [Generated(0, 3, None), Generated(0, 4, "stop")]
    monkeypatch.setattr(answers, "generate", lambda *_, **how: asked.update(how) or iter(made))
    stream = SimpleNamespace(push=lambda token: f"{token} ", finish=lambda: "end")
    shown: list[dict[str, Any]] = []
    tokenizer = SimpleNamespace(stream=lambda **how: shown.append(how) or stream)
    trained: Any = SimpleNamespace(stop=frozenset(), stages=None, tokenizer=tokenizer)
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
    assert list(answers._growing(trained, Writing([1], tokens=6, **drawn))) == ["3 ", "3 end"]  # type: ignore[arg-type]
    assert asked == {"max_new_tokens": 6, "stop": frozenset(), **drawn}
    assert shown == [{"behind": (), "skip_special": True}], "a text by itself, in which control tokens are none"


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
    said = StringIO("reading\nthe last colonnade answer []\ncolonnade answer [1, 2]\nout of memory\n")
    process: Any = SimpleNamespace(stdin=None, stdout=said, wait=lambda: 3)
    remote._process = process
    assert remote._answer() == [1, 2]
    assert capsys.readouterr().err == "reading\nthe last colonnade answer []\n"
    with pytest.raises(RanksEnded, match="have ended with status 3"):
        remote._answer()
    assert capsys.readouterr() == ("", "out of memory\n")


class Pipe(StringIO):
    """Of a process that reads, or has ended."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken, self.sent = broken, list[str]()

    def flush(self) -> None:
        if self.broken:
            raise BrokenPipeError
        self.sent.append(self.getvalue())


def test_ranks_are_asked_in_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they have said that the model is there; each request is sent at once."""
    started, pipe = list[list[str]](), Pipe()
    out = StringIO("opening\ncolonnade answer []\ncolonnade answer [1]\n")

    def start(command: list[str], **_: Any) -> Any:
        started.append(command)
        return SimpleNamespace(stdin=pipe, stdout=out, wait=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", start)
    remote = RemoteModel(["run", "--tp", "2"])
    assert started == [[sys.executable, "-m", "colonnade", "rank-of-answers", "run", "--tp", "2"]]
    assert remote.ask({"score": ["é\n"]}) == [1]
    assert [json.loads(line) for line in pipe.sent[-1].splitlines()] == [{"score": ["é\n"]}]
    assert pipe.sent[-1].endswith("\n") and pipe.sent[-1].count("\n") == 1
    remote.close()
    assert pipe.closed and out.closed


def test_ranks_that_are_asked_when_they_have_ended_say_so() -> None:
    remote = RemoteModel.__new__(RemoteModel)
    process: Any = SimpleNamespace(stdin=Pipe(broken=True), stdout=StringIO("no memory\n"), wait=lambda: 2)
    remote._process = process
    with pytest.raises(RanksEnded, match="have ended with status 2"):
        remote.ask({})


@pytest.mark.parametrize("is_first", [True, False])
def test_all_ranks_answer_and_the_first_tells(is_first: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """What the others hear is what it shares."""
    heard = iter(["idle", "[1]", "idle", "[2]", "end", "[3]"])
    answered = list[Any]()
    ranks.serve(
        lambda request: answered.append(request) or [request],
        lambda text: text if is_first else next(heard),
        asked=cast(Any, iter(["[1]", "[2]"])),
        is_first=is_first,
    )
    assert answered == [[1], [2]]
    told = ["colonnade answer []", "colonnade answer [[1]]", "colonnade answer [[2]]"]
    assert capsys.readouterr().out.splitlines() == (told if is_first else [])


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
