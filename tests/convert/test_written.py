"""What is written of each family, tensor by tensor, without a file: names, shapes and numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.architecture.huggingface.families import model_of
from colonnade.convert import to_huggingface
from colonnade.convert.progress import Progress
from colonnade.convert.to_huggingface import Opened, _numbers, _planned
from colonnade.huggingface.order import to_ours
from tests.convert.published import IDLE, MODELS, VOCAB, random_model


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_each_of_its_tensors_written_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tied ones one; and one that nothing reads where their class has it."""
    theirs = random_model(name)
    output = "embed_out" if theirs.config.model_type == "gpt_neox" else "lm_head"  # in files, whatever their module is
    state = {each.replace("lm_head", output): x for each, x in theirs.state_dict().items()}
    family, model = model_of(theirs.config.to_dict())
    sources = {source.ours: source for source in family.sources(model, VOCAB)}
    parts = {ours: [state[each] for each in source.theirs] for ours, source in sources.items()}
    weights = {ours: to_ours(source, parts[ours], model.head_width) for ours, source in sources.items()}
    monkeypatch.setattr(to_huggingface, "read_whole", lambda path, manifest, ours: weights[ours])
    nothing: Any = None
    config: Any = SimpleNamespace(model=model)
    it = Opened(Path(), nothing, config, nothing, family, {}, sources, None)
    planned = list(_planned(it, torch.float32))
    numbers = list(_numbers(it, Progress("written", 1, say=lambda line: None), torch.float32))
    written = {each.name: x for each, x in zip(planned, numbers, strict=True)}
    assert len(written) == len(planned) and [each.shape for each in planned] == [tuple(x.shape) for x in numbers]
    assert {state[each].data_ptr() for each in written} == {x.data_ptr() for x in state.values()}
    assert [each for each in written if each not in IDLE and not torch.equal(written[each], state[each])] == []
