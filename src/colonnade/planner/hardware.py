"""What a machine can do, read from a small TOML file: bundled by name, or a user's own.

Every figure has a unit and a range in which it can be; what is missing, absurd or unknown is refused in one message.
Bundled files say under [sources] where each figure is from, and which are fitted to what.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from colonnade.errors import ConfigError

MACHINES = "machines"


class Figure(NamedTuple):
    """What a key of a file may be."""

    low: float
    high: float
    unit: str


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "device.memory": Figure(1e8, 1e14, "bytes of a device"),
        "device.memory_bandwidth": Figure(1e8, 1e15, "bytes/s, read and written"),
        "device.kernel_seconds": Figure(0, 1e-3, "s, the least time of a kernel"),
        "device.dispatch_seconds": Figure(0, 1e-2, "s of the host to ask for an operator"),
        "device.together": Figure(0.05, 1, "share of its speed that a core keeps while all cores work"),
        "device.crowded": Figure(0.05, 1, "share of that speed that is left where cores are shared by ranks"),
        "device.peak_flops.bfloat16": Figure(1e8, 1e18, "FLOP/s"),
        "device.peak_flops.float16": Figure(1e8, 1e18, "FLOP/s"),
        "device.peak_flops.float32": Figure(1e8, 1e18, "FLOP/s"),
        "device.peak_flops.float64": Figure(1e8, 1e18, "FLOP/s"),
        "products.efficiency": Figure(0.01, 1, "share of the peak that large products reach"),
        "products.half_area": Figure(0, 1e9, "elements of a result at which half of that is reached"),
        "products.half_depth": Figure(0, 1e6, "elements summed up at which half of that is reached"),
        "products.attention": Figure(0.01, 1, "share of the peak that fused attention of wide heads reaches"),
        "products.half_head": Figure(0, 1e4, "head dimension at which half of that is reached"),
        "products.memory": Figure(0.01, 1, "share of the memory bandwidth that other operators reach"),
        "island.size": Figure(1, 1e6, "devices that share fast links"),
        "island.bandwidth": Figure(1e6, 1e14, "bytes/s of a device, one way"),
        "island.latency": Figure(0, 1, "s of a message"),
        "island.call": Figure(0, 1, "s of the host for a collective, beside its messages"),
        "node.size": Figure(1, 1e6, "devices of a machine"),
        "network.bandwidth": Figure(1e6, 1e15, "bytes/s of a machine, one way"),
        "network.latency": Figure(0, 1, "s of a message"),
        "network.switch_nodes": Figure(1, 1e7, "machines under one switch"),
        "network.oversubscription": Figure(1, 100, "factor on time beyond one switch"),
        "network.efficiency": Figure(0.01, 1, "share of a link's bandwidth that collectives reach"),
        "host.memory_bandwidth": Figure(1e8, 1e15, "bytes/s of a device's share of its machine"),
        "host.link_bandwidth": Figure(1e6, 1e14, "bytes/s between a device and its machine"),
        "host.token_seconds": Figure(0, 1e-3, "s of a core to read a token into a batch"),
        "storage.write_bandwidth": Figure(1e5, 1e15, "bytes/s of all machines together"),
        "failures.device_hours": Figure(1, 1e9, "hours of one device between failures"),
        "failures.restart_seconds": Figure(0, 1e6, "s until a run goes on after a failure"),
        "cost.device_hour": Figure(0, 1e5, "US dollars"),
    }
)
OPERATORS = "operators."
OPERATOR = Figure(0, 1e-3, "s an element")
"""Of operators by name, as far as a file has them: see `Hardware.operators`."""
KINDS = ("cuda", "cpu")


@dataclass(frozen=True)
class Hardware:
    """A machine, and how many of its kind."""

    name: str
    kind: Literal["cuda", "cpu"]
    figures: Mapping[str, float]
    sources: Mapping[str, str]
    cores: int = 0
    """Of a CPU: ranks share them. 0: a device a rank."""
    operators: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """[s an element] Of operators whose arithmetic may take longer than their bytes, by name."""

    def __getitem__(self, key: str) -> float:
        return self.figures[key]

    def peak(self, dtype: str) -> float:
        """[FLOP/s] Of products in a number format."""
        return self.figures.get(f"device.peak_flops.{dtype}", self.figures["device.peak_flops.float32"])

    def having(self, **figures: float) -> "Hardware":
        """The same with other figures; dots are written as double underscores."""
        changed = {key.replace("__", "."): value for key, value in figures.items()}
        assert changed.keys() <= self.figures.keys(), "only what there is can change"
        return replace(self, figures={**self.figures, **changed})


def names() -> list[str]:
    """Of the machines that are bundled."""
    folder = resources.files("colonnade.planner") / MACHINES
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def hardware(name: str) -> Hardware:
    """A bundled machine by its name, or one from a file. Raises ConfigError."""
    if name in names():
        text = (resources.files("colonnade.planner") / MACHINES / f"{name}.toml").read_text(encoding="utf-8")
        return parsed(text, name)
    path = Path(name)
    if not path.is_file():
        guess = [each for each in names() if each.startswith(name)] or get_close_matches(name, names(), n=1)
        meant = f" Did you mean {guess[0]}?" if guess else ""
        raise ConfigError(
            f"--hardware {name}: there is no such file, and no machine of this name.{meant} Use {', '.join(names())}, "
            "or a file that `colonnade hardware --output FILE` has written."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hardware {name}: the file cannot be read: {error}. Name another one.") from error
    return parsed(text, str(path))


def parsed(text: str, source: str) -> Hardware:
    """A machine from the text of a file. Raises ConfigError with everything that is wrong with it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is no TOML file: {error}. Mend it there.") from error
    sources = content.pop("sources", {})
    flat = dict(_flat(content))
    name, kind, cores = flat.pop("name", source), flat.pop("device.kind", "cuda"), flat.pop("device.cores", 0)
    problems = list(_problems(flat))
    if kind not in KINDS:
        problems.append(f'device.kind = {kind!r} is neither "cuda" nor "cpu"')
    if not isinstance(cores, int) or isinstance(cores, bool) or not 0 <= cores <= 10**6:
        problems.append(f"device.cores = {cores!r} is no number of cores")
    if problems:
        raise ConfigError(
            f"{source} does not describe a machine:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nMend these; the machines that are bundled have all keys (docs/planner.md)."
        )
    figures = {key: float(value) for key, value in flat.items() if not key.startswith(OPERATORS)}
    operators = {key.removeprefix(OPERATORS): float(flat[key]) for key in flat.keys() - figures.keys()}
    return Hardware(str(name), kind, MappingProxyType(figures), sources, cores, MappingProxyType(operators))


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _problems(flat: Mapping[str, Any]) -> Iterator[str]:
    operators = {key: OPERATOR for key in flat if key.startswith(OPERATORS)}
    for key, (low, high, unit) in {**FIGURES, **operators}.items():
        if key not in flat:
            yield f"{key} is missing [{unit}]"
            continue
        value = flat[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{key} = {value!r} is no number [{unit}]"
        elif not low <= value <= high:
            yield f"{key} = {value:g} cannot be: it is between {low:g} and {high:g} [{unit}]"
    for key in flat:
        if key not in FIGURES and key not in operators:
            guess = get_close_matches(key, FIGURES, n=1)
            yield f"{key} is unknown" + (f": did you mean {guess[0]}?" if guess else "")
