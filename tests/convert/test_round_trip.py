"""There and back, to the bit: every family, two number formats, cut in files at awkward places."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
import torch

from colonnade.checkpoint.manifest import read_manifest, verify
from colonnade.config.load import load
from colonnade.convert import to_huggingface
from colonnade.convert.card import _history
from colonnade.convert.convert import _size
from colonnade.convert.to_huggingface import Opened, _ids, _listed, _with_template
from colonnade.mesh.mesh import Mesh
from colonnade.serving.trained import open_trained
from tests.commands import here
from tests.convert.published import MODELS, VOCAB, classes, heard, saved, state_of, transformers
from tests.data.test_sentencepiece import CONTROL, UNKNOWN, piece
from tests.parity.runs import SERIAL, Case, configured
from tests.runs import whole_tensors

SHORT = ("gpt2", "qwen3")
"""Those that the default suite converts in bf16 too."""
VARIANTS = ("gpt2, untied, exact gelu", "gpt2, relu", "llama, for three ranks", "smollm", "qwen3, windows")
"""Those whose way back is in the slow suite."""
T5_ALSO_HAS = ("n_positions", "bos_token_id", "decoder_start_token_id")
OF_NO_EFFECT = {"dropout_rate", "_name_or_path", "max_window_layers", "seq_length", "n_inner", "rope_theta"}


def converted(*arguments: object) -> str:
    answer = here("convert", *arguments)
    assert (answer.status, answer.err) == (0, ""), answer
    return answer.out


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, torch.float32, id=f"{name}, fp32", marks=pytest.mark.slow if name in VARIANTS else [])
            for name in MODELS
        ),
        *(
            pytest.param(name, torch.bfloat16, id=f"{name}, bf16", marks=[] if name in SHORT else pytest.mark.slow)
            for name in MODELS
        ),
    ],
)
def test_there_and_back(name: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved(tmp_path / "theirs", name, dtype=dtype, size="7KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    converted(tmp_path / "theirs", tmp_path / "ours")
    verify(tmp_path / "ours")
    assert {each.dtype for each in read_manifest(tmp_path / "ours").tensors.values()} == {dtype}
    converted(tmp_path / "ours", tmp_path / "back", "--max-shard-size", "5.5KB")
    with heard(caplog) as said:
        back, info = classes(name)[0].from_pretrained(tmp_path / "back", output_loading_info=True, dtype="auto")
    # of T5 1.1 they say so whoever wrote it: their class takes any config.json for tied, and then sees two tensors
    said = [line for line in said if name != "t5, gated, untied" or "we will NOT tie them" not in line]
    assert said == [] and not any(info.values()), (said, info)
    assert back.dtype == dtype
    before, after = state_of(model), state_of(back)
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    after_all = what_counts(back.config)
    if name.startswith("t5"):  # keys that their class does not have, and does not read
        after_all = {key: value for key, value in after_all.items() if key not in T5_ALSO_HAS}
    assert what_counts(model.config) == after_all


def what_counts(config: Any) -> dict[str, Any]:
    """Of a configuration of theirs: everything but what says nothing of what is computed."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if key not in OF_NO_EFFECT and not key.endswith(("dropout", "pdrop", "dropout_prob"))
    }


def test_the_checkpoint_knows_its_model(tmp_path: Path) -> None:
    """Keys of [model] that are derived, none of which is a default."""
    saved(tmp_path / "theirs", "mistral")
    converted(tmp_path / "theirs", tmp_path / "ours")
    model = load(tmp_path / "ours" / "config.toml").model
    assert (model.position, model.norm, model.activation, model.bias) == ("rotary", "rmsnorm", "swiglu", False)
    assert (model.num_layers, model.hidden_size, model.ffn, model.seq_length) == (3, 36, 50, 32)
    assert (model.num_heads, model.key_value_heads, model.head_width, model.window) == (6, 2, 10, 4)
    assert (model.vocab_size, model.tie_embeddings, model.norm_epsilon) == (61, False, 1e-6)
    metadata = read_manifest(tmp_path / "ours").metadata
    assert metadata["step"] == 0 and metadata["converted_from"]["family"] == "Mistral"


@pytest.mark.parametrize(("said", "kept", "used"), [(0, 0, 0), (None, 3, 1), (VOCAB, 3, 1)])
def test_a_decoder_begins_with_the_token_that_it_was_published_with(
    said: int | None, kept: int, used: int, tmp_path: Path
) -> None:
    """Which need not be the one that pads, as in MADLAD-400. Where none is said that it has, that is written, and
    text is begun as in training here.
    """
    saved(tmp_path / "theirs", "t5")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": 3, "decoder_start_token_id": said}))
    (tmp_path / "theirs" / "generation_config.json").unlink()
    converted(tmp_path / "theirs", tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["decoder_start_token_id"] == kept
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
    assert (generation.decoder_start_token_id, generation.eos_token_id, generation.pad_token_id) == (kept, 1, 3)
    assert open_trained(tmp_path / "ours", Mesh(), torch.device("cpu")).stages.start == used


def test_the_number_format_can_be_another(tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", "gpt2")
    converted(tmp_path / "theirs", tmp_path / "ours", "--dtype", "bf16")
    assert load(tmp_path / "ours" / "config.toml").train.precision == "bf16"
    table = model.transformer.wte.weight.detach()
    assert torch.equal(whole_tensors(tmp_path / "ours")["embedding.tokens.weight"], table.bfloat16())
    converted(tmp_path / "ours", tmp_path / "back", "--dtype", "fp64")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "float64"
    back = classes("gpt2")[0].from_pretrained(tmp_path / "back", dtype="auto")
    assert torch.equal(back.transformer.wte.weight.detach(), table.bfloat16().double())


def test_a_number_that_the_format_has_no_room_for_is_refused(tmp_path: Path) -> None:
    """What rounds to the largest number, and what is infinite already, stays."""
    model = saved(tmp_path / "theirs", "gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[0, :4] = torch.tensor([65519.0, torch.inf, torch.nan, 2.0])
        model.transformer.wte.weight[1, 0] = 1e6
    model.save_pretrained(tmp_path / "theirs")
    converted(tmp_path / "theirs", tmp_path / "ours")
    for source, name in (("theirs", "embedding.tokens.weight"), ("ours", "transformer.wte.weight")):
        answer = here("convert", tmp_path / source, tmp_path / "half", "--dtype", "fp16")
        assert (
            answer.status == 2 and f"{name} has the value 1e+06, and float16 has room for at most 65504" in answer.err
        )
        converted(tmp_path / source, tmp_path / f"{source}-bf16", "--dtype", "bf16")
    with torch.no_grad():
        model.transformer.wte.weight[1, 0] = 1
    model.save_pretrained(tmp_path / "theirs")
    converted(tmp_path / "theirs", tmp_path / "half", "--dtype", "fp16")
    found = whole_tensors(tmp_path / "half")["embedding.tokens.weight"][0, :4].float()
    assert torch.equal(found.nan_to_num(3, 4), torch.tensor([65504.0, 4, 3, 2]))


def test_a_dry_run_lists_every_tensor_and_writes_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "llama, grouped, tied, biases")
    before = sorted(tmp_path.rglob("*"))
    out = converted(tmp_path / "theirs", tmp_path / "ours", "--dry-run", "--dtype", "bf16")
    assert sorted(tmp_path.rglob("*")) == before
    keys = "model.layers.2.self_attn.k_proj.weight + model.layers.2.self_attn.v_proj.weight"
    assert f"  {keys} -> blocks.2.attention.key_value.weight [24, 36] float32 -> bfloat16\n" in out
    assert "Nothing was written" in out and "LLaMA (LlamaForCausalLM)" in out
    converted(tmp_path / "theirs", tmp_path / "ours")
    back = converted(tmp_path / "ours", tmp_path / "back", "--dry-run")
    assert f"  blocks.2.attention.key_value.weight -> {keys} [12, 36] float32\n" in back
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_one_file_or_several_with_and_without_an_index(tmp_path: Path, index: bool) -> None:
    for size, folder in (("5GB", "one"), ("7KB", "many")):
        saved(tmp_path / folder, "gpt2", size=size)
    if not index:
        (tmp_path / "many" / "model.safetensors.index.json").unlink()
    for folder in ("one", "many"):
        converted(tmp_path / folder, tmp_path / f"{folder}, ours")
    one, many = (whole_tensors(tmp_path / f"{folder}, ours") for folder in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[key], many[key]) for key in one)


def test_a_limit_that_no_file_reaches_leaves_one_file(tmp_path: Path) -> None:
    """However long it is."""
    saved(tmp_path / "theirs", "gpt2")
    converted(tmp_path / "theirs", tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back", "--max-shard-size", f"{'9' * 320}GB")
    assert [file.name for file in (tmp_path / "back").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "older", "eos_token": "<|endoftext|>"},
        {"chat_template": "older", "eos_token": "<|im_end|>"},
        {},
    ],
    ids=["two", "another end", "one"],
)
def test_a_chat_template_in_a_file_of_its_own_is_the_one_that_is_kept(config: dict[str, str], tmp_path: Path) -> None:
    """As in transformers, beside an older one in tokenizer_config.json or without that file."""
    saved(tmp_path / "theirs", "gpt2")
    if config:
        (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "theirs" / "chat_template.jinja").write_text("newer")
    converted(tmp_path / "theirs", tmp_path / "ours")
    published = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "theirs")
    kept = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert kept == {**config, "chat_template": published.chat_template} and published.chat_template == "newer"
    converted(tmp_path / "ours", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert back.items() >= kept.items() and back["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_chat_templates_by_name_in_files_of_their_own_are_kept(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "gpt2")
    texts = {"default": "of all", "rag": "for documents", "tool_use": "for tools"}
    published = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "theirs")
    published.chat_template = texts
    published.save_pretrained(tmp_path / "theirs")
    named = tmp_path / "theirs" / "additional_chat_templates"
    assert (named / "tool_use.jinja").read_text() == "for tools"
    (named / "._tool_use.jinja").write_bytes(b"\0\5\x16\7\xff")  # its attributes, of macOS
    converted(tmp_path / "theirs", tmp_path / "ours")
    kept = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())["chat_template"]
    assert kept == [{"name": name, "template": text} for name, text in texts.items()]
    converted(tmp_path / "ours", tmp_path / "back")
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "back").chat_template == texts


@pytest.mark.parametrize(
    ("name", "vocabulary", "text", "pair", "types"),
    [
        ("bert", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], [2, 5, 3], [2, 5, 3, 6, 3], [0, 0, 0, 1, 1]),
        ("t5", ["<pad>", "</s>", "<unk>", "<|endoftext|>", "."], [5, 1], [5, 1, 6, 1], None),
        ("t5", ["<unk>", "<|endoftext|>", ".", ",", ";"], [5, 1], [5, 1, 6, 1], None),
        ("llama", ["<unk>", "<|endoftext|>", ".", ",", ";"], [5], [5, 6], None),
    ],
)
def test_a_tokenizer_puts_around_a_text_what_the_model_was_trained_to_read(
    name: str, vocabulary: list[str], text: list[int], pair: list[int], types: list[int] | None, tmp_path: Path
) -> None:
    """One that says nothing of it itself, as those that are trained here."""
    saved(tmp_path / "theirs", name)
    ids = {token: number for number, token in enumerate([*vocabulary, "dog", "tree"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    words.add_special_tokens([token for token in vocabulary if len(token) > 1])
    words.save(str(tmp_path / "theirs" / "tokenizer.json"))
    converted(tmp_path / "theirs", tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("dog").input_ids == text
    both = tokenizer("dog", "tree")
    assert (both.input_ids, both.get("token_type_ids")) == (pair, types)
    if name == "t5":
        assert tokenizer.eos_token_id == text[-1]
    card = (tmp_path / "back" / "README.md").read_text()
    (imported,) = (line for line in card.splitlines() if line.startswith("from transformers import "))
    used = [line for line in card.splitlines() if ".from_pretrained(" in line]
    assert imported.count(",") + 1 == len(used) == (2 if name == "llama" else 1), card


def test_control_tokens_of_sentencepiece_are_those_of_training_for_other_programs(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "t5")
    pieces = [piece("<pad>", kind=CONTROL), piece("</s>", kind=CONTROL), piece("<unk>", kind=UNKNOWN), piece("▁dog")]
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    (tmp_path / "theirs" / "spiece.model").write_bytes(b"".join(pieces))
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 2, "eos_token": "</s>"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(config))
    converted(tmp_path / "theirs", tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id, len(theirs)) == (0, 1, 2, 6)
    assert theirs("dog").input_ids == [3, 1]
    converted(tmp_path / "back", tmp_path / "again")
    before, after = (read_manifest(tmp_path / folder).metadata for folder in ("ours", "again"))
    assert after["tokenizer_sha256"] == before["tokenizer_sha256"]


@pytest.mark.parametrize(
    ("first", "second", "written"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_weights_are_written_in_the_narrowest_type_that_loses_nothing_of_any(
    first: torch.dtype, second: torch.dtype, written: torch.dtype
) -> None:
    stub: Any = None
    manifest: Any = SimpleNamespace(tensors={"a": SimpleNamespace(dtype=first), "b": SimpleNamespace(dtype=second)})
    assert Opened(stub, manifest, stub, stub, stub, {}, dict.fromkeys(("a", "b"), stub), None).stored_dtype is written


@pytest.mark.parametrize("place", ["manifest", "folder", "nowhere"])
def test_a_tokenizer_is_found_in_a_checkpoint_or_beside_its_files(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, metadata = configured(Case(), SERIAL), SimpleNamespace(model=SimpleNamespace(vocab_size=37))
    manifest = SimpleNamespace(files={"tokenizer.json": None} if place == "manifest" else {})
    if place == "folder":
        (tmp_path / "tokenizer.json").touch()
    family = SimpleNamespace(sources=lambda *_: [])
    monkeypatch.setattr(to_huggingface, "described", lambda path: (manifest, config, metadata))
    monkeypatch.setattr(to_huggingface, "family_of", lambda *_: (family, {}))
    monkeypatch.setattr(to_huggingface, "tokenizer_of", lambda path, _: f"that of {path.name}")
    expected = None if place == "nowhere" else f"that of {tmp_path.name}"
    assert to_huggingface._open(tmp_path).tokenizer == expected


def test_a_card_counts_the_tokens_of_all_samples() -> None:
    config = configured(Case(), SERIAL)
    metadata: Any = SimpleNamespace(step=3, samples=12)
    tokens = 12 * config.model.seq_length
    assert f"step 3 of {config.train.steps}: 12 samples, up to {tokens} tokens." in _history(config, metadata, "run")[0]


def test_a_card_names_all_token_files_and_no_credentials() -> None:
    config, metadata = configured(Case(), SERIAL), SimpleNamespace(step=3, samples=12)
    blend = ["https://you:secret@host/corpus/news?token=abc", "/disk/of/mine/books"]
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": None, "blend": blend})})
    (line,) = (line for line in _history(config, cast(Any, metadata), "run") if line.startswith("- token files: "))
    assert "`news" in line and line.endswith(", `books`"), "names alone, of each"
    assert not any(part in line for part in ("secret", "abc", "/disk", "host")), line


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1KB", 10**3),
        ("500MB", 5 * 10**8),
        ("5GB", 5 * 10**9),
        ("1TB", 10**12),
        ("2KiB", 2**11),
        ("2MiB", 2**21),
        ("2GiB", 2**31),
        (" 1.5 gb ", 15 * 10**8),
        ("1000B", 10**3),
    ],
)
def test_sizes_of_files_are_in_the_units_that_they_name(text: str, size: int) -> None:
    assert _size(text) == size


def test_what_belongs_to_training_is_left_and_told() -> None:
    names = ("optimizer.exp_avg.a", "optimizer.exp_avg_sq.a", "blocks.0.to_teacher.weight")
    it: Any = SimpleNamespace(sources={}, manifest=SimpleNamespace(tensors=dict.fromkeys(names)))
    assert _listed(it, torch.float32) == [
        "  left: 2 tensors of the optimizer",
        "  left: blocks.0.to_teacher.weight",
        "Nothing was written (--dry-run).",
    ]


def test_several_tokens_may_end_a_text() -> None:
    """Llama 3's instruct models have a list of them."""
    came = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": "x"}
    opened: Any = SimpleNamespace(manifest=SimpleNamespace(metadata={"converted_from": came}))
    assert _ids(opened) == {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": None}


def test_a_template_gets_no_token_that_it_had_none_of() -> None:
    """Of those that it names; others are of no consequence to it."""
    ours = {"tokenizer_class": "x", "bos_token": "a", "eos_token": "b", "pad_token": "c"}
    kept = {"chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": "d"}
    assert _with_template(ours, kept) == {"tokenizer_class": "x", "eos_token": "d", "pad_token": "c", **kept}
