"""Questions that are answered at each evaluation of a run, and scored as SQuAD's own scripts do it.

The token file of a development set says where one right answer is, in tokens. Exact match and F1 are of texts and count
the best of several: they take the official file, data.questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from colonnade.config.schema import Config
from colonnade.data.example_dataset import PairTokens
from colonnade.data.question_windows import Windows
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.evaluation.answers import Selection
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.squad import SquadScores

if TYPE_CHECKING:
    from colonnade.evaluation.questions import Prepared
    from colonnade.examples.squad import Question
    from colonnade.mesh.mesh import Mesh
    from colonnade.model.model import Transformer
    from colonnade.tasks.task import Hidden


@dataclass(frozen=True)
class ScoredQuestions:
    """All questions of a file, as a run's model reads them."""

    questions: Sequence[Question]
    may_be_none: bool
    """Whether a question may have no answer (2.0)."""
    content: str
    """SHA-256 of the file."""
    tokenizer: Tokenizer
    windows: Windows
    length: int
    """[tokens] Of a window."""

    @cached_property
    def prepared(self) -> list[Prepared]:
        """Their tokens and windows."""
        from colonnade.evaluation.questions import prepare

        return prepare(self.questions, self.tokenizer, self.windows, self.length)

    def score(self, model: Transformer, mesh: Mesh, hidden: Hidden, *, batch_size: int) -> SquadScores:
        """Exact match and F1, the same on every rank and on every layout that has the same logits, NaN where these are
        no numbers; every rank calls this.
        """
        from colonnade.evaluation.questions import choose, logits_of
        from colonnade.evaluation.squad_files import scores_of_answers
        from colonnade.model.bert_spans import SpanBERT

        assert isinstance(model, SpanBERT), "the config check asks for the head spans"
        logits = logits_of(
            model,
            self.prepared,
            control=PairTokens.of(self.tokenizer),
            mesh=mesh,
            hidden=hidden,
            length=self.length,
            batch_size=batch_size,
            progress=Progress("windows", shown=False),
        )
        known = bool(np.isfinite(logits).all())  # else the run has diverged, and by its losses ends or returns
        logits = logits if known else np.zeros_like(logits)
        answers = choose(self.prepared, logits, Selection(), may_be_none=self.may_be_none)
        scores = scores_of_answers(self.questions, answers, 0.0, may_be_none=self.may_be_none)
        assert scores is not None, "all of them say what is right"
        return scores if known else scores.unknown()


def open_questions(config: Config, tokenizer: Tokenizer | None, windows: Windows) -> ScoredQuestions | None:
    """Those of data.questions, read; None where it is unset. ConfigError for no such file, DataError for one whose
    questions cannot be scored.
    """
    if config.data.questions is None:
        return None
    from colonnade.evaluation.squad_files import read_questions
    from colonnade.examples.squad import may_have_none

    path = Path(config.data.questions)
    if not path.is_file():
        raise ConfigError(f"data.questions = {str(path)!r} is no file. Name a file of SQuAD (.json).")
    if path.suffix != ".json":
        raise ConfigError(f"data.questions = {str(path)!r} does not end in .json. Name a file of SQuAD.")
    questions = read_questions(path)
    unanswered = next((each for each in questions if each.answers is None), None)
    if unanswered is not None:
        instead = f"; or, {unanswered.unsaid}" if unanswered.unsaid else ""
        raise DataError(
            f'{path}: question "{unanswered.name}" does not say what is right, so it cannot be scored. Name a file '
            f"with answers, such as the development set{instead}."
        )
    assert tokenizer is not None, "examples are made with one"
    content = content_of(path)
    return ScoredQuestions(questions, may_have_none(path), content, tokenizer, windows, config.model.seq_length)


def content_of(path: Path) -> str:
    """By what the content of a file of questions is known: its SHA-256."""
    return sha256(path.read_bytes()).hexdigest()
