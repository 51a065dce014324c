"""What cannot be converted is one message with the remedy, exit status 2, and nothing left behind."""

import codecs
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch

from colonnade.checkpoint import files as checkpoint_files
from colonnade.checkpoint.manifest import SavedFile, read_manifest, to_json
from colonnade.convert import target as targets
from colonnade.huggingface import write
from colonnade.lock import NAME as LOCK
from colonnade.lock import locked
from tests.commands import forked, here
from tests.convert.published import saved
from tests.convert.test_round_trip import converted
from tests.disks import room_for
from tests.runs import Finished, whole_tensors
from tests.tiny import TinyCorpus, write_config

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that can be converted: of a kind and in one file, and in several."""
    folder = tmp_path_factory.mktemp("folders")
    for name in ("gpt2", "llama", "neox", "qwen3", "mistral", "bloom", "bert"):
        saved(folder / name, name)
    saved(folder / "many", "gpt2", size="7KB")
    return folder


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders / name, tmp_path / "theirs"))

    return copy


def refused(tmp_path: Path, *arguments: object) -> str:
    """What `convert` says, having left everything as it was."""
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    answer = here("convert", *arguments)
    assert answer.status == 2 and answer.out == "", answer
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert answer.err.startswith("colonnade: ") and "Traceback" not in answer.err
    return answer.err


def converted_to(folder: Path, target: Path) -> Path:
    converted(folder, target)
    return target


def with_file(checkpoint: Path, name: str, content: bytes) -> Path:
    """A checkpoint with a file of this content, which its manifest knows."""
    (checkpoint / name).write_bytes(content)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, name: SavedFile(len(content), hashlib.sha256(content).hexdigest())}
    (checkpoint / "manifest.json").write_text(to_json(replace(manifest, files=files)))
    return checkpoint


def change(folder: Path, **keys: Any) -> None:
    """Set keys of config.json; ... takes one away."""
    content = json.loads((folder / CONFIG).read_text()) | keys
    content = {key: value for key, value in content.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(content))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in safetensors.torch.load_file(folder / WHOLE).items()}


def write_tensors(folder: Path, state: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(state, folder / WHOLE, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        (
            "gpt2",
            {"model_type": "gemma3"},
            'model_type = "gemma3" is none that can be built here. Known are gpt2, llama',
        ),
        ("gpt2", {"model_type": ...}, "model_type = null is none"),
        ("gpt2", {"model_type": "mixtral"}, "mixture of experts"),
        ("gpt2", {"auto_map": {"AutoModel": "code.Model"}}, "auto_map: the folder brings code of its own"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config: the weights are quantized"),
        ("gpt2", {"logit_softcap": 30.0}, "logit_softcap = 30.0 is not known here"),
        (
            "gpt2",
            {"activation_function": "silu"},
            'activation_function = "silu": this family can have gelu, gelu_python, gelu_new, gelu_pytorch_tanh, '
            "gelu_fast, relu here",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scores are scaled alike in all layers here"),
        ("gpt2", {"n_embd": "24"}, 'n_embd = "24" is no whole number'),
        ("gpt2", {"n_embd": True}, "n_embd = true is no whole number"),
        ("gpt2", {"n_layer": 0}, "num_layers: Input should be greater than or equal to 1"),
        ("gpt2", {"n_layer": 90_000}, "says that the model has 90,000 layers"),
        ("gpt2", {"n_head": 5}, "model.num_heads = 5"),
        ("gpt2", {"n_layer": 4}, "12 tensors are missing: transformer.h.3.attn.c_attn.bias"),
        ("llama", {"rms_norm_eps": 10**320}, "is no number"),
        ("gpt2", {"vocab_size": 62}, "transformer.wte.weight is [61, 24], and should be [62, 24]"),
        ("gpt2", {"tie_word_embeddings": False}, "1 tensor is missing: lm_head.weight"),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, "only GPT2LMHeadModel and GPT2Model have all"),
        ("llama", {"attention_bias": True}, "attention_bias = true, mlp_bias = false: all linear layers"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, 'rope_type = "dynamic"'),
        ("llama", {"rope_scaling": {"type": "longrope"}}, 'rope_type = "longrope"'),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}},
            "rope_scaling.mscale = 0.7: attention",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}},
            "rope_scaling.beta = 1 is not known here",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5: rotary positions of this family turn whole heads here",
        ),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu": this family can have silu, swish'),
        ("llama", {"num_attention_heads": ...}, "num_attention_heads is missing"),
        ("neox", {"use_parallel_residual": "yes"}, 'use_parallel_residual = "yes" is no true or false'),
        ("neox", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "model.rotary.share = 0.2 of"),
        ("neox", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "less than or equal to 1"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "all layers have the same",
        ),
        ("mistral", {"sliding_window": 0}, "window: Input should be greater than or equal to 1"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm = true: the residual is taken before the norm here",
        ),
        ("bloom", {"hidden_size": 24, "n_embed": 48}, "hidden_size = 24 and n_embed = 48 are two names of one number"),
        ("bert", {"position_embedding_type": "relative_key"}, "positions are learned vectors here"),
        ("bert", {"is_decoder": True}, "reads a text from both sides"),
    ],
)
def test_what_config_json_says(
    name: str, keys: dict[str, Any], said: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(name)
    change(folder, **keys)
    message = refused(tmp_path, folder, tmp_path / "ours")
    assert said in message and str(folder) in message, message


def test_several_problems_are_one_message(copied: Callable[[str], Path], tmp_path: Path) -> None:
    change(folder := copied("llama"), hidden_act="relu", rms_norm_eps="small", logit_scale=2.0)
    message = refused(tmp_path, folder, tmp_path / "ours")
    for said in ('hidden_act = "relu"', 'rms_norm_eps = "small" is no number', "logit_scale = 2.0 is not known here"):
        assert said in message


def test_keys_that_are_null_or_change_nothing_are_let_pass(copied: Callable[[str], Path], tmp_path: Path) -> None:
    converted(folder := copied("gpt2"), tmp_path / "plain")
    change(folder, logit_softcap=None, top_k=50, summary_type="mean", task_specific_params={"a": 1})
    converted(folder, tmp_path / "ours")
    assert (tmp_path / "ours" / "config.toml").read_text() == (tmp_path / "plain" / "config.toml").read_text()
    plain, ours = (whole_tensors(tmp_path / name) for name in ("plain", "ours"))
    assert plain.keys() == ours.keys() and all(torch.equal(x, ours[name]) for name, x in plain.items())


def test_classes_that_are_no_list_name_no_head(copied: Callable[[str], Path], tmp_path: Path) -> None:
    change(folder := copied("bert"), architectures=5)
    converted(folder, tmp_path / "ours")
    assert 'head = "pretraining"' in (tmp_path / "ours" / "config.toml").read_text()


def test_half_a_character_in_files_beside_a_model_goes_there_and_back(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """JSON can say it, and UTF-8 cannot."""
    content = {"note": "schön \ud800"}
    names = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    folder = copied("gpt2")
    for name in names:
        (folder / name).write_text(json.dumps(content))
    converted(folder, tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    for place in ("ours", "back"):
        kept = [json.loads((tmp_path / place / name).read_text(encoding="utf-8")) for name in names]
        assert [each.get("note") for each in kept] == [content["note"]] * 3, place


@pytest.mark.parametrize("name", ["special_tokens_map.json", "generation_config.json"])
def test_a_file_beside_a_checkpoint_that_is_no_text_is_damaged(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """Though its bytes are those that were written."""
    made = with_file(converted_to(copied("gpt2"), tmp_path / "ours"), name, b"\xff")
    assert f"{made / name} is damaged: it is not text" in refused(tmp_path, made, tmp_path / "back")


def test_settings_of_a_tokenizer_that_are_none_are_left(copied: Callable[[str], Path], tmp_path: Path) -> None:
    made = with_file(converted_to(copied("gpt2"), tmp_path / "ours"), "tokenizer_config.json", b"[1, 2]")
    converted(made, tmp_path / "back")
    kept = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert kept["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda x: x.pop("transformer.h.1.mlp.c_fc.bias"), "1 tensor is missing: transformer.h.1.mlp.c_fc.bias"),
        (lambda x: x.update(extra=torch.ones(2)), "1 tensor is there that it does not have: extra"),
        (
            lambda x: x.update({"transformer.h.1.mlp.c_fc.weight": torch.ones(50, 24)}),
            "transformer.h.1.mlp.c_fc.weight is [50, 24], and should be [24, 50]",
        ),
        (
            lambda x: x.update({"transformer.ln_f.bias": torch.ones(24, dtype=torch.int8)}),
            "transformer.ln_f.bias is in I8: weights are read in F64, F32, F16, BF16",
        ),
        (lambda x: x.update({"lm_head.weight": torch.ones(61, 24)}), "with different numbers"),
        (
            lambda x: x.update({"lm_head.weight": x["transformer.wte.weight"].to(torch.float8_e4m3fn)}),
            "lm_head.weight is in F8_E4M3: weights are read in F64, F32, F16, BF16, not quantized ones",
        ),
        (lambda x: x.clear(), "has 0 tensors"),
    ],
)
def test_tensors_that_are_not_the_models(
    edit: Callable[[dict[str, torch.Tensor]], object], said: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    state = tensors(folder := copied("gpt2"))
    edit(state)
    write_tensors(folder, state)
    assert said in refused(tmp_path, folder, tmp_path / "ours")


def test_masks_of_older_versions_and_names_without_the_prefix_are_read(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """As the first GPT-2 on the hub: the class without a head, and its masks."""
    state = tensors(folder := copied("gpt2"))
    bare = {name.removeprefix("transformer."): x for name, x in state.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "h.2.attn.masked_bias": torch.tensor(-1e4)}
    write_tensors(folder, bare | masks)
    change(folder, architectures=["GPT2Model"])
    converted(folder, tmp_path / "ours")
    assert torch.equal(whole_tensors(tmp_path / "ours")["embedding.tokens.weight"], bare["wte.weight"])


def test_an_encoder_without_a_head_may_have_the_prefix(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Its class names tensors without it; a file that was cut out of a model with a head has it still."""
    state = tensors(folder := copied("bert"))
    write_tensors(folder, {name: x for name, x in state.items() if name.startswith("bert.")})
    converted(folder, tmp_path / "ours")
    found = whole_tensors(tmp_path / "ours")
    assert torch.equal(found["embedding.tokens.weight"], state["bert.embeddings.word_embeddings.weight"])


def test_an_encoder_has_the_head_that_its_files_have(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Whichever class its config.json names."""
    state = tensors(folder := copied("bert"))
    change(folder, architectures=["BertModel"])
    converted(folder, tmp_path / "ours")
    found = whole_tensors(tmp_path / "ours")
    assert torch.equal(found["head.order.weight"], state["cls.seq_relationship.weight"])


def test_old_names_of_norms_and_a_second_name_alone_are_read(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """As the first BERT on the hub; and a file that holds a tied table under its other name."""
    state = tensors(folder := copied("bert"))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in state.items()
    }
    old["cls.predictions.decoder.weight"] = old.pop("bert.embeddings.word_embeddings.weight")
    write_tensors(folder, old | {"bert.embeddings.position_ids": torch.arange(32)[None]})
    converted(folder, tmp_path / "ours")
    found = whole_tensors(tmp_path / "ours")
    assert torch.equal(found["embedding.norm.weight"], state["bert.embeddings.LayerNorm.weight"])
    assert torch.equal(found["embedding.tokens.weight"], state["bert.embeddings.word_embeddings.weight"])


def test_parts_of_one_weight_have_one_number_format(copied: Callable[[str], Path], tmp_path: Path) -> None:
    state = tensors(folder := copied("llama"))
    state["model.layers.1.self_attn.k_proj.weight"] = state["model.layers.1.self_attn.k_proj.weight"].half()
    write_tensors(folder, state)
    assert "are one weight here, and have different number formats" in refused(tmp_path, folder, tmp_path / "ours")


def lie(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Another header before the same numbers."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 5),
    "empty": lambda path: path.write_bytes(b""),
    "no header": lambda path: path.write_bytes(b"\x07\x00\x00\x00\x00\x00\x00\x00nothing"),
    "a header longer than the file": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "longer than it says": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "a larger shape": lambda path: lie(path, lambda header: header["transformer.wpe.weight"].update(shape=[1000, 24])),
    "a gigantic shape": lambda path: lie(
        path, lambda header: header["transformer.wpe.weight"].update(shape=[2**62, 8])
    ),
    "numbers of another": lambda path: lie(
        path, lambda header: header["transformer.ln_f.bias"].update(data_offsets=[0, 96])
    ),
    "a dtype that there is not": lambda path: lie(
        path, lambda header: header["transformer.ln_f.bias"].update(dtype="X9")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_and_headers_that_lie(damage: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    DAMAGES[damage]((folder := copied("gpt2")) / WHOLE)
    message = refused(tmp_path, folder, tmp_path / "ours")
    assert f"{folder / WHOLE} cannot be read as safetensors" in message and "Fetch the folder again" in message


def test_a_fifo_is_not_waited_for(copied: Callable[[str], Path], tmp_path: Path) -> None:
    (folder := copied("gpt2")).joinpath(WHOLE).unlink()
    os.mkfifo(folder / WHOLE)
    assert "is no plain file" in refused(tmp_path, folder, tmp_path / "ours")


def test_a_folder_of_links_as_in_the_hubs_cache_is_read(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in (folders / "gpt2").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    converted(tmp_path / "snapshot", tmp_path / "ours")
    stored = tensors(folders / "gpt2")["transformer.wte.weight"]
    assert torch.equal(whole_tensors(tmp_path / "ours")["embedding.tokens.weight"], stored)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda map_: map_.update(a="../secret.safetensors"),
            "names '../secret.safetensors', which is no file in its own",
        ),
        (lambda map_: map_.update(a="/etc/passwd"), "names '/etc/passwd', which is no file in its own"),
        (
            lambda map_: map_.update(a="sub/../../other/model.safetensors"),
            "names 'sub/../../other/model.safetensors', which is no file in its own",
        ),
        (lambda map_: map_.update(a=7), "has no weight_map"),
        (lambda map_: map_.clear(), "has no weight_map"),
        (lambda map_: map_.update(a="model-00009-of-00009.safetensors"), "lacks 1 of the"),
        (
            lambda map_: map_.update({"transformer.wte.weight": max(map_.values())}),
            "names 1 tensor in files that do not have them: transformer.wte.weight",
        ),
        (  # they are there, each in a file of another
            lambda map_: map_.update(zip(sorted(map_, key=map_.__getitem__)[::-1], sorted(map_.values()), strict=True)),
            "in files that do not have them: ",
        ),
    ],
)
def test_an_index_that_leads_astray(
    edit: Callable[[dict[str, Any]], object], said: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("many")
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))
    assert said in refused(tmp_path, folder, tmp_path / "ours")


def test_files_that_are_missing_or_of_two_models(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("many")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    shutil.copy(first, folder / "model-copy.safetensors")
    (folder / INDEX).unlink()
    assert "both have a tensor" in refused(tmp_path, folder, tmp_path / "ours")
    (folder / "model-copy.safetensors").rename(folder / "consolidated.safetensors")
    assert here("convert", folder, tmp_path / "made").status == 0, "beside model-…, as Mistral's folders have it"
    second.unlink()
    assert "are missing" in refused(tmp_path, folder, tmp_path / "ours")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert "has no weights" in refused(tmp_path, folder, tmp_path / "ours")
    write_tensors(folder, {"a": torch.ones(1)})
    (folder / CONFIG).write_text("{'no': json")
    assert "cannot be read as JSON" in refused(tmp_path, folder, tmp_path / "ours")
    (folder / CONFIG).unlink()
    assert f"has no {CONFIG}" in refused(tmp_path, folder, tmp_path / "ours")


class Code:
    """Leaves a trace where a pickle of it is read with all that pickles may do."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_state_dicts_of_torch_are_read_as_data(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """In one file and in several, to the same bits."""
    state = tensors(folder := copied("gpt2"))
    (folder / WHOLE).unlink()
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    both = torch.stack([state["transformer.ln_f.weight"], state["transformer.ln_f.bias"]])
    state |= {"transformer.ln_f.weight": both[0], "transformer.ln_f.bias": both[1]}  # views of one storage
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"].t().contiguous().t()
    torch.save(state, folder / "pytorch_model.bin")
    converted(folder, tmp_path / "one")
    (folder / "pytorch_model.bin").unlink()
    names = sorted(state)
    where = {name: f"pytorch_model-0000{1 + (name in names[9:])}-of-00002.bin" for name in names}
    for file in set(where.values()):
        torch.save({name: state[name] for name in names if where[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    converted(folder, tmp_path / "two")
    one, two = (whole_tensors(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    for ours, name in (("embedding.tokens", "wte"), ("embedding.positions", "wpe"), ("head.norm", "ln_f")):
        assert torch.equal(one[f"{ours}.weight"], state[f"transformer.{name}.weight"])
    assert torch.equal(one["head.norm.bias"], both[1])


def test_pickles_of_anything_else_are_refused_and_not_run(copied: Callable[[str], Path], tmp_path: Path) -> None:
    state: dict[str, Any] = dict(tensors(folder := copied("gpt2")))
    (folder / WHOLE).unlink()
    file, trace = folder / "pytorch_model.bin", tmp_path / "trace"
    for content, said in (
        (state | {"transformer.wte.weight": Code(trace)}, "cannot be read as a state dict of tensors alone"),
        (list(state.values()), "is no state dict: it holds a list"),
        (state | {"transformer.wte.weight": torch.ones(1).expand(10**9, 10**3)}, "is no plain tensor that lies in"),
        (state | {"epoch": 3}, "has 'epoch', which is no plain tensor"),
    ):
        torch.save(content, file)
        assert said in refused(tmp_path, folder, tmp_path / "ours") and not trace.exists()
    file.write_bytes(file.read_bytes()[:-100])
    assert "cannot be read as a state dict" in refused(tmp_path, folder, tmp_path / "ours")


def test_sources_and_targets(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = folders / "gpt2"
    message = refused(tmp_path, "meta-llama/Llama-3-8B", "ours")
    assert "`hf download meta-llama/Llama-3-8B --local-dir Llama-3-8B`" in message and "does not exist" in message
    assert "hf download" not in refused(tmp_path, "/no/where/at/all", "ours")
    assert "is a file, and no GGUF. Name the folder" in refused(tmp_path, theirs / WHOLE, "ours")
    (tmp_path / "empty").mkdir()
    assert "is neither a checkpoint nor" in refused(tmp_path, "empty", "ours")
    snapshot = tmp_path / "models--gpt2" / "snapshots" / "0a1b"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(theirs)
    assert f"cache: its model is the folder {snapshot}. Name " in refused(tmp_path, tmp_path / "models--gpt2", "ours")
    assert "exists already, and a conversion overwrites nothing" in refused(tmp_path, theirs, "empty")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already, and a conversion overwrites nothing" in refused(tmp_path, theirs, "link")
    assert "has the name of a checkpoint of another step" in refused(tmp_path, theirs, "step_00000007")
    assert "--best is of a run's checkpoints" in refused(tmp_path, theirs, "ours", "--best")
    for option in (("--tokenizer", theirs), ("--vocab-size", 61), ("--base", theirs)):
        said = f"{option[0]} is of weights that others wrote, and {tmp_path / 'empty'} is a checkpoint"
        assert said in refused(tmp_path, tmp_path / "empty", "ours", *option)
    assert "--dtype 'int8': there is no such number format" in refused(tmp_path, theirs, "ours", "--dtype", "int8")
    for size in ("5", "big", "1KBB", "10B", "-5GB"):
        assert f"--max-shard-size '{size}' is no size" in refused(tmp_path, theirs, "ours", f"--max-shard-size={size}")
    said = f"--max-shard-size is of a folder of Hugging Face that is written, and {theirs} becomes a checkpoint"
    assert said in refused(tmp_path, theirs, "ours", "--max-shard-size", "1KB")


def test_targets_that_cannot_be_made(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is converted, also with --dry-run, and by no name but those that were given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    theirs, longest = folders / "gpt2", os.pathconf(tmp_path, "PC_NAME_MAX") - len("..partial")
    for target in ("file/ours", "file/a/ours"):
        said = f"colonnade: {target} cannot be made: {tmp_path / 'file'} is no folder. Choose another TARGET.\n"
        assert refused(tmp_path, theirs, target, "--dry-run") == said
    said = f"has a name of {longest + 1} bytes, and where it is to be made a TARGET's can have {longest} at most"
    assert said in refused(tmp_path, theirs, "a/" + "x" * (longest + 1))
    assert here("convert", theirs, "x" * longest).status == 0


def test_a_target_that_appears_during_a_conversion_is_left_as_it_is(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, sync = tmp_path / "ours", targets.sync
    monkeypatch.setattr(targets, "sync", lambda path: (sync(path), target.mkdir(exist_ok=True)))
    answer = here("convert", folders / "gpt2", target)
    assert answer.status == 2 and "exists already, and a conversion overwrites nothing" in answer.err, answer
    assert list(tmp_path.rglob("*")) == [target]


def test_tokenizers(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("gpt2")
    large = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(90)}, unk_token="w0"))
    large.save(str(folder / "tokenizer.json"))
    assert "has 90 ids, and the model has rows for 61" in refused(tmp_path, folder, tmp_path / "ours")
    (folder / "tokenizer.json").write_text("{}")
    assert "The tokenizer of" in refused(tmp_path, folder, tmp_path / "ours")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertJapaneseTokenizer"}))
    said = 'tokenizer_config.json has tokenizer_class = "BertJapaneseTokenizer"'
    assert said in refused(tmp_path, folder, tmp_path / "ours")
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "code.T"}}))
    out = converted(folder, tmp_path / "ours")
    assert "tokenizer  none in the folder" in out
    assert not (tmp_path / "ours" / "tokenizer_config.json").exists(), "it names code"


def full(*arguments: object, **more: object) -> object:
    raise OSError(28, "No space left on device")


def test_full_disks(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before, and at any write, in both directions."""
    theirs, ours = folders / "gpt2", tmp_path / "ours"
    with monkeypatch.context() as patch:
        patch.setattr(targets.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        message = refused(tmp_path, theirs, ours)
        assert (
            "needs 68.8 kB, and its disk has 1 B free." in message
            and "Free some space, or choose a TARGET on another disk" in message
        )
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files._HashingStream, "write", full)
        message = refused(tmp_path, theirs, ours)
        assert f"The disk is full: {ours} could not be written. Free some space, or choose a TARGET" in message
    converted(theirs, ours)
    with monkeypatch.context() as patch:
        patch.setattr(write, "_write", full)
        assert "The disk is full" in refused(tmp_path, ours, tmp_path / "back")


def test_a_limit_on_files_is_told_in_a_conversions_words(folders: Path, tmp_path: Path) -> None:
    """There is no run that has saved before, and none to start again."""
    with room_for(3_000):
        message = refused(tmp_path, folders / "gpt2", tmp_path / "ours")
    assert f"{tmp_path / 'ours'} could not be written: File too large, more than the 3,000 bytes " in message
    assert "or choose a TARGET on another file system, and run the command again." in message


def test_what_a_killed_conversion_left_is_removed_and_one_that_goes_on_is_not(folders: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".ours.partial"
    (partial / ".step_00000000.partial").mkdir(parents=True)
    (partial / ".step_00000000.partial" / "__0_0.distcp").write_bytes(b"half")
    with locked(partial, "colonnade convert"):
        answer = here("convert", folders / "gpt2", tmp_path / "ours")
        assert answer.status == 2 and "choose another TARGET" in answer.err
        assert answer.err.startswith(f"colonnade: {tmp_path / 'ours'} is in use by ")
        assert (partial / ".step_00000000.partial" / "__0_0.distcp").exists()
    with targets.workspace(tmp_path / "ours") as folder:
        assert folder == partial and [path.name for path in folder.iterdir()] == [LOCK], "nothing else is left"
    (partial / "step_00000000").mkdir(parents=True)  # whole, and not yet renamed
    (partial / "step_00000000" / "older").touch()
    converted(folders / "gpt2", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert not [*(tmp_path / "ours").rglob("older")]


@pytest.mark.slow
def test_a_model_that_no_family_has(corpus: TinyCorpus, tmp_path: Path) -> None:
    answer = forked("train", write_config(corpus, tmp_path), "train.steps=1", "model.norm_position=post")
    assert answer.status == 0, answer
    message = refused(tmp_path, tmp_path / "run", tmp_path / "back")
    assert "GPT-2 (GPT2LMHeadModel) is nearest" in message
    assert 'model.norm_position = "post": it would become "pre"' in message


@pytest.mark.slow
def test_checkpoints_that_cannot_be_given_on(finished: Finished, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(finished.newest, tmp_path / finished.newest.name))
    (file,) = damaged.glob("*.distcp")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert "is damaged: its bytes are not those" in refused(tmp_path, damaged, tmp_path / "back")


def test_a_chat_template_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "gpt2")
    template = tmp_path / "theirs" / "chat_template.jinja"
    template.write_bytes("schön".encode("latin-1"))
    assert f"{template} cannot be read as text" in refused(tmp_path, tmp_path / "theirs", tmp_path / "ours")
    template.write_bytes(codecs.BOM_UTF8 + b"newer")
    converted(tmp_path / "theirs", tmp_path / "ours")
    kept = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert kept == {"chat_template": "newer"}, "a mark of byte order is none of it"
