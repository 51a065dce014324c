"""What the demonstration runs, and what it says at its end."""

import json
import lzma
import subprocess
from pathlib import Path

import pytest

from colonnade import demo
from colonnade.config.load import load
from colonnade.config.split import parse_split
from colonnade.demo import _compare_with_xz
from colonnade.errors import ColonnadeError


def test_the_model_is_held_against_xz_on_the_stories_that_it_was_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stories = ["the same words " * 50, "one two three " * 40, "a dog and a cat ran home", "“Who?” — “nobody”, said é"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in stories))
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"validation_bits_per_byte": each}) for each in (3.0, 2.125)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    _compare_with_xz(tmp_path, tmp_path / "text.jsonl")
    kept = "\n".join(stories[2:]).encode()
    model, *others = capsys.readouterr().out.splitlines()
    told = [f"{8 * len(lzma.compress(text, preset=9)) / len(text):.3f}" for text in (kept, "\n".join(stories).encode())]
    assert "2.125 bits per byte" in model and [line.split()[-1] for line in others] == told


@pytest.mark.usefixtures("ascii_locale")
def test_the_stories_are_read_whatever_the_locale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"text": "“Who?” — “nobody”, said é"}, ensure_ascii=False)
    (tmp_path / "text.jsonl").write_text(f"{text}\n" * 2, encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"validation_bits_per_byte": 2.125}\n')
    _compare_with_xz(tmp_path, tmp_path / "text.jsonl")
    assert "2.125 bits per byte" in capsys.readouterr().out


def test_it_stops_half_way_goes_on_and_looks_at_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo, "_run", lambda *words: ran.append(tuple(map(str, words))))
    monkeypatch.setattr(demo, "_compare_with_xz", lambda folder, text: ran.append(("xz", str(text))))
    monkeypatch.setattr(demo.time, "perf_counter", iter([1000.0, 1063.4]).__next__)
    here = tmp_path / "new" / "demo"
    demo.main(here)
    text, config, tokenizer = str(here / "holmes.jsonl"), str(here / "demo.toml"), str(here / "tokenizer.json")
    trained, tokens, half, whole, xz, written, compared = ran
    assert trained[:3] == ("data", "train-tokenizer", text) and tokenizer in trained and "2048" in trained
    assert tokens[:3] == ("data", "tokenize", text) and str(here / "holmes") in tokens and tokenizer in tokens
    assert (half, whole, xz) == (("train", config, "train.steps=150"), ("train", config), ("xz", text))
    assert written[:2] == ("generate", str(here / "run")) and compared[:2] == ("verify", config)
    settings = load(Path(config))
    assert (settings.train.steps, settings.parallel.num_ranks, settings.run.folder) == (300, 2, str(here / "run"))
    stories = len((here / "holmes.jsonl").read_text().splitlines())
    assert stories == 37 == sum(parse_split(settings.data.split)) and parse_split(settings.data.split)[1] == 2
    said = capsys.readouterr().out
    assert f"generate {here}/run --prompt" in said and "\nDone in 63 s. " in said


def test_it_is_not_run_where_it_has_been(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ColonnadeError, match="the demonstration has been run there"):
        demo.main(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("status", [3, -9])
def test_it_ends_with_the_first_command_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """Or is killed."""
    monkeypatch.setattr(subprocess, "run", lambda words, check: subprocess.CompletedProcess(words, status))
    with pytest.raises(ColonnadeError, match=rf"`colonnade train` failed with exit status {status};"):
        demo._run("train", "a b.toml", 5)
    assert capsys.readouterr().out == "\n$ colonnade train 'a b.toml' 5\n"
