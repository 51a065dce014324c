"""A head for answers beside Hugging Face's: logits, loss and gradients in float64, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.huggingface.folder import open_published
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_spans import SpanBERT, SpanInputs
from colonnade.tensor_parallel.parallel import Parallel
from tests.commands import here
from tests.convert.published import LLAMA, heard, transformers
from tests.convert.test_labels import NO_DROPOUT, VOCAB, B, S
from tests.convert.test_round_trip import converted
from tests.model.theirs import joined

KINDS = ("BertForQuestionAnswering", "MegatronBertForQuestionAnswering")


def published(folder: Path, kind: str) -> Any:
    """A model of theirs with random numbers everywhere, in a folder."""
    config = getattr(transformers, kind.partition("For")[0] + "Config")
    model = getattr(transformers, kind)(config(**{**LLAMA, **NO_DROPOUT}))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 2 else 0.2)
        parameter.data = drawn + (parameter.ndim == 1)
    model.eval().save_pretrained(folder)
    return model


def given() -> SpanInputs:
    """Samples of several lengths: padding is among the positions of their losses, too."""
    generator, place = torch.Generator().manual_seed(3), torch.arange(S)[:, None]
    tokens = torch.randint(1, VOCAB, (S, B), generator=generator)
    answers = torch.tensor([[6, 0, 4], [7, 0, 4]])
    weights = torch.full((B,), 1.0 / B, dtype=torch.float64)
    types, real = (place >= 4).long().expand(S, B), place < torch.tensor([S, 8, 10])
    return SpanInputs(tokens, types=types, real=real, answers=answers, answer_weights=weights)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_are_theirs(kind: str, tmp_path: Path) -> None:
    twin = published(tmp_path / "theirs", kind).double()
    folder = open_published(tmp_path / "theirs")
    assert folder.model.head == "spans" and folder.model.num_labels is None
    model = SpanBERT(folder.model, VOCAB, Parallel(Mesh().tp)).double()
    mine = {f"{p}.{k}": w for p, module in model.bucket_modules().items() for k, w in module.named_parameters()}
    with torch.no_grad():
        for ours in folder.sources:
            whole = folder.read(ours)
            mine[ours][: len(whole)].copy_(whole)
    inputs = given()
    assert inputs.tokens is not None and inputs.types is not None
    assert inputs.real is not None and inputs.answers is not None
    carry: tuple[Tensor, ...] = ()
    for unit in model.units():
        before, carry = carry, model.run(unit, carry, inputs)
    (loss,) = carry
    loss.backward()
    theirs = twin(
        input_ids=inputs.tokens.t(),
        token_type_ids=inputs.types.t(),
        attention_mask=inputs.real.long().t(),
        start_positions=inputs.answers[0],
        end_positions=inputs.answers[1],
    )
    theirs.loss.backward()
    logits = torch.stack([theirs.start_logits.t(), theirs.end_logits.t()], dim=-1)
    torch.testing.assert_close(model.head.predict(before[0]), logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-12, atol=0)
    gradients = {key: parameter.grad for key, parameter in twin.named_parameters()}
    assert {part for source in folder.sources.values() for part in source.theirs} == gradients.keys()
    for ours, source in folder.sources.items():
        expected = joined([gradients[part] for part in source.theirs], folder.model.head_width)  # type: ignore[misc]
        found = mine[ours].grad
        assert found is not None
        torch.testing.assert_close(
            found[: len(expected)], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=ours: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of it becomes a folder that transformers loads without a word, with the same numbers."""
    theirs = published(tmp_path / "theirs", kind)
    converted(tmp_path / "theirs", tmp_path / "ours")
    assert kind in converted(tmp_path / "ours", tmp_path / "back")
    with heard(caplog) as warned:
        back, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert warned == [] and not any(info.values()), (warned, info)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_folder_with_more_than_a_beginning_and_an_end_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "theirs", KINDS[0])
    path = tmp_path / "theirs" / "config.json"
    names = {str(number): f"LABEL_{number}" for number in range(3)}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": names}))
    answer = here("convert", tmp_path / "theirs", tmp_path / "ours")
    assert answer.status == 2 and "id2label has 3 labels" in answer.err, answer
