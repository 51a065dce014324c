"""A run under torchrun on machines that share no memory: one loses its power, and another takes its place."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.launch.agent import PREFIX
from colonnade.train.memory_folder import MEMORY
from tests.launch import machines
from tests.launch.machines import Machine, Network
from tests.runs import assert_same_end, events, metrics, saved_steps

KEYS = ("parallel.tp=2", "parallel.dp=2", "parallel.zero=1", "train.steps=40", "checkpoint.every=10")
KEYS = (*KEYS, "optim.decay_steps=6", "train.evaluate_every=0", "checkpoint.memory_every=1")
LIMIT = 300.0  # seconds


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Its folder is where the run's is: a file system that all machines see."""
    if refused := machines.why_not():
        pytest.skip(f"no machines of their own for torchrun here: {refused}")
    with machines.network(tmp_path) as made:
        yield made


def started(network: Network, config: Path, run: Path, first: Machine | None = None) -> Machine:
    """A machine with an agent of torchrun and two of the run's four ranks. The agents meet at the `first` machine."""
    at = network.next_name if first is None else first.name
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=books", f"--rdzv-endpoint={at}:29500", "-m", "colonnade", "train"]
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return network.start(*words, config, *KEYS, f"run.folder={run}", more=more)


@pytest.mark.slow
def test_machines_whose_names_lead_to_themselves_are_told_what_to_set(
    config: Path, tmp_path: Path, network: Network
) -> None:
    """As the installers of Debian and Ubuntu have it. With the interface, it trains."""

    def both(name: str, **more: str) -> list[Machine]:
        at = network.next_name
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=books", f"--rdzv-endpoint={at}:29500", "-m", "colonnade", "train"]
        words += [str(config), "parallel.dp=2", "train.steps=2", f"run.folder={tmp_path / name}"]
        return [network.start(*words, more=more, itself="127.0.1.1") for _ in range(2)]

    lost, end = both("lost"), time.monotonic() + LIMIT
    while all(each.process.poll() is None for each in lost):
        assert time.monotonic() < end, [each.said for each in lost]
        time.sleep(0.1)
    told = "".join(each.said for each in lost)
    assert "offered the address 127.0.1.1" in told and "Set GLOO_SOCKET_IFNAME on every machine" in told, told
    await_end(*both("found", GLOO_SOCKET_IFNAME="eth0"))
    assert len(metrics(tmp_path / "found")) == 2


def await_end(*them: Machine) -> None:
    assert [each.process.wait(LIMIT) for each in them] == [0, 0], [each.said for each in them]


@pytest.mark.slow
def test_a_new_machine_is_sent_what_a_lost_one_had_in_memory(config: Path, tmp_path: Path, network: Network) -> None:
    """Of the lost one neither a process nor a file in memory is left, and the other hears nothing of its end."""
    run, expected = tmp_path / "run", tmp_path / "expected"
    first = started(network, config, run)
    lost = started(network, config, run, first)
    end = time.monotonic() + LIMIT
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) <= 12:
        assert first.process.poll() is None and time.monotonic() < end, first.said
        time.sleep(0.01)
    network.cut_off(lost)
    assert saved_steps(run)[-1] == 10
    new = started(network, config, run, first)
    await_end(first, new)
    told = [event for event in events(run) if event["event"] in ("resumed", "damaged copy in memory")]
    assert [(event["event"], event.get("origin")) for event in told] == [("resumed", "memory")], told
    assert told[0]["step"] > 10 and f"Resumed from {MEMORY}/{PREFIX}" in first.said + new.said

    undisturbed = started(network, config, expected)
    await_end(undisturbed, started(network, config, expected, undisturbed))
    assert_same_end(run, expected)
