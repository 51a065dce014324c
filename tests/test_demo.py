"""What the demonstration says at its end."""

import json
import lzma
from pathlib import Path

import pytest

from colonnade.demo import _compare_with_xz


def test_the_model_is_held_against_xz_on_the_stories_that_it_was_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stories = ["the same words " * 50, "one two three " * 40, "a dog and a cat ran home", "and nobody knew why"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in stories))
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"validation_bits_per_byte": each}) for each in (3.0, 2.125)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    _compare_with_xz(tmp_path, tmp_path / "text.jsonl")
    kept = "\n".join(stories[2:]).encode()
    model, xz, _ = capsys.readouterr().out.splitlines()
    assert "2.125 bits per byte" in model and xz.endswith(f"{8 * len(lzma.compress(kept, preset=9)) / len(kept):.3f}")
