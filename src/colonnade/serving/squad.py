"""`evaluate CHECKPOINT squad`: a model's answers to the questions of a file, in official files, and their scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colonnade.atomic import write_whole
from colonnade.data.example_dataset import PairTokens
from colonnade.data.question_windows import Windows
from colonnade.errors import ConfigError
from colonnade.evaluation.answers import Answers, Selection, submission
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.questions import answer, prepare
from colonnade.evaluation.squad import SquadScores, scores_1, scores_2
from colonnade.evaluation.squad_files import read_questions
from colonnade.examples.squad import Question, may_have_none
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_spans import SpanBERT
from colonnade.serving.measured import Measured
from colonnade.serving.measurement import Measurement
from colonnade.serving.trained import Trained

BATCH_SIZE = 8


def measure_squad(trained: Trained, mesh: Mesh, asked: Measurement, data: str) -> Measured:
    """Answer every question, and write what --output asks for (rank 0)."""
    model, path = trained.model, Path(data)
    if not isinstance(model, SpanBERT):
        now = f'kind "{trained.config.model.kind}" with head "{trained.config.model.head}"'
        raise ConfigError(
            f'a model of {now} has no answers to questions about texts: that takes model.head = "spans". '
            "Fine-tune one from it with train.init_from."
        )
    length, windows, selection, threshold = _settings(trained, asked)
    questions = read_questions(path)
    impossible = may_have_none(path)
    answers = answer(
        model,
        prepare(questions, trained.tokenizer, windows, length),
        control=PairTokens.of(trained.tokenizer),
        mesh=mesh,
        hidden=trained.hidden,
        length=length,
        batch_size=asked.batch_size or BATCH_SIZE,
        selection=selection,
        may_be_none=impossible,
        progress=Progress("windows", shown=mesh.rank == 0),
    )
    written = _write(asked.output, submission(answers, threshold)) if asked.output and mesh.rank == 0 else []
    scores = _scores(questions, answers, threshold, impossible)
    numbers: dict[str, object] = {"questions": len(questions), **({} if scores is None else scores.numbers())}
    parameters = {
        "window": length,
        "stride": windows.doc_stride,
        "max_query_length": windows.max_query_length,
        "max_answer_length": selection.longest,
        "n_best": selection.n_best,
        **({"null_threshold": threshold} if impossible else {}),
        "batch_size": asked.batch_size or BATCH_SIZE,
    }
    notes = tuple(f"wrote {each}" for each in written)
    return Measured(f"SQuAD {'2.0' if impossible else '1.1'}", parameters, numbers, _line(scores, numbers), notes)


def _settings(trained: Trained, asked: Measurement) -> tuple[int, Windows, Selection, float]:
    """Length of windows, how they are cut, how answers are chosen, and from which odds on there is none."""
    usual, choice = Windows(), Selection()
    longest = trained.config.model.seq_length
    if asked.window is not None and asked.window > longest:
        raise ConfigError(
            f"--window {asked.window:,} is longer than model.seq_length = {longest:,}, the positions that the "
            f"model has. Use {longest:,} or less."
        )
    windows = Windows(asked.stride or usual.doc_stride, asked.max_query_length or usual.max_query_length)
    selection = Selection(asked.n_best or choice.n_best, asked.max_answer_length or choice.longest)
    return asked.window or longest, windows, selection, asked.null_threshold or 0.0


def _scores(
    questions: list[Question], answers: Mapping[str, Answers], threshold: float, impossible: bool
) -> SquadScores | None:
    """None where some question does not say what is right."""
    right = {each.name: [given.text for given in each.answers] for each in questions if each.answers is not None}
    if len(right) < len(questions):
        return None
    texts = {name: each.text for name, each in answers.items()}
    if not impossible:
        return scores_1(right, texts)
    odds = {name: each.null_odds for name, each in answers.items() if each.null_odds is not None}
    return scores_2(right, texts, odds, threshold=threshold)


def _line(scores: SquadScores | None, numbers: Mapping[str, object]) -> str:
    told = f"{numbers['questions']:,} questions"
    if scores is None:
        return f"{told} answered; the file does not say what is right, so there are no scores"
    told = f"exact match {scores.exact:.2f}, F1 {scores.f1:.2f} of {told}"
    if scores.has_answer is not None and scores.no_answer is not None:
        told += f" (with an answer: exact match {scores.has_answer.exact:.2f}, F1 {scores.has_answer.f1:.2f}; "
        told += f"without: {scores.no_answer.exact:.2f})"
    if scores.best_exact is not None and scores.best_f1 is not None:
        told += (
            f"; best exact match {scores.best_exact.score:.2f} with --null-threshold {scores.best_exact.threshold!r}, "
            f"best F1 {scores.best_f1.score:.2f} with --null-threshold {scores.best_f1.threshold!r}"
        )
    return told


def output_files(output: str) -> dict[str, Path]:
    """Where the official files go: predictions at `output`, the others beside it."""
    path = Path(output)
    beside = {name: path.with_name(f"{path.stem}.{name}.json") for name in ("nbest_predictions", "null_odds")}
    return {"predictions": path, **beside}


def _write(output: str, files: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    places, written = output_files(output), []
    for name, content in files.items():
        places[name].parent.mkdir(parents=True, exist_ok=True)
        write_whole(places[name], (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode())
        written.append(places[name])
    return written
