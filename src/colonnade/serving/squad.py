"""`evaluate CHECKPOINT squad`: a model's answers to the questions of a file, in official files, and their scores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colonnade.atomic import write_whole
from colonnade.config.numbers import counted
from colonnade.data.example_dataset import PairTokens
from colonnade.data.question_windows import Windows
from colonnade.errors import ConfigError
from colonnade.evaluation.answers import Answers, Selection, submission
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.questions import Logits, Prepared, choose, logits_of, prepare
from colonnade.evaluation.squad import SquadScores
from colonnade.evaluation.squad_files import has_lines, output_files, read_questions, scores_of_answers
from colonnade.examples.squad import Question, may_have_none
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_spans import SpanBERT
from colonnade.serving.measured import Measured
from colonnade.serving.measurement import Measurement
from colonnade.serving.trained import Trained

BATCH_SIZE = 8


@dataclass(frozen=True)
class Manner:
    """How questions are read and answered."""

    length: int
    """[tokens] Of a window."""
    windows: Windows
    selection: Selection
    threshold: float
    """[logits] From how much likelier on there is no answer."""
    batch_size: int


def measure_squad(trained: Trained, mesh: Mesh, asked: Measurement, data: str) -> Measured:
    """Answer every question, and write what --output asks for (rank 0)."""
    path, how = Path(data), manner(trained, asked)
    questions, impossible = read_questions(path), may_go_unanswered(asked, [path])
    answers = answers_to(questions, trained, mesh, how, may_be_none=impossible)
    written = write_official(asked.output, answers, how.threshold) if asked.output and mesh.rank == 0 else []
    scores = scores_of_answers(questions, answers, how.threshold, may_be_none=impossible)
    numbers: dict[str, object] = {"questions": len(questions), **({} if scores is None else scores.numbers())}
    parameters = {
        "window": how.length,
        "stride": how.windows.doc_stride,
        "max_query_length": how.windows.max_query_length,
        "max_answer_length": how.selection.longest,
        "n_best": how.selection.n_best,
        **({"null_threshold": how.threshold} if impossible else {}),
        "batch_size": how.batch_size,
    }
    notes = tuple(f"wrote {each}" for each in written)
    line = score_line(scores, questions)
    return Measured(f"SQuAD {'2.0' if impossible else '1.1'}", parameters, numbers, line, notes)


def may_go_unanswered(asked: Measurement, files: Iterable[Path]) -> bool:
    """Whether a question may have no answer: where a file is of 2.0, or a threshold was asked for."""
    return asked.null_threshold is not None or any(may_have_none(path) for path in files if not has_lines(path))


def answers_to(
    questions: Sequence[Question],
    trained: Trained,
    mesh: Mesh,
    how: Manner,
    *,
    may_be_none: bool,
    others: Iterable[Trained] = (),
) -> dict[str, Answers]:
    """By id, the same on every rank; every rank calls this. `others`: models whose logits are averaged with those of
    `trained`, one open at a time. ConfigError for a model that answers no questions, and for one that reads others.
    """
    prepared = prepare(questions, trained.tokenizer, how.windows, how.length)
    total, number = _logits(trained, prepared, mesh, how), 1
    for member in others:
        check_member(member, trained)
        total, number = total + _logits(member, prepared, mesh, how), number + 1
    return choose(prepared, total / number, how.selection, may_be_none=may_be_none)


def _logits(trained: Trained, prepared: Sequence[Prepared], mesh: Mesh, how: Manner) -> Logits:
    model = trained.model
    if not isinstance(model, SpanBERT):
        now = f'kind "{trained.config.model.kind}" with head "{trained.config.model.head}"'
        raise ConfigError(
            f'a model of {now} has no answers to questions about texts: that takes model.head = "spans". '
            "Fine-tune one from it with train.init_from."
        )
    return logits_of(
        model,
        prepared,
        control=PairTokens.of(trained.tokenizer),
        mesh=mesh,
        hidden=trained.hidden,
        length=how.length,
        batch_size=how.batch_size,
        progress=Progress("windows", shown=mesh.rank == 0),
    )


def check_member(member: Trained, first: Trained) -> None:
    """ConfigError where the logits of two models are not of the same tokens of the same windows."""
    longest = first.config.model.seq_length
    if member.tokenizer.sha256 != first.tokenizer.sha256 or member.config.model.seq_length != longest:
        raise ConfigError(
            f"one model reads windows of {longest:,} tokens, another of {member.config.model.seq_length:,}, or with "
            "another tokenizer: an ensemble averages logits of the same tokens. Leave one out."
        )


def manner(trained: Trained, asked: Measurement) -> Manner:
    """The usual one, with what was asked for otherwise."""
    usual, choice = Windows(), Selection()
    longest = trained.config.model.seq_length
    if asked.window is not None and asked.window > longest:
        raise ConfigError(
            f"--window {asked.window:,} is longer than model.seq_length = {longest:,}, the positions that the "
            f"model has. Use {longest:,} or less."
        )
    return Manner(
        length=asked.window or longest,
        windows=Windows(asked.stride or usual.doc_stride, asked.max_query_length or usual.max_query_length),
        selection=Selection(asked.n_best or choice.n_best, asked.max_answer_length or choice.longest),
        threshold=asked.null_threshold or 0.0,
        batch_size=asked.batch_size or BATCH_SIZE,
    )


def score_line(scores: SquadScores | None, questions: Sequence[Question]) -> str:
    """Scores for people."""
    line = counted(len(questions), "question")
    if scores is None:
        how = next((f": {each.unsaid}" for each in questions if each.unsaid), "")
        return f"{line} answered; the file does not say what is right, so there are no scores{how}"
    line = f"exact match {scores.exact:.2f}, F1 {scores.f1:.2f} of {line}"
    if scores.has_answer is not None and scores.no_answer is not None:
        line += f" (with an answer: exact match {scores.has_answer.exact:.2f}, F1 {scores.has_answer.f1:.2f}; "
        line += f"without: {scores.no_answer.exact:.2f})"
    if scores.best_exact is not None and scores.best_f1 is not None:
        line += (
            f"; best exact match {scores.best_exact.score:.2f} with --null-threshold {scores.best_exact.threshold!r}, "
            f"best F1 {scores.best_f1.score:.2f} with --null-threshold {scores.best_f1.threshold!r}"
        )
    return line


def write_official(output: str, answers: Mapping[str, Answers], threshold: float) -> list[Path]:
    """The files of `submission`; returns their places."""
    places, written = output_files(output), []
    for name, content in submission(answers, threshold).items():
        write_whole(places[name], (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode())
        written.append(places[name])
    return written
