"""What `evaluate` is to measure, as a user asks for it: held against itself and the disk before torch is imported."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from colonnade.errors import DataError
from colonnade.evaluation.detokenize import DETOKENIZERS
from colonnade.evaluation.passages import VARIANTS, read_passages
from colonnade.evaluation.squad_files import has_lines, output_files, read_questions
from colonnade.evaluation.wikitext import read_wikitext
from colonnade.outputs import output_problems
from colonnade.storage import as_given, is_remote, not_here

PARTS = ("validation", "test")
"""Of a run's data: what it is not trained on."""
OWN = "run"
"""Instead of a corpus: that which the checkpoint was trained on."""


@dataclass(frozen=True)
class Measurement:
    """The options of `evaluate` that say what is measured. None: not given."""

    task: str = "perplexity"
    data: str | None = None
    part: str | None = None
    samples: int | None = None
    window: int | None = None
    stride: int | None = None
    batch_size: int | None = None
    variant: str | None = None
    detokenizer: str | None = None
    overlap: tuple[str, ...] = ()
    as_json: bool = False
    output: str | None = None
    null_threshold: float | None = None
    max_answer_length: int | None = None
    max_query_length: int | None = None
    n_best: int | None = None


QUESTIONS = ("output", "null_threshold", "max_answer_length", "max_query_length", "n_best")
"""Options of questions about texts alone."""
_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "perplexity": ("part", "samples", "window", "stride"),
        "wikitext103": ("window", "stride", "detokenizer"),
        "lambada": ("variant",),
        "squad": ("window", "stride", *QUESTIONS),
    }
)
"""The options of each task; all have --data, --batch-size and --overlap."""
TASKS = tuple(_OF)


def measurement_problems(asked: Measurement) -> Iterator[str]:
    """What is wrong with what `evaluate` is to measure, and on which text."""
    if asked.task not in _OF:
        yield f"there is no task {asked.task!r}. Use {', '.join(TASKS)}."
    else:
        yield from _foreign(asked)
    yield from _text(asked)
    yield from _keys(asked)
    yield from _windows(asked)
    yield from _overlap(asked)
    yield from _output(asked)
    yield from threshold_problems(asked.null_threshold)


def _foreign(asked: Measurement) -> Iterator[str]:
    """Options of other tasks."""
    for option in ("part", "samples", "window", "stride", "variant", "detokenizer", *QUESTIONS):
        if getattr(asked, option) is not None and option not in _OF[asked.task]:
            tasks = [task for task, options in _OF.items() if option in options]
            name = option.replace("_", "-")
            yield f"--{name} is of the task {' and of '.join(tasks)}, not of {asked.task}. Leave it out."


def _text(asked: Measurement) -> Iterator[str]:
    data, part = asked.data, asked.part
    if (data is None) == (part is None):
        both = "neither --data nor --part is given" if data is None else f"--data {data} and --part {part} are given"
        yield f"{both}: one of them says what to measure on. Use --data FILE, or --part test for the run's own data."
    if part is not None and part not in PARTS:
        yield f"--part {part!r}: there is no such held-out part. Use {' or '.join(PARTS)}."
    for option in ("window", "stride"):
        given = getattr(asked, option)
        if part is not None and given is not None:
            yield f"--{option} {given} does not go with --part, read as the run reads it. Leave out --{option}."
    if data is not None and asked.samples is not None:
        yield f"--samples {asked.samples} is of a --part; --data is read whole. Leave out --samples."
    if data is not None:
        yield from data_problems(data) if asked.task == "perplexity" else _file_problems(asked, Path(data))


def _file_problems(asked: Measurement, file: Path) -> Iterator[str]:
    """What is wrong with a test set of a certain form: it is read here, so that a line is told in a second."""
    if not file.is_file():
        what = "is a folder." if file.is_dir() else f"does not exist.{not_here(file)}"
        yield f"--data {as_given(file)} {what} Name the file of the test set."
        return
    if asked.task == "squad" and has_lines(file):
        yield (
            f"--data {file} has questions without answers, as every .jsonl has: there is nothing to measure. Name a "
            "file of SQuAD (.json), or have the questions answered with `colonnade predict`."
        )
        return
    try:
        _READ.get(asked.task, str)(file)
    except DataError as error:
        yield str(error)


_READ: Mapping[str, Callable[[Path], object]] = MappingProxyType(
    {"lambada": read_passages, "squad": read_questions, "wikitext103": lambda file: read_wikitext(file, "none")}
)


def data_problems(data: str) -> Iterator[str]:
    """What is wrong with --data: nothing of that name here, as a text or as a token file."""
    if is_remote(data):
        yield f"--data {data} cannot be measured.{not_here(data)}"
    elif not any(Path(f"{data}{ending}").exists() for ending in ("", ".bin", ".idx")):
        yield (
            f"{data} does not exist, and there is no {data}.bin with {data}.idx. Name a text (.txt, .jsonl, also "
            "compressed), or the prefix of a token file."
        )


def _output(asked: Measurement) -> Iterator[str]:
    """Of squad."""
    if asked.output is not None and has_lines(Path(asked.output)):
        yield (
            f"--output {asked.output}: the official file of predictions is one object of all answers, and a .jsonl has "
            "an object a line. Use a name that ends in .json, or have a .jsonl written by `colonnade predict`."
        )
    elif asked.output is not None:
        inputs = [Path(given) for given in (asked.data, *asked.overlap) if given is not None]
        yield from output_problems(asked.output, files=output_files(asked.output).values(), inputs=inputs)


def threshold_problems(null_threshold: float | None) -> Iterator[str]:
    """What is wrong with --null-threshold."""
    if null_threshold is not None and not math.isfinite(null_threshold):
        yield (
            f"--null-threshold {null_threshold} is no difference of logits. Give a number, like 0; 1e9 has every "
            "question answered, and -1e9 none."
        )


def _keys(asked: Measurement) -> Iterator[str]:
    for option, given, known in (
        ("variant", asked.variant, VARIANTS),
        ("detokenizer", asked.detokenizer, DETOKENIZERS),
    ):
        if given is not None and given not in known:
            yield f"--{option} {given!r}: there is no such {option}. Use {', '.join(known)}."


def _windows(asked: Measurement) -> Iterator[str]:
    window, stride = asked.window, asked.stride
    if window is not None and stride is not None and stride > window:
        yield (
            f"--stride {stride:,} is larger than --window {window:,}: the tokens between two windows would not be "
            f"scored. Use 1 to {window:,}."
        )


def _overlap(asked: Measurement) -> Iterator[str]:
    if not asked.overlap:
        return
    if asked.data is None or not Path(asked.data).is_file():
        yield "--overlap compares the words of a text file with a corpus. Name one with --data."
    for corpus in asked.overlap:
        if corpus != OWN and not any(Path(f"{corpus}{ending}").exists() for ending in ("", ".idx")):
            yield (
                f"--overlap {corpus}: there is no such text, folder or token file. Name a text (.txt, .jsonl, also "
                f"compressed), a folder of them or the prefix of a token file; or {OWN!r}, the data that the "
                "checkpoint was trained on."
            )
