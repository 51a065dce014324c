"""What a language model's task makes of samples."""

from dataclasses import replace

import torch

from colonnade.config.model import ModelConfig
from colonnade.data.loader import Batch
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.tasks.gpt import LanguageModeling
from colonnade.tensor_parallel.parallel import Parallel
from tests.generation.tiny import tiny_gpt

TASK = LanguageModeling()


def batch() -> Batch:
    tokens = torch.arange(12).view(6, 2)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    return Batch(tokens, tokens + 1, mask, torch.tensor([70, 4]), tokens // 4, tokens % 4)


def test_what_units_read_of_a_batch() -> None:
    given = batch()
    inputs = TASK.inputs(given, torch.tensor([0.5], dtype=torch.float64), 9)
    assert inputs.tokens is given.tokens and inputs.labels is given.labels
    assert inputs.documents is given.documents and inputs.positions is given.positions
    assert inputs.loss_weights is not None and torch.equal(inputs.loss_weights, given.loss_mask.double() / 2)
    assert inputs.masks is not None and inputs.masks.seed == 9 and inputs.masks.samples.tolist() == [70, 4]
    quiet = TASK.inputs(given, None, None)
    assert quiet.loss_weights is None and quiet.masks is None, "an evaluation asks for no loss and drops nothing"


def test_what_counts_is_what_its_mask_counts() -> None:
    counts = TASK.counts(batch())
    assert counts.tolist() == [10.0] and counts.dtype is torch.float64


def test_a_batch_for_measuring_has_documents_where_a_run_has_them() -> None:
    joined, separate = (
        TASK.random_batch(ModelConfig(seq_length=5), 3, 20, separate_documents=apart) for apart in (False, True)
    )
    for each in (joined, separate):
        assert each.tokens.shape == each.labels.shape == each.loss_mask.shape == (5, 3)
        assert int(each.tokens.min()) >= 0 and int(each.tokens.max()) < 20 and bool((each.loss_mask == 1).all())
        assert each.samples.tolist() == [0, 1, 2]
    assert joined.documents is joined.positions is None
    assert separate.documents is not None and separate.positions is not None
    assert separate.documents.shape == separate.positions.shape == (5, 3)


def test_an_evaluation_tells_whether_its_tokenizer_was_checked() -> None:
    model, given = tiny_gpt(Axis("tp")), replace(batch(), documents=None, positions=None)
    for checked in (True, False):
        found = TASK.evaluate(
            model,
            [given],
            dp=Mesh().dp,
            pp=Mesh().pp,
            hidden=None,  # type: ignore[arg-type]
            byte_lengths=torch.ones(21, dtype=torch.int64),
            tokenizer_checked=checked,
        )
        assert found.tokenizer_checked is checked and found.tokens == found.bytes == 10


def test_it_builds_the_units_that_are_asked_for() -> None:
    model = TASK.build(
        ModelConfig(num_layers=2, hidden_size=8, num_heads=2, seq_length=4), 11, Parallel(Axis("tp")), None
    )
    assert list(model.units()) == ["embedding", "blocks.0", "blocks.1", "head"]
