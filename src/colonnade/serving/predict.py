"""Labels, scores and choices of new examples, by a model that was fine-tuned for them.

    file of a benchmark, or a token file of examples ──▶ logits [n, labels] ──▶ lines · GLUE's .tsv · .jsonl

Where the examples have labels, the scores of all of them are reported too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colonnade.atomic import write_whole
from colonnade.config.numbers import counted, one_of
from colonnade.data.datasets import open_tokens
from colonnade.data.example_dataset import ExampleDataset, PairTokens, Reading, fields_of, misfit
from colonnade.data.indexed import idx_path
from colonnade.data.label_names import compare_labels, numbers_of
from colonnade.data.loader import evaluation_batches
from colonnade.data.sidecar import ExampleFields
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.examples.formats import FORMATS, WITH_TEMPLATE, format_of
from colonnade.examples.make import make_examples
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_labels import LabelBERT
from colonnade.outputs import json_of, json_to_print
from colonnade.serving.predict_spans import predict_spans
from colonnade.serving.trained import Trained, open_another
from colonnade.tasks.labels import Labels
from colonnade.tasks.scores import scores_of

AS_TEXT = frozenset({"mnli", "qnli", "rte"})
"""Tasks whose predictions GLUE's server takes as names; of the others it takes numbers."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """What a model predicts of n examples, in their order."""

    fields: ExampleFields
    logits: Floats
    """[n, labels]; of scores [n, 1]."""
    targets: Floats
    """[n]: what is right; NaN where it is not known."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the labels, or of the texts to choose from; none for scores."""
        if self.fields.head == "choice":
            return tuple(name.rpartition(" ")[2] for name in self.fields.fields[1:])
        return self.fields.labels

    @property
    def probabilities(self) -> Floats:
        """[n, labels]"""
        shifted = np.exp(self.logits - self.logits.max(1, keepdims=True))
        found: Floats = shifted / shifted.sum(1, keepdims=True)
        return found

    def records(self) -> Iterator[dict[str, Any]]:
        """An object an example."""
        probabilities = self.probabilities
        for index, logits in enumerate(self.logits):
            if not self.names:
                yield {"index": index, "score": float(logits[0])}
                continue
            by_name = dict(zip(self.names, map(float, probabilities[index]), strict=True))
            yield {"index": index, "prediction": self.names[int(logits.argmax())], "probabilities": by_name}

    def submission(self) -> str:
        """As GLUE's server takes it: a header, and a line an example."""
        lines = ["index\tprediction"]
        as_text = self.fields.head == "choice" or self.fields.format in AS_TEXT
        for index, logits in enumerate(self.logits):
            number = int(logits.argmax())
            predicted = f"{logits[0]:.3f}" if not self.names else self.names[number] if as_text else str(number)
            lines.append(f"{index}\t{predicted}")
        return "\n".join(lines) + "\n"

    def scores(self) -> dict[str, float]:
        """Of all examples; nothing where one has no label."""
        if np.isnan(self.targets).any():
            return {}
        binary = len(self.names) == 2 and self.fields.head != "choice"
        return scores_of(self.logits, self.targets, binary=binary)

    def save(self, path: Path) -> None:
        """Write them whole: a .tsv for submission, or a .jsonl with probabilities."""
        lines = (json_of(record, ensure_ascii=False) + "\n" for record in self.records())
        write_whole(path, (self.submission() if path.suffix == ".tsv" else "".join(lines)).encode())

    def about(self) -> dict[str, Any]:
        """For --json."""
        return {"format": self.fields.format, "examples": len(self.logits), "scores": self.scores()}

    def summary(self) -> str:
        """One line for people."""
        scores = ", ".join(f"{name} {score:.4f}" for name, score in self.scores().items())
        return f"{counted(len(self.logits), 'example')} of {self.fields.format}{f': {scores}' if scores else ''}"


class Predicted(Protocol):
    """What a model predicts of new data: of examples, or of questions."""

    def records(self) -> Iterator[dict[str, Any]]:
        """An object an example."""
        ...

    def about(self) -> dict[str, Any]:
        """For --json."""
        ...

    def save(self, path: Path) -> None:
        """Write them whole, as the name's ending says."""
        ...

    def summary(self) -> str:
        """One line for people."""
        ...


def predict_any(
    trained: Trained,
    mesh: Mesh,
    inputs: Sequence[Path],
    *,
    others: Sequence[Path],
    output: Path | None,
    format_name: str | None,
    batch_size: int,
    null_threshold: float | None,
) -> Predicted:
    """What the model predicts, or with `others` an ensemble; every rank calls this. ConfigError for options of another
    head.
    """
    head = trained.config.model.head
    check_options(head, output, null_threshold)
    if head == "spans":
        return predict_spans(
            *(trained, mesh, inputs),
            format_name=format_name,
            batch_size=batch_size,
            null_threshold=null_threshold,
            others=others,
        )
    members = [predict(trained, mesh, inputs, format_name=format_name, batch_size=batch_size)]
    for path in others:
        member = open_another(path, mesh, trained)
        members.append(predict(member, mesh, inputs, format_name=format_name, batch_size=batch_size))
    return averaged(members)


def predict(
    trained: Trained, mesh: Mesh, inputs: Sequence[Path], *, format_name: str | None, batch_size: int
) -> Predictions:
    """Of one token file of examples, or files of a benchmark's `format_name`; every rank calls this, and gets it.
    CheckpointError for logits that are not finite.
    """
    model, head = trained.model, trained.config.model.head
    if not isinstance(model, LabelBERT) or head == "none":
        raise ConfigError(
            f'the checkpoint has model.kind = "{trained.config.model.kind}" and model.head = "{head}", which tells no '
            'labels. Fine-tune a BERT with model.head = "classification", "choice" or "spans" on the task.'
        )
    with _token_file(trained, inputs, format_name) as prefix:
        file = open_tokens(prefix, vocab_size=model.vocab_size, tokenizer=trained.tokenizer)
        reading = Reading(PairTokens.of(trained.tokenizer), head, model.num_logits, labelled=False)
        wrong = misfit(fields_of(file), reading)
        if wrong is not None:
            raise DataError(
                f"{' '.join(map(str, inputs))}: {wrong.what} in the checkpoint. Use a checkpoint of a model that was "
                "fine-tuned for them, or name other files."
            )
        length, everything = trained.config.model.seq_length, range(file.num_documents)
        dataset = ExampleDataset(file, everything, length, vocab_size=model.vocab_size, reading=reading)
        task = Labels()
        batches = evaluation_batches(
            lambda positions: task.batch(dataset.rows(positions), positions),
            len(dataset),
            micro_batch_size=batch_size,
            dp_rank=mesh.data.rank,
            dp_size=mesh.data.size,
        )
        columns = columns_of(trained, fields_of(file), model.num_logits)
        logits, targets = task.logits(model, batches, dp=mesh.data, pp=mesh.pp, hidden=trained.hidden)
        if not logits.isfinite().all():
            raise CheckpointError.of_broken_weights("logits of labels")
        return Predictions(fields_of(file), logits[:, columns].numpy(), targets.numpy())


def columns_of(trained: Trained, fields: ExampleFields, num_logits: int) -> list[int]:
    """Which of a model's logits each label of examples has: by its name where the model has the same names, else by its
    number, which is told on standard error where they have other names. ConfigError for those of a converted model.
    """
    how = compare_labels(trained.labels, fields.labels)
    if how == "reordered":
        return numbers_of(fields.labels, trained.labels)
    both = (
        f"the checkpoint tells {', '.join(trained.labels)} apart, and examples of {fields.format} have the labels "
        f"{', '.join(fields.labels)}"
    )
    if how == "other" and trained.is_converted:
        raise ConfigError(
            f"{both}. Use a model that was fine-tuned for {fields.format}. If only the names differ, write those of "
            "the examples in id2label of the config.json that the checkpoint was converted from, and convert again."
        )
    if how == "other" and trained.mesh.rank == 0:
        print(f"Note: {both}: their numbers are taken to mean the same.", file=sys.stderr, flush=True)
    return list(range(num_logits))


def averaged(members: Sequence[Predictions]) -> Predictions:
    """An ensemble: the mean of its members' logits. ConfigError where they tell of different labels."""
    first = members[0]
    for other in members[1:]:
        if (other.fields.head, other.names, other.logits.shape) != (first.fields.head, first.names, first.logits.shape):
            raise ConfigError(
                f"one model tells {_described(other)}, another {_described(first)}: an ensemble is of models that were "
                "fine-tuned for the same task. Leave one out."
            )
    return replace(first, logits=np.mean([each.logits for each in members], axis=0))


def _described(found: Predictions) -> str:
    what = ", ".join(found.names) or "a score"
    return f"{what} of {counted(len(found.logits), 'example')}"


def check_options(head: str, output: Path | None, null_threshold: float | None) -> None:
    """ConfigError for options of another head than the checkpoint's."""
    spans = head == "spans"
    if output is not None and output.suffix == (".tsv" if spans else ".json"):
        other = "SQuAD's predictions are .json" if spans else "labels are told in .tsv, as GLUE takes it"
        raise ConfigError(f'--output {output}, and the checkpoint has model.head = "{head}": {other}, or .jsonl.')
    if null_threshold is not None and not spans:
        raise ConfigError(
            f'--null-threshold is of questions about texts, and the checkpoint has model.head = "{head}". Leave it out.'
        )


def show(found: Predicted, output: Path | None, *, as_json: bool) -> None:
    """Print them, or write them to a file and print what they are."""
    if output is not None:
        found.save(output)
    if as_json:
        written = {} if output is None else {"output": str(output)}
        records = list(found.records()) if output is None else []
        print(json_of({**found.about(), **written, **({"predictions": records} if output is None else {})}))
        return
    if output is None:
        print("".join(json_to_print(record) + "\n" for record in found.records()), end="")
    where = "" if output is None else f" -> {output}"
    print(f"{found.summary()}{where}", file=sys.stderr if output is None else sys.stdout, flush=True)


@contextmanager
def _token_file(trained: Trained, inputs: Sequence[Path], format_name: str | None) -> Iterator[str]:
    """The prefix of a token file of the examples: the one that is named, or one that is made for the time."""
    if format_name is None:
        if len(inputs) != 1 or not idx_path(str(inputs[0])).exists():
            raise ConfigError(
                f"{' '.join(map(str, inputs))}: no token file, and --format is not given. Say how the file is to be "
                "read, like --format mnli, or name the prefix of one that `colonnade data examples` made."
            )
        yield str(inputs[0])
        return
    if format_name in WITH_TEMPLATE:
        raise ConfigError(
            f"--format {format_name}: a conversation has no label to predict. Use {one_of(FORMATS)}, or write answers "
            "with `colonnade generate --messages FILE`."
        )
    with tempfile.TemporaryDirectory(prefix="colonnade-predict-") as folder:
        made = make_examples(format_of(format_name), inputs, Path(folder) / "examples", trained.tokenizer)
        if made.rejected:
            raise DataError(
                f"{counted(made.rejected, 'row')} of {' '.join(map(str, inputs))} cannot be read as {format_name}, "
                f"the first is {made.first[0]}. A prediction of every row needs all of them: mend or remove these."
            )
        yield made.prefix
