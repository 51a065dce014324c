"""Adapters that `peft` saved beside a published base become one checkpoint with peft's own logits, or one message."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor

from colonnade.checkpoint.names import MANIFEST
from colonnade.convert.their_base import FILE, write_base
from colonnade.convert.their_base import _is_same as is_same
from colonnade.data.tokenizer import Tokenizer
from colonnade.huggingface.folder import open_published
from colonnade.huggingface.peft import _scale as scale
from colonnade.huggingface.peft import open_peft
from colonnade.mesh.mesh import Mesh
from colonnade.serving.trained import open_trained
from colonnade.train.base import BaseMetadata, content_of
from tests.commands import here
from tests.convert.published import saved, transformers
from tests.convert.test_logits import CPU, TOKENS, in_float64, logits_of
from tests.convert.test_refused import refused
from tests.convert.test_round_trip import converted

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft to transformers
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),  # k_proj is as it was
    "patterns": (
        "llama, grouped, tied, biases",
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
            "alpha_pattern": {"self_attn.q_proj": 11, "layers.1.mlp.up_proj": 3.5},
        },
    ),
}


def adapted(folder: Path, name: str = "llama") -> Any:
    """A base and adapters of random numbers beside it, as peft saves both: base/ and adapters/."""
    base, more = SETTINGS[name]
    model = saved(folder / "base", base)
    twin = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **more))
    generator = torch.Generator().manual_seed(5)
    for key, parameter in twin.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    twin.save_pretrained(folder / "adapters", save_embedding_layers=False)  # "auto" asks the hub for the base
    return twin


def test_a_pattern_is_for_whole_parts_of_a_name() -> None:
    content = {"lora_alpha": 8, "alpha_pattern": {"o": 32}}
    assert scale(content, "decoder.block.0.SelfAttention.o", 4) == 8.0
    assert scale(content, "decoder.block.0.DenseReluDense.wo", 4) == 2.0


def test_a_pattern_that_is_none_is_for_no_module() -> None:
    assert scale({"lora_alpha": 8, "alpha_pattern": {"q_proj(": 32, "v_proj": 16}}, "layers.0.q_proj", 4) == 2.0
    assert scale({"lora_alpha": 8, "alpha_pattern": None, "use_rslora": True}, "layers.0.q_proj", 4) == 4.0


def test_adapters_that_left_their_base_as_it_was_are_read_from_either_file(tmp_path: Path) -> None:
    """Older versions wrote them by torch.save."""
    adapted(tmp_path)
    adapters, base, name = tmp_path / "adapters", tmp_path / "base", "blocks.0.mlp.down.weight"
    first = open_peft(adapters, base).read(name)
    assert not torch.equal(first, open_published(base).read(name))
    torch.save(safetensors.torch.load_file(adapters / WEIGHTS), adapters / "adapter_model.bin")
    (adapters / WEIGHTS).unlink()
    for beginning in (True, False, None, "gaussian", "orthogonal", "eva"):
        edit_config(init_lora_weights=beginning)(adapters)
        assert torch.equal(open_peft(adapters, base).read(name), first)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_merged_model_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    twin = adapted(tmp_path, name)
    out = converted(tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base", "--dtype", "fp64")
    assert "parameters" in out
    ours = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")
    with in_float64(twin.base_model.model, ours) as exact, torch.no_grad():
        theirs = exact(input_ids=TOKENS.t()).logits.transpose(0, 1)
    found = logits_of(ours)
    assert found is not None
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)  # merged weights are rounded to fp32
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").double().eval()
    with torch.no_grad():
        assert (plain(input_ids=TOKENS.t()).logits.transpose(0, 1) - theirs).abs().max() > 0.1


def test_the_base_is_found_where_the_adapters_say(tmp_path: Path) -> None:
    adapted(tmp_path)
    content = json.loads((tmp_path / "adapters" / CONFIG).read_text())
    (tmp_path / "adapters" / CONFIG).write_text(
        json.dumps({**content, "base_model_name_or_path": str(tmp_path / "base")})
    )
    converted(tmp_path / "adapters", tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    assert "adapters on base" in (tmp_path / "back" / "README.md").read_text()


def test_a_tokenizer_beside_the_adapters_goes_before_that_of_the_base(tmp_path: Path) -> None:
    """As `peft` leaves it where tokens were added or renamed for the adapters."""
    adapted(tmp_path)
    own = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
    vocab = own["model"]["vocab"]
    own["model"]["vocab"] = {{"w2": "w3", "w3": "w2"}.get(word, word): number for word, number in vocab.items()}
    (tmp_path / "adapters" / "tokenizer.json").write_text(json.dumps(own))
    converted(tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base")
    kept, base = (Tokenizer.load(tmp_path / name / "tokenizer.json") for name in ("ours", "base"))
    assert kept.encode("w2 w3 w4") == base.encode("w3 w2 w4") == [3, 2, 4]


def of_a_tokenizer(folder: Path, template: str) -> dict[str, Any]:
    """Writes what transformers writes beside a tokenizer.json; returns what a checkpoint keeps of it."""
    content = {"eos_token": f"<{template}>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": f"<{template}>"}))
    (folder / "chat_template.jinja").write_text(template)
    return {**content, "chat_template": template}


def test_what_belongs_to_a_tokenizer_is_that_of_its_own_folder(tmp_path: Path) -> None:
    """Template, class and names of control tokens: of the adapters' where they have a tokenizer, of their base's where
    they have none, and of the one that is named.
    """
    adapted(tmp_path)
    base, adapters, named = (tmp_path / name for name in ("base", "adapters", "named"))
    named.mkdir()
    expected = {each: of_a_tokenizer(each, each.name) for each in (base, adapters, named)}
    for folder in (base, adapters):
        (folder / "generation_config.json").write_text(json.dumps({"top_k": len(folder.name)}))
    shutil.copy(base / "tokenizer.json", named)

    def check(whose: Path, generation: Path, target: str, source: Path, *more: object) -> None:
        converted(source, tmp_path / target, *more)
        kept = {
            file.name: json.loads(file.read_text())
            for file in (tmp_path / target).glob("*.json")
            if file.name not in ("manifest.json", "tokenizer.json")
        }
        assert kept == {
            "tokenizer_config.json": expected[whose],
            "special_tokens_map.json": {"eos_token": f"<{whose.name}>"},
            "generation_config.json": {"top_k": len(generation.name)},
        }

    check(base, adapters, "of the base", adapters, "--base", base)
    shutil.copy(base / "tokenizer.json", adapters)
    check(adapters, adapters, "of the adapters", adapters, "--base", base)
    check(named, adapters, "named with adapters", adapters, "--base", base, "--tokenizer", named / "tokenizer.json")
    check(named, base, "named without adapters", base, "--tokenizer", named)
    (adapters / "generation_config.json").unlink()
    (adapters / "chat_template.jinja").unlink()
    expected[adapters].pop("chat_template")
    check(adapters, base, "without a template", adapters, "--base", base)


def edit_config(**keys: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**content, **keys}))

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = safetensors.torch.load_file(folder / WEIGHTS)
        change(found)
        safetensors.torch.save_file(found, folder / WEIGHTS)

    return edit


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edit_config(peft_type="IA3"), 'peft_type = "IA3": LORA is read'),
        (edit_config(use_dora=True), "use_dora = true is not known here"),
        (edit_config(modules_to_save=["lm_head"]), 'modules_to_save = ["lm_head"] is not known here'),
        (edit_config(bias="all"), 'bias = "all": its biases were trained too'),
        (edit_config(init_lora_weights="pissa"), 'init_lora_weights = "pissa": it has changed the base'),
        (edit_config(lora_alpha="8"), 'lora_alpha = "8" is no number'),
        (edit_config(lora_alpha=10**320), "lora_alpha = 1000"),
        (edit_config(alpha_pattern={"q_proj": 10**320}), "is no table of numbers"),
        (edit_config(some_new_key=3), "some_new_key = 3 is not known here"),
        (edit_config(layer_replication=[[0, 2], [1, 3]]), "layer_replication = [[0, 2], [1, 3]] is not known here"),
        (edit_tensors(lambda x: x.pop(f"{FIRST}.lora_B.weight")), "more than pairs of lora_A and lora_B"),
        (edit_tensors(lambda x: x.clear()), "it has no pair of lora_A and lora_B"),
        (
            edit_tensors(lambda x: x.update({f"{FIRST}.lora_A.weight": torch.ones(3, 7)})),
            "self_attn.q_proj: its adapter is [36, 3] times [3, 7], and the weight [36, 36]",
        ),
        (
            edit_tensors(
                lambda x: x.update(
                    {f"{FIRST}.lora_A.weight": torch.ones(0, 36), f"{FIRST}.lora_B.weight": torch.ones(36, 0)}
                )
            ),
            "self_attn.q_proj: its adapter is [36, 0] times [0, 36], and the weight [36, 36]",
        ),
        (
            edit_tensors(lambda x: x.update({f"{FIRST}.lora_B.weight": torch.ones(36, 3, dtype=torch.int8)})),
            "self_attn.q_proj: its adapter is in I8, which is not read",
        ),
        (
            edit_tensors(
                lambda x: x.update(
                    {f"base_model.model.other.lora_{each}.weight": torch.ones(3, 3) for each in ("A", "B")}
                )
            ),
            "other has an adapter, and is no weight of",
        ),
        (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"short"), "cannot be read as safetensors"),
    ],
)
def test_adapters_that_cannot_be_read(edit: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    adapted(tmp_path)
    edit(tmp_path / "adapters")
    message = refused(tmp_path, tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base")
    assert said in message, message


def test_where_a_base_is_not(tmp_path: Path) -> None:
    adapted(tmp_path)
    adapters, ours = tmp_path / "adapters", tmp_path / "ours"
    edit_config(base_model_name_or_path="someone/model")(adapters)
    assert "`hf download someone/model --local-dir model`" in refused(tmp_path, adapters, ours)
    edit_config(base_model_name_or_path=None)(adapters)
    assert "Name that with --base FOLDER" in refused(tmp_path, adapters, ours)
    (tmp_path / "empty").mkdir()
    assert "is no folder of Hugging Face" in refused(tmp_path, adapters, ours, "--base", tmp_path / "empty")
    assert "--base is of adapters" in refused(tmp_path, tmp_path / "base", ours, "--base", tmp_path / "base")
    message = here("generate", adapters, "--prompt", "a")
    assert message.status == 2 and f"`colonnade convert {adapters} TARGET --base BASE`" in message.err
    message = here("generate", tmp_path / "base", "--prompt", "a")
    assert message.status == 2 and f"`colonnade convert {tmp_path / 'base'} TARGET`" in message.err


# --- is it their base -------------------------------------------------------------------------------------------------


def test_a_base_of_another_name_is_told(tmp_path: Path) -> None:
    """Of the same shape nothing else shows that adapters and base do not belong together."""
    adapted(tmp_path)
    edit_config(base_model_name_or_path="someone/Model-1.5")(tmp_path / "adapters")
    said = converted(tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base")
    assert f"note: {CONFIG} says that the adapters were trained with 'someone/Model-1.5'" in said
    assert f"and they are merged with {tmp_path / 'base'}." in said
    (tmp_path / "model-1.5").symlink_to(tmp_path / "base")
    said = converted(tmp_path / "adapters", tmp_path / "again", "--base", tmp_path / "model-1.5")
    assert "note:" not in said


@pytest.mark.parametrize(
    ("named", "base", "same"),
    [
        ("org/model", "models/model", True),
        ("org/model", "Org--Model", True),
        ("/elsewhere/model/", "model", True),
        ("C:\\models\\model", "model", True),
        ("org/model", "hub/models--org--model/snapshots/0123abcd", True),
        ("org/model", "hub/models--org--other/snapshots/0123abcd", False),
        ("org/model", "model-chat", False),
        ("org/model", "org", False),
        ("x" * 5000, "model", False),
        ("/home/you/hub/models--org--model/snapshots/0123abcd", "model", True),
        ("/home/you/hub/models--org--model/snapshots/0123abcd", "hub/models--org--model/snapshots/4567", True),
        ("/home/you/hub/models--gpt2/snapshots/0123abcd/", "gpt2", True),
        ("gpt2", "hub/models--gpt2/snapshots/0123abcd", True),
        ("/home/you/hub/models--org--model/snapshots/0123abcd", "other", False),
        ("/", "model", False),
    ],
)
def test_which_names_can_be_that_of_a_folder(named: str, base: str, same: bool, tmp_path: Path) -> None:
    (tmp_path / base).mkdir(parents=True)
    assert is_same(named, tmp_path / base) == same


def test_two_folders_here_are_the_same_only_if_they_are_one(tmp_path: Path) -> None:
    for each in ("a/model", "b/model"):
        (tmp_path / each).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/model")
    assert not is_same(str(tmp_path / "a/model"), tmp_path / "b/model")
    assert is_same(str(tmp_path / "a/model"), tmp_path / "link")
    assert is_same("org/model", tmp_path / "link") and is_same("org/link", tmp_path / "link"), "by either name"


def test_kept_digests_are_held_against_the_base(tmp_path: Path) -> None:
    adapted(tmp_path)
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    write_base(adapters, BaseMetadata(path="/moved", files={MANIFEST: "0" * 64}, weights=()))
    assert not (adapters / FILE).exists(), "what a checkpoint has, no folder of Hugging Face has"
    write_base(adapters, BaseMetadata(path="/moved", files=content_of(base), weights=()))
    assert "note:" not in converted(adapters, tmp_path / "ours", "--base", base), "known, whatever its name"
    weights = safetensors.torch.load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    safetensors.torch.save_file(weights, base / "model.safetensors")
    message = refused(tmp_path, adapters, tmp_path / "other", "--base", base)
    assert f"{base} has other weights than the base of the adapters in {adapters}: model.safetensors has" in message
    assert "trained beside '/moved': name where that lies now with --base. If they were trained again" in message
    assert f"remove {adapters / FILE}." in message
    dry = converted(adapters, tmp_path / "other", "--base", base, "--dry-run")
    assert "note: whether the base is theirs is not looked at (--dry-run)" in dry
    (adapters / FILE).write_text('{"path": "/moved", "files": {"config.json": "0"}}')
    for more in ([], ["--dry-run"]):
        message = refused(tmp_path, adapters, tmp_path / "other", "--base", base, *more)
        assert f"{adapters / FILE} is damaged: " in message


def test_what_does_not_show_another_base_is_no_reason_to_refuse_one(tmp_path: Path) -> None:
    """A hub's folder may lack the .bin beside the safetensors, and later libraries write another config.json."""
    adapted(tmp_path)
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    kept = {**content_of(base), "pytorch_model.bin": "0" * 64}
    write_base(adapters, BaseMetadata(path="/moved", files=kept, weights=()))
    assert "note:" not in converted(adapters, tmp_path / "first", "--base", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "transformers_version": "99"}))
    told = converted(adapters, tmp_path / "second", "--base", base)
    assert f"note: config.json of {base} is not what it was when the adapters were exported; the weights are." in told
    (tmp_path / "a.bin").write_text("of nobody's business")
    files = {"config.json": "0" * 64, "../a.bin": "0" * 64, "b.bin": "0" * 64}
    write_base(adapters, BaseMetadata(path="/moved", files=files, weights=()))
    told = converted(adapters, tmp_path / "third", "--base", base)
    assert f"note: {base} has none of the files of weights that {FILE} names" in told


def test_adapters_of_a_checkpoint_are_not_told_to_have_another_base(tmp_path: Path) -> None:
    adapted(tmp_path)
    edit_config(base_model_name_or_path="runs/gpt/checkpoints/step_00000400/")(tmp_path / "adapters")
    said = converted(tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base")
    assert f"a checkpoint of Colonnade, and whether {tmp_path / 'base'} is what was exported of it" in said
    assert "If these are two models" not in said


def test_a_folder_beside_that_is_called_as_the_hub_calls_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("gpt2", "models/gpt2"):
        (tmp_path / each).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_same("gpt2", tmp_path / "models/gpt2") and is_same("gpt2", tmp_path / "gpt2")
