"""Ranks that cannot connect are told which setting chooses the network."""

import sys

import pytest
import torch

from colonnade.launch import launch

REFUSED = (
    "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
    "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:38277$0"
)


@pytest.mark.parametrize(("said", "noted"), [(REFUSED, True), ("the store is gone, remote=[10.0.0.1]", False)])
def test_a_rank_that_cannot_connect_says_where_to_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch, said: str, noted: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (place | {"MASTER_ADDR": "machine-1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    for name in (launch.FOLDER, launch.PIPE, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(RuntimeError, match="remote=") as failed:
        launch.connect(2, "cpu", threads=torch.get_num_threads())
    notes = getattr(failed.value, "__notes__", [])
    assert len(notes) == noted and all("127.0.1.1" in note and "Set GLOO_SOCKET_IFNAME" in note for note in notes)
