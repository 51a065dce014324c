"""What [distillation] does not go with is one message each."""

from collections.abc import Callable

import pytest

TEACHER = "distillation.teacher=runs/books"


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
            (TEACHER, "model.kind=bert", "model.head=classification", "model.num_labels=2"),
            'distillation.teacher is set, and model.kind = "bert" with model.head = "classification" is not taught',
        ),
    ],
)
def test_what_does_not_go_together(overrides: tuple[str, ...], said: str, problems: Callable[..., list[str]]) -> None:
    assert any(message.startswith(said) for message in problems(*overrides)), problems(*overrides)
