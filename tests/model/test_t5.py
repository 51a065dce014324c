"""T5 beside Hugging Face's `T5ForConditionalGeneration`: logits, loss and every gradient, in float64, in odd sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.relative import Ranges, RelativeBias
from colonnade.mesh.mesh import Mesh
from colonnade.model.initialize import initialize_
from colonnade.model.t5 import T5, T5Inputs
from colonnade.tensor_parallel.parallel import Parallel
from tests.model.theirs import joined

transformers = pytest.importorskip("transformers")

VOCAB, S, T, B = 61, 37, 23, 3
SHAPE: dict[str, Any] = {
    "kind": "t5",
    "num_layers": 3,
    "num_decoder_layers": 2,
    "hidden_size": 36,
    "num_heads": 5,
    "head_dim": 6,
    "ffn_hidden_size": 50,
    "seq_length": S,
    "relative_buckets": 10,
    "relative_distance": 21,
}
MODELS = {
    "1.0": ModelConfig(**SHAPE),
    "1.1": ModelConfig(**SHAPE, activation="geglu_tanh", tie_embeddings=False),
}


def theirs(model: ModelConfig) -> nn.Module:
    """Hugging Face's model of these sizes, with random weights."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=model.hidden_size,
        d_kv=model.head_width,
        d_ff=model.ffn,
        num_layers=model.num_layers,
        num_decoder_layers=model.decoder_layers,
        num_heads=model.num_heads,
        relative_attention_num_buckets=model.relative_buckets,
        relative_attention_max_distance=model.relative_distance,
        dropout_rate=0.0,
        feed_forward_proj="relu" if model.activation == "relu" else "gated-gelu",
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="eager",
    )
    twin = transformers.T5ForConditionalGeneration(config)
    if not model.tie_embeddings:  # their class always ties; files of version 1.1 have both
        twin.lm_head.weight = nn.Parameter(torch.randn(VOCAB, model.hidden_size) * 0.2)
    for weight in twin.parameters():  # norms that begin as 1 would hide whoever forgets them
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn(weight.shape)
    for module in twin.modules():  # theirs takes means of squares in float32, whatever the model's type
        if type(module).__name__ == "T5LayerNorm":
            module.forward = norm_in_float64(module)  # type: ignore[method-assign]
    return twin.double()


def norm_in_float64(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return out

    return forward


def names(model: ModelConfig) -> dict[str, list[str]]:
    """Our weights, and those of theirs that lie in them."""
    found = {
        "embedding.tokens.weight": ["shared.weight"],
        "encoder.norm.weight": ["encoder.final_layer_norm.weight"],
        "head.norm.weight": ["decoder.final_layer_norm.weight"],
    }
    if not model.tie_embeddings:
        found["head.output.weight"] = ["lm_head.weight"]
    for stack, layers in (("encoder", model.num_layers), ("decoder", model.decoder_layers)):
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{stack}.positions.weight"] = [table]
        for layer in range(layers):
            ours, block = f"{stack}.blocks.{layer}", f"{stack}.block.{layer}.layer"
            kinds = [("attention", "SelfAttention")] + [("cross", "EncDecAttention")] * (stack == "decoder")
            for place, (our, their) in enumerate(kinds):
                found[f"{ours}.{our}.query.weight"] = [f"{block}.{place}.{their}.q.weight"]
                found[f"{ours}.{our}.key_value.weight"] = [f"{block}.{place}.{their}.{x}.weight" for x in "kv"]
                found[f"{ours}.{our}.output.weight"] = [f"{block}.{place}.{their}.o.weight"]
                found[f"{ours}.{our}_norm.weight"] = [f"{block}.{place}.layer_norm.weight"]
            last = f"{block}.{len(kinds)}"
            found[f"{ours}.mlp_norm.weight"] = [f"{last}.layer_norm.weight"]
            gated = model.activation != "relu"
            if gated:
                found[f"{ours}.mlp.gate.weight"] = [f"{last}.DenseReluDense.wi_0.weight"]
            found[f"{ours}.mlp.up.weight"] = [f"{last}.DenseReluDense.wi{'_1' if gated else ''}.weight"]
            found[f"{ours}.mlp.down.weight"] = [f"{last}.DenseReluDense.wo.weight"]
    return found


def inputs() -> T5Inputs:
    """Texts of three lengths to be read, and three to be written."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, VOCAB, (T, B), generator=generator)
    counted = torch.arange(T)[:, None] < torch.tensor([T, 9, 14])
    return T5Inputs(
        torch.randint(1, VOCAB, (S, B), generator=generator),
        labels,
        counted.double() / counted.sum(),
        decoder_tokens=torch.cat([torch.zeros(1, B, dtype=torch.int64), labels[:-1]]),
        real=torch.arange(S)[:, None] < torch.tensor([20, S, 30]),
    )


def built(model: ModelConfig) -> tuple[T5, dict[str, nn.Parameter]]:
    """Ours, and its weights by their logical names."""
    t5 = T5(model, VOCAB, Parallel(Mesh().tp)).double()
    initialize_(t5, Mesh().tp, 1)
    mine: dict[str, nn.Parameter] = {}
    for bucket, module in t5.bucket_modules().items():
        for key, weight in module.named_parameters():
            if not any(weight is other for other in mine.values()):
                mine[f"{bucket}.{key}"] = weight
    return t5, mine


def run(t5: T5, given: T5Inputs) -> tuple[Tensor, Tensor]:
    """The last block's stream, and the loss."""
    carry: tuple[Tensor, ...] = ()
    for unit in t5.units():
        before, carry = carry, t5.run(unit, carry, given)
    return before[0], carry[0]


@pytest.mark.parametrize("fp32", [False, True])
def test_buffers_are_like_what_the_units_hand_on(fp32: bool) -> None:
    t5 = T5(ModelConfig(**SHAPE, fp32_residual=fp32), VOCAB, Parallel(Mesh().tp)).bfloat16()
    initialize_(t5, Mesh().tp, 1)
    carry: tuple[Tensor, ...] = ()
    for unit in t5.units():
        buffers = t5.carry_buffers(inputs(), into=unit)
        if buffers:  # nothing is sent into the first unit of a stack
            assert [(x.shape, x.dtype) for x in buffers] == [(x.shape, x.dtype) for x in carry], unit
        carry = t5.run(unit, carry, inputs())


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_are_hugging_faces(name: str) -> None:
    model = MODELS[name]
    t5, mine = built(model)
    twin = theirs(model)
    state = dict(twin.named_parameters())
    assert mine.keys() == names(model).keys() == t5.architecture.weights().keys()
    with torch.no_grad():
        for ours, parts in names(model).items():
            mine[ours].copy_(joined([state[part] for part in parts], model.head_width))
    given = inputs()
    x, loss = run(t5, given)
    loss.backward()

    assert given.tokens is not None and given.real is not None and given.decoder_tokens is not None
    assert given.labels is not None and given.loss_weights is not None
    output = twin(
        input_ids=given.tokens.t(), attention_mask=given.real.t().long(), decoder_input_ids=given.decoder_tokens.t()
    )
    losses = nn.functional.cross_entropy(output.logits.flatten(0, 1), given.labels.t().flatten(), reduction="none")
    expected = (losses * given.loss_weights.t().flatten()).sum()
    expected.backward()

    torch.testing.assert_close(t5.head.logits(x).transpose(0, 1), output.logits, rtol=1e-10, atol=1e-12)
    every, hits = t5.head.guesses(x, given.labels)
    torch.testing.assert_close(every, losses.view(B, T).t(), rtol=1e-10, atol=1e-12)
    assert torch.equal(hits, output.logits.argmax(-1).t() == given.labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, parts in names(model).items():
        grad, theirs_ = mine[ours].grad, [state[part].grad for part in parts]
        assert grad is not None and all(each is not None for each in theirs_)
        torch.testing.assert_close(
            grad,
            joined([each for each in theirs_ if each is not None], model.head_width),
            rtol=1e-10,
            atol=1e-12,
            msg=lambda m, n=ours: f"{n}: {m}",
        )


@pytest.mark.parametrize("activation", ["relu", "geglu_tanh"])
def test_weights_begin_as_wide_as_hugging_faces(activation: str) -> None:
    """Where heads together are narrower than the stream."""
    shape = {"hidden_size": 64, "num_heads": 4, "head_dim": 4, "ffn_hidden_size": 256}
    model = ModelConfig(**{**SHAPE, **shape, "activation": activation})
    _, mine = built(model)
    state = dict(theirs(model).named_parameters())
    for ours, parts in names(model).items():
        found, expected = mine[ours].detach(), joined([state[part] for part in parts], model.head_width)
        if found.ndim == 2:
            assert abs(found.std() - expected.std()) < 5 * expected.std() / found.numel() ** 0.5, ours


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("count", "furthest"), [(32, 128), (10, 21), (4, 3), (64, 1000)])
def test_ranges_are_hugging_faces(count: int, furthest: int, both_sides: bool) -> None:
    distances = torch.arange(-1500, 1500)
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    expected = bucket(distances, bidirectional=both_sides, num_buckets=count, max_distance=furthest)
    assert torch.equal(Ranges(count, furthest, both_sides).of(distances), expected)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 9), (3, 5)])
def test_the_gradient_of_the_table_is_autograds(queries: int, keys: int) -> None:
    """Of queries that are the last of the keys, as when a text is written."""
    torch.manual_seed(0)
    table, ranges = nn.Parameter(torch.randn(8, 3).double()), Ranges(8, 6, True)
    bias = RelativeBias(table, ranges)
    scores, grad = torch.zeros(2, 3, queries, keys).double(), torch.randn(2, 3, queries, keys).double()
    bias.add_to_(scores)
    distances = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    expected = table[ranges.of(distances)].permute(2, 0, 1).expand(2, -1, -1, -1)
    assert torch.equal(scores, expected)
    (wanted,) = torch.autograd.grad(expected, table, grad)
    bias.add_gradient_(grad)
    torch.testing.assert_close(table.grad, wanted, rtol=1e-13, atol=1e-14)


def test_a_frozen_table_gets_no_gradient() -> None:
    t5, mine = built(MODELS["1.0"])
    frozen = "encoder.positions.weight"
    mine[frozen].requires_grad_(False)
    _, loss = run(t5, inputs())
    loss.backward()
    assert [name for name, weight in mine.items() if weight.grad is None] == [frozen]


@pytest.mark.parametrize("unit", ["encoder.blocks.1", "decoder.blocks.1"])
def test_attention_multiplies_by_the_kernel_that_was_decided(unit: str) -> None:
    """In bf16 as it is, or widened, on a processor that has no other way to tell."""
    found = []
    for kernel in ("native", "blas"):
        t5 = T5(MODELS["1.0"], VOCAB, Parallel(Mesh().tp, products=Products(bf16=Kernels(attention=kernel))))
        initialize_(t5, Mesh().tp, 1)
        t5.bfloat16()
        carry = tuple(torch.randn(S, B, 36, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
        with torch.no_grad():
            found.append(t5.run(unit, carry[: len(t5.stated[unit].takes)], inputs())[0])
    assert not torch.equal(*found)
