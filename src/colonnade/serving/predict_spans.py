"""Answers to new questions about texts, by a model that was fine-tuned for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.atomic import write_whole
from colonnade.errors import ConfigError
from colonnade.evaluation.answers import Answers
from colonnade.evaluation.squad_files import read_questions, scores_of_answers
from colonnade.examples.squad import Question
from colonnade.mesh.mesh import Mesh
from colonnade.outputs import json_of
from colonnade.serving.measurement import Measurement
from colonnade.serving.squad import answers_to, manner, may_go_unanswered, score_line, write_official
from colonnade.serving.trained import Trained, open_another

SHOWN = 3
"""Answers of a question that are reported, of those found."""


@dataclass(frozen=True)
class AnsweredQuestions:
    """What a model answers, in the order of the questions."""

    questions: Sequence[Question]
    answers: Mapping[str, Answers]
    """By the questions' ids."""
    threshold: float
    """[logits] From how much likelier on there is no answer."""
    may_be_none: bool

    def records(self) -> Iterator[dict[str, Any]]:
        """An object a question: what is answered ("" is nothing), and the likeliest answers with probabilities."""
        for each in self.questions:
            found = self.answers[each.name]
            likeliest = [{"text": one.text, "probability": one.probability} for one in found.best[:SHOWN]]
            odds = {} if found.null_odds is None else {"null_odds": found.null_odds}
            prediction = found.prediction(self.threshold)
            yield {"id": each.name, "question": each.text, "prediction": prediction, "answers": likeliest, **odds}

    def scores(self) -> dict[str, Any]:
        """Of all questions; nothing where the files do not say what is right."""
        found = scores_of_answers(self.questions, self.answers, self.threshold, may_be_none=self.may_be_none)
        return {} if found is None else found.numbers()

    def save(self, path: Path) -> None:
        """Write them whole: SQuAD's official .json and what goes beside it, or a .jsonl with probabilities."""
        if path.suffix == ".json":
            write_official(str(path), self.answers, self.threshold)
            return
        lines = (json_of(record, ensure_ascii=False) + "\n" for record in self.records())
        write_whole(path, "".join(lines).encode())

    def about(self) -> dict[str, Any]:
        """For --json."""
        return {"format": "squad", "questions": len(self.questions), "scores": self.scores()}

    def summary(self) -> str:
        """One line for people."""
        found = scores_of_answers(self.questions, self.answers, self.threshold, may_be_none=self.may_be_none)
        return score_line(found, self.questions)


def predict_spans(
    trained: Trained,
    mesh: Mesh,
    inputs: Sequence[Path],
    *,
    format_name: str | None,
    batch_size: int,
    null_threshold: float | None,
    others: Sequence[Path] = (),
) -> AnsweredQuestions:
    """Of files of questions; every rank calls this, and gets it. `null_threshold`: None in files that do not say that
    a question may have no answer: each gets one. `others`: the rest of an ensemble, whose logits are averaged.
    """
    if format_name not in (None, "squad"):
        raise ConfigError(
            f'--format {format_name}, and the checkpoint has model.head = "spans": it answers questions about texts. '
            "Give it files of SQuAD (.json), or of objects with question and context (.jsonl)."
        )
    for path in inputs:
        if path.suffix not in (".json", ".jsonl") or not path.is_file():
            what = "does not end in .json or .jsonl" if path.is_file() else "is no file"
            raise ConfigError(
                f"{path} {what}. Questions are read from files of SQuAD (.json), or of objects with question and "
                "context (.jsonl)."
            )
    questions, asked = read_questions(*inputs), Measurement(batch_size=batch_size, null_threshold=null_threshold)
    impossible, how = may_go_unanswered(asked, inputs), manner(trained, asked)
    members = (open_another(path, mesh, trained) for path in others)
    answers = answers_to(questions, trained, mesh, how, may_be_none=impossible, others=members)
    return AnsweredQuestions(questions, answers, how.threshold, impossible)
