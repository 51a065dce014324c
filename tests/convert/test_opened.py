"""A checkpoint of adapters and its base, opened together; what is made of both, without a training run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colonnade.architecture.parts import trained_architecture
from colonnade.config.parts import LoraConfig
from colonnade.config.schema import Config
from colonnade.convert import adapted, merge, target, to_peft
from colonnade.convert.adapted import Adapted, _weights_at, open_adapted
from colonnade.errors import CheckpointError
from colonnade.huggingface.folder import open_published
from colonnade.train.base import BaseMetadata, content_of
from tests.convert.published import VOCAB, saved
from tests.convert.test_adapters import settings_of
from tests.convert.test_round_trip import converted
from tests.runs import whole_tensors


def described(config: Config, base: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is opened is a checkpoint of this configuration, which was trained beside `base`."""
    files = None if base is None else BaseMetadata(path=str(base), files=content_of(base), weights=())
    metadata = SimpleNamespace(step=1234, model=SimpleNamespace(vocab_size=VOCAB), base=files)
    monkeypatch.setattr(adapted, "described", lambda path: (SimpleNamespace(tensors={}), config, metadata))


def test_adapters_are_opened_beside_the_base_that_they_were_trained_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, moved, run = tmp_path / "base", tmp_path / "moved", Path("run")
    saved(base, "gpt2")
    described(settings_of(base, rank=3, alpha=6.0), base, monkeypatch)
    it, name = open_adapted(run, None), "embedding.positions.weight"
    assert (it.adapters.rank, it.adapters.scale) == (3, 2.0) and it.modules[0] == "blocks.0.attention.qkv"
    assert torch.equal(it.read(name), open_published(base).read(name))
    shutil.copytree(base, moved)
    there = open_adapted(run, moved).base
    assert there is not None and there.path == moved
    (file,) = moved.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match="run has adapters of another base than"):
        open_adapted(run, moved)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is no checkpoint and no folder of Hugging Face"):
        open_adapted(run, tmp_path / "empty")
    (tmp_path / "empty/summary.json").write_text("{}")
    with pytest.raises(CheckpointError, match="empty is the folder of a sweep, and each of its points has a run of"):
        open_adapted(run, tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is not there"):
        open_adapted(run, tmp_path / "nowhere")
    assert open_adapted(run, None, with_base=False).base is None


def test_a_base_is_opened_only_for_adapters_that_lack_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "base", "gpt2")
    config = settings_of(tmp_path / "base")
    described(config, None, monkeypatch)
    assert open_adapted(Path("run"), None).base is None, "it has all weights itself"
    with pytest.raises(CheckpointError, match="run has all of its weights, and no base that lies elsewhere"):
        open_adapted(Path("run"), tmp_path / "base")
    described(config.model_copy(update={"lora": LoraConfig()}), None, monkeypatch)
    with pytest.raises(CheckpointError, match=r"run has no adapters: its lora\.rank is 0"):
        open_adapted(Path("run"), None)


def test_a_checkpoint_that_is_a_base_is_whole(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "gpt2", dtype=torch.bfloat16)
    converted(tmp_path / "theirs", tmp_path / "base")
    found, weights = _weights_at(tmp_path / "base"), whole_tensors(tmp_path / "base")
    assert all(torch.equal(found.read(name), x) and found.dtype(name) == x.dtype for name, x in weights.items())
    (file,) = (tmp_path / "base").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        _weights_at(tmp_path / "base")


def test_a_base_need_not_have_what_its_loss_alone_reads(tmp_path: Path) -> None:
    """A classifier's, which has a head of its own: an encoder that was published with a part of one."""
    saved(tmp_path / "base", "bert")
    expected = open_published(tmp_path / "base").read("blocks.0.attention.qkv.weight")
    (file,) = (tmp_path / "base").glob("*.safetensors")
    save_file({name: x for name, x in load_file(file).items() if not name.startswith("cls.predictions")}, file)
    assert torch.equal(_weights_at(tmp_path / "base").read("blocks.0.attention.qkv.weight"), expected)


@pytest.fixture
def opened(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapted:
    """Adapters of random numbers beside a base of a family: on a module of attention and one of the MLP."""
    saved(tmp_path / "base", request.param)
    config = settings_of(tmp_path / "base", rank=3, targets=["attention.q*", "mlp.down"])
    architecture, draw = trained_architecture(config, VOCAB), torch.Generator().manual_seed(2)
    numbers = {
        name: torch.randn(weight.shape, generator=draw)
        for name, weight in architecture.weights().items()
        if ".lora_" in name
    }
    assert numbers and architecture.adapters is not None
    monkeypatch.setattr(adapted, "read_whole", lambda path, manifest, name: numbers[name])
    for module in (merge, to_peft):
        monkeypatch.setattr(module, "verify", lambda path, next_file: None)
    monkeypatch.setattr(adapted, "check_unchanged", lambda path, manifest: None)
    manifest: Any = SimpleNamespace(tensors={name: SimpleNamespace(dtype=x.dtype) for name, x in numbers.items()})
    metadata: Any = SimpleNamespace(step=1234, model=SimpleNamespace(vocab_size=VOCAB), base=None)
    base = _weights_at(tmp_path / "base")
    return Adapted(tmp_path / "run", manifest, config, metadata, architecture, architecture.adapters, base)


def no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]


def numbers_of(it: Adapted, module: str) -> tuple[Tensor, Tensor]:
    return it.read(f"{module}.lora_a"), it.read(f"{module}.lora_b")


@pytest.mark.parametrize("opened", ["gpt2"], indirect=True)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_export_has_the_adapters_in_the_format_that_is_asked_for(
    opened: Adapted, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a look at it alone leaves nothing."""
    monkeypatch.setattr(to_peft, "open_adapted", lambda path, base, *, with_base: opened)
    checkpoint, made = tmp_path / "run", tmp_path / "peft"
    first = "base_model.model.transformer.h.0.attn.c_attn"
    told = to_peft.to_peft(checkpoint, made, dtype=dtype, dry_run=True)
    assert not made.exists() and told[-1] == "Nothing was written (--dry-run)."
    assert f"  {first}.lora_A.weight [3, 24]" in told and f"  {first}.lora_B.weight [72, 3]" in told
    assert told[0] == f"{checkpoint}: step 1,234, adapters of rank 3 beside 6 weights"
    assert to_peft.to_peft(checkpoint, made, dtype=dtype, dry_run=False) == [*told[:3], f"Written: {made}"]
    found = load_file(made / "adapter_model.safetensors")
    assert len(found) == 2 * 6 and {x.dtype for x in found.values()} == {dtype or torch.float32}
    a, b = numbers_of(opened, "blocks.2.mlp.down")
    last = "base_model.model.transformer.h.2.mlp.c_proj"
    assert torch.equal(found[f"{last}.lora_A.weight"], a.to(dtype or a.dtype))
    assert torch.equal(found[f"{last}.lora_B.weight"], b.to(dtype or b.dtype))
    config = json.loads((made / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is True and "attn.c_attn" not in config["target_modules"]
    no_space(monkeypatch)
    with pytest.raises(CheckpointError, match=r"other needs .*, and its disk has 0 B free"):
        to_peft.to_peft(checkpoint, tmp_path / "other", dtype=dtype, dry_run=False)


@pytest.mark.parametrize("opened", ["llama", "gpt2"], indirect=True)
def test_a_merged_checkpoint_has_all_weights_of_the_model_and_no_adapters(
    opened: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, answer in (
        ("chosen", None),
        ("find", opened.path),
        ("described", None),
        ("_metadata", {}),
        ("_files", {}),
    ):
        monkeypatch.setattr(merge, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(merge, "open_adapted", lambda path, base: opened)
    merge.merge(opened.path, tmp_path / "merged", base=None, best=False)
    base, found = open_published(tmp_path / "base"), whole_tensors(tmp_path / "merged")
    assert found.keys() == base.sources.keys()
    for name, x in found.items():
        module = name.removesuffix(".weight")
        if module in opened.modules:
            a, b = numbers_of(opened, module)
            expected = (base.read(name).double() + opened.adapters.scale * b.double() @ a.double()).float()
            torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)
        else:
            assert torch.equal(x, base.read(name)), name
    said, written = capsys.readouterr().out.splitlines()
    assert said == f"{opened.path}: adapters of rank 3 beside 6 weights, merged"
    assert written.startswith(f"Written: {tmp_path / 'merged'}, {len(found)} tensors, ")
    no_space(monkeypatch)
    with pytest.raises(CheckpointError, match=r"other needs .*, and its disk has 0 B free"):
        merge.merge(opened.path, tmp_path / "other", base=None, best=False)


def test_a_merge_that_has_no_place_to_go_reads_nothing(tmp_path: Path) -> None:
    for name, said in (("", "exists already"), ("step_00000007", "has the name of a checkpoint of another step")):
        with pytest.raises(CheckpointError, match=said):
            merge.merge(tmp_path / "nowhere", tmp_path / name, base=None, best=False)
