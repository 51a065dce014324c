"""What belongs to the tokenizer of weights that others wrote is kept, or named as left."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from colonnade.convert.their_tokenizer import find_tokenizer
from colonnade.errors import CheckpointError
from tests.convert.published import saved
from tests.convert.test_peft import adapted, of_a_tokenizer
from tests.convert.test_peft import pytestmark as pytestmark
from tests.convert.test_round_trip import converted

FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def kept(folder: Path) -> dict[str, Any]:
    return {name: json.loads((folder / name).read_text()) for name in FILES if (folder / name).exists()}


def expected(content: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer_config.json": content, "special_tokens_map.json": {"eos_token": content["eos_token"]}}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A published model whose tokenizer has all of `FILES` beside it, and the folder alone/ for another tokenizer."""
    saved(tmp_path / "theirs", "gpt2")
    (tmp_path / "alone").mkdir()
    return tmp_path / "theirs"


def test_a_tokenizer_that_lies_alone_has_what_lies_beside_the_same_one(theirs: Path, tmp_path: Path) -> None:
    content, named = of_a_tokenizer(theirs, "chat"), tmp_path / "alone" / "tokenizer.json"
    tokenizer = json.loads((theirs / "tokenizer.json").read_text())
    named.write_text(json.dumps(tokenizer, indent=7))
    assert "left" not in converted(theirs, tmp_path / "ours", "--tokenizer", named)
    assert kept(tmp_path / "ours") == expected(content)


def test_adapters_whose_tokenizer_lies_alone_have_what_lies_beside_the_same_one_of_their_base(tmp_path: Path) -> None:
    adapted(tmp_path)
    content = of_a_tokenizer(tmp_path / "base", "chat")
    shutil.copy(tmp_path / "base" / "tokenizer.json", tmp_path / "adapters")
    assert "left" not in converted(tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base")
    assert kept(tmp_path / "ours") == expected(content)


@pytest.mark.parametrize("own", ["other", "none", "broken"])
def test_what_belongs_to_another_tokenizer_is_left_and_named(own: str, theirs: Path, tmp_path: Path) -> None:
    """Whatever the folder's own is, one that cannot be read too."""
    of_a_tokenizer(theirs, "chat")
    tokenizer = json.loads((theirs / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {{"w2": "w3", "w3": "w2"}.get(word, word): number for word, number in vocab.items()}
    (tmp_path / "alone" / "tokenizer.json").write_text(json.dumps(tokenizer))
    if own == "none":
        (theirs / "tokenizer.json").unlink()
    if own == "broken":
        (theirs / "tokenizer.json").write_text("{")
    lines = [f"  left: {theirs / name} (the tokenizer beside it is another, or none)" for name in FILES]
    for more in ("--dry-run",), ():
        out = converted(theirs, tmp_path / "ours", "--tokenizer", tmp_path / "alone", *more)
        assert [line for line in out.splitlines() if "left" in line] == lines, out
    assert kept(tmp_path / "ours") == {}
    content = of_a_tokenizer(tmp_path / "alone", "its own")
    out = converted(theirs, tmp_path / "again", "--tokenizer", tmp_path / "alone")
    assert [line for line in out.splitlines() if "left" in line] == lines, "those of its own take their names"
    assert kept(tmp_path / "again") == expected(content)


def test_what_lies_beside_a_base_is_kept_where_neither_it_nor_its_adapters_have_a_tokenizer(tmp_path: Path) -> None:
    adapted(tmp_path)
    content = of_a_tokenizer(tmp_path / "base", "chat")
    of_a_tokenizer(tmp_path / "adapters", "other")
    (tmp_path / "base" / "tokenizer.json").unlink()
    out = converted(tmp_path / "adapters", tmp_path / "ours", "--base", tmp_path / "base")
    assert "tokenizer  none in the folder" in out and kept(tmp_path / "ours") == expected(content)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"])
def test_no_tokenizer_is_passed_over_for_what_its_file_is_called(name: str, tmp_path: Path) -> None:
    """One that cannot be read is told, and not taken for none."""
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(
        CheckpointError, match=rf"^The tokenizer of {tmp_path} cannot be read: .* to take the weights alone\.$"
    ):
        find_tokenizer(None, (tmp_path,))


def test_attributes_that_macos_puts_beside_a_model_are_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "._tokenizer.model").write_bytes(b"\0\5\x16\7")
    assert find_tokenizer(None, (tmp_path,)).tokenizer == "none in the folder"
