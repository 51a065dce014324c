"""What a checkpoint says of its run, checked."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colonnade.checkpoint.manifest import Manifest, SavedFile, read_manifest, to_json
from colonnade.checkpoint.names import MANIFEST
from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.data.identity import identify
from colonnade.data.indexed import DTYPES, TokenFile
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import CheckpointError
from colonnade.train.divergence import LossWatch
from colonnade.train.metadata import RunMetadata, config_of, metadata_of


@pytest.mark.parametrize("step", [9, 10, 11])
def test_a_run_goes_on_from_one_step(step: int) -> None:
    """The folder and the manifest may say another than the run did."""
    manifest = Manifest(10, {"step": step, "samples": 80, "model": {"vocab_size": 50}}, {}, {})
    if step == 10:
        assert metadata_of(Path("step_00000010"), manifest).samples == 80
        return
    with pytest.raises(CheckpointError, match=f"its manifest says step 10, its metadata says {step}"):
        metadata_of(Path("step_00000010"), manifest)


FILE = {
    "tokens": 90,
    "documents": 3,
    "sequences": 3,
    "dtype": "uint16",
    "index_bytes": 100,
    "index_sha256": "0" * 64,
    "blocks": f"{'0' * 16} {'1' * 16}",
}
WRITTEN: dict[str, Any] = {
    "step": 10,
    "samples": 80,
    "skipped_steps": 1,
    "global_batch_size": 8,
    "optimizer": "lamb",
    "loss_scale": {"value": 1024.0, "good_steps": 7},
    "model": {"vocab_size": 50},
    "tokenizer_sha256": "0" * 64,
    "data": {"data.train": FILE},
}


def read(**changes: Any) -> RunMetadata:
    content = json.loads(json.dumps({**WRITTEN, **changes}))
    return metadata_of(Path("step_00000010"), Manifest(10, content, {}, {}))


def test_what_a_run_writes_is_read() -> None:
    metadata = read()
    assert metadata.loss_scale is not None and metadata.data is not None
    assert (metadata.skipped_steps, metadata.global_batch_size, metadata.optimizer) == (1, 8, "lamb")
    assert metadata.loss_scale.model_dump() == WRITTEN["loss_scale"] and metadata.tokenizer_sha256 == "0" * 64
    assert metadata.data["data.train"].identity().to_json() == FILE
    assert read(loss_scale={}).loss_scale is None, "a scale that is constant"


def test_what_a_run_watches_is_known_again() -> None:
    """Losses, signs of a divergence, and how thermometers have grown."""
    watch = {
        "losses": [2.5, 2.25],
        "signs": 1,
        "windows": {"blocks.1.attention": [[40, 3.5], [50, 4.0]]},
        "growth_steps": 80,
        "without_loss": 3,
    }
    found = LossWatch(**read(watch=watch).watch.model_dump())
    assert (found.losses, found.signs, found.growth_steps, found.without_loss) == ([2.5, 2.25], 1, 80, 3)
    assert {name: list(map(list, kept)) for name, kept in found.windows.items()} == watch["windows"]


def test_by_what_a_run_multiplies_and_what_was_published_with_its_weights_is_known_again() -> None:
    products = {
        "precision": "bf16", "kernels": {"forward": "onednn", "weight_gradient": "compiled"}, "processor": "p",
        "torch": "2", "how": "measured", "compiled": "c",
    }  # fmt: skip
    published = {"begin": 0, "ends": [3, 2], "pad": 7, "sampling": {"do_sample": True, "top_k": 40, "top_p": 0.5}}
    metadata = read(products=products, published=published)
    assert metadata.products is not None and metadata.products.model_dump() == products
    assert metadata.published is not None and metadata.published.model_dump(mode="json") == published
    assert metadata.published.sampling["do_sample"] is True and type(metadata.published.sampling["top_k"]) is int


def test_what_the_first_checkpoints_did_not_say() -> None:
    metadata = metadata_of(Path("x"), Manifest(3, {"step": 3, "samples": 9, "model": {"vocab_size": 1}}, {}, {}))
    assert (metadata.skipped_steps, metadata.global_batch_size, metadata.optimizer) == (0, None, "adamw")
    assert metadata.loss_scale is metadata.tokenizer_sha256 is metadata.data is metadata.products is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_data_of_any_type_of_token_is_known_again(tmp_path: Path, dtype: np.dtype[np.integer]) -> None:
    with TokenFileWriter(tmp_path / "x", dtype) as writer:
        writer.add_document([1, 2, 3])
    identity = identify(TokenFile(tmp_path / "x"))
    known = read(data={"data.train": identity.to_json()}).data
    assert known is not None and known["data.train"].identity() == identity


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": -1},
        {"samples": 2**63},
        {"samples": "80"},
        {"skipped_steps": -1},
        {"global_batch_size": -8},
        {"model": {"vocab_size": 0}},
        {"model": {}},
        {"loss_scale": {"value": 0.0, "good_steps": 7}},
        {"loss_scale": {"value": -1.0, "good_steps": 7}},
        {"loss_scale": {"value": float("inf"), "good_steps": 7}},
        {"loss_scale": {"value": 1.0, "good_steps": -7}},
        {"optimizer": 3},
        {"tokenizer_sha256": 3},
        *({"data": {"data.train": {**FILE, name: -1}}} for name in ("tokens", "documents", "sequences", "index_bytes")),
        {"data": {"data.train": {**FILE, "dtype": "float32"}}},
        {"data": {"data.train": {**FILE, "index_sha256": "0" * 63}}},
        {"data": {"data.train": {**FILE, "blocks": "0" * 16}}},
        {"data": {"data.train": {**FILE, "blocks": f"{'0' * 16} {'1' * 15}"}}},
        {"data": [FILE]},
        {"questions": "0" * 63},
        *(
            {"published": each}
            for each in ({"begin": -1}, {"ends": [3, -1]}, {"pad": -1}, {"sampling": {"top_p": "a"}})
        ),
        {"watch": {"losses": [float("inf")], "signs": 0}},
        {"watch": {"losses": [], "signs": -1}},
        {"watch": {"losses": [], "signs": 0, "windows": {"head logits": [[3, float("inf")]]}}},
        {"products": {"precision": "bf16", "kernels": {"forward": "cublas"}, "processor": "", "torch": "", "how": ""}},
    ],
    ids=str,
)
def test_what_no_run_writes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="has metadata that no run of Colonnade writes: "):
        read(**changes)


def test_a_configuration_that_is_not_the_one_that_was_written(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load(config)))
    content = file.read_bytes()
    files = {"config.toml": SavedFile(len(content), hashlib.sha256(content).hexdigest())}

    def found(files: dict[str, SavedFile]) -> Config:
        (tmp_path / MANIFEST).write_text(to_json(Manifest(1, {}, {}, files)))
        return config_of(tmp_path, read_manifest(tmp_path))

    assert found(files) == load(config)
    file.write_bytes(content.replace(b"steps = 6", b"steps = 7"))
    with pytest.raises(CheckpointError, match=r"config\.toml is damaged: its bytes are not those that were written"):
        found(files)
    with pytest.raises(CheckpointError, match=r"has no config\.toml, so its model is unknown"):
        found({})
    files = {"config.toml": SavedFile(2, hashlib.sha256(b"\xff\xfe").hexdigest())}
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.toml is damaged: it is not text"):
        found(files)
