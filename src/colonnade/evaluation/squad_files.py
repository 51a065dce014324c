"""The questions of a file of SQuAD that is measured on: all of them, or a refusal."""

from pathlib import Path

from colonnade.corpus.documents import Rejected
from colonnade.errors import DataError
from colonnade.examples.squad import Question, questions_of


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. DataError where there are none, one is broken, or an id comes twice."""
    found = list(questions_of(path))
    broken = [each for each in found if isinstance(each, Rejected)]
    if broken:
        raise DataError(f"{path} has {len(broken):,} that are no questions. The first: {broken[0]}. Copy it again.")
    questions = [each for each in found if isinstance(each, Question)]
    if not questions:
        raise DataError(f"{path} has no question. Name a file of SQuAD with some.")
    names = set[str]()
    for each in questions:
        if each.name in names:
            raise DataError(f'{path} has the id "{each.name}" twice: predictions are told by it. Give each its own.')
        names.add(each.name)
    return questions
