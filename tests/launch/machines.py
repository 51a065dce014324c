"""Machines of one network that share files and nothing else, made of Linux namespaces on this one.

    machine-1      machine-2      …      each: a network, a name, numbers of processes and a /dev/shm of its own
    10.77.0.1      10.77.0.2
        └─── switch ───┘                 a bridge in a network of its own

All belong to processes that end with the test's, and the kernel removes each with its processes; nothing has a name
that could be left behind. Needs root.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.commands import environment

PROGRAMS = ("ip", "mount", "nsenter", "setpriv", "unshare")
MOST = 9  # machines
OWN = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
# Ends with the process that has started it, however that ends.
TIED = ("setpriv", "--pdeathsig", "KILL")
BEGIN = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$3" /etc/hosts
ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
ip address add "$2/24" dev eth0
ip link set eth0 up
shift 3
"$@"
"""


def why_not() -> str:
    """Why there can be no such machines here; "" if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = ["unshare", *OWN, "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link add switch type bridge"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"the kernel refuses namespaces or a bridge: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Machine:
    """One of them, which is there while `process` runs."""

    name: str
    port: str
    """Of the switch."""
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def said(self) -> str:
        """What its processes have printed, errors too."""
        return self.log.read_text()


class Network:
    """The switch, and the machines that are on it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._machines = folder, list[Machine]()
        self._hosts = folder / "hosts"
        names = "".join(f"{_address(number)} machine-{number}\n" for number in range(1, MOST + 1))
        self._hosts.write_text(f"127.0.0.1 localhost\n{names}")
        self._switch = subprocess.Popen([*TIED, "unshare", "--net", "sleep", "infinity"])
        _await_network(self._switch.pid)
        self._ip("link", "add", "switch", "type", "bridge")
        self._ip("link", "set", "switch", "up")

    @property
    def next_name(self) -> str:
        """Of the machine that is started next."""
        return f"machine-{len(self._machines) + 1}"

    def start(self, *command: object, more: Mapping[str, str], itself: str | None = None) -> Machine:
        """A new machine that runs `command`, with `more` in its environment. `itself`: the address that its name leads
        to there; None: that which it has for the others.
        """
        number, name = len(self._machines) + 1, self.next_name
        said, hosts = self._folder / f"{name}.log", self._hosts
        if itself is not None:
            hosts = self._folder / f"{name}.hosts"
            hosts.write_text(self._hosts.read_text().replace(f"{_address(number)} {name}", f"{itself} {name}"))
        begin = ["sh", "-c", BEGIN, "sh", name, _address(number), str(hosts)]
        with said.open("w") as file:
            process = subprocess.Popen(
                [*TIED, "unshare", *OWN, *begin, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment(), **more},
            )
        machine = Machine(name, f"port{number}", process, said)
        self._machines.append(machine)
        _await_network(process.pid)
        end = ("peer", "name", "eth0", "netns", str(process.pid))
        self._ip("link", "add", machine.port, "master", "switch", "type", "veth", *end)
        self._ip("link", "set", machine.port, "up")
        return machine

    def cut_off(self, machine: Machine) -> None:
        """Pull its cable, then its plug: to the others it falls silent, and its processes and memory are gone."""
        self._ip("link", "set", machine.port, "down")
        machine.process.kill()
        machine.process.wait()

    def close(self) -> None:
        for process in (*(each.process for each in self._machines), self._switch):
            process.kill()
            process.wait()

    def _ip(self, *words: str) -> None:
        _done("nsenter", f"--net=/proc/{self._switch.pid}/ns/net", "ip", *words)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Machines, which are gone when the block ends."""
    made = Network(folder)
    try:
        yield made
    finally:
        made.close()


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def _await_network(pid: int) -> None:
    """Return when a process has left the network of this one."""
    end = time.monotonic() + 20.0
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < end, "it has no network of its own"
        time.sleep(0.01)


def _done(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
