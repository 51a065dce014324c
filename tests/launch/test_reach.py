"""Ranks that cannot connect are told which setting chooses the network."""

import sys
from datetime import timedelta
from typing import Any

import pytest
import torch

from colonnade.launch import launch

REFUSED = (
    "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
    "connecting: SO_ERROR: Connection refused, remote=[10.9.8.7]:38277$0"
)


@pytest.mark.parametrize(
    ("said", "noted"),
    [
        (REFUSED, True),
        (REFUSED.replace("failed with", "failed with\n"), True),
        ("the store is gone, remote=[10.0.0.1]", False),
    ],
    ids=["refused", "refused, in two lines", "something else"],
)
def test_a_rank_that_cannot_connect_says_where_to_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch, said: str, noted: bool
) -> None:
    asked: dict[str, Any] = {}

    def refuse(backend: str, **more: Any) -> None:
        asked.update(more, backend=backend)
        raise RuntimeError(said)

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (place | {"MASTER_ADDR": "machine-1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    for name in (launch.FOLDER, launch.PIPE, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(RuntimeError, match="remote=") as failed:
        launch.connect(2, "cpu", threads=torch.get_num_threads(), timeout=77.0)
    ranks = {"rank": 1, "world_size": 2, "timeout": timedelta(seconds=77.0)}
    assert asked == {"backend": "gloo", "init_method": "env://", "store": None, **ranks}
    notes = getattr(failed.value, "__notes__", [])
    told = "Another rank offered the address 10.9.8.7, and this one cannot connect to it."
    assert len(notes) == noted and all(told in note and "Set GLOO_SOCKET_IFNAME" in note for note in notes)
