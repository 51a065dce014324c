"""What the harness' requests ask of a model that is there, and what it opens: answers are made up."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, ConfigError, DataError

pytest.importorskip("lm_eval")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the harness imports
    from lm_eval.api.instance import Instance

    from colonnade.lm_eval import model as lm
    from colonnade.lm_eval.__main__ import main
    from colonnade.lm_eval.options import BATCH_SIZE, ModelArguments, read_arguments
    from colonnade.serving.ranks import RanksEnded


class Cached:
    """In place of the harness' cache of answers."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def add_partial(self, *told: Any) -> None:
        self.told.append(told)


class Bar:
    """In place of a bar on the terminal."""

    done: list[tuple[int, int]] = []

    def __init__(self, total: int, **_: Any) -> None:
        self.total, self.count = total, 0

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: Any) -> None:
        self.done.append((self.count, self.total))

    def update(self, count: int) -> None:
        self.count += count


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    Bar.done = []
    monkeypatch.setattr(lm, "tqdm", Bar)
    return []


def ours(tokenizer: Any, asked: list[dict[str, Any]], **given: Any) -> Any:
    """A model of 32 positions without weights: a loss is a context's length and a hundredth of its target's."""

    def ask(request: dict[str, Any]) -> list[Any]:
        asked.append(request)
        if "write" in request:
            return [f"text {each['seed']}" for each in request["write"]]
        return [(len(context) + len(target) / 100, len(target) == 1) for context, target in request["score"]]

    found: Any = object.__new__(lm.ColonnadeLM)
    found.arguments, found.max_length, found.inner = ModelArguments(Path("c"), **given), 32, tokenizer
    found.cache_hook, found._ask, found.path = Cached(), ask, Path("c")
    return found


def test_likelihoods_are_asked_for_some_batches_at_a_time_the_longest_first(
    tokenizer: Tokenizer, asked: list[dict[str, Any]]
) -> None:
    """What is new is told to the harness' cache, under its text; windows of a text have none."""
    model = ours(tokenizer, asked, batch_size=2, dp=2)
    requests = [((f"c{n}", f"t{n}") if n % 2 else None, [1] * (1 + n * 7 % 30), [2] * (1 + n % 2)) for n in range(70)]
    found = model._loglikelihood_tokens(requests)
    assert found == [(-(len(context) + len(target) / 100), len(target) == 1) for _, context, target in requests], (
        "in the order of the requests"
    )
    assert [len(each["score"]) for each in asked] == [2 * 2 * 16, 6] and {each["batch_size"] for each in asked} == {2}
    lengths = [len(context) + len(target) for each in asked for context, target in each["score"]]
    assert lengths == sorted(lengths, reverse=True)
    cached = {text: answer for kind, text, answer in model.cache_hook.told if kind == "loglikelihood"}
    assert cached == {request[0]: answer for request, answer in zip(requests, found, strict=True) if request[0]}
    assert len(model.cache_hook.told) == 35 and Bar.done == [(70, 70)]


def test_whole_texts_are_told_to_the_cache(tokenizer: Tokenizer, asked: list[dict[str, Any]]) -> None:
    model = ours(tokenizer, asked)
    requests = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(("It was", "no"))]
    totals = model.loglikelihood_rolling(requests)
    assert model.cache_hook.told == [
        ("loglikelihood_rolling", request.args, total) for request, total in zip(requests, totals, strict=True)
    ]


def test_as_many_texts_are_written_at_once_as_there_are_copies(
    tokenizer: Tokenizer, asked: list[dict[str, Any]]
) -> None:
    """As long as the arguments say, where the task says nothing."""
    model = ours(tokenizer, asked, dp=2, max_gen_toks=5)
    requests = [Instance("generate_until", {}, ("It was", {"until": ["x"]}), number) for number in range(5)]
    assert model.generate_until(requests) == [f"text {number}" for number in range(5)]
    assert [len(each["write"]) for each in asked] == [2, 2, 1] and Bar.done == [(5, 5)]
    assert {each["tokens"] for request in asked for each in request["write"]} == {5}
    told = [("generate_until", request.args, f"text {number}") for number, request in enumerate(requests)]
    assert model.cache_hook.told == told


def test_what_has_no_token_cannot_be_scored(tokenizer: Tokenizer, asked: list[dict[str, Any]]) -> None:
    model = ours(tokenizer, asked)
    with pytest.raises(DataError, match="a continuation of 0 tokens cannot be scored"):
        model._loglikelihood_tokens([(None, [1, 2], [])])
    assert model._loglikelihood_tokens([(None, [1], [2] * 32)]) == [(-1.32, False)], "as many as the model reads"
    with pytest.raises(DataError, match="a continuation of 33 tokens"):
        model._loglikelihood_tokens([(None, [1], [2] * 33)])


def test_without_an_end_of_documents_a_token_has_to_be_named(tokenizer: Tokenizer) -> None:
    without = SimpleNamespace(end_of_document=None, sha256="abc")
    model = ours(without, [])
    with pytest.raises(ConfigError, match=r"has no end-of-document token, .* prefix_token_id=ID"):
        assert model.prefix_token_id
    assert ours(without, [], prefix_token_id=3).prefix_token_id == 3
    assert ours(tokenizer, [], prefix_token_id=0).prefix_token_id == 0 != ours(tokenizer, []).prefix_token_id
    assert model.tokenizer_name != ours(tokenizer, []).tokenizer_name, "answers are cached by it"


# --- what is opened ---------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """With what a checkpoint was opened, and that it was closed."""
    calls: list[Any] = []

    @contextmanager
    def open_it(path: Path, **keys: Any) -> Iterator[tuple[str, str]]:
        calls.append((path, keys))
        yield "model", "mesh"
        calls.append("closed")

    monkeypatch.setattr(lm, "opened", open_it)
    monkeypatch.setattr(lm, "answer", lambda model, mesh, request: [model, mesh, request])
    monkeypatch.setattr(lm, "chosen", lambda path, best: path / "best" if best else path)
    monkeypatch.setattr(lm, "find", lambda path: path / "found")
    monkeypatch.setattr(lm, "tokenizer_of", lambda path, manifest: None)
    monkeypatch.setattr(lm, "read_manifest", lambda path: SimpleNamespace(digest=f"digest of {path}"))
    monkeypatch.setattr(lm, "read_arguments", lambda given: ModelArguments(Path("run"), **given))
    return calls


def made(monkeypatch: pytest.MonkeyPatch, *, kind: str = "gpt", position: str = "learned", **given: Any) -> Any:
    shape = SimpleNamespace(kind=kind, seq_length=32, position=position)
    config = SimpleNamespace(model=shape, train=SimpleNamespace(precision="bf16"))
    monkeypatch.setattr(lm, "described", lambda path: (None, config, SimpleNamespace(step=7)))
    return lm.ColonnadeLM(**given)


def test_a_checkpoint_is_opened_as_it_is_asked_for_and_closed(
    monkeypatch: pytest.MonkeyPatch, opened: list[Any]
) -> None:
    keys = {"device": "cpu", "precision": "fp64", "threads": 3, "base": Path("base")}
    model = made(monkeypatch, best=True, **keys)
    assert opened == [(Path("run/best/found"), {"tp": 1, **keys})]
    assert model._ask({"score": []}) == ["model", "mesh", {"score": []}]
    model.close()
    model.close()
    assert opened[1:] == ["closed"], "once"


def test_results_tell_which_model_was_measured_and_how(monkeypatch: pytest.MonkeyPatch, opened: list[Any]) -> None:
    told = []
    for given in ({}, {"precision": "fp64"}):
        model = made(monkeypatch, **given)
        told.append(model.get_model_info())
        model.close()
    assert [each["model_dtype"] for each in told] == ["bf16", "fp64"]
    assert (told[0]["model_sha"], told[0]["model_step"]) == ("digest of run/found", 7)
    assert told[0]["layout"] == {"tp": 1, "pp": 1, "dp": 1}


def test_a_model_without_learned_positions_may_read_longer_texts(
    monkeypatch: pytest.MonkeyPatch, opened: list[Any]
) -> None:
    for position, given, length in (("rotary", 99, 99), ("rotary", None, 32), ("learned", 32, 32), ("learned", 5, 5)):
        model = made(monkeypatch, position=position, max_length=given)
        assert model.max_length == length
        model.close()
    with pytest.raises(ConfigError, match="max_length = 33, but the model has learned 32 positions"):
        made(monkeypatch, max_length=33)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_what_gives_tokens_no_chances_is_refused(monkeypatch: pytest.MonkeyPatch, opened: list[Any], kind: str) -> None:
    with pytest.raises(ConfigError, match=f'a model of kind "{kind}", which gives the tokens of a text no chances'):
        made(monkeypatch, kind=kind)
    assert opened == []


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "size"), [(None, BATCH_SIZE), ("auto", BATCH_SIZE), ("auto:4", BATCH_SIZE), ("8", 8), (3, 3)]
)
def test_sequences_that_are_read_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | int | None, size: int
) -> None:
    monkeypatch.setattr("colonnade.lm_eval.options.check_options", lambda *_, **__: None)
    found = read_arguments({"checkpoint": str(tmp_path), "batch_size": given, "base": "there"})
    assert found.batch_size == size and isinstance(found.batch_size, int)
    assert (found.checkpoint, found.base, found.max_gen_toks) == (tmp_path, Path("there"), 256)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_length": 0}, "max_length = 0 is no number of 1 or more"),
        ({"max_gen_toks": 0}, "max_gen_toks = 0 is no number of 1 or more"),
        ({"tp": True}, "tp = True is no number of 1 or more"),
        ({"batch_size": "-1"}, "--batch_size -1 is no number of sequences"),
        ({"precision": "fp8"}, "fp8"),
        ({"best": True}, "best"),
    ],
    ids=str,
)
def test_options_are_checked_before_anything_is_read(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ColonnadeError, match=said):
        read_arguments({"checkpoint": str(tmp_path), **given})


# --- the command ------------------------------------------------------------------------------------------------------


def test_ranks_that_have_ended_have_said_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate() -> None:
        raise RanksEnded

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (2, "")


def test_a_bug_of_the_harness_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    with pytest.raises(KeyError, match="a bug"):
        main()
