"""What a config.json means that does not say everything, beside transformers' own reading of it."""

import json
from typing import Any

import pytest

from colonnade.architecture.huggingface.families import family_of, model_of
from colonnade.architecture.huggingface.keys import Keys, Refused
from tests.convert.published import LLAMA, LLAMA3, MODELS, VOCAB, YARN, classes

hub = pytest.importorskip("huggingface_hub")

Content = dict[str, Any]


def described(content: Content) -> Content | str:
    """The [model] that a config.json describes, or why there is none."""
    try:
        _, model = model_of(content)
    except Refused as refused:
        return str(refused)
    return {**model.model_dump(), "head_dim": model.head_width}


def completed(name: str, content: Content) -> Content | None:
    """`content` with transformers' defaults for what it lacks; None where it is none for transformers either."""
    try:
        found: Content = classes(name)[1](**content).to_dict()
    except (ValueError, hub.errors.StrictDataclassError):
        return None
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_is_left_out_has_the_default_of_transformers(name: str) -> None:
    """Or has to be there: sizes that every published file says."""
    whole = completed(name, MODELS[name][1])
    assert whole is not None and isinstance(described(whole), dict)
    compared = 0
    for key in whole.keys() - {"model_type"}:
        content = {other: value for other, value in whole.items() if other != key}
        theirs, ours = completed(name, content), described(content)
        if theirs is not None and ours != f"{key} is missing":
            assert ours == described(theirs), f"without {key}"
            compared += 1
    assert compared > len(whole) - 10


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_written_by_the_same_family(name: str) -> None:
    config = classes(name)[1](**MODELS[name][1]).to_dict()
    family, model = model_of(config)
    assert family_of(model, VOCAB) == (family, family.write(model))
    written = family_of(model, VOCAB)[1]
    assert ("head_dim" in written) == (config.get("head_dim") is not None), "as they write it"
    assert "rope_scaling" not in written or model.rotary.scaling != "none"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_whether_the_output_layer_is_the_token_table_is_written(name: str, tied: bool) -> None:
    """Also where it is not as in most models of the family."""
    family, model = model_of(classes(name)[1](**MODELS[name][1]).to_dict())
    content = family.write(model.model_copy(update={"tie_embeddings": tied}))
    found = described({"model_type": family.model_type, **content})
    assert isinstance(found, str) or found["tie_embeddings"] is tied


@pytest.mark.parametrize(("content", "window"), [({}, 4096), ({"sliding_window": None}, None)])
def test_a_window_of_null_is_none(content: Content, window: int | None) -> None:
    """As Mistral's later models say it; left out it is that of the first."""
    whole = completed("mistral", MODELS["mistral"][1])
    assert whole is not None
    del whole["sliding_window"]
    found = described(whole | content)
    assert isinstance(found, dict) and found["window"] == window


@pytest.mark.parametrize(
    ("content", "window"),
    [
        ({"max_window_layers": 0, "use_sliding_window": True}, 5),
        ({"max_window_layers": 0, "use_sliding_window": False}, None),
        ({"max_window_layers": 100, "use_sliding_window": True}, None),
        ({"max_window_layers": 1, "use_sliding_window": True}, "all layers have the same window here"),
        ({"max_window_layers": 0, "use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True}, None),  # left out, the first 28 layers have none
    ],
)
def test_qwens_window_is_that_of_layers_behind_the_first(content: Content, window: int | str | None) -> None:
    whole = completed("qwen3", MODELS["qwen3"][1])
    assert whole is not None
    for key in ("max_window_layers", "use_sliding_window", "layer_types"):
        whole.pop(key, None)
    found = described(whole | {"sliding_window": 5, **content})
    if isinstance(window, str):
        assert isinstance(found, str) and window in found
    else:
        assert isinstance(found, dict) and found["window"] == window


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_heads_of_keys_and_values_of_null_are_as_many_as_those_of_queries(name: str) -> None:
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    heads = whole["num_attention_heads"]
    assert whole["num_key_value_heads"] != heads
    found = described(whole | {"num_key_value_heads": None})
    assert isinstance(found, dict) and found.get("num_key_value_heads", heads) == heads


@pytest.mark.parametrize("key", ["attention_factor", "mscale", "mscale_all_dim"])
def test_yarn_with_another_sharpness_is_refused_with_the_reason(key: str) -> None:
    whole = completed("smollm", MODELS["smollm"][1])
    assert whole is not None
    whole["rope_parameters"] = {**whole["rope_parameters"], key: 0.7}
    found = described(whole)
    assert isinstance(found, str) and f"rope_parameters.{key} = 0.7: attention is as sharp as YaRN's paper" in found


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_the_length_before_scaling_is_read_beside_the_table_too(rope: Content) -> None:
    rest = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    content = {**LLAMA, "original_max_position_embeddings": 8, "rope_parameters": rest}
    found, theirs = described({"model_type": "llama", **content}), completed("llama", content)
    assert isinstance(found, dict) and found["rotary"]["original_length"] == 8
    assert theirs is not None and found == described(theirs)


@pytest.mark.parametrize(
    ("key", "value"), [("beta_fast", 32.0), ("beta_slow", 1.0), ("original_max_position_embeddings", 32)]
)
def test_what_a_table_of_yarn_leaves_out_is_that_of_the_paper_and_the_length_that_of_the_model(
    key: str, value: float
) -> None:
    rest = {other: each for other, each in YARN.items() if other != key}
    found, said = (
        described({"model_type": "llama", **LLAMA, "rope_parameters": rope}) for rope in (rest, {**rest, key: value})
    )
    assert isinstance(found, dict) and found == said


@pytest.mark.parametrize(("share", "refused"), [(1.0, False), (1, False), (0.5, True)])
@pytest.mark.parametrize("inside", [True, False])
def test_llama_turns_whole_heads_wherever_its_file_says_so(share: float, refused: bool, inside: bool) -> None:
    whole = completed("llama", MODELS["llama"][1])
    assert whole is not None
    plain, where = described(whole), whole["rope_parameters"] if inside else whole
    where["partial_rotary_factor"] = share
    found = described(whole)
    assert isinstance(found, str) and "turn whole heads here" in found if refused else found == plain


@pytest.mark.parametrize("inside", [True, False])
def test_neox_turns_the_share_that_its_file_says_wherever(inside: bool) -> None:
    whole = completed("pythia", MODELS["pythia"][1])
    assert whole is not None
    whole["rope_parameters"].pop("partial_rotary_factor", None)
    (whole["rope_parameters"] if inside else whole)["partial_rotary_factor"] = 0.75
    found = described(whole)
    assert not isinstance(found, str) and found["rotary"]["share"] == 0.75


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 5000.0}, {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}, LLAMA3, YARN],
    ids=["default", "linear", "llama3", "yarn"],
)
def test_rotary_positions_are_written_for_versions_before_5_of_transformers_too(rope: Content) -> None:
    """Which know no rope_parameters, and read what stands beside them."""
    family, model = model_of({"model_type": "llama", **LLAMA, "rope_parameters": rope})
    content = {"model_type": "llama", **family.write(model)}
    whole = described(content)
    assert isinstance(whole, dict) and whole["rotary"]["base"] == 5000.0
    del content["rope_parameters"]
    assert described(content) == whole


def test_a_t5_that_says_nothing_of_its_output_layer_has_its_token_table_there() -> None:
    """As the first were published; of later files one of two keys says it."""
    content = {key: value for key, value in MODELS["t5"][1].items() if key != "tie_word_embeddings"}
    found, theirs = described({"model_type": "t5", **content}), completed("t5", content)
    assert isinstance(found, dict) and found["tie_embeddings"] is True
    assert theirs is not None and found == described(theirs)


@pytest.mark.parametrize("name", ["t5", "t5, gated, untied"])
def test_what_follows_from_a_t5s_mlp_may_not_say_otherwise(name: str) -> None:
    """transformers computes by these keys where a file has them."""
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    gated, plain = name != "t5", described(whole)
    known = {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"} if gated else {"relu"}
    for act in ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "silu"):
        found, theirs = described(whole | {"dense_act_fn": act}), completed(name, whole | {"dense_act_fn": act})
        assert theirs is not None and theirs["dense_act_fn"] == act
        said = f'dense_act_fn = "{act}": feed_forward_proj = "{whole["feed_forward_proj"]}" says otherwise'
        assert found == (plain if act in known else said)
    theirs = completed(name, whole | {"is_gated_act": not gated})
    assert theirs is not None and theirs["is_gated_act"] is not gated
    assert f"is_gated_act = {str(not gated).lower()}: feed_forward_proj = " in str(described(theirs))
    without = {key: value for key, value in whole.items() if key not in ("dense_act_fn", "is_gated_act")}
    assert described(without) == plain and isinstance(plain, dict)
    assert "feed_forward_proj = [] is no text" in str(described(whole | {"feed_forward_proj": []}))
    silu = whole | {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": True}
    assert described(silu) == 'feed_forward_proj = "gated-silu": this family can have relu, gated-gelu here'


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gpt2", "GPT2Model"),
        ("llama", "LlamaModel"),
        ("bert", "BertForMaskedLM"),
        ("bert", "BertModel"),
        ("bloom", "BloomModel"),
        ("neox", "GPTNeoXModel"),
        ("t5", "T5WithLMHeadModel"),
    ],
)
def test_classes_that_files_were_published_under_are_read(name: str, architecture: str) -> None:
    """The files of T5 1.0 say the name that its class had before."""
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    found, expected = described({**whole, "architectures": [architecture]}), described(whole)
    assert isinstance(expected, dict)
    assert found == (expected | {"head": "none"} if architecture == "BertModel" else expected)
    other = described({**whole, "architectures": ["XForSequenceLabelling"]})
    assert isinstance(other, str) and architecture in other
    assert described({**whole, "architectures": ["XForSequenceLabelling", architecture]}) == found, "one is enough"


def test_a_number_may_stand_under_both_of_its_names() -> None:
    for content in ('{"hidden_size": 4096}', '{"n_embed": 4096}', '{"hidden_size": 4096, "n_embed": 4096}'):
        keys = Keys(json.loads(content), {"hidden_size": "n_embed"})
        assert keys.take("hidden_size", int) == 4096
        keys.finish()
    keys = Keys({"hidden_size": 24, "n_embed": 48}, {"hidden_size": "n_embed"})
    keys.take("hidden_size", int)
    with pytest.raises(Refused, match="hidden_size = 24 and n_embed = 48 are two names of one number"):
        keys.finish()


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("gpt2", {"n_ctx": 16}, "n_ctx = 16: it is not n_positions = 32"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = false: scores are divided by"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = true: attention is computed in"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = true: a decoder with an encoder"),
        ("gpt2", {"is_encoder_decoder": True}, "is_encoder_decoder = true: a model with an encoder and a decoder is"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, 'pruned_heads = {"0": [1]}: all layers have the same heads here'),
        ("gpt2", {"auto_map": {}}, "auto_map: the folder brings code of its own"),
        ("gpt2", {"model_type": "qwen3_moe"}, '"qwen3_moe" is none that can be built here: its MLP is a mixture'),
        ("gpt2", {"model_type": "smollm3"}, '"smollm3" is none that can be built here: every fourth of its layers'),
        ("bert", {"add_cross_attention": True}, "add_cross_attention = true: a decoder with an encoder"),
        ("bloom", {"n_inner": 100}, "n_inner = 100: BLOOM's MLP is four times as wide"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved = true: features i and i + d/2 of a head turn"),
        ("smollm", {"rope_parameters": {**YARN, "truncate": False}}, "rope_parameters.truncate = false: the ramp's"),
        ("qwen3", {"attention_bias": True}, "attention_bias = true: all linear layers of a model have a bias here"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention, and use_sliding"),
        ("neox", {"attention_bias": False}, "attention_bias = false: all linear layers of a model have a bias"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder = false: a T5 is an encoder and a decoder here"),
        ("t5", {"is_decoder": True}, "is_decoder = true: the encoder's part says it of itself alone"),
        ("t5", {"architectures": ["T5EncoderModel"]}, 'architectures = ["T5EncoderModel"]: only '),
    ],
)
def test_what_would_make_it_another_model_is_refused_with_the_reason(name: str, keys: Content, said: str) -> None:
    whole = completed(name, MODELS[name][1])
    assert whole is not None and isinstance(described(whole), dict)
    found = described(whole | keys)
    assert isinstance(found, str) and said in found


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gpt2", {"n_ctx": 32, "tie_encoder_decoder": True}),
        ("bloom", {"n_inner": 96}),
        ("neox", {"is_decoder": True}),  # as Pythia's files say
        ("qwen2", {"use_mrope": False}),
        ("smollm", {"rope_parameters": {**YARN, "truncate": True}}),
    ],
)
def test_what_says_the_same_once_more_changes_nothing(name: str, keys: Content) -> None:
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    assert described(whole | keys) == described(whole) and isinstance(described(whole), dict)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("gpt2", {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}),
        ("gpt2", {"max_position_embeddings": "n_positions"}),
        ("bloom", {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}),
    ],
)
def test_other_names_of_sizes_are_read_as_transformers_reads_them(name: str, others: dict[str, str]) -> None:
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    renamed = {next((other for other in others if others[other] == key), key): value for key, value in whole.items()}
    assert set(others) <= renamed.keys() and described(renamed) == described(whole)


@pytest.mark.parametrize("act", ["gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_a_gelu_is_exact_or_the_approximation_by_its_name(act: str) -> None:
    whole = completed("gpt2", MODELS["gpt2"][1])
    assert whole is not None
    found = described(whole | {"activation_function": act})
    assert isinstance(found, dict)
    assert found["activation"] == ("gelu" if act in ("gelu", "gelu_python") else "gelu_tanh")


def test_values_of_a_stranger_are_shown_in_part() -> None:
    whole = completed("gpt2", MODELS["gpt2"][1])
    assert whole is not None
    found = described(whole | {"odd": "x" * 500})
    assert isinstance(found, str) and f'odd = "{"x" * 79}… is not known here' in found


@pytest.mark.parametrize("key", ["initializer_range", "initializer_factor"])
def test_weights_that_begin_as_zeros_there_begin_by_default_here(key: str) -> None:
    """As the width of what is drawn, 0 would be none."""
    name = "gpt2" if key == "initializer_range" else "t5"
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    found, without = (described({**whole, key: width}) for width in (0.0, None))
    assert isinstance(found, dict) and isinstance(without, dict) and found["init_std"] > 0
    told = described({**whole, key: 0.75})
    assert isinstance(told, dict) and told["init_std"] == 0.75


@pytest.mark.parametrize("name", MODELS)
def test_dropout_and_initial_widths_are_written_for_who_trains_on(name: str) -> None:
    """What no file here says of itself: each number under all of its names."""
    _, model = model_of(classes(name)[1](**MODELS[name][1]).to_dict())
    model = model.model_copy(update={"dropout": 0.25, "attention_dropout": 0.125, "init_std": 0.5})
    family, content = family_of(model, VOCAB)
    names = {
        "gpt2": {"resid_pdrop": 0.25, "embd_pdrop": 0.25, "attn_pdrop": 0.125},
        "bert": {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.125},
        "megatron-bert": {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.125},
        "bloom": {"hidden_dropout": 0.25, "attention_dropout": 0.125},
        "gpt_neox": {"hidden_dropout": 0.25, "attention_dropout": 0.125},
        "t5": {"dropout_rate": 0.25},
    }
    expected = names.get(family.model_type, {"attention_dropout": 0.125})
    theirs = classes(name)[1](**content).to_dict()
    assert {key: theirs[key] for key in expected} == expected
    assert theirs["initializer_factor" if family.model_type == "t5" else "initializer_range"] == 0.5


@pytest.mark.parametrize(
    ("name", "changed", "nearest", "lost"),
    [
        ("gpt2", {"norm_position": "post"}, "GPT-2 (GPT2LMHeadModel)", ["norm_position"]),
        ("llama", {"norm_position": "post"}, "LLaMA (LlamaForCausalLM)", ["norm_position"]),
        ("neox", {"norm_position": "post"}, "GPT-NeoX (GPTNeoXForCausalLM)", ["norm_position"]),
        ("gpt2", {"norm_position": "post", "embedding_norm": True}, "BERT (BertForPreTraining)", ["kind"]),
        ("gpt2", {"norm_position": "post", "window": 7}, "GPT-2 (GPT2LMHeadModel)", ["norm_position", "window"]),
        ("neox", {"activation": "geglu_tanh"}, "GPT-NeoX (GPTNeoXForCausalLM)", ["activation"]),
        ("bert", {"activation": "relu"}, "BERT (BertForPreTraining)", ["activation"]),
    ],
)
def test_a_model_that_no_family_can_say_is_told_with_the_nearest_one(
    name: str, changed: Content, nearest: str, lost: list[str]
) -> None:
    """And with everything that it would become there."""
    whole = completed(name, MODELS[name][1])
    assert whole is not None
    model = model_of(whole)[1].model_copy(update=changed)
    with pytest.raises(Refused) as refused:
        family_of(model, VOCAB)
    first, *lines = refused.value.lines
    assert first == f"{nearest} is nearest, and cannot say this:"
    assert [line.partition(" = ")[0] for line in lines] == [f"model.{key}" for key in lost]


@pytest.mark.parametrize(
    ("architecture", "keys", "head", "labels"),
    [
        ("BertForSequenceClassification", {}, "classification", 2),
        ("BertForSequenceClassification", {"num_labels": 5}, "classification", 5),
        ("BertForSequenceClassification", {"num_labels": 5, "id2label": {"0": "a", "1": "b"}}, "classification", 2),
        ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}, "classification", 1),
        ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "single_label_classification"}, None, 0),
        ("BertForMultipleChoice", {}, "choice", 4),
        ("BertForMultipleChoice", {"num_choices": 5}, "choice", 5),
        ("BertForQuestionAnswering", {}, "spans", None),
        ("BertForNextSentencePrediction", {}, "pretraining", None),
        ("BertModel", {}, "none", None),
    ],
)
def test_a_class_of_bert_says_the_head_and_how_many_labels_it_tells(
    architecture: str, keys: Content, head: str | None, labels: int | None
) -> None:
    """Labels are counted by their names, where they have some."""
    whole = completed("bert", MODELS["bert"][1])
    assert whole is not None
    plain = {key: value for key, value in whole.items() if key not in ("id2label", "label2id", "problem_type")}
    found = described({**plain, "architectures": [architecture], **keys})
    if head is None:
        assert isinstance(found, str) and "one output is a score here" in found
        return
    assert isinstance(found, dict) and (found["head"], found["num_labels"]) == (head, labels)
    _, model = model_of({**plain, "architectures": [architecture], **keys})
    family, content = family_of(model, VOCAB)
    assert family.architecture == ("BertForPreTraining" if head == "pretraining" else architecture)
    assert described({"model_type": "bert", **content}) == found
    if head == "classification":
        assert content["problem_type"] == ("regression" if labels == 1 else "single_label_classification")
        assert content["label2id"] == {f"LABEL_{number}": number for number in range(labels or 0)}
