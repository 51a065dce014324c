"""What weights of one model mean for another with another last unit."""

from typing import Any

import pytest

from colonnade.architecture.bert import answers_alike, has_output_layer, taken_by_another_head
from colonnade.architecture.families import architecture_of
from colonnade.config.compare import model_metadata
from colonnade.config.model import ModelConfig


def model(head: str, **keys: Any) -> ModelConfig:
    return ModelConfig(kind="bert", num_layers=1, hidden_size=16, num_heads=2, seq_length=8, head=head, **keys)


YES_OR_NO, GRADES, CHOICES = (
    model("classification", num_labels=2),
    model("classification", num_labels=5),
    model("choice", num_labels=4),
)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (YES_OR_NO, YES_OR_NO, True),
        (YES_OR_NO, GRADES, False),
        (YES_OR_NO, model("choice", num_labels=2), False),
        (CHOICES, model("choice", num_labels=5), True),  # each text has one score, however many there are
        (model("spans"), model("spans"), True),
        (model("spans"), model("pretraining"), False),
    ],
)
def test_answers_mean_the_same_to_a_head_of_the_same_kind_and_labels(
    one: ModelConfig, other: ModelConfig, alike: bool
) -> None:
    said = [model_metadata(each, 40) for each in (one, other)]
    assert answers_alike(*said) is answers_alike(*said[::-1]) is alike


@pytest.mark.parametrize(
    "head", [YES_OR_NO, CHOICES, model("spans"), model("none"), model("pretraining")], ids=lambda each: each.head
)
def test_another_head_takes_all_but_the_answers(head: ModelConfig) -> None:
    """And an output layer is there where tokens are told."""
    names = architecture_of(head, 40).weights().keys()
    answers = {f"head.{each}" for each in ("classifier", "spans", "order", "dense", "dense_norm", "output", "bias")}
    left = names - taken_by_another_head(names)
    assert left == {name for name in names if name.rpartition(".")[0] in answers or name in answers}
    assert len(left) == {"none": 0, "pretraining": 7}.get(head.head, 2)
    assert has_output_layer(model_metadata(head, 40)) is (head.head == "pretraining")


@pytest.mark.parametrize(("labelled", "outputs"), [(YES_OR_NO, 2), (GRADES, 5), (CHOICES, 1)])
def test_a_head_with_labels_reads_one_position_of_each_text(labelled: ModelConfig, outputs: int) -> None:
    """The pooler and the classifier, spread over the eight tokens of a text."""
    assert architecture_of(labelled, 40).units[-1].multiply_adds == (16 + outputs) * 16 // 8
