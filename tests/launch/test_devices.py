"""Which device ranks compute on: never another one than expected without a word."""

import ctypes
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import LayoutError
from colonnade.launch import devices
from colonnade.launch.devices import choose_device, count_gpus, gpus_now


@pytest.mark.parametrize(
    ("device", "num_gpus", "num_ranks", "chosen"),
    [
        ("cpu", 8, 2, "cpu"),
        ("auto", 0, 4, "cpu"),
        ("auto", 4, 4, "cuda"),
        ("auto", 8, 4, "cuda"),
        ("cuda", 2, 2, "cuda"),
    ],
)
def test_what_is_chosen(device: str, num_gpus: int, num_ranks: int, chosen: str) -> None:
    assert choose_device(device, num_gpus, num_ranks) == chosen


@pytest.mark.parametrize(("device", "num_gpus"), [("auto", 3), ("cuda", 3), ("cuda", 0)])
def test_too_few_gpus_are_refused_with_what_to_set(device: str, num_gpus: int) -> None:
    with pytest.raises(LayoutError) as caught:
        choose_device(device, num_gpus, 4)
    said = str(caught.value)
    assert f"train.device = '{device}', but this machine has {num_gpus} CUDA GPUs for 4 local ranks" in said
    assert "Set train.device = 'cpu'" in said and ("dp to 3." in said) == (num_gpus == 3)


def test_one_is_said_as_one() -> None:
    with pytest.raises(LayoutError, match=r"has 1 CUDA GPU for 2 local ranks: .*× parallel.dp to 1\.$"):
        choose_device("auto", 1, 2)
    with pytest.raises(LayoutError, match=r"has 0 CUDA GPUs for 1 local rank: .*Set train.device = 'cpu'\.$"):
        choose_device("cuda", 0, 1)


def test_options_are_named_where_they_say_it() -> None:
    """The commands that use a checkpoint have no keys."""
    with pytest.raises(LayoutError, match=r"^--device 'cuda', but .*'cpu', or lower --tp × --pp × --dp to 1\.$"):
        choose_device("cuda", 1, 2, by_option=True)


@pytest.mark.parametrize(
    ("version", "driver", "count"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", 4, 0),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", 4, 4),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", None, 0),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", 4, None),
        ("", 4, None),
    ],
)
def test_gpus_are_counted_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, driver: int | None, count: int | None
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, found: Any) -> int:
            found._obj.value = driver
            return 0

    class Spec:
        origin = str(tmp_path / "__init__.py")

    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return Driver()

    (tmp_path / "version.py").write_text(version)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert count_gpus() == count


def test_gpus_that_come_and_go_are_counted_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this one the driver says what it said the first time. Where no other can be asked nothing is known."""
    monkeypatch.setattr(devices, "count_gpus", lambda: pytest.fail("counted here"))
    assert gpus_now() == count_gpus()
    for program in (shutil.which("false"), "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", program)
        assert gpus_now() is None


def test_gpus_of_another_driver_are_as_unknown_to_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not none, as if all had been lost."""
    for name, text in (("__init__.py", ""), ("version.py", "cuda: str | None = None\nhip: str | None = '6.4'\n")):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert gpus_now() is None


WITH_CUDA = "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(("fails", "count"), [("cuInit", 0), ("cuDeviceGetCount", None)])
def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str, count: int | None) -> None:
    """One that cannot begin, as in a container that sees no device, has none; one that does not count is unknown."""
    (tmp_path / "version.py").write_text(WITH_CUDA)
    answers = {name: lambda *_, status=100 * (name == fails): status for name in ("cuInit", "cuDeviceGetCount")}
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=tmp_path / "x.py"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**answers))
    assert count_gpus() == count


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None), SimpleNamespace(origin="/nowhere/__init__.py")])
def test_where_torch_does_not_say_nothing_is_known(monkeypatch: pytest.MonkeyPatch, spec: object) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: spec)
    assert count_gpus() is None


def test_the_count_is_that_of_torch() -> None:
    import torch

    assert count_gpus() in (None, torch.cuda.device_count())
