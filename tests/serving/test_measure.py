"""What is told of a measurement on a text: how it was made, and every number by its name."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade import __version__
from colonnade.errors import DataError, DiskError
from colonnade.evaluation.perplexity import Perplexity
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh
from colonnade.serving import measure
from colonnade.serving.measured import HELD_OUT, Measured
from colonnade.serving.measurement import Measurement

FOUND = Perplexity(loss=1.5, perplexity=4.5, bits_per_byte=2.25, tokens=30, bytes=60, words=10, word_perplexity=99.5)
TRAINED: Any = SimpleNamespace(
    config=SimpleNamespace(model=SimpleNamespace(seq_length=24), data="its data"),
    left_to_right=SimpleNamespace(seq_length=24),
    tokenizer=None,
    hidden=None,
)


@pytest.mark.parametrize(
    ("asked", "parameters"),
    [
        (Measurement(), {"window": 24, "stride": 24, "batch_size": measure.BATCH_SIZE}),
        (Measurement(window=16, batch_size=3), {"window": 16, "stride": 16, "batch_size": 3}),
        (Measurement(stride=8), {"window": 24, "stride": 8, "batch_size": measure.BATCH_SIZE}),
    ],
)
def test_windows_are_told_as_they_were_read(
    monkeypatch: pytest.MonkeyPatch, asked: Measurement, parameters: dict[str, int]
) -> None:
    """Beside each other where nothing else was asked for; documents are cut as the run cuts them."""
    read = dict[str, Any]()
    monkeypatch.setattr(measure, "cut_of", lambda data: ("as in", data))
    monkeypatch.setattr(measure, "perplexity_of_file", lambda *_, **how: read.update(how) or FOUND)
    assert measure._perplexity(TRAINED, Mesh(), asked, "text.txt").parameters == parameters
    assert read["cut"] == ("as in", TRAINED.config.data)
    assert (read["seq_length"], read["stride"] or read["seq_length"], read["batch_size"]) == (*parameters.values(),)


@pytest.mark.parametrize("bits", [2.25, None])
def test_perplexities_of_words_and_of_tokens_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, bits: float | None
) -> None:
    found = Perplexity(**{**FOUND.__dict__, "bits_per_byte": bits})
    monkeypatch.setattr(measure, "read_wikitext", lambda *_: SimpleNamespace(original_tokens=10))
    monkeypatch.setattr(measure, "perplexity_of_wikitext", lambda *_, **__: found)
    told = measure._wikitext(TRAINED, Mesh(), Measurement(), "test.tokens")
    assert (told.parameters["window"], told.parameters["stride"]) == (24, 24), "of a model of so few positions"
    names = ("perplexity", "token_perplexity", "original_tokens", "tokens")
    assert [told.numbers[name] for name in names] == [99.5, 4.5, 10, 30] and "words" not in told.numbers
    assert "perplexity 99.50 (10 original tokens, 30 scored; " in told.line and "), 4.50 a token" in told.line
    assert told.line.endswith(", 2.2500 bits per byte") is (bits is not None)


def test_a_number_says_what_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content: of the checkpoint, of its base, and of the data where that is a file."""
    monkeypatch.setattr(measure, "content_together", lambda path, world: {"manifest.json": "c0ffee"})
    (tmp_path / "text.txt").write_text("some text")
    trained: Any = SimpleNamespace(step=7, base=None, precision="bf16")
    mesh: Any = SimpleNamespace(world=None, layout=Layout(tp=2, pp=3, dp=4))
    told = measure.about(trained, mesh, Path("run/step_7"), str(tmp_path / "text.txt"))
    assert told == {
        "step": 7,
        "checkpoint": {"path": "run/step_7", "sha256": "c0ffee"},
        "data": {"path": str(tmp_path / "text.txt"), "sha256": hashlib.sha256(b"some text").hexdigest()},
        "layout": {"tp": 2, "pp": 3, "dp": 4},
        "precision": "bf16",
        "versions": {"colonnade": __version__, "torch": torch.__version__},
    }
    trained.base = SimpleNamespace(files={"model.safetensors": "f00d"})
    of_adapters: Any = measure.about(trained, mesh, Path("run/step_7"), str(tmp_path))
    assert of_adapters["checkpoint"]["base"] == {"model.safetensors": "f00d"}
    assert of_adapters["data"] == {"path": str(tmp_path), "sha256": None}
    nothing: Any = measure.about(trained, mesh, Path("run/step_7"), None)
    assert nothing["data"] == {"path": None, "sha256": None}


def test_a_report_is_one_object_or_lines_with_notes(capsys: pytest.CaptureFixture[str]) -> None:
    overlaps: Any = SimpleNamespace(as_json=lambda: {"share": 0.5}, summary=lambda: "half of it")
    lines = {"perplexity": "loss 1.5", HELD_OUT: "loss 1.5", "LAMBADA": "LAMBADA: loss 1.5"}
    for protocol, line in lines.items():
        found = Measured(protocol, {"window": 8}, {"loss": 1.5}, "loss 1.5", ("first", "second"))
        report = measure.Report(found, {"step": 7})
        report.show(as_json=True, overlaps=overlaps)
        whole = {"protocol": protocol, "loss": 1.5, "notes": ["first", "second"], "parameters": {"window": 8}}
        assert json.loads(capsys.readouterr().out) == {**whole, "step": 7, "overlap": {"share": 0.5}}
        report.show(as_json=True)
        assert json.loads(capsys.readouterr().out) == {**whole, "step": 7}
        report.show(as_json=False, overlaps=overlaps)
        assert capsys.readouterr().out == f"{line}\nNote: first.\nNote: second.\nhalf of it\n"


@pytest.mark.parametrize("error", [DataError, DiskError, OSError])
def test_a_report_is_told_though_the_corpus_beside_it_cannot_be_read(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with the overlap or without; no corpus is asked for where none is named."""
    report = measure.Report(Measured("perplexity", {}, {}, "loss 1.5"), {})
    compared = list[Any]()

    def overlap(corpus: list[Path], test: Path, checkpoint: Path) -> Any:
        compared.append((corpus, test, checkpoint))
        if corpus == [Path("bad")]:
            raise error("bad cannot be read")
        return SimpleNamespace(summary=lambda: "half of it")

    monkeypatch.setattr(measure, "_overlap_with", overlap)
    measure.show_with_overlap(report, [], Path("test"), Path("step"), as_json=False)
    assert capsys.readouterr().out == "loss 1.5\n" and not compared
    measure.show_with_overlap(report, [Path("good")], Path("test"), Path("step"), as_json=False)
    assert capsys.readouterr().out == "loss 1.5\nhalf of it\n"
    with pytest.raises(error, match="bad cannot be read"):
        measure.show_with_overlap(report, [Path("bad")], Path("test"), Path("step"), as_json=False)
    assert capsys.readouterr().out == "loss 1.5\n"
    assert compared == [([Path(name)], Path("test"), Path("step")) for name in ("good", "bad")]
