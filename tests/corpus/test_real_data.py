"""Real texts: known near-duplicates, published evaluation sets, and files that other programs wrote."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.testsets import passages
from colonnade.data.indexed import bin_path, idx_path
from colonnade.data.overlap import overlap
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer
from tests.corpus.recipes import Result, words
from tests.data.conftest import SHARED

Run = Callable[..., Result]
SETS = {
    "wikitext": "wikitext/wikitext-103.test.tokens",
    "lambada": "lambada/lambada_test.jsonl",
    "squad": "squad/cs224n-dev-v2.0.json",
    "xquad": "squad/xquad-en-v1.1.json",
}


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path


def test_the_known_near_duplicates_and_no_others(run: Run, write_lines: Any) -> None:
    """100 news articles, five of them twice with small changes (Jaccard 0.96; all other pairs below 0.11)."""
    lines = shared("near-duplicates/articles_100.train").read_text().splitlines()
    pairs = [line.split() for line in shared("near-duplicates/articles_100.truth").read_text().splitlines()]
    rows = [{"id": line.split(" ", 1)[0], "text": line.split(" ", 1)[1]} for line in lines]
    result = run(write_lines("in.jsonl", rows), deduplicate={"similarity": 0.7, "keep": "first"})
    place = {row["id"]: number for number, row in enumerate(rows)}
    second = {max(pair, key=place.__getitem__) for pair in pairs}
    assert len(pairs) == 5
    assert {entry["id"] for entry in result.dropped("deduplicate")} == second
    assert set(result.ids()) == set(place) - second


def test_web_text_becomes_the_tokens_that_megatron_made_of_it(tmp_path: Path) -> None:
    folder = shared("openwebtext")
    theirs = folder / "meg-gpt2-openwebtext_text_document"
    source, tokenizer = folder / "openwebtext_1000.decoded.jsonl.xz", Tokenizer.load(folder / "gpt2-tiny")
    tokenize_files([source], tmp_path / "ours", tokenizer, workers=2, progress=False)
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(theirs).read_bytes()


def test_wikitexts_raw_text_is_found_in_its_tokens(tmp_path: Path) -> None:
    """One of them says " @-@ ", the other "-"; n-grams with a word that became <unk> do not count."""
    (tmp_path / "raw.txt").write_bytes(shared("wikitext/wiki.test.raw").read_bytes())
    found = overlap([tmp_path / "raw.txt"], shared(SETS["wikitext"]))
    assert found.ngrams > 170_000
    assert found.share == 1.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETS)
def test_passages_are_found_in_whatever_form(run: Run, write_lines: Any, name: str) -> None:
    """In capitals, without signs, with a word changed in the middle, among other words."""
    path = shared(SETS[name])
    draw = random.Random(name)
    long = [passage for passage in passages(path, "text") if len(passage) >= 40]
    planted = []
    for passage in draw.sample(long, 25):
        changed = [*passage]
        changed[len(changed) // 2] = "otherwise"
        planted.append(" ".join([*words(50, 1), *(word.upper() + "," for word in changed), *words(50, 2)]))
    clean = [" ".join(words(200, seed)) for seed in range(10, 30)]
    result = run(write_lines("in.jsonl", [*clean, *planted]), decontaminate={"tests": {name: str(path)}})
    assert result.texts() == clean
    assert sum(result.reasons("decontaminate").values()) == len(planted)


def test_web_pages_hold_themselves_and_hardly_one_another(tmp_path: Path) -> None:
    """The report's two ends: a corpus that has the set, and one that has nothing of it but phrases."""
    with lzma.open(shared("openwebtext/openwebtext_1000.decoded.jsonl.xz"), "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines][:200]
    exam = tmp_path / "exam.jsonl"
    exam.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:20]))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert overlap([corpus], exam).share == 1.0
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[20:]))
    assert overlap([corpus], exam).share < 0.05
