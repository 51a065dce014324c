"""Whoever names token files by URLs with keys in them finds the keys nowhere: not in files, lines, events, messages."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.commands import Answer, forked, here
from tests.runs import events, metrics
from tests.tiny import TinyCorpus, write_config

SECRET = "s3cr3t/K+y"
PLACE = f"user:{SECRET}@bucket"


@pytest.fixture
def url(corpus: TinyCorpus) -> Iterator[str]:
    """The corpus in a storage in memory, which forked ranks inherit; removed afterwards."""
    memory = fsspec.filesystem("memory")
    for ending in (".bin", ".idx", ".json"):
        memory.put_file(f"{corpus.prefix}{ending}", f"/{PLACE}/corpus{ending}")
    yield f"memory://{PLACE}/corpus"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def assert_nowhere(folder: Path, *answers: Answer) -> None:
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {f"answer {number}": (answer.out + answer.err).encode() for number, answer in enumerate(answers)}
    assert [name for name, text in texts.items() if b"s3cr3t" in text or b"K+y" in text] == []


def test_a_run_and_what_comes_of_it(corpus: TinyCorpus, url: str, tmp_path: Path) -> None:
    config = write_config(corpus, tmp_path / "made")
    keys = (f"data.train={url}", f"data.cache={tmp_path / 'cache'}", f"run.folder={tmp_path / 'run'}")
    first = forked("train", config, *keys, "train.steps=4")
    assert first.status == 0, first
    again = forked("train", config, *keys)
    assert again.status == 0 and len(metrics(tmp_path / "run")) == 6, again
    assert [event["event"] for event in events(tmp_path / "run")].count("resumed") == 1
    assert "memory://…@bucket/corpus" in (tmp_path / "run" / "config.toml").read_text()
    assert_nowhere(tmp_path, first, again)


def test_messages(corpus: TinyCorpus, url: str, tmp_path: Path) -> None:
    config = write_config(corpus, tmp_path)
    cache = f"data.cache={tmp_path / 'cache'}"
    answers = [
        here("train", config, f"data.train={url}"),
        here("train", config, f"data.train={url}-else", cache),
        here("train", config, f"data.train={url}", f"data.train.x={url}", cache),
        here("train", config, f"data.train={url}", "train.steps=x", cache),
        here("train", config, f"data.{url}=3", cache),
        here("train", config, f"data.train=nothing://{PLACE}/x", cache),
        here("train", config, f"train.steps={url}", cache),
        here("data", "inspect", url),
        here("plan", config, f"data.tokenizer={url}"),
        here("evaluate", url, "perplexity", "--data", url),
    ]
    assert {answer.status for answer in answers} == {2}
    assert all("Traceback" not in answer.err for answer in answers)
    assert_nowhere(tmp_path, *answers)
