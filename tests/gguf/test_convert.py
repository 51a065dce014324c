"""A GGUF file becomes a checkpoint that computes what transformers computes with the same numbers."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
import torch

from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import CheckpointError
from colonnade.gguf import source
from colonnade.gguf.header import FORMATS, Header, Laid, read_header
from colonnade.gguf.source import Packed
from colonnade.gguf.tokenizer import config_in, has_its_tokens, tokenizer_in
from colonnade.mesh.mesh import Mesh
from colonnade.model.rotary import inverse_wavelengths
from colonnade.serving.trained import open_trained
from tests.convert.published import LLAMA3, MODELS, random_model
from tests.convert.test_logits import CPU, TOKENS, assert_equal, in_float64, logits_of
from tests.convert.test_refused import refused
from tests.convert.test_round_trip import converted
from tests.examples.chats import CHATML
from tests.gguf.written import words, write

gguf = pytest.importorskip("gguf")
F32, F16, BF16, Q8_0, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0"))
ARCHITECTURES = {"mistral": "llama"}  # as llama.cpp writes it


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of whole blocks of quantized numbers."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
    for name in ("llama", "qwen2", "qwen3"):
        kind, keys = MODELS[name]
        head = {"head_dim": 16} if name == "qwen3" else {}
        scaled = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
        rope = {"rope_parameters": scaled} if name == "llama" else {}
        monkeypatch.setitem(MODELS, name, (kind, {**keys, **wide, **head, **rope}))


@pytest.mark.usefixtures("shapes")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", F16),
        ("llama", Q8_0),
        ("qwen2", BF16),
        ("qwen3", Q4_0),
        ("llama, grouped, tied, biases", F32),
        ("mistral", F32),
        ("qwen3, windows", F32),
        *(
            pytest.param("llama", gguf.GGMLQuantizationType[each], marks=pytest.mark.slow)
            for each in ("F32", "Q4_1", "Q5_0", "Q5_1")
        ),
    ],
)
def test_logits_are_those_of_transformers(name: str, kind: Any, tmp_path: Path) -> None:
    twin = random_model(name)
    window = getattr(twin.config, "sliding_window", None)
    keys = {"add_sliding_window": window} if window else {}
    state = write(tmp_path / "model.gguf", twin, ARCHITECTURES.get(name, name.split(",")[0]), kind, **keys)
    twin.load_state_dict(state, strict=False)
    converted(tmp_path / "model.gguf", tmp_path / "ours", "--tokenizer", words(tmp_path))
    trained = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")
    if name == "llama":
        assert (
            trained.config.model.rotary.scaling == "llama3" and trained.config.model.rotary.factor == LLAMA3["factor"]
        )
    ours = logits_of(trained)
    with in_float64(twin, trained) as exact, torch.no_grad():
        assert ours is not None and ours.std() > 0.3
        assert_equal(ours, exact(input_ids=TOKENS.t()).logits.transpose(0, 1))


@pytest.mark.parametrize("kind", [None, gguf.RopeScalingType.LINEAR])
def test_a_factor_of_positions_without_a_rule_is_that_of_linear_scaling(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp takes it."""
    name = "llama, grouped, tied, biases"
    model, keys = MODELS[name]
    linear = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    monkeypatch.setitem(MODELS, name, (model, {**keys, "rope_parameters": linear}))
    twin, said = random_model(name), {} if kind is None else {"add_rope_scaling_type": kind}
    write(tmp_path / "model.gguf", twin, "llama", F32, add_rope_scaling_factor=4.0, **said)
    converted(tmp_path / "model.gguf", tmp_path / "ours", "--tokenizer", words(tmp_path))
    found = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64").config.model
    assert (found.rotary.scaling, found.rotary.factor) == ("linear", 4.0)
    ours = inverse_wavelengths(found.rotary, found.rotary_width)
    torch.testing.assert_close(ours.float(), twin.model.rotary_emb.inv_freq)


LLAMA_SAYS = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 48, "context_length": 64}


@pytest.mark.parametrize(
    ("arch", "said", "found"),
    [
        ("llama", {}, {"model_type": "llama", "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "head_dim": 8}),
        ("llama", {"attention.sliding_window": 7}, {"model_type": "mistral", "sliding_window": 7}),
        (
            "qwen2",
            {"attention.sliding_window": 7},
            {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        ),
        ("llama", {"rope.freq_base": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            "llama",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        (
            "llama",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
        ),
        (
            "llama",
            {"rope.scaling.type": "yarn"},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 1.0}},
        ),
        ("llama", {"rope.scaling.type": "none"}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    ],
)
def test_what_metadata_mean(arch: str, said: dict[str, Any], found: dict[str, Any]) -> None:
    keys = {f"{arch}.{key}": value for key, value in {**LLAMA_SAYS, "attention.head_count": 4, **said}.items()}
    tensors = {"token_embd.weight": Laid("token_embd.weight", (61, 32), 0, 0)}
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unk_token_id": 0}
    header = Header(Path(), {"general.architecture": arch, **ids, **keys}, tensors)
    content = source.config_of(header)
    assert {key: content.get(key) for key in found} == found
    assert content["vocab_size"] == 61 and content["tie_word_embeddings"] is True
    assert source._facts(header) == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({"eos": 2, "eot": 5, "eom": 4}, [2, 5, 4]),
        ({"eot": 5}, 5),
        ({"eos": 2, "eot": 2}, 2),
        ({"eos": 0, "eot": "5", "eom": None}, 0),
        ({}, None),
    ],
)
def test_a_text_ends_with_each_token_that_ends_one_in_llama_cpp(said: dict[str, Any], ends: Any) -> None:
    """Of a document, of a turn, and of a message."""
    header = Header(Path(), {f"tokenizer.ggml.{kind}_token_id": id_ for kind, id_ in said.items()}, {})
    assert source._facts(header) == ({} if ends is None else {"eos_token_id": ends})


@pytest.mark.usefixtures("shapes")
@pytest.mark.parametrize("more", [{}, {"add_rope_scaling_type": gguf.RopeScalingType.YARN}], ids=["linear", "yarn"])
def test_two_rules_for_longer_texts_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", random_model("llama"), "llama", F16, add_rope_scaling_factor=4.0, **more)
    message = refused(tmp_path, tmp_path / "model.gguf", tmp_path / "ours")
    assert "rope.scaling.factor = 4.0 beside rope_freqs.weight: one rule for longer texts is read" in message


@pytest.mark.usefixtures("shapes")
def test_divisors_of_positions_that_follow_from_no_known_rule_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_model("llama"), "llama", F16)
    assert source.open_gguf(path)[0].model.rotary.factor == LLAMA3["factor"]
    laid, raw = read_header(path).tensors["rope_freqs.weight"], bytearray(path.read_bytes())
    numpy.frombuffer(raw, numpy.float32, laid.shape[0], laid.start)[0] *= 1.02
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not hold what LLaMA 3's rule gives for a"):
        source.open_gguf(path)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256_have_the_sizes_that_ggml_gives_them(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    assert FORMATS[int(kind)] == (name, *gguf.GGML_QUANT_SIZES[kind])
    zeros = numpy.zeros((2, FORMATS[int(kind)].num_bytes), numpy.uint8)
    assert gguf.quants.dequantize(zeros, kind).shape == (2, 256)


def test_every_format_is_as_ggml_says() -> None:
    for code, numbers in FORMATS.items():
        assert (numbers.elements, numbers.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)]


@pytest.mark.parametrize("alignment", [8, 4096])
def test_tensors_lie_where_ggml_finds_them(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_model("llama, grouped, tied, biases"), "llama", F16, add_custom_alignment=alignment)
    theirs = {each.name: each.data_offset for each in gguf.GGUFReader(path).tensors}
    assert {name: each.start for name, each in read_header(path).tensors.items()} == theirs


@pytest.mark.usefixtures("shapes")
def test_quantized_numbers_are_ggmls_however_many_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last stretch that is shorter among them: 700 elements are 21 blocks of 32."""
    path = tmp_path / "model.gguf"
    write(path, random_model("llama"), "llama", Q8_0)
    (theirs,) = (each for each in gguf.GGUFReader(path).tensors if each.name == "blk.0.ffn_gate.weight")
    assert theirs.n_elements % (21 * 32) and theirs.tensor_type == Q8_0
    packed = Packed(path, read_header(path).tensors[theirs.name])
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"pip install 'colonnade\[gguf\]'"):
        patch.setitem(sys.modules, "gguf", None)  # importing it fails
        source.open_gguf(path)
    monkeypatch.setattr(source, "_AT_ONCE", 700)
    expected = torch.from_numpy(gguf.quants.dequantize(theirs.data, Q8_0))
    assert packed.read().std() > 0 and torch.equal(packed.read(), expected)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "model.gguf", random_model("llama, grouped, tied, biases"), "llama", F16)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_a_byte_level_tokenizer_comes_along(pre: str, tmp_path: Path) -> None:
    trained = train_bpe(["the cat sat on the mat, 1234 times; isn't that so?\n\n  Yes."] * 3, 300)
    content = json.loads(trained.to_json())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    for added in content["added_tokens"]:
        tokens = tokens if added["content"] in tokens else [*tokens, added["content"]]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
    special = {added["content"] for added in content["added_tokens"]}
    with pytest.MonkeyPatch.context() as patch:
        kind, keys = MODELS["llama, grouped, tied, biases"]
        patch.setitem(MODELS, "llama, grouped, tied, biases", (kind, {**keys, "vocab_size": len(tokens)}))
        patch.setattr("tests.gguf.written.VOCAB", len(tokens))
        write(
            tmp_path / "model.gguf",
            random_model("llama, grouped, tied, biases"),
            "llama",
            F16,
            add_tokenizer_model="gpt2",
            add_tokenizer_pre=pre,
            add_token_list=tokens,
            add_token_merges=merges,
            add_token_types=[3 if token in special else 1 for token in tokens],
            add_bos_token_id=0,
            add_eos_token_id=len(tokens) - 1,
            add_chat_template=CHATML,
        )
    out = converted(tmp_path / "model.gguf", tmp_path / "ours")
    assert f"tokenizer  {len(tokens):,} ids" in out and "left" not in out
    content = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert content == {"chat_template": CHATML, "bos_token": tokens[0], "eos_token": tokens[-1]}
    made = Tokenizer.load(tmp_path / "ours" / "tokenizer.json")
    text = "the cat isn't 12345 on\n\n the  mat: é?"
    assert made.decode(made.encode(text)) == text
    if pre == "gpt-2":
        assert made.encode(text) == trained.encode(text)
    assert isinstance(tokenizers.Tokenizer.from_str(made.to_json()), tokenizers.Tokenizer)


def test_what_users_add_is_kept_whole_and_is_text() -> None:
    """As llama.cpp has it, and as the original's added tokens that are not special; a control token is neither."""
    tokens, kinds = ["a", "<", ">", "|", "<a>", "<|a|>"], [1, 1, 1, 1, 4, 3]
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [], "token_type": kinds}
    made = tokenizer_in(Header(Path(), {f"tokenizer.ggml.{key}": value for key, value in said.items()}, {}))
    assert isinstance(made, Tokenizer) and made.special_ids == {5}
    assert made.encode("a<a>a<|a|>") == [0, 4, 0, 1, 3, 0, 3, 2] and made.decode([0, 4, 5]) == "a<a>"


@pytest.mark.parametrize(
    "wrong", [{"token_type": 1}, {"token_type": None}, {"tokens": [["a"]]}, {"merges": [1]}, {"pre": ["gpt-2"]}]
)
def test_a_tokenizer_that_is_not_as_it_should_be_is_left(wrong: dict[str, Any]) -> None:
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "merges": [], "token_type": [1], **wrong}
    made = tokenizer_in(Header(Path(), {f"tokenizer.ggml.{key}": value for key, value in said.items()}, {}))
    assert isinstance(made, str) and made.startswith("left: it ") and "tokenizer.json with --tokenizer" in made


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [2]), ("gpt-2", [0, 1])])
def test_text_is_split_as_the_file_says_and_no_further(pre: str, ids: list[int]) -> None:
    """LLaMA 3 leaves what is no letter before a word at it."""
    said = {"model": "gpt2", "pre": pre, "tokens": ["(", "a", "(a"], "merges": ["( a"], "token_type": [1, 1, 1, 3]}
    made = tokenizer_in(Header(Path(), {f"tokenizer.ggml.{key}": value for key, value in said.items()}, {}))
    assert isinstance(made, Tokenizer) and made.encode("(a") == ids, "kinds of tokens that there are not say nothing"


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [3]), ("gpt-2", [0, 1, 2]), ("qwen2", [0, 1, 2])])
def test_a_word_of_the_vocabulary_that_no_merges_make_is_one_token_where_llama_cpp_says_so(
    pre: str, ids: list[int]
) -> None:
    said = {"model": "gpt2", "pre": pre, "tokens": ["c", "a", "t", "cat"], "merges": [], "token_type": [1] * 4}
    made = tokenizer_in(Header(Path(), {f"tokenizer.ggml.{key}": value for key, value in said.items()}, {}))
    assert isinstance(made, Tokenizer) and made.encode("cat") == ids


def test_a_tokenizer_split_as_qwen_2_is_qwen_2s_own(tmp_path: Path) -> None:
    """Accents that stand behind their letters are joined with them before."""
    tokens, merges = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "Ã©"], ["Ã ©"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: id_ for id_, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    theirs = Tokenizer.load(tmp_path)
    said = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": merges, "token_type": [1] * len(tokens)}
    made = tokenizer_in(Header(Path(), {f"tokenizer.ggml.{key}": value for key, value in said.items()}, {}))
    assert isinstance(made, Tokenizer) and made.sha256 == theirs.sha256
    assert made.encode("cafe\u0301") == made.encode("caf\u00e9") == theirs.encode("cafe\u0301")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_accents_stay_as_they_are_written_where_the_original_leaves_them(pre: str) -> None:
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "Ã©"]
    said = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["Ã ©"], "token_type": [1] * len(tokens)}
    made = tokenizer_in(Header(Path(), {f"tokenizer.ggml.{key}": value for key, value in said.items()}, {}))
    assert isinstance(made, Tokenizer)
    for text, count in (("e\u0301", 3), ("\u00e9", 1)):
        assert len(made.encode(text)) == count and made.decode(made.encode(text)) == text


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"chat_template": "{{ bos_token }}"}, {"bos_token": "a", "eos_token": "<b>"}),
        ({"chat_template": "", "ggml.bos_token_id": 2, "ggml.eos_token_id": -1}, {}),
        ({"chat_template": "", "ggml.bos_token_id": "0", "ggml.eos_token_id": True}, {}),
        ({"chat_template": "", "ggml.tokens": [1, 2]}, {}),
        ({"chat_template": "", "ggml.tokens": None}, {}),
        ({"chat_template": ["{{ bos_token }}"]}, None),
        ({"chat_template.tool_use": "{{ bos_token }}"}, None),
    ],
)
def test_a_chat_template_comes_with_the_names_of_the_tokens_that_it_may_write(
    said: dict[str, Any], found: dict[str, str] | None
) -> None:
    """As far as there are such tokens; without a template these are said by their ids alone."""
    metadata = {"ggml.tokens": ["a", "<b>"], "ggml.bos_token_id": 0, "ggml.eos_token_id": 1, **said}
    made = config_in(Header(Path(), {f"tokenizer.{key}": value for key, value in metadata.items()}, {}))
    assert made == ({} if found is None else {"chat_template": said["chat_template"], **found})


def test_a_chat_template_for_tools_comes_beside_the_other() -> None:
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert config_in(Header(Path(), templates, {})) == {"chat_template": named}


def test_one_of_another_kind_is_left_with_the_file_to_name(tmp_path: Path) -> None:
    write(
        tmp_path / "model.gguf",
        random_model("llama, grouped, tied, biases"),
        "llama",
        F16,
        add_tokenizer_model="llama",
        add_token_list=["a"] * 61,
        add_chat_template=CHATML,
    )
    out, left = (
        converted(tmp_path / "model.gguf", tmp_path / "ours"),
        f"  left: the chat template in {tmp_path}/model.gguf",
    )
    assert "tokenizer  left: of kind llama. Name the original model's tokenizer.model (SentencePiece) with --tok" in out
    assert left in out and left in converted(tmp_path / "model.gguf", tmp_path / "its", "--tokenizer", words(tmp_path))
    assert not [*tmp_path.glob("*/tokenizer_config.json")]


def test_a_chat_template_comes_with_the_same_tokenizer_that_is_named_and_lies_alone(tmp_path: Path) -> None:
    """As all models of SentencePiece need; one with files of its own brings its own."""
    tokens = Tokenizer.load(words(tmp_path)).names
    ours, its = tmp_path / "ours", tmp_path / "its"
    more = {"add_tokenizer_model": "llama", "add_token_list": tokens, "add_chat_template": CHATML}
    write(tmp_path / "model.gguf", random_model("llama, grouped, tied, biases"), "llama", F16, **more)
    assert "left" not in converted(tmp_path / "model.gguf", ours, "--tokenizer", words(tmp_path))
    assert json.loads((ours / "tokenizer_config.json").read_text()) == {"chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "its own"}')
    assert "left: the chat template" in converted(tmp_path / "model.gguf", its, "--tokenizer", words(tmp_path))
    assert json.loads((its / "tokenizer_config.json").read_text()) == {"chat_template": "its own"}


def test_a_tokenizer_is_that_of_a_file_whose_tokens_it_begins_with(tmp_path: Path) -> None:
    """Behind these it may have some of its own."""
    tokenizer = Tokenizer.load(words(tmp_path))
    names = tokenizer.names
    found = [
        has_its_tokens(Header(Path(), {"tokenizer.ggml.tokens": tokens}, {}), tokenizer)
        for tokens in (names, names[:-2], [*names, "more"], names[1:], [])
    ]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"add_expert_count": 8}, "expert_count = 8: its MLP is a mixture of experts"),
        ({"add_rope_dimension_count": 4}, "rope.dimension_count = 4: rotary positions of these families turn whole"),
        ({"add_rope_scaling_type": gguf.RopeScalingType.LONGROPE}, 'rope.scaling.type = "longrope"'),
        ({"add_logit_scale": 2.0}, "logit_scale = 2.0 is not known here"),
    ],
)
def test_metadata_of_other_models(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", random_model("llama, grouped, tied, biases"), "llama", F16, **keys)
    assert said in refused(tmp_path, tmp_path / "model.gguf", tmp_path / "ours")


def test_other_architectures(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", random_model("llama, grouped, tied, biases"), "gemma2", F16)
    message = refused(tmp_path, tmp_path / "model.gguf", tmp_path / "ours")
    assert 'general.architecture = "gemma2": llama, qwen2, qwen3 are read' in message


def at(data: bytes, name: bytes, more: int) -> int:
    return data.index(name) + len(name) + more


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda x: x[:20], "it is too short"),
        (lambda x: x[:300], "it ends at byte 300"),
        (lambda x: x[:-40], "lies up to"),
        (lambda x: x[:4] + struct.pack("<I", 9) + x[8:], "it is of version 9"),
        (lambda x: x[:8] + struct.pack("<Q", 2**60) + x[16:], "it ends at byte"),
        (lambda x: x[:16] + struct.pack("<Q", 2**63) + x[24:], "it ends at byte"),
        (lambda x: x[:24] + struct.pack("<Q", 2**50) + x[32:], "it ends at byte"),
        (
            lambda x: x[: (n := at(x, b"token_embd.weight", 20))] + struct.pack("<I", 99) + x[n + 4 :],
            "token_embd.weight is stored in ggml's format 99; known are F32, F16",
        ),
        (
            lambda x: x[: (n := at(x, b"token_embd.weight", 20))] + struct.pack("<I", Q8_0) + x[n + 4 :],
            "token_embd.weight has rows of 36, which are no whole blocks",
        ),
        (
            lambda x: x[: (n := at(x, b"token_embd.weight", 24))] + struct.pack("<Q", 2**62) + x[n + 8 :],
            "token_embd.weight lies up to",
        ),
        (
            lambda x: x[: (n := at(x, b"token_embd.weight", 4))] + struct.pack("<Q", 2**61) + x[n + 8 :],
            "token_embd.weight lies up to",
        ),
        (lambda x: x.replace(b"blk.1.attn_q.weight", b"blk.1.attn_X.weight"), "blk.1.attn_X.weight"),
    ],
)
def test_damage_and_lies(edit: Callable[[bytes], bytes], said: str, file: Path, tmp_path: Path) -> None:
    file.write_bytes(edit(file.read_bytes()))
    message = refused(tmp_path, file, tmp_path / "ours")
    assert said in message and str(file) in message, message


def test_a_list_that_lies_about_its_length_ends_at_once(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for kind in (0, 8):
        (tmp_path / "model.gguf").write_bytes(head + struct.pack("<IIQ", 9, kind, 2**62))
        assert "it ends at byte" in refused(tmp_path, tmp_path / "model.gguf", tmp_path / "ours")


def test_without_the_package_plain_numbers_are_read_and_quantized_ones_refused(
    shapes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in (("plain", F16), ("quantized", Q8_0)):
        write(tmp_path / f"{name}.gguf", random_model("llama"), "llama", kind)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert "pip install 'colonnade[gguf]'" in refused(tmp_path, tmp_path / "quantized.gguf", tmp_path / "ours")
    converted(tmp_path / "plain.gguf", tmp_path / "ours")
    assert read_header(tmp_path / "plain.gguf").metadata["general.architecture"] == "llama"
