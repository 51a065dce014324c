"""Questions as a model reads them: what is cut, and the windows that are left."""

from pathlib import Path

import numpy as np
import pytest
import torch

from colonnade.data.example_dataset import PairTokens
from colonnade.data.question_windows import CONTROL_TOKENS, Windows
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, DataError
from colonnade.evaluation.answers import Selection
from colonnade.evaluation.questions import _inputs, choose, prepare
from colonnade.examples.squad import Given, Question, SquadFormat
from tests.tasks.examples import WORDS, vocabulary


def question(words: int, context: str) -> Question:
    asked = " ".join([*WORDS[1:4], *WORDS[:1] * words][:words])
    return Question(Path("dev.json"), 1, "q", asked, context, None)


@pytest.mark.parametrize("words", [3, 4, 30])
def test_windows_are_as_wide_as_the_question_that_is_read_leaves_room_for(tmp_path: Path, words: int) -> None:
    """What a question has behind its longest length takes no room from the text."""
    tokenizer, length = vocabulary(tmp_path), 12
    context = " ".join(WORDS[:1] * 20)
    (found,) = prepare([question(words, context)], tokenizer, Windows(doc_stride=4, max_query_length=3), length)
    assert (
        found.asked.tolist() == tokenizer.encode(found.question.text)[:3] and len(found.text) == len(found.places) == 20
    )
    assert found.windows == [range(6), range(4, 10), range(8, 14), range(12, 18), range(16, 20)]
    assert max(map(len, found.windows)) == length - CONTROL_TOKENS - 3


@pytest.mark.parametrize(("multiple", "longest"), [(1, 8), (2, 8), (3, 9), (5, 10)])
def test_windows_side_by_side_are_as_long_as_sequence_parallelism_can_cut(
    tmp_path: Path, multiple: int, longest: int
) -> None:
    tokenizer = vocabulary(tmp_path)
    (found,) = prepare([question(2, " ".join(WORDS[:1] * 4))], tokenizer, Windows(doc_stride=2), 8)
    assert found.windows == [range(3), range(2, 4)]
    inputs = _inputs([(found, each) for each in found.windows], PairTokens.of(tokenizer), torch.device("cpu"), multiple)
    assert inputs.tokens.shape == inputs.real.shape == (longest, 2)
    assert inputs.real.sum(0).tolist() == [8, 7], "tokens of the question, the window, and three around them"


@pytest.mark.parametrize("answer", ["Zoe\u0308", "\u092e\u0947\u0902", "\u2764\ufe0f", "dog"])
def test_a_model_that_is_right_answers_with_the_marks_of_the_text(tmp_path: Path, answer: str) -> None:
    """As get_final_text of run_squad.py, which gives the whole word where the tokens lack a part of it. What a model
    learns to point at and what it answers with are the same characters.
    """
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog", "zoe", "\u092e", "\u2764"]
    (tmp_path / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    tokenizer, context = Tokenizer.load(tmp_path), f"dog {answer} dog"
    asked = Question(Path("dev.json"), 1, "q", "dog", context, (Given(answer, 4),))
    prepared = prepare([asked], tokenizer, Windows(), 8)
    ((_, _, (first, stop)),) = [each.sequences for each in SquadFormat().encode([asked], tokenizer)]
    logits = np.zeros((1, 8, 2))
    logits[0, 3 + first, 0] = logits[0, 3 + stop - 1, 1] = 9.0
    assert choose(prepared, logits, Selection(), may_be_none=False)["q"].text == answer


def test_what_leaves_no_room_is_told_with_the_tokens_that_are_read(tmp_path: Path) -> None:
    tokenizer = vocabulary(tmp_path)
    with pytest.raises(DataError, match=r'question "q" has 5 tokens, and a window of 8 leaves no room'):
        prepare([question(9, WORDS[0])], tokenizer, Windows(max_query_length=5), 8)
    assert prepare([question(9, WORDS[0])], tokenizer, Windows(max_query_length=4), 8)[0].windows == [range(1)]


@pytest.mark.parametrize("may_be_none", [True, False])
def test_a_model_whose_logits_are_no_numbers_answers_nothing(tmp_path: Path, may_be_none: bool) -> None:
    prepared = prepare([question(1, WORDS[0])], vocabulary(tmp_path), Windows(), 8)
    logits = np.zeros((1, 8, 2))
    assert choose(prepared, logits, Selection(), may_be_none=may_be_none)["q"].best[0].text == WORDS[0]
    for broken in (np.nan, np.inf, -np.inf):
        logits[0, 3, 1] = broken
        with pytest.raises(CheckpointError, match=r"logits of where answers begin and end are not finite: its weights"):
            choose(prepared, logits, Selection(), may_be_none=may_be_none)


def test_a_text_of_which_the_tokenizer_makes_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'question "q" has a context without a token, which nothing can be answered'):
        prepare([question(1, " ")], vocabulary(tmp_path), Windows(), 8)
