"""What this machine is said to be and to have."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colonnade.train import machine
from colonnade.train.machine import cpu_cores, device_name, free_memory, processor

CPU = torch.device("cpu")
INTEL = [
    "vendor_id\t: GenuineIntel",
    "model\t\t: 143",
    "model name\t: Intel(R)  Xeon(R) 8481C  @ 2.7",
    "flags\t: fpu avx2",
]
ARM = ["processor\t: 0", "Features\t: fp asimd"]


def test_a_processor_is_told_by_its_name_and_its_vector_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "lines_in", lambda path: INTEL)
    assert device_name(CPU) == "Intel(R) Xeon(R) 8481C @ 2.7" and processor() == "Intel(R) Xeon(R) 8481C @ 2.7; avx2"
    monkeypatch.setattr(machine, "lines_in", lambda path: ARM)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert device_name(CPU) == "aarch64" and processor() == "aarch64; asimd"


@pytest.mark.parametrize(("said", "name"), [("Apple M2\n", "Apple M2"), ("", "arm64"), (None, "arm64")])
def test_macos_names_a_processor_by_sysctl(said: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its kind, where that says nothing or cannot be had."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command == ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        if said is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, int(not said), said)

    monkeypatch.setattr(machine, "lines_in", lambda path: [])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    assert device_name(CPU) == name and processor().partition("; ")[0] == name


def test_cores_are_those_of_the_machine_and_threads_those_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    monkeypatch.setattr(machine, "core_quota", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu_cores() == "8 cores, 1 thread for each rank"


def test_cores_that_a_control_group_keeps_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "core_quota", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cpu_cores() == "2 cores (a quota of 1.5), 2 threads for each rank"


def test_free_memory_is_told_in_bytes_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limits", list)
    told = ["MemTotal:       16000 kB", "MemFree:         1000 kB", "MemAvailable:    9000 kB", ""]
    monkeypatch.setattr(machine, "lines_in", lambda path: told if path == Path("/proc/meminfo") else [])
    assert free_memory(CPU) == (9000 * 1024, 16000 * 1024)
    monkeypatch.setattr(machine, "memory_limits", lambda: [(7000, 8000), (2**63 - 4096, 2**63 - 1)])
    assert free_memory(CPU) == (7000, 8000)
    monkeypatch.setattr(machine, "lines_in", lambda path: [])
    assert free_memory(CPU) is None
