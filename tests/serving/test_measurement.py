"""What `evaluate` is asked to measure: all that is wrong with it, and nothing that is right."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from colonnade.serving.measurement import Measurement, measurement_problems
from tests.tasks.questions import squad

TEXT, LAMBADA = Measurement(data="text.txt"), Measurement(task="lambada", data="lambada.jsonl")
WIKITEXT = Measurement(task="wikitext103", data="text.txt")
SQUAD, PART = Measurement(task="squad", data="dev.json"), Measurement(part="test")


def in_short(asked: object) -> str:
    """The options that are given."""
    if not isinstance(asked, Measurement):
        return ""
    return " ".join(f"{key} {value}" for key, value in vars(asked).items() if value != getattr(Measurement(), key))


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" = A = \n a text\n")
    Path("lambada.jsonl").write_text('{"text": "a b"}\n')
    Path("dev.json").write_text(json.dumps(squad(2)))
    Path("asked.jsonl").write_text('{"question": "Who?", "context": "Ada."}\n')
    Path("tokens.idx").touch()
    Path("folder").mkdir()


@pytest.mark.parametrize(
    "asked",
    [
        replace(TEXT, window=8, stride=8),
        replace(TEXT, stride=8),
        replace(TEXT, data="tokens"),
        replace(PART, samples=3),
        replace(LAMBADA, variant="last-token"),
        replace(WIKITEXT, detokenizer="none", window=8, stride=3),
        replace(SQUAD, output="p.json", null_threshold=-1e9, window=8, stride=3, n_best=2),
    ],
    ids=in_short,
)
def test_what_can_be_measured(asked: Measurement) -> None:
    assert list(measurement_problems(asked)) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(TEXT, window=8, stride=9), ["--stride 9 is larger than --window 8"]),
        (replace(TEXT, detokenizer="none"), ["--detokenizer is of the task wikitext103, not of perplexity."]),
        (replace(TEXT, data="gone"), ["gone does not exist, and there is no gone.bin with gone.idx."]),
        (replace(TEXT, data="s3://bucket/text"), ["--data s3://bucket/text cannot be measured. It is a URL, and what"]),
        (replace(PART, window=8), ["--window 8 does not go with --part"]),
        (replace(PART, task="lambada"), ["--part is of the task perplexity, not of lambada. Leave it out."]),
        (replace(LAMBADA, samples=3), ["--samples is of the task perplexity, not", "--samples 3 is of a --part;"]),
        (
            replace(LAMBADA, window=8),
            ["--window is of the task perplexity and of wikitext103 and of squad, not of lambada."],
        ),
        (replace(LAMBADA, variant="cloze"), ["--variant 'cloze': there is no such variant. Use whole-word, "]),
        (replace(LAMBADA, data="folder"), ["--data folder is a folder. Name the file of the test set."]),
        (replace(LAMBADA, data="gone"), ["--data gone does not exist. Name the file of the test set."]),
        (replace(LAMBADA, data="text.txt", n_best=2), ["--n-best is of the task squad, not of lambada."]),
        (replace(WIKITEXT, detokenizer="moses"), ["--detokenizer 'moses': there is no such detokenizer."]),
        (replace(SQUAD, data="asked.jsonl"), ["--data asked.jsonl has questions without answers"]),
        (replace(SQUAD, output="p.jsonl"), ["--output p.jsonl: the official file of predictions is one object"]),
        (replace(SQUAD, null_threshold=math.inf), ["--null-threshold inf is no difference of logits."]),
        (replace(SQUAD, null_threshold=-math.inf), ["--null-threshold -inf is no difference of logits."]),
        (replace(SQUAD, null_threshold=math.nan), ["--null-threshold nan is no difference of logits."]),
    ],
    ids=in_short,
)
def test_what_cannot_be_measured_is_told_once_each(asked: Measurement, said: list[str]) -> None:
    found = list(measurement_problems(asked))
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found
