"""State dicts that torch has written: whatever a pickle says that is no dict of tensors is one message."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch._utils import _rebuild_parameter

from colonnade.errors import CheckpointError
from colonnade.huggingface.pickled import load_pickled
from colonnade.megatron.rank_file import RankFile

READERS: tuple[Callable[[Path], object], ...] = (load_pickled, lambda path: RankFile(path).content())


class Made:
    """Becomes a call in a pickle."""

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self.call = make, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def with_pickle(path: Path, content: bytes) -> None:
    """Replace what the file says of its tensors; the archive around it stays whole."""
    with ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else part)


@pytest.mark.parametrize(
    "made",
    [Made(OrderedDict, 1), Made(_rebuild_parameter, 1, True, OrderedDict())],
    ids=["of a wrong kind", "without what is asked of it"],
)
@pytest.mark.parametrize("read", READERS, ids=["state dict", "rank file"])
def test_makers_that_are_let_through_may_be_given_anything(
    read: Callable[[Path], object], made: Made, tmp_path: Path
) -> None:
    torch.save({"a": made}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read"):
        read(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    "content",
    [b"\x80\x02X\x01\x00", b"\x80\x02K\x01Q.", b"\x80\x02h\x07.", b"\x80\x02.", b"\x80\x02"],
    ids=["cut off in a length", "a tensor by a number", "what was never kept", "nothing", "no end"],
)
@pytest.mark.parametrize("read", READERS, ids=["state dict", "rank file"])
def test_damaged_pickles_in_whole_archives_are_refused(
    read: Callable[[Path], object], content: bytes, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with_pickle(tmp_path / "pytorch_model.bin", content)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read"):
        read(tmp_path / "pytorch_model.bin")


def test_each_tensor_is_read_from_where_it_lies(tmp_path: Path) -> None:
    """A part of another's numbers too, in whatever order they lie there."""
    table = torch.arange(24, dtype=torch.float32).view(6, 4)
    state = {
        "table": table,
        "rows": table[2:4],
        "column": table[:, 1],
        "turned": table.t(),
        "every second": table[1::2],
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)[1:],
        "number": torch.tensor(3.0, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    for name, place in load_pickled(tmp_path / "pytorch_model.bin").items():
        found = place.read()
        assert torch.equal(found, state[name]) and found.dtype == state[name].dtype, name
        assert found.is_contiguous() and place.shape == tuple(state[name].shape), name


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, while it reads
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": torch.eye(3).to_sparse()}, "has 'a', which is no plain tensor that lies in the file"),
        ({"a": torch.ones(1).expand(1000, 1000)}, "has 'a', which is no plain tensor that lies in the file"),
        ({3: torch.ones(1)}, "is no state dict: it holds a dict"),
    ],
    ids=["sparse", "one number for many", "a number for a name"],
)
def test_what_is_no_dict_of_plain_tensors_is_refused(content: object, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=said):
        load_pickled(tmp_path / "pytorch_model.bin")
