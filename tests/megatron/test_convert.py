"""A checkpoint of Megatron-LM becomes one of ours that computes the same, whatever layout and version wrote it."""

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.architecture import megatron
from colonnade.architecture.huggingface.keys import Keys, Refused
from colonnade.architecture.huggingface.statement import Family
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert import BERT, BertInputs
from colonnade.serving.trained import open_trained
from tests.commands import here
from tests.convert.published import tokenizer, transformers
from tests.convert.test_logits import CPU, TOKENS, assert_equal, logits_of
from tests.convert.test_round_trip import converted
from tests.megatron.test_refused import FILE, change
from tests.megatron.written import GPT, LLAMA_LIKE, VOCAB, gpt_logits, weights, write
from tests.runs import whole_tensors


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The option that names a tokenizer of as many ids as the models have tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer().to_str())
    return "--tokenizer", path


@pytest.mark.parametrize(
    ("args", "how"),
    [
        (GPT, {}),
        (GPT, {"tp": 2, "version": 0, "style": "old"}),
        (GPT, {"tp": 3, "pp": 2, "version": 1.0, "style": "old", "tracker": False}),
        (GPT, {"tp": 2, "pp": 2, "virtual": 2, "version": 2.0}),
        (GPT, {"pp": 2, "style": "core"}),
        pytest.param(GPT, {"tp": 3, "style": "norm"}, marks=pytest.mark.slow),
        pytest.param({**GPT, "bias_gelu_fusion": False}, {"tp": 2, "version": 1.0}, marks=pytest.mark.slow),
        (LLAMA_LIKE, {"tp": 3, "pp": 2}),
        pytest.param(LLAMA_LIKE, {"tp": 3, "style": "core"}, marks=pytest.mark.slow),
    ],
    ids=lambda each: "" if "num_layers" in each else ", ".join(f"{key} {value}" for key, value in each.items()),
)
def test_a_gpt_computes_what_it_did(
    args: dict[str, Any], how: dict[str, Any], words: tuple[object, ...], tmp_path: Path
) -> None:
    whole = weights(args)
    write(tmp_path / "theirs", args, whole, **how)
    converted(tmp_path / "theirs", tmp_path / "ours", *words)
    ours = logits_of(open_trained(tmp_path / "ours", Mesh(), CPU, "fp64"))
    theirs = gpt_logits(whole, args, TOKENS)
    assert ours is not None and theirs.std() > 0.3
    assert_equal(ours, theirs)


@pytest.mark.parametrize("how", [{"tp": 2, "version": 0, "style": "old"}, {"tp": 3, "pp": 2, "virtual": 2}], ids=str)
def test_a_bert_computes_what_transformers_makes_of_it(
    how: dict[str, Any], words: tuple[object, ...], tmp_path: Path
) -> None:
    args = {**GPT, "bias_gelu_fusion": False, "bert_binary_head": True}
    whole = weights(args, bert=True)
    write(tmp_path / "theirs", args, whole, **how)
    converted(tmp_path / "theirs", tmp_path / "ours", *words)
    trained = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")
    twin = megatron_bert(args, whole)
    types, real = (TOKENS > 30).long(), torch.ones_like(TOKENS, dtype=torch.bool)
    real[9:, 1] = False
    bert = trained.model
    assert isinstance(bert, BERT)
    with torch.no_grad():
        carry = trained.hidden(BertInputs(TOKENS, types=types, real=real))
        assert carry is not None
        x = bert.head.normed(carry[0])
        words = torch.nn.functional.linear(bert.head.transformed(x), bert.head.output.weight, bert.head.bias)
        out = twin(input_ids=TOKENS.t(), token_type_ids=types.t(), attention_mask=real.t().long())
    assert_equal(words[..., :VOCAB][real], out.prediction_logits.transpose(0, 1)[real])
    assert_equal(bert.head.pair_logits(x), out.seq_relationship_logits)


@pytest.mark.parametrize(
    ("said", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": True}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_tanh"),
    ],
)
def test_gelu_is_the_approximation_where_it_is_fused_and_it_is_fused_unless_it_is_said(
    said: dict[str, bool], activation: str
) -> None:
    args = {key: value for key, value in GPT.items() if "gelu" not in key}
    assert megatron.GPT.read(Keys({**args, "padded_vocab_size": 64, **said}))["activation"] == activation


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, {"num_key_value_heads": None, "bias": True, "norm": "layernorm", "norm_epsilon": 1e-5}),
        ({"norm_epsilon": 1e-6}, {"norm_epsilon": 1e-6}),  # as newer versions call it
        ({"num_query_groups": 3}, {"num_key_value_heads": None}),  # it says so, unless the option is set
        ({"num_query_groups": 3, "group_query_attention": True}, {"num_key_value_heads": 3}),
        ({"add_qkv_bias": True}, {"bias": True, "query_key_value_bias": None}),
        ({"add_qkv_bias": True, "add_bias_linear": False}, {"bias": False, "query_key_value_bias": True}),
        ({"position_embedding_type": "rope"}, {"position": "rotary", "rotary": {"share": 1.0, "base": 10_000.0}}),
        ({"use_rotary_position_embeddings": True}, {"position": "rotary", "rotary": {"share": 1.0, "base": 10_000.0}}),
        (
            {"position_embedding_type": "rope", "rotary_percent": 0.25, "rotary_base": 5000},
            {"rotary": {"share": 0.25, "base": 5000.0}},
        ),
        (
            {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4},
            {"rotary": {"share": 1.0, "base": 10_000.0, "scaling": "linear", "factor": 4.0}},
        ),
        (
            {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 1},
            {"rotary": {"share": 1.0, "base": 10_000.0}},
        ),
        ({"init_method_std": 0.0}, {"init_std": None}),
    ],
)
def test_what_the_arguments_of_a_run_mean(said: dict[str, Any], found: dict[str, Any]) -> None:
    keys = Keys({**GPT, "params_dtype": None, "padded_vocab_size": 64, **said})
    model = megatron.GPT.read(keys)
    keys.finish(unknown=False)
    assert {key: model.get(key) for key in found} == found


@pytest.mark.parametrize("kind", [megatron.GPT, megatron.BERT], ids=["GPT", "BERT"])
def test_only_a_bert_has_to_tell_the_order_of_two_texts(kind: Family) -> None:
    """GPT's files say of BERT's head whatever its default was."""
    keys = Keys({**GPT, "padded_vocab_size": 64, "bert_binary_head": False})
    assert kind.read(keys).get("token_types") == (2 if kind is megatron.BERT else None)
    with pytest.raises(Refused, match="BERT tells the order") if kind is megatron.BERT else nullcontext():
        keys.finish(unknown=False)


def test_what_the_fused_approximation_moves_in_berts_head() -> None:
    """The GELU of BERT's head is exact there, and is that of the MLPs here."""
    x = torch.linspace(-20, 20, 4_000_001, dtype=torch.float64)
    moved = torch.nn.functional.gelu(x) - torch.nn.functional.gelu(x, approximate="tanh")
    assert 4.73e-4 < moved.abs().max() < 4.74e-4


def megatron_bert(args: dict[str, Any], whole: dict[str, torch.Tensor]) -> Any:
    """NVIDIA's BERT of transformers with the same weights."""
    n, d, h = args["num_attention_heads"], args["kv_channels"], args["hidden_size"]
    config = transformers.MegatronBertConfig(
        vocab_size=VOCAB,
        hidden_size=h,
        num_hidden_layers=args["num_layers"],
        num_attention_heads=n,
        intermediate_size=args["ffn_hidden_size"],
        hidden_act="gelu",
        max_position_embeddings=args["max_position_embeddings"],
        layer_norm_eps=args["layernorm_epsilon"],
    )
    model = transformers.MegatronBertForPreTraining(config)
    state = {}
    plain = {
        "word_embeddings": "bert.embeddings.word_embeddings",
        "position_embeddings": "bert.embeddings.position_embeddings",
        "tokentype_embeddings": "bert.embeddings.token_type_embeddings",
        "final_layernorm": "bert.encoder.ln",
        "pooler.dense": "bert.pooler.dense",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
        "lm_head": "cls.predictions",
        "binary_head": "cls.seq_relationship",
    }
    inner = {
        "input_layernorm": "attention.ln",
        "dense": "attention.output.dense",
        "post_attention_layernorm": "ln",
        "dense_h_to_4h": "intermediate.dense",
        "dense_4h_to_h": "output.dense",
    }
    for name, x in whole.items():
        module, _, kind = name.rpartition(".")
        if not module.startswith("layers."):
            state[f"{plain[module]}.{kind}"] = x
            continue
        _, number, module = module.split(".")
        block = f"bert.encoder.layer.{number}"
        if module == "query_key_value":
            parts = x.view(n, 3, d, *x.shape[1:]).unbind(1)
            for part, rows in zip(("query", "key", "value"), parts, strict=True):
                state[f"{block}.attention.self.{part}.{kind}"] = rows.flatten(0, 1)
        else:
            state[f"{block}.{inner[module]}.{kind}"] = x
    state["cls.predictions.decoder.weight"] = whole["word_embeddings.weight"]
    state["cls.predictions.decoder.bias"] = whole["lm_head.bias"]
    missing, surplus = model.load_state_dict(state, strict=False)
    assert not surplus and all("position_ids" in name for name in missing), (missing, surplus)
    return model.double().eval()


@pytest.mark.slow
def test_the_same_bytes_whatever_layout_wrote_it(words: tuple[object, ...], tmp_path: Path) -> None:
    whole = weights(GPT)
    found = []
    for number, how in enumerate(({}, {"tp": 2, "pp": 2, "version": 1.0}, {"tp": 6, "pp": 4, "style": "old"})):
        write(tmp_path / f"theirs{number}", GPT, whole, **how)  # type: ignore[arg-type]
        converted(tmp_path / f"theirs{number}", tmp_path / f"ours{number}", *words)
        found.append(whole_tensors(tmp_path / f"ours{number}"))
    for other in found[1:]:
        assert all(torch.equal(found[0][name], x) for name, x in other.items()) and other.keys() == found[0].keys()


def test_release_an_iterations_folder_a_dry_run_and_a_type(words: tuple[object, ...], tmp_path: Path) -> None:
    where = write(tmp_path / "theirs", GPT, weights(GPT), tp=2)
    out = converted(where, tmp_path / "ours", *words, "--dry-run")
    assert "Megatron-LM GPT (GPTModel)" in out and "vocabulary 61" in out and not (tmp_path / "ours").exists()
    where.rename(tmp_path / "theirs" / "release")
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("release\n")
    converted(tmp_path / "theirs", tmp_path / "ours", *words, "--dtype", "bf16")
    assert {x.dtype for x in whole_tensors(tmp_path / "ours").values()} == {torch.bfloat16}
    answer = here("convert", tmp_path / "ours", tmp_path / "back")
    assert answer.status == 0 and "becomes    GPT-2 (GPT2LMHeadModel)" in answer.out, answer


@pytest.mark.parametrize("state", [io.BytesIO(b"scales"), torch.zeros(5, dtype=torch.uint8)], ids=["file", "bytes"])
def test_what_transformer_engine_keeps_beside_its_weights_is_left_out(
    state: object, words: tuple[object, ...], tmp_path: Path
) -> None:
    where = write(tmp_path / "theirs", GPT, weights(GPT), style="core")
    converted(where.parent, tmp_path / "without", *words)
    key = "decoder.layers.0.mlp.linear_fc1._extra_state"
    change(where / "mp_rank_00" / FILE, lambda content: content["model"].update({key: state}))
    converted(where.parent, tmp_path / "with", *words)
    one, other = (whole_tensors(tmp_path / name) for name in ("without", "with"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], x) for name, x in other.items())
