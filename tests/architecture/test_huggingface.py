"""What a config.json means that does not say everything, beside transformers' own reading of it."""

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


def test_a_number_may_stand_under_both_of_its_names() -> None:
    for content in ({"hidden_size": 24}, {"n_embed": 24}, {"hidden_size": 24, "n_embed": 24}):
        keys = Keys(content, {"hidden_size": "n_embed"})
        assert keys.take("hidden_size", int) == 24
        keys.finish()
    keys = Keys({"hidden_size": 24, "n_embed": 48}, {"hidden_size": "n_embed"})
    keys.take("hidden_size", int)
    with pytest.raises(Refused, match="hidden_size = 24 and n_embed = 48 are two names of one number"):
        keys.finish()
