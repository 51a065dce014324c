"""How long a device takes for an operator, and links for a collective: a roofline, and α–β by where ranks sit. Pure.

    operator      max(FLOPs / (peak · e), bytes / bandwidth, elements · what an element takes) + least time of a kernel
                  e = efficiency · a / (a + half_area) · k / (k + half_depth)        of a product with a results, k deep
                      attention · d / (d + half_head)             of fused attention, d the dimension of a head
    collective    the host's call + α · messages in a row + β · bytes over the slowest link

    all-reduce    2·⌈log₂ n⌉ messages, 2·(n − 1)/n of the bytes        within an island: its links
    gather        n − 1 messages, (n − 1) parts                        between machines: the machine's links, shared by
    scatter       n − 1 messages, (n − 1)/n of the bytes               the groups that cross them at the same time
    transfer      one message, all bytes                               of all groups of an axis, the slowest counts

    reading       so much a token of a rank's batches; where a GPU computes, what is left of it behind the step before

What CPU ranks share (cores, the bandwidth of memory) is divided among those that are there; and cores are slower the
more of them work. While some stages of a pipeline wait, the others have more of both (`pace`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from colonnade.config.schema import Config
from colonnade.mesh.ledger import Entry
from colonnade.planner.hardware import Hardware
from colonnade.planner.operators import Operator

CAUSAL = 0.5
"""Of a causal kernel's FLOPs, which are counted in full, it computes half."""


def share_of_peak(area: float, depth: float, half_area: float, half_depth: float) -> float:
    """That a product reaches with so many results, each summed over `depth`."""
    return area / (area + half_area) * depth / (depth + half_depth)


@dataclass(frozen=True)
class Cost:
    """Of one rank on a machine, with `num_ranks` in all."""

    hardware: Hardware
    num_ranks: int = 1
    _known: dict[tuple[int, int], list[Sequence[int]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What `_alike` has found, by the size of groups and how far apart their ranks are."""

    @cached_property
    def sharing(self) -> float:
        """Ranks for each core, where there are more ranks than cores; 1 on devices of their own."""
        return self._sharing(self._ranks_here)

    @cached_property
    def crowding(self) -> float:
        """How many times as long as alone a rank computes beside the others."""
        return self._crowding(self._ranks_here)

    def pace(self, share: float) -> float:
        """How fast a rank computes while only such a share of all ranks do; 1 is beside all of them."""
        return self.crowding / self._crowding(max(1.0, share * self._ranks_here))

    def _sharing(self, ranks: float) -> float:
        cores = self.hardware.cores
        return max(1.0, ranks / cores) if cores else 1.0

    def _crowding(self, ranks: float) -> float:
        """Beside so many at work, itself among them."""
        cores, sharing = self.hardware.cores, self._sharing(ranks)
        at_work = (min(ranks, cores) - 1) / (cores - 1) if cores > 1 else 0.0
        crowded = self.hardware["device.crowded"] if sharing > 1 else 1.0
        return sharing / crowded / (1 - at_work * (1 - self.hardware["device.together"]))

    @property
    def _ranks_here(self) -> int:
        return min(self.num_ranks, int(self.hardware["node.size"]))

    @cached_property
    def dispatch(self) -> float:
        """[s] Of the host for each operator."""
        return self.hardware["device.dispatch_seconds"] * self.crowding

    @cached_property
    def bandwidth(self) -> float:
        """[bytes/s] Of memory, for what is no product."""
        return self.hardware["device.memory_bandwidth"] * self.hardware["products.memory"] / self.crowding

    def arithmetic(self, operator: Operator) -> float:
        """[s] For its FLOPs."""
        if not operator.flops:
            return 0.0
        peak = self.hardware.peak(operator.dtype) / self.crowding
        assert operator.product is not None, "what multiplies is a product"
        batch, m, n, k = operator.product
        area, hardware = batch * m * n, self.hardware
        if operator.is_attention:
            flops = operator.flops * (CAUSAL if operator.is_causal else 1.0)
            return flops / (peak * hardware["products.attention"]) * (k + hardware["products.half_head"]) / k
        share = share_of_peak(area, k, hardware["products.half_area"], hardware["products.half_depth"])
        return operator.flops / (peak * hardware["products.efficiency"] * max(share, 1e-9))

    def movement(self, operator: Operator) -> float:
        """[s] For its bytes, and what else it does with each element."""
        if operator.on_host == "copy":
            return operator.bytes / 2 / self.hardware["host.link_bandwidth"]
        if operator.on_host == "host":
            return operator.bytes / self.hardware["host.memory_bandwidth"]
        elements = operator.elements * self.hardware.operators.get(operator.name.rstrip("_"), 0.0) * self.crowding
        return max(operator.bytes / self.bandwidth, elements)

    def operator(self, operator: Operator) -> float:
        """[s] Of the device."""
        least = self.hardware["device.kernel_seconds"] * self.crowding
        return max(self.arithmetic(operator), self.movement(operator)) + least

    def reading(self, config: Config, step: float) -> float:
        """[s] That a step, of so many seconds without it, waits for its batches. Those of a GPU are read meanwhile."""
        tokens = config.train.global_batch_size // config.parallel.dp * config.model.sample_length
        seconds = tokens * self.hardware["host.token_seconds"] * self.crowding
        return seconds if self.hardware.kind == "cpu" else max(0.0, seconds - step)

    def collective(self, entry: Entry, ranks: Sequence[int]) -> float:
        """[s] Over these ranks of the run."""
        return self.slowest(entry.operation, entry.bytes, ranks)

    def slowest(self, operation: str, size: int, ranks: Sequence[int]) -> float:
        """[s] As `move`, of the slowest of all groups along the axis of these ranks: a step waits for each of them."""
        return max(self.move(operation, size, group) for group in self._alike(ranks))

    def _alike(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """These ranks, and a group for each other kind of links that groups of their axis have: of as many ranks, as
        far apart. Ranks that are not all as far apart stand for themselves.
        """
        n, reach = len(ranks), ranks[-1] - ranks[0]
        apart = ranks[min(1, n - 1)] - ranks[0]
        if not apart or reach != (n - 1) * apart:
            return [ranks]
        if (n, apart) not in self._known:
            firsts = (first for first in range(self.num_ranks - reach) if first % (n * apart) < apart)
            groups = (ranks, *(range(first, first + reach + 1, apart) for first in firsts))
            self._known[n, apart] = list({self._link(group): group for group in reversed(groups)}.values())
        return self._known[n, apart]

    def move(self, operation: str, size: int, ranks: Sequence[int]) -> float:
        """[s] Of an operation into which each of these ranks puts `size` bytes."""
        n = len(ranks)
        if n < 2:
            return 0.0
        latency, bandwidth = self._link(ranks)
        messages, moved = {
            "all_reduce": (2 * math.ceil(math.log2(n)), 2 * (n - 1) / n * size),
            "all_gather": (n - 1, (n - 1) * size),
            "reduce_scatter": (n - 1, (n - 1) / n * size),
            "broadcast": (math.ceil(math.log2(n)), size),
        }.get(operation, (1, size))
        return (self.hardware["island.call"] + messages * latency + moved / bandwidth) * self.sharing

    def message(self, size: int, stages: Sequence[int], beside: int) -> float:
        """[s] From a stage to another, of `beside` ranks each that all send at once: a step waits for the slowest.
        Whatever boundary lies between two of them lies between the first two or the last two.
        """
        return max(self.move("send", size, [at * beside + each for at in stages]) for each in (0, beside - 1))

    def _link(self, ranks: Sequence[int]) -> tuple[float, float]:
        """(latency, bytes/s of a rank) of the slowest link in a ring of these ranks."""
        hardware = self.hardware
        island, node = (int(hardware[key]) for key in ("island.size", "node.size"))
        efficiency = hardware["network.efficiency"]
        within = hardware["island.bandwidth"] * efficiency
        if len({rank // island for rank in ranks}) == 1:
            return hardware["island.latency"], within
        nodes = {rank // node for rank in ranks}
        if len(nodes) == 1:
            return hardware["network.latency"], min(within, hardware["network.bandwidth"] / node * efficiency)
        together = max(1.0, len(ranks) / len(nodes))  # ranks of the group in a machine: the links of all are theirs
        between = hardware["network.bandwidth"] * min(1.0, together / node) * efficiency
        switch = int(hardware["network.switch_nodes"])
        if len({each // switch for each in nodes}) > 1:
            between /= hardware["network.oversubscription"]
        return hardware["network.latency"], min(within, between)
