"""BERT beside Hugging Face's own models: logits, both losses and every gradient, in float64, padded and in odd sizes.

The post-norm order is `BertForPreTraining`'s, the pre-norm order `MegatronBertForPreTraining`'s.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.bert import BERT, BertInputs
from colonnade.model.bert_labels import LabelBERT, LabelInputs, SoftLabels, label_divergences, label_losses
from colonnade.model.bert_spans import SpanBERT
from colonnade.model.initialize import initialize_
from colonnade.tensor_parallel.distillation import SoftTargets
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements
from tests.distributed import run_on_ranks
from tests.model.theirs import joined
from tests.tensor_parallel.shards import drawn

transformers = pytest.importorskip("transformers")

VOCAB, S, B = 61, 13, 3
SHAPE: dict[str, Any] = {
    "kind": "bert",
    "num_layers": 3,
    "hidden_size": 36,
    "num_heads": 6,
    "ffn_hidden_size": 50,
    "seq_length": 16,
    "init_std": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "norm_epsilon": 1e-12,
}
POST: dict[str, Any] = {**SHAPE, "norm_position": "post", "embedding_norm": True}
MODELS = {
    "post": ModelConfig(**POST),
    "post, untied, tanh": ModelConfig(**{**POST, "tie_embeddings": False, "activation": "gelu_tanh"}),
    "pre": ModelConfig(**SHAPE),
    "pre, three token types": ModelConfig(**{**SHAPE, "token_types": 3, "norm_epsilon": 1e-5}),
}


def theirs(model: ModelConfig) -> nn.Module:
    """Hugging Face's model of these sizes."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": model.seq_length,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": "gelu" if model.activation == "gelu" else "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if model.norm_position == "post":
        return transformers.BertForPreTraining(transformers.BertConfig(**shape)).double()
    return transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(**shape)).double()


def names(model: ModelConfig) -> dict[str, list[str]]:
    """Our weights, and those of theirs that lie in them."""
    pre = model.norm_position == "pre"
    found = {
        "embedding.tokens.weight": ["bert.embeddings.word_embeddings.weight"],
        "embedding.positions.weight": ["bert.embeddings.position_embeddings.weight"],
        "embedding.types.weight": ["bert.embeddings.token_type_embeddings.weight"],
        "head.bias": ["cls.predictions.bias"],
    }
    if not model.tie_embeddings:
        found["head.output.weight"] = ["cls.predictions.decoder.weight"]
        found["head.bias"] = ["cls.predictions.decoder.bias"]
    for kind in ("weight", "bias"):
        if pre:
            found[f"head.norm.{kind}"] = [f"bert.encoder.ln.{kind}"]
        if model.embedding_norm:
            found[f"embedding.norm.{kind}"] = [f"bert.embeddings.LayerNorm.{kind}"]
        found[f"head.dense.{kind}"] = [f"cls.predictions.transform.dense.{kind}"]
        found[f"head.dense_norm.{kind}"] = [f"cls.predictions.transform.LayerNorm.{kind}"]
        found[f"head.pooler.{kind}"] = [f"bert.pooler.dense.{kind}"]
        found[f"head.order.{kind}"] = [f"cls.seq_relationship.{kind}"]
        for layer in range(model.num_layers):
            ours, their = f"blocks.{layer}", f"bert.encoder.layer.{layer}"
            parts = ("query", "key", "value")
            found[f"{ours}.attention.qkv.{kind}"] = [f"{their}.attention.self.{part}.{kind}" for part in parts]
            found[f"{ours}.attention.output.{kind}"] = [f"{their}.attention.output.dense.{kind}"]
            found[f"{ours}.mlp.up.{kind}"] = [f"{their}.intermediate.dense.{kind}"]
            found[f"{ours}.mlp.down.{kind}"] = [f"{their}.output.dense.{kind}"]
            first, second = ("attention.ln", "ln") if pre else ("attention.output.LayerNorm", "output.LayerNorm")
            found[f"{ours}.attention_norm.{kind}"] = [f"{their}.{first}.{kind}"]
            found[f"{ours}.mlp_norm.{kind}"] = [f"{their}.{second}.{kind}"]
    return found


def inputs(generator: torch.Generator) -> BertInputs:
    """Texts of three lengths; what is to be guessed is spread over them."""
    # theirs has no gradient for the embedding of token 0
    tokens, labels = (torch.randint(1, VOCAB, (S, B), generator=generator) for _ in range(2))
    place, lengths = torch.arange(S)[:, None], torch.tensor([S, 7, 10])
    chosen = (torch.rand(S, B, generator=generator) < 0.4) & (place < lengths)
    chosen[0] = True
    return BertInputs(
        tokens,
        labels,
        chosen.double() / chosen.sum(),
        types=(place >= torch.tensor([5, 3, 9])).long(),
        real=place < lengths,
        pair_labels=torch.tensor([1, 0, 1]),
        pair_weights=torch.full((B,), 1.0 / B, dtype=torch.float64),
    )


def vary_vectors_(twin: nn.Module) -> None:
    """Biases and norms that begin as 0 and 1 would hide whoever forgets them."""
    generator = torch.Generator().manual_seed(9)
    for weight in twin.parameters():
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def run(bert: BERT, given: BertInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The last block's stream, and the losses."""
    carry: tuple[Tensor, ...] = ()
    for unit in bert.units():
        if unit == "head":
            (x,) = carry
        carry = bert.run(unit, carry, given)
    return x, carry


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_hugging_faces(name: str) -> None:
    model, tp = MODELS[name], Mesh().tp
    bert = BERT(model, VOCAB, Parallel(tp)).double()
    initialize_(bert, tp, 1)
    twin = theirs(model)
    vary_vectors_(twin)
    state, mine = twin.state_dict(), {}
    for part, module in bert.bucket_modules().items():
        mine |= {f"{part}.{key}": weight for key, weight in module.named_parameters()}
    table = "embedding.tokens.weight"
    mine = {key: weight for key, weight in mine.items() if key == table or weight is not mine[table]}
    assert mine.keys() == names(model).keys()
    with torch.no_grad():
        for ours, parts in names(model).items():
            weight = joined([state[part] for part in parts], model.head_width)
            mine[ours][: len(weight)].copy_(weight)
    given = inputs(torch.Generator().manual_seed(0))
    x, (masked, order) = run(bert, given)
    (masked + order).backward()

    assert given.tokens is not None and given.types is not None and given.real is not None
    assert given.labels is not None and given.loss_weights is not None
    output = twin(input_ids=given.tokens.t(), token_type_ids=given.types.t(), attention_mask=given.real.t().long())
    losses = nn.functional.cross_entropy(
        output.prediction_logits.flatten(0, 1), given.labels.t().flatten(), reduction="none"
    )
    expected = (losses * given.loss_weights.t().flatten()).sum()
    pairs = nn.functional.cross_entropy(output.seq_relationship_logits, given.pair_labels)
    (expected + pairs).backward()

    torch.testing.assert_close(
        bert.head.pair_logits(bert.head.normed(x)), output.seq_relationship_logits, rtol=1e-10, atol=1e-12
    )
    told, likelier = bert.head.tell_order(x, given.pair_labels)
    theirs_of_pairs = nn.functional.cross_entropy(output.seq_relationship_logits, given.pair_labels, reduction="none")
    torch.testing.assert_close(told, theirs_of_pairs, rtol=1e-10, atol=1e-12)
    assert torch.equal(likelier, output.seq_relationship_logits.argmax(-1) == given.pair_labels)
    every, hits = bert.head.guesses(x, given.labels)
    right = output.prediction_logits.argmax(-1).t() == given.labels
    torch.testing.assert_close(every[given.real], losses.view(B, S).t()[given.real], rtol=1e-10, atol=1e-12)
    assert torch.equal(hits[given.real], right[given.real])
    torch.testing.assert_close(masked, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(order, pairs, rtol=1e-12, atol=0)
    gradients = {key: parameter.grad for key, parameter in twin.named_parameters()}
    for ours, parts in names(model).items():
        if any(gradients.get(part) is None for part in parts):
            assert parts == ["cls.predictions.decoder.weight"] and model.tie_embeddings
            continue
        theirs_ = joined([gradients[part] for part in parts], model.head_width)
        grad = mine[ours].grad
        assert grad is not None
        torch.testing.assert_close(
            grad[: len(theirs_)], theirs_, rtol=1e-9, atol=1e-12, msg=lambda m, n=ours: f"{n}: {m}"
        )


def test_padding_changes_nothing_that_is_read() -> None:
    """What stands behind a text's end reaches neither of its losses nor any gradient of its tokens."""
    tp = Mesh().tp
    found = []
    for filled in (0, 7):
        bert = BERT(MODELS["post"], VOCAB, Parallel(tp)).double()
        initialize_(bert, tp, 1)
        given = inputs(torch.Generator().manual_seed(3))
        assert given.tokens is not None and given.real is not None
        given.tokens[~given.real] = filled
        _, losses = run(bert, given)
        sum(losses).backward()  # type: ignore[union-attr]
        found.append([*losses, *(p.grad for n, p in bert.named_parameters() if "qkv" in n)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_losses_of_pairs_are_computed_in_32_bits() -> None:
    bert = BERT(MODELS["post"], VOCAB, Parallel(Mesh().tp)).bfloat16()
    initialize_(bert, Mesh().tp, 1)
    x, labels = torch.randn(S, B, 36, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor([1, 0, 1])
    losses, _ = bert.head.tell_order(x, labels)
    logits = bert.head.pair_logits(bert.head.normed(x)).double()
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)


def test_weights_have_the_names_and_shapes_that_are_stated() -> None:
    for model in MODELS.values():
        bert, tp = BERT(model, VOCAB, Parallel(Mesh().tp)), Mesh().tp
        built = {
            f"{part}.{place.name}": place.shape
            for part, places in named_placements(bert.bucket_modules(), tp).items()
            for place in places
        }
        assert built == {name: weight.shape for name, weight in bert.architecture.weights().items()}


@pytest.mark.parametrize("name", ["pre", "post"])
def test_what_the_output_layer_reads_makes_the_words_logits(name: str) -> None:
    """What a student is taught of a teacher is computed from it."""
    bert = BERT(MODELS[name], VOCAB, Parallel(Mesh().tp))
    for place, weight in enumerate(bert.parameters()):
        weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(place)))
    x = torch.randn(S, 1, 36, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        read = bert.head.read_by_output(x)[:, 0]
        logits = read @ bert.embedding.tokens.weight.t() + bert.head.output_bias
    torch.testing.assert_close(logits[:, :VOCAB], bert.head.word_logits(x)[:, :VOCAB])


def test_what_a_teacher_says_of_labels_is_compared_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(5, 3, generator=generator).bfloat16() for _ in range(2))
    found = label_divergences(ours, SoftLabels(torch.ones(5), 2.0, theirs))
    expected = nn.functional.kl_div(
        (ours.float() / 2).log_softmax(-1), (theirs.float() / 2).softmax(-1), reduction="none"
    ).sum(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert found.dtype is torch.float32


@pytest.mark.parametrize("built", [LabelBERT, SpanBERT])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_heads_read_a_wide_stream_in_the_type_of_their_weights(
    norm_position: str, built: type[LabelBERT | SpanBERT]
) -> None:
    """A post-norm model has no norm there that would narrow it."""
    head = "classification" if built is LabelBERT else "spans"
    shape = {**SHAPE, "norm_position": norm_position, "head": head, "num_labels": 3 if built is LabelBERT else None}
    bert = built(ModelConfig.model_validate({**shape, "fp32_residual": True}), VOCAB, Parallel(Mesh().tp))
    initialize_(bert, Mesh().tp, 1)
    x = torch.randn(S, B, 36, generator=torch.Generator().manual_seed(0))
    found = bert.bfloat16().head.predict(x)
    assert found.dtype is torch.bfloat16
    if norm_position == "post":
        assert torch.equal(found, bert.head.predict(x.bfloat16()))


@pytest.mark.parametrize("logits", [(5.0, 4.0), (4.0, 5.0), (-5.0, -4.0), (-4.0, -5.0), (-1.0, 1.0)])
def test_the_likelier_order_of_two_texts_is_told(logits: tuple[float, float]) -> None:
    head = BERT(MODELS["pre"], VOCAB, Parallel(Mesh().tp)).double().head
    for weight in head.parameters():
        weight.data.zero_()
    head.order.bias.data.copy_(torch.tensor(logits))
    labels = torch.tensor([0, 1, 1])
    losses, likelier = head.tell_order(drawn(S, B, 36, seed=1), labels)
    assert likelier.tolist() == [label == logits.index(max(logits)) for label in labels.tolist()]
    expected = nn.functional.cross_entropy(torch.tensor([logits] * B).double(), labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0.0)


def test_the_output_bias_learns_from_labels_and_from_a_teacher() -> None:
    bert = BERT(MODELS["post"], VOCAB, Parallel(Mesh().tp)).double()
    initialize_(bert, Mesh().tp, 1)
    bert.head.bias.data.copy_(drawn(VOCAB, seed=1))
    given, x, theirs = inputs(torch.Generator().manual_seed(0)), drawn(S, B, 36, seed=2), drawn(VOCAB, 7, seed=3)
    soft = SoftTargets(drawn(S, B, seed=4).abs(), 2.0, drawn(S, B, 7, seed=5), theirs)
    masked, _ = bert.head(x, replace(given, soft=soft))
    masked.backward()

    assert given.labels is not None and given.loss_weights is not None and soft.hidden is not None
    bias = bert.head.bias.detach().clone().requires_grad_()
    logits = bert.head.read_by_output(x).detach() @ bert.embedding.tokens.weight.detach().t() + bias
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), given.labels.flatten(), reduction="none").view(S, B)
    q, p = (soft.hidden @ theirs.t() / 2.0).softmax(-1), (logits / 2.0).log_softmax(-1)
    divergences = nn.functional.kl_div(p, q, reduction="none").sum(-1)
    expected = (losses * given.loss_weights + divergences * soft.weights).sum()
    expected.backward()
    torch.testing.assert_close(masked, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(bert.head.bias.grad, bias.grad, rtol=1e-10, atol=1e-12)


def words_on_a_rank(rank: int, num_ranks: int) -> Tensor:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    bert = BERT(MODELS["pre"], VOCAB, Parallel(tp)).double()
    initialize_(bert, tp, 1)
    mine = len(bert.head.bias)
    whole = nn.functional.pad(drawn(VOCAB, seed=1), (0, num_ranks * mine - VOCAB))
    bert.head.bias.data.copy_(whole[rank * mine : (rank + 1) * mine])
    found: Tensor = bert.head.word_logits(drawn(3, 1, 36, seed=2))
    return found


def test_every_rank_has_the_logits_of_all_words() -> None:
    """At several positions at once, of a vocabulary that no number of ranks divides."""
    alone = words_on_a_rank(0, 1)
    assert alone.shape == (3, VOCAB)
    for found in run_on_ranks(words_on_a_rank, 2):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


def test_the_error_of_a_score_is_computed_in_fp32() -> None:
    scores = torch.randn(5, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([0.1, 0.7, 3.3, -2.0, 1e-3], dtype=torch.float64)
    found = label_losses(scores, targets)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), (scores[:, 0].double() - targets).square(), rtol=1e-5, atol=1e-7)


def test_labels_and_what_a_teacher_says_of_them_have_weights_of_their_own() -> None:
    model = ModelConfig(**{**SHAPE, "head": "classification", "num_labels": 3})
    bert = LabelBERT(model, VOCAB, Parallel(Mesh().tp)).double()
    initialize_(bert, Mesh().tp, 1)
    x, targets = drawn(S, B, 36, seed=1), torch.tensor([2.0, 0.0, 1.0]).double()
    weights, soft = drawn(B, seed=2).abs(), SoftLabels(drawn(B, seed=3).abs(), 2.0, drawn(B, 3, seed=4))
    logits = bert.head.predict(x)
    losses = nn.functional.cross_entropy(logits, targets.long(), reduction="none")
    found = [
        bert.head(x, LabelInputs(targets=targets, target_weights=weights, soft_labels=said)) for said in (None, soft)
    ]
    expected = (losses * weights).sum()
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=0.0)
    expected = expected + (label_divergences(logits, soft) * soft.weights).sum()
    torch.testing.assert_close(found[1], expected, rtol=1e-12, atol=0.0)
