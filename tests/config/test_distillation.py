"""What [distillation] does not go with is one message each."""

from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.config.load import load

TEACHER = "distillation.teacher=runs/books"
LABELS = ("model.kind=bert", "model.head=classification", "model.num_labels=2")
STATES = ("distillation.student_layers=[0, 1]", "distillation.teacher_layers=[1, 3]")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("distillation.alpha=0.2",), "[distillation] has no effect without distillation.teacher."),
        ((TEACHER, "distillation.alpha=0.0"), "distillation.alpha = 0 leaves the teacher out."),
        (
            (TEACHER, "distillation.store=there"),
            'distillation.store = "there" has no effect without distillation.top_k',
        ),
        (
            (TEACHER, "distillation.top_k=3", "curriculum.tokens=[100]", "curriculum.seq_lengths=[8]"),
            "distillation.top_k = 3 does not go with curriculum.tokens",
        ),
        (
            (TEACHER, "distillation.top_k=40", "model.vocab_size=37"),
            "distillation.top_k = 40 is more than the vocabulary's 37 tokens.",
        ),
        (
            (TEACHER, "model.kind=bert", "model.head=spans"),
            'distillation.teacher is set, and model.kind = "bert" with model.head = "spans" is not taught',
        ),
        (
            (TEACHER, *LABELS, "model.num_labels=1"),
            "distillation.teacher is set, and model.num_labels = 1 is a score",
        ),
        (
            (TEACHER, *LABELS, "distillation.top_k=3"),
            'distillation.top_k = 3 is of tokens, and model.head = "classification" has none.',
        ),
        ((TEACHER, *STATES), 'distillation.student_layers = [0, 1], and model.kind = "gpt": hidden states'),
        (
            (TEACHER, *LABELS, *STATES, "distillation.teacher_layers=[3]"),
            "distillation.student_layers = [0, 1] and distillation.teacher_layers = [3] are to be compared in pairs",
        ),
        (
            (TEACHER, *LABELS, *STATES, "distillation.student_layers=[1, 1]"),
            "distillation.student_layers = [1, 1] names a layer twice",
        ),
        (
            (TEACHER, *LABELS, *STATES, "distillation.student_layers=[0, 9]", "model.num_layers=9"),
            "distillation.student_layers = [0, 9], and the student's layers are 0 … 8 ",
        ),
        (
            (TEACHER, "model.kind=bert", *STATES, "distillation.top_k=3"),
            "distillation.top_k = 3 stores tokens, and distillation.student_layers = [0, 1] asks for hidden states.",
        ),
        (
            (TEACHER, "distillation.hidden_weight=2.0"),
            "distillation.hidden_weight and distillation.teacher_hidden_size have no effect without",
        ),
        (
            (TEACHER, "distillation.teacher_hidden_size=32"),
            "distillation.hidden_weight and distillation.teacher_hidden_size have no effect without",
        ),
        (
            (TEACHER, "model.kind=t5"),
            'distillation.teacher is set, and model.kind = "t5" with model.head = "pretraining" is not taught',
        ),
    ],
)
def test_what_does_not_go_together(overrides: tuple[str, ...], said: str, problems: Callable[..., list[str]]) -> None:
    assert any(message.startswith(said) for message in problems(*overrides)), problems(*overrides)


def test_hidden_states_alone_may_teach(small: Path) -> None:
    """A share of 0 is no hindrance then."""
    assert load(small, (TEACHER, "model.kind=bert", *STATES, "distillation.alpha=0.0")).distillation.alpha == 0.0


def test_a_teacher_may_say_all_of_a_vocabulary(small: Path) -> None:
    assert load(small, (TEACHER, "distillation.top_k=37", "model.vocab_size=37")).distillation.top_k == 37


def test_layers_of_a_student_may_be_like_one_of_the_teacher(small: Path) -> None:
    """But each of them like one alone."""
    overrides = (TEACHER, "model.kind=bert", *STATES, "distillation.teacher_layers=[3, 3]")
    assert load(small, overrides).distillation.teacher_layers == (3, 3)
