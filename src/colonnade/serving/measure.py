"""A trained model measured on a text, and what is told of it: the numbers, how they came about, and by what."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colonnade import __version__
from colonnade.control_groups import num_cores
from colonnade.data.gpt_dataset import cut_of
from colonnade.data.sidecar import hash_file
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.evaluation.file import BATCH_SIZE, perplexity_of_file, perplexity_of_wikitext
from colonnade.evaluation.lambada import BATCH_SIZE as PASSAGES
from colonnade.evaluation.lambada import evaluate_lambada
from colonnade.evaluation.passages import examples, read_passages
from colonnade.evaluation.perplexity import Perplexity, perplexity_in_words
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.wikitext import PAPER_STRIDE, PAPER_WINDOW, read_wikitext
from colonnade.mesh.mesh import Mesh
from colonnade.outputs import json_of
from colonnade.serving.measured import HELD_OUT, Measured
from colonnade.serving.measurement import Measurement
from colonnade.serving.squad import measure_squad
from colonnade.serving.trained import Trained
from colonnade.train.base import content_together

if TYPE_CHECKING:
    from colonnade.data.overlap import Overlap


@dataclass(frozen=True)
class Report:
    """What is told of a measurement."""

    measured: Measured
    about: Mapping[str, object]
    """Of the checkpoint, the data, the layout and the versions."""

    def show(self, *, as_json: bool, overlaps: "Overlap | None" = None) -> None:
        """Print it: one JSON object, or lines for people."""
        found = self.measured
        if as_json:
            content = {"protocol": found.protocol, **found.numbers, "notes": list(found.notes)}
            more = {} if overlaps is None else {"overlap": overlaps.as_json()}
            print(json_of({**content, "parameters": dict(found.parameters), **self.about, **more}))
            return
        told = found.line if found.protocol in ("perplexity", HELD_OUT) else f"{found.protocol}: {found.line}"
        print("\n".join([told, *(f"Note: {note}." for note in found.notes)]), flush=True)
        if overlaps is not None:
            print(overlaps.summary())


def measure(trained: Trained, mesh: Mesh, checkpoint: Path, asked: Measurement) -> Report:
    """Measure what `asked` says, on a text or token file, with every rank. `checkpoint`: where `trained` comes from."""
    assert asked.data is not None, "what there is no text for is measured elsewhere"
    make = {"perplexity": _perplexity, "wikitext103": _wikitext, "lambada": _lambada, "squad": measure_squad}[
        asked.task
    ]
    found = make(trained, mesh, asked, asked.data)
    return Report(found, about(trained, mesh, checkpoint, asked.data))


def about(trained: Trained, mesh: Mesh, checkpoint: Path, data: str | None) -> dict[str, object]:
    """What a number came from; every rank calls this."""
    content = content_together(checkpoint, mesh.world)
    layout = mesh.layout
    base = trained.base
    return {
        "step": trained.step,
        "checkpoint": {
            "path": str(checkpoint),
            "sha256": next(iter(content.values())),
            **({} if base is None else {"base": dict(base.files)}),
        },
        "data": {"path": data, "sha256": hash_file(Path(data)) if data and Path(data).is_file() else None},
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        "precision": trained.precision,
        "versions": {"colonnade": __version__, "torch": torch.__version__},
    }


def _perplexity(trained: Trained, mesh: Mesh, asked: Measurement, data: str) -> Measured:
    window, batch_size = asked.window or trained.config.model.seq_length, asked.batch_size or BATCH_SIZE
    result = perplexity_of_file(
        trained.left_to_right,
        data,
        tokenizer=trained.tokenizer,
        mesh=mesh,
        hidden=trained.hidden,
        seq_length=window,
        stride=asked.stride,
        batch_size=batch_size,
        cut=cut_of(trained.config.data),
        progress=_progress("windows", mesh),
    )
    parameters = {"window": window, "stride": asked.stride or window, "batch_size": batch_size}
    return Measured("perplexity", parameters, _numbers(result), result.summary(), result.notes)


def _wikitext(trained: Trained, mesh: Mesh, asked: Measurement, data: str) -> Measured:
    model, detokenizer = trained.left_to_right, asked.detokenizer or "invertible"
    window = asked.window or min(PAPER_WINDOW, model.seq_length)
    stride, batch_size = min(asked.stride or PAPER_STRIDE, window), asked.batch_size or BATCH_SIZE
    if asked.stride is not None and asked.stride > window:
        raise ConfigError(
            f"--stride {asked.stride:,} is larger than the window, {window:,} tokens: the tokens between two windows "
            f"would not be scored. Use 1 to {window:,}."
        )
    test = read_wikitext(Path(data), detokenizer)
    result = perplexity_of_wikitext(
        model,
        test,
        tokenizer=trained.tokenizer,
        mesh=mesh,
        hidden=trained.hidden,
        seq_length=window,
        stride=stride,
        batch_size=batch_size,
        progress=_progress("windows", mesh),
    )
    parameters = {"window": window, "stride": stride, "detokenizer": detokenizer, "batch_size": batch_size}
    numbers = _numbers(result)
    numbers["original_tokens"] = numbers.pop("words")
    numbers["token_perplexity"] = numbers.pop("perplexity")
    numbers = {"perplexity": numbers.pop("word_perplexity"), **numbers}
    by_words = "too large to be told" if result.word_perplexity is None else perplexity_in_words(result.word_perplexity)
    line = (
        f"perplexity {by_words} ({test.original_tokens:,} original tokens, {result.tokens:,} scored; window "
        f"{window:,} moved by {stride:,}; detokenizer {detokenizer}), {perplexity_in_words(result.perplexity)} a token"
    )
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
    return Measured("WikiText-103", parameters, numbers, line + bits, result.notes)


def _lambada(trained: Trained, mesh: Mesh, asked: Measurement, data: str) -> Measured:
    model, variant, batch_size = trained.left_to_right, asked.variant or "whole-word", asked.batch_size or PASSAGES
    file = Path(data)
    cut = examples(file, read_passages(file), trained.tokenizer, variant=variant, longest=model.longest)
    result = evaluate_lambada(
        model,
        cut,
        mesh=mesh,
        hidden=trained.hidden,
        batch_size=batch_size,
        progress=_progress("passages", mesh),
    )
    parameters = {"variant": variant, "batch_size": batch_size}
    return Measured(f"LAMBADA ({variant})", parameters, asdict(result), result.summary())


def _numbers(result: Perplexity) -> dict[str, Any]:
    numbers = asdict(result)
    del numbers["notes"]
    return numbers


def _progress(what: str, mesh: Mesh) -> Progress:
    return Progress(what, shown=mesh.rank == 0)


def show_with_overlap(report: Report, corpus: list[Path], test: Path, checkpoint: Path, *, as_json: bool) -> None:
    """Print a report, with the overlap of its test set with `corpus` where that names any.

    A corpus that cannot be read raises its error behind the report, which may have taken hours.
    """
    try:
        overlaps = _overlap_with(corpus, test, checkpoint) if corpus else None
    except (ColonnadeError, OSError):
        report.show(as_json=as_json)
        raise
    report.show(as_json=as_json, overlaps=overlaps)


def _overlap_with(corpus: list[Path], test: Path, checkpoint: Path) -> "Overlap":
    """The share of 8-grams of a test set that a corpus has. Takes this process alone, and its cores."""
    from colonnade.data.overlap import overlap  # what reads corpora is an extra

    print(f"  comparing the 8-grams of {test} with {', '.join(map(str, corpus))}", file=sys.stderr, flush=True)
    return overlap(corpus, test, tokenizer=checkpoint / "tokenizer.json", workers=num_cores())
