"""GPT-NeoX's and Qwen 2's blocks beside Hugging Face's own: logits, loss and every gradient, in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from colonnade.architecture.huggingface.families import model_of
from colonnade.huggingface.order import to_ours
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.tensor_parallel.parallel import Parallel
from tests.convert.published import VOCAB, random_model
from tests.convert.test_logits import angles
from tests.model.test_llama import norm_in_float64
from tests.model.whole import loss_of

S, B = 13, 3


@pytest.mark.parametrize("name", ["pythia", "neox", "qwen2"])
def test_loss_and_every_gradient_are_theirs(name: str) -> None:
    twin: Any = random_model(name).double()
    family, model = model_of({**twin.config.to_dict(), "architectures": None})
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_in_float64(module)
    width = model.rotary_width
    assert width == {"pythia": 2, "neox": 6, "qwen2": 6}[name]
    inverse = model.rotary.base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    twin.base_model.rotary_emb.forward = angles(inverse, 1.0)
    ours = GPT(model, VOCAB, Parallel(Mesh().tp)).double()
    state: dict[str, Any] = dict(twin.named_parameters())
    state["embed_out.weight"] = twin.get_output_embeddings().weight  # as it is called in files
    parameters = {
        f"{part}.{key}": weight
        for part, module in ours.bucket_modules().items()
        for key, weight in module.named_parameters()
    }
    sources = {source.ours: source for source in family.sources(model, VOCAB)}
    tied = {"head.output.weight"} if model.tie_embeddings else set()
    assert parameters.keys() - tied == sources.keys()
    with torch.no_grad():
        for key, source in sources.items():
            mine = parameters[key]
            whole = to_ours(source, [state[each] for each in source.theirs], model.head_width)
            mine.zero_()[tuple(slice(size) for size in whole.shape)] = whole
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(0, VOCAB, (S, B), generator=generator) for _ in range(2))
    loss = loss_of(ours, tokens, labels, torch.full((S, B), 1.0 / (S * B), dtype=torch.float64))
    loss.backward()
    logits = twin(input_ids=tokens.t()).logits.transpose(0, 1)
    reference = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
    reference.backward()
    torch.testing.assert_close(loss.double(), reference, rtol=1e-10, atol=1e-12)
    for key, source in sources.items():
        theirs = to_ours(source, [state[each].grad for each in source.theirs], model.head_width)
        mine = parameters[key].grad
        assert mine is not None, key
        mine = mine[tuple(slice(size) for size in theirs.shape)]
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")
