"""The questions of files that are answered or measured on: all of them, or a refusal; and scores of their answers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from colonnade.config.numbers import counted
from colonnade.corpus.documents import Rejected
from colonnade.errors import DataError
from colonnade.evaluation.answers import Answers
from colonnade.evaluation.squad import SquadScores, scores_1, scores_2
from colonnade.examples.rows import json_rows
from colonnade.examples.squad import Question, questions_of


def read_questions(*paths: Path) -> list[Question]:
    """All questions of SQuAD's files, or of files with an object a line (`has_lines`) that has "question" and
    "context", and "id" where it is to be known by something else than its line. DataError where there are none, one is
    broken, or an id comes twice.
    """
    questions = [each for path in paths for each in _whole(path)]
    names = set[str]()
    for each in questions:
        if each.name in names:
            raise DataError(
                f'{each.file} has the id "{each.name}" twice, or a file before it has it: predictions are told by it. '
                "Give each its own."
            )
        names.add(each.name)
    return questions


def has_lines(path: Path) -> bool:
    """Whether a file of questions has an object a line; any other is read as one of SQuAD."""
    return path.suffix == ".jsonl"


def output_files(output: str | Path) -> dict[str, Path]:
    """Where the official files go: predictions at `output`, the others beside it."""
    path = Path(output)
    beside = {name: path.with_name(f"{path.stem}.{name}.json") for name in ("nbest_predictions", "null_odds")}
    return {"predictions": path, **beside}


def scores_of_answers(
    questions: Sequence[Question], answers: Mapping[str, Answers], threshold: float, *, may_be_none: bool
) -> SquadScores | None:
    """None where some question does not say what is right."""
    right = {each.name: [given.text for given in each.answers] for each in questions if each.answers is not None}
    if len(right) < len(questions):
        return None
    texts = {name: each.text for name, each in answers.items()}
    if not may_be_none:
        return scores_1(right, texts)
    odds = {name: each.null_odds for name, each in answers.items() if each.null_odds is not None}
    return scores_2(right, texts, odds, threshold=threshold)


def _whole(path: Path) -> list[Question]:
    found = list(_lines(path) if has_lines(path) else questions_of(path))
    broken = [each for each in found if isinstance(each, Rejected)]
    if broken:
        count = counted(len(broken), "entry", "entries")
        raise DataError(
            f"{path} has {count} without a question that can be read. The first: {broken[0]}. Copy it again."
        )
    questions = [each for each in found if isinstance(each, Question)]
    if not questions:
        raise DataError(f"{path} has no question. Name a file of SQuAD with some.")
    return questions


def _lines(path: Path) -> Iterator[Question | Rejected]:
    """Of a .jsonl."""
    for row in json_rows(path):
        if isinstance(row, Rejected):
            yield row
            continue
        asked, context = (row.values.get(key) for key in ("question", "context"))
        if isinstance(asked, str) and isinstance(context, str) and asked and context:
            yield Question(path, row.line, str(row.values.get("id", row.line)), asked, context, answers=None)
        else:
            yield row.rejected('it has no texts in "question" and "context"')
