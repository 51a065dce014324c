"""What is read of a published folder."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from colonnade.errors import CheckpointError
from colonnade.huggingface.folder import Published, ids_in, labels_of, open_published
from tests.convert.published import saved


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({"0": "no", "1": "yes"}, ("no", "yes")),
        ({"1": "yes", "0": "no"}, ("no", "yes")),
        ({"0": "no"}, ()),
        ({"0": "no", "1": None}, ()),
        (["no", "yes"], ()),
        (None, ()),
    ],
)
def test_labels_have_names_where_each_has_one(named: object, labels: tuple[str, ...]) -> None:
    """In the order of their ids."""
    model: Any = SimpleNamespace(head="classification", num_labels=2)
    assert labels_of({"id2label": named}, model) == labels
    assert labels_of({"id2label": named}, cast(Any, SimpleNamespace(head="choice", num_labels=2))) == ()


@pytest.mark.parametrize(
    ("said", "ids"), [(3, [3]), ([3, 5], [3, 5]), (None, []), ("3", []), ([3, "5"], []), (True, [])]
)
def test_one_token_may_end_a_text_or_several(said: object, ids: list[int]) -> None:
    assert ids_in(said) == ids


def test_a_models_number_format_is_that_of_most_of_its_numbers() -> None:
    kinds = {
        "norm": (torch.float32, 8),
        "up": (torch.bfloat16, 64),
        "down": (torch.bfloat16, 64),
        "scale": (torch.float64, 1),
    }
    sources: Any = {
        name: SimpleNamespace(weight=SimpleNamespace(size=n), theirs=(name,)) for name, (_, n) in kinds.items()
    }
    stored: Any = {name: SimpleNamespace(dtype=dtype) for name, (dtype, _) in kinds.items()}
    nothing: Any = None
    published = Published(Path("folder"), nothing, nothing, 10, sources, stored)
    assert published.dtype == torch.bfloat16 and published.dtype_of("norm") == torch.float32


def change(folder: Path, *, less: str = "(?!)", **more: torch.Tensor) -> Path:
    """Without the tensors whose names match `less`, and with others."""
    path = folder / "model.safetensors"
    kept = {name: x for name, x in load_file(path).items() if not re.search(less, name)}
    save_file({**kept, **more}, path, {"format": "pt"})
    return folder


def test_a_tensor_that_is_there_by_two_spellings_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    first = load_file(tmp_path / "model.safetensors")["transformer.wte.weight"]
    with pytest.raises(
        CheckpointError, match=r"\n  transformer\.wte\.weight and wte\.weight are two spellings of one tensor\n"
    ):
        open_published(change(tmp_path, **{"wte.weight": first + 1}))


def test_of_an_encoder_that_lacks_some_of_its_head_the_rest_is_there(tmp_path: Path) -> None:
    """As of one that was published to tell the order of sentences alone."""
    saved(tmp_path, "bert")
    with pytest.raises(
        CheckpointError, match=r"(?s)tensors are missing: .*cls\.predictions\..*Or begin a run from these"
    ):
        open_published(change(tmp_path, less=r"^cls\.predictions"))
    found = open_published(tmp_path, whole=False)
    found.check_seconds()
    head = [name for name in found.sources if name.startswith("head.")]
    assert head == [f"head.{module}.{kind}" for module in ("pooler", "order") for kind in ("weight", "bias")]
    assert "embedding.tokens.weight" in found.sources


def test_a_bias_that_nothing_reads_stands_for_no_other(tmp_path: Path) -> None:
    """An untied BERT has two of one size, and one of them is idle: it may be anything."""
    saved(tmp_path, "bert, untied")
    open_published(tmp_path).check_seconds()
    with pytest.raises(CheckpointError, match=r"1 tensor is missing: cls\.predictions\.decoder\.bias\n"):
        open_published(change(tmp_path, less=r"decoder\.bias"))


def test_a_t5s_one_table_may_stand_under_all_of_its_names(tmp_path: Path) -> None:
    """As state dicts of torch have it; with different numbers, which of them is meant is unknown."""
    saved(tmp_path, "t5")
    table = load_file(tmp_path / "model.safetensors")["shared.weight"]
    names = [f"{name}.weight" for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")]
    for other in names:
        change(tmp_path, **{name: table.clone() for name in names})
        open_published(tmp_path).check_seconds()
        with pytest.raises(CheckpointError, match=f"has {other} and shared.weight with different numbers"):
            open_published(change(tmp_path, **{other: table + 1})).check_seconds()


def test_of_a_gated_t5_the_table_stands_for_an_output_layer_that_the_folder_leaves_out(tmp_path: Path) -> None:
    """transformers 5 ties the two of every T5, though it scales what goes into that of version 1.0 alone."""
    saved(tmp_path, "t5, gated, untied")
    before = load_file(tmp_path / "model.safetensors")
    found = open_published(tmp_path)
    assert torch.equal(found.read("head.output.weight"), before["lm_head.weight"])
    change(tmp_path, less="lm_head")
    for whole in (True, False):
        found = open_published(tmp_path, whole=whole)
        found.check_seconds()
        assert torch.equal(found.read("head.output.weight"), before["shared.weight"])
        assert not found.model.tie_embeddings, "its input would be scaled"
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"1 tensor is missing: lm_head\.weight"):
        open_published(tmp_path)
    assert "head.output.weight" not in open_published(tmp_path, whole=False).sources


def test_everything_that_is_wrong_with_a_folder_is_told_at_once(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    odd = {"transformer.ln_f.weight": torch.ones(7), "transformer.ln_f.bias": torch.ones(24, dtype=torch.int8)}
    with pytest.raises(CheckpointError) as told:
        open_published(change(tmp_path, less=r"h\.1\.ln_1|wpe", one=torch.ones(1), two=torch.ones(1), **odd))
    _, *problems, _ = str(told.value).splitlines()
    assert problems == [
        "  2 tensors are there that it does not have: one, two",
        "  3 tensors are missing: transformer.h.1.ln_1.bias, transformer.h.1.ln_1.weight, transformer.wpe.weight",
        "  transformer.ln_f.weight is [7], and should be [24]",
        "  transformer.ln_f.bias is in I8: weights are read in F64, F32, F16, BF16, not quantized ones",
    ]
    assert "Or begin a run" not in str(told.value), "what is missing is not of the head alone"
