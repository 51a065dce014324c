"""Which files of a folder hold the model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from colonnade.errors import CheckpointError
from colonnade.huggingface import files
from colonnade.huggingface.files import Stored, read_json, tensors_in


def write(folder: Path, name: str, *tensors: str) -> Path:
    content = {each: torch.full((2,), float(len(name))) for each in tensors}
    if name.endswith(".bin"):
        torch.save(content, folder / name)
    else:
        save_file(content, folder / name)
    return folder / name


def index(folder: Path, names: dict[str, str], whole: str = "model.safetensors") -> None:
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": names}))


def found(folder: Path) -> dict[str, str]:
    return {name: stored.file.name for name, stored in tensors_in(folder).items()}


def test_the_whole_model_in_one_file_goes_before_all_others(tmp_path: Path) -> None:
    """And before an index that another model has left."""
    write(tmp_path, "consolidated.safetensors", "c")
    write(tmp_path, "pytorch_model.bin", "p")
    (tmp_path / "._consolidated.safetensors").write_bytes(b"\0\5\x16\7")  # its attributes, of macOS
    assert found(tmp_path) == {"c": "consolidated.safetensors"}, "safetensors before a pickle"
    write(tmp_path, "model-00001-of-00001.safetensors", "m")
    assert found(tmp_path) == {"m": "model-00001-of-00001.safetensors"}
    index(tmp_path, {"m": "model-00001-of-00001.safetensors"})
    write(tmp_path, "model-old.safetensors", "m")
    assert found(tmp_path) == {"m": "model-00001-of-00001.safetensors"}, "those of an index alone"
    write(tmp_path, "model.safetensors", "w")
    assert found(tmp_path) == {"w": "model.safetensors"}


def test_a_pickle_is_read_where_there_is_nothing_else_by_its_own_index(tmp_path: Path) -> None:
    write(tmp_path, "a.bin", "x")
    write(tmp_path, "b.bin", "y")
    index(tmp_path, {"x": "a.bin", "y": "b.bin"}, "pytorch_model.bin")
    assert found(tmp_path) == {"x": "a.bin", "y": "b.bin"}
    index(tmp_path, {"x": "a.bin", "y": "a.bin", "z": "b.bin"}, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"names 2 tensors in files that do not have them: y, z"):
        tensors_in(tmp_path)
    write(tmp_path, "pytorch_model.bin", "p")
    assert found(tmp_path) == {"p": "pytorch_model.bin"}, "an index beside the whole model says nothing of it"


@pytest.mark.parametrize("name", ["", ".", "..", "sub/a.safetensors", "/a.safetensors"])
def test_an_index_leads_to_files_of_its_own_folder_alone(name: str, tmp_path: Path) -> None:
    index(tmp_path, {"x": name})
    with pytest.raises(CheckpointError, match="which is no file in its own folder: only those are opened"):
        tensors_in(tmp_path)


def test_a_json_file_is_an_object_of_some_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    monkeypatch.setattr(files, "MOST_BYTES", 8)
    assert read_json(path) == {"a": 1}
    path.write_text('{"a": 12}')
    with pytest.raises(CheckpointError, match=r"config\.json is no plain file of at most 8 bytes"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON object"):
        read_json(path)


def test_an_index_may_name_all_weights_of_a_large_mixture_of_experts(tmp_path: Path) -> None:
    """Of the largest that are published it has several megabytes."""
    write(tmp_path, "a.safetensors", "x")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}' + " " * 10**7 + "}")
    assert found(tmp_path) == {"x": "a.safetensors"}


def test_a_file_that_is_gone_or_cut_off_since_it_was_looked_at_is_told(tmp_path: Path) -> None:
    """Numbers are read later than what is said of them."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = write(tmp_path, name, "x")
        stored = tensors_in(tmp_path)["x"]
        assert stored.read().tolist() == [float(len(name))] * 2
        path.write_bytes(path.read_bytes()[: stored.place.start + 4 if stored.place else -4])
        with pytest.raises(CheckpointError, match=rf"{name} (cannot be read as safetensors: |is cut off: )"):
            stored.read()
        path.unlink()
    with pytest.raises(CheckpointError, match=r"x cannot be read as safetensors: No such file or directory\."):
        Stored(tmp_path / "x", "x", (2,), "F32").read()
