"""What a GGUF file says of itself, read from bytes that are written here one by one."""

import errno
import math
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from colonnade.architecture.huggingface.keys import Refused
from colonnade.errors import CheckpointError, DataError
from colonnade.gguf.header import Header, Laid, is_gguf, read_header
from colonnade.gguf.source import _facts, _theirs, config_of

F32, F16, Q8_0 = 0, 1, 8
STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, *dims: int, kind: int = F32, offset: int = 0) -> bytes:
    """`dims`: the fastest first, as the file has them."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(
    folder: Path, keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), numbers: int = 0, version: int = 3
) -> Path:
    """A file with so many bytes of numbers behind the next multiple of 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join([*keys, *tensors])
    path = folder / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(numbers))
    return path


def test_a_value_of_each_kind_is_what_was_written(tmp_path: Path) -> None:
    scalars = {"B": 200, "b": -100, "H": 60_000, "h": -30_000, "I": 4_000_000_000, "i": -2_000_000_000, "f": 0.5,
               "?": True, "Q": 1 << 63, "q": -(1 << 62), "d": math.pi}  # fmt: skip
    kinds = (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
    keys = [key(code, kind, struct.pack(f"<{code}", scalars[code])) for code, kind in zip(scalars, kinds, strict=True)]
    several = struct.pack("<IQ3h", 3, 3, -1, 0, 1)
    names = struct.pack("<IQ", STRING, 2) + text("é") + text(b"\xff")
    keys += [key("one", STRING, text("word")), key("several", ARRAY, several), key("names", ARRAY, names)]
    found = read_header(file(tmp_path, keys)).metadata
    assert found == {**scalars, "one": "word", "several": [-1, 0, 1], "names": ["é", "\ufffd"]}
    assert {type(found[name]) for name in ("?", "B", "f")} == {bool, int, float}


def test_tensors_lie_behind_each_other_to_the_end_of_the_file(tmp_path: Path) -> None:
    """Shapes are written the fastest dim first; quantized numbers are counted in blocks."""
    tensors = [tensor("a", 2, 3), tensor("b", 64, 1, 1, 2, kind=Q8_0, offset=32)]
    path = file(tmp_path, [], tensors, numbers=32 + 4 * 34)
    found = read_header(path).tensors
    assert {name: (each.shape, each.num_bytes) for name, each in found.items()} == {
        "a": ((3, 2), 24),
        "b": ((2, 1, 1, 64), 4 * 34),
    }
    assert found["b"].start - found["a"].start == 32
    assert found["b"].start + found["b"].num_bytes == path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cannot be read as GGUF: it ends at byte .* and b lies up to"):
        read_header(path)


@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ([key("k", 0, b"\1"), key("k", 0, b"\1")], [], "it has k twice"),
        ([], [tensor("a", 2), tensor("a", 2, offset=32)], "it has two tensors of one name"),
        ([], [tensor("a")], "a has 0 dims"),
        ([], [tensor("a", 1, 1, 1, 1, 1)], "a has 5 dims"),
        ([], [tensor("a", 0, 2)], "and a lies up to"),
        ([], [tensor("a", 48, 2, kind=Q8_0)], "a has rows of 48, which are no whole blocks"),
        ([key("k", 13, b"\1")], [], "a value has type 13, which is not known"),
        ([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], "a list has values of type 9, which is not known"),
        *(
            ([key("general.alignment", 5, struct.pack("<i", size))], [], f"general.alignment = {size} is no power")
            for size in (0, -8, 12, 33)
        ),
        ([key("general.alignment", 6, struct.pack("<f", 32.0))], [], "general.alignment = 32.0 is no power"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, keys: list[bytes], tensors: list[bytes], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"model.gguf cannot be read as GGUF: .*{said}"):
        read_header(file(tmp_path, keys, tensors, numbers=256))


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    """The first one has shorter lengths, and would be misread."""
    path = file(tmp_path, [key("k", 0, b"\1")], numbers=8, version=version)
    assert is_gguf(path)
    if version in (2, 3):
        assert read_header(path).metadata == {"k": 1}
        return
    with pytest.raises(CheckpointError, match=f"it is of version {version}, and 2 and 3 are known"):
        read_header(path)


def metadata(**said: Any) -> dict[str, Any]:
    sizes = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 48, "context_length": 64}
    keys = {**sizes, "attention.head_count": 4, **said}
    return {"general.architecture": "llama", **{f"llama.{name}": value for name, value in keys.items()}}


def described(*names: str, **more: Any) -> dict[str, Any]:
    found = {name: Laid(name, (61, 32), F32, 0) for name in ("token_embd.weight", *names)}
    return config_of(Header(Path(), {**metadata(), **more}, found))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (None, {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
        ("blk.0.attn_q.bias", {"attention_bias": True, "mlp_bias": False}),
        ("blk.0.ffn_up.bias", {"attention_bias": False, "mlp_bias": True}),
        ("output.weight", {"tie_word_embeddings": False}),
    ],
)
def test_what_tensors_there_are_says_what_a_llama_has(name: str | None, found: dict[str, Any]) -> None:
    content = described(*([] if name is None else [name]))
    assert {each: content[each] for each in found} == found


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"split.count": 2}, "split.count: the model is in several files"),
        ({"llama.vocab_size": 60}, "vocab_size = 60: token_embd.weight has 61 rows"),
        ({"llama.attention.value_length": 4}, "attention.value_length = 4: keys and values are equally wide here"),
        ({"llama.expert_used_count": 2}, "expert_used_count = 2: its MLP is a mixture of experts"),
        ({"general.architecture": "gemma"}, 'general.architecture = "gemma": llama, qwen2, qwen3 are read'),
    ],
)
def test_a_model_that_would_be_another_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        described(**said)


@pytest.mark.parametrize(
    "said",
    [{"split.count": 0}, {"split.count": 1}, {"llama.vocab_size": 61}, {"llama.rope.scaling.finetuned": True}],
)
def test_what_says_the_same_once_more_changes_nothing(said: dict[str, Any]) -> None:
    assert described(**said) == described()


def test_a_file_without_a_table_of_tokens_is_refused() -> None:
    with pytest.raises(Refused, match=r"there is no token_embd\.weight"):
        config_of(Header(Path(), metadata(), {}))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("blk.10.attn_q.weight", "model.layers.10.self_attn.q_proj.weight"),
        ("blk.3.ffn_up.bias", "model.layers.3.mlp.up_proj.bias"),
        ("output.weight", "lm_head.weight"),
        ("blk.x.attn_q.weight", "self_attn.q_proj.weight"),
        ("enc.3.attn_q.weight", "self_attn.q_proj.weight"),
        ("blk.3.new_module.weight", "blk.3.new_module.weight"),
        ("output", "output"),
    ],
)
def test_a_tensor_has_its_familys_name_or_one_that_no_family_has(name: str, theirs: str) -> None:
    assert _theirs(name)[0] == theirs


def test_ids_of_control_tokens_are_whole_numbers() -> None:
    ids = {"bos": True, "eos": 7, "unk": 3}
    header = Header(Path(), {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}, {})
    assert _facts(header) == {"eos_token_id": 7}


def test_one_on_a_file_system_that_maps_no_files_is_to_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*words: Any, **more: Any) -> Any:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    path = file(tmp_path)
    monkeypatch.setattr(mmap, "mmap", no_file)
    with pytest.raises(DataError) as told:
        read_header(path)
    assert str(told.value) == (
        f"{path} lies on a file system that maps no files into memory, as they are read here. Copy it to another."
    )
