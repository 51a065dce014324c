"""Which rank stands where: pure arithmetic, no process needed.

    rank = (pp · DP + dp) · TP + tp          tp innermost: its ranks are neighbours, inside one server

Every tp group needs the fastest links (it talks inside each layer), dp the next, pp can do with the slowest
(Megatron-LM paper, section 5; Megatron-DeepSpeed places BLOOM's ranks alike).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from colonnade.errors import LayoutError

AXES: Final = ("pp", "dp", "tp")  # outermost first


@dataclass(frozen=True)
class Layout:
    """The sizes of all axes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            if self.size(name) < 1:
                raise LayoutError(f"parallel.{name} = {self.size(name)} is not a number of ranks. Use 1 or more.")

    def __str__(self) -> str:
        return " ".join(f"{name}{self.size(name)}" for name in AXES)

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def size(self, axis: str) -> int:
        """Number of ranks along `axis` ("pp", "dp" or "tp")."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(f"rank {rank} does not exist in a layout of {self.num_ranks} ranks ({self}).")
        return {"pp": rank // (self.dp * self.tp), "dp": rank // self.tp % self.dp, "tp": rank % self.tp}

    def written(self, rank: int) -> str:
        """`[pp1 dp0 tp3]`, with which the log lines of `rank` start."""
        return f"[{' '.join(f'{axis}{at}' for axis, at in self.coordinates(rank).items())}]"

    def rank_at(self, *, pp: int, dp: int, tp: int) -> int:
        """The rank that stands at these coordinates: the inverse of `coordinates`."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The ranks split into groups that differ along `axes` alone, each group in rising order.

        `groups("tp")` are the tensor-parallel groups, `groups("pp", "tp")` the ranks that hold one copy of the model.
        """
        split: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            split.setdefault(tuple(at[name] for name in AXES if name not in axes), []).append(rank)
        return [tuple(ranks) for ranks in split.values()]

    def ends(self) -> list[tuple[int, ...]]:
        """The ranks split into pairs of first and last pipeline stage with equal dp and tp; whoever is in no pair is
        alone.
        """
        return self.holders(sorted({0, self.pp - 1}))

    def axis_of(self, stages: Sequence[int]) -> str:
        """The name of the axis of these stages. A rank may stand on several, and each counts for itself."""
        return "ends" if tuple(stages) == (0, self.pp - 1) else f"holders {','.join(map(str, stages))}"

    def holders(self, stages: Sequence[int]) -> list[tuple[int, ...]]:
        """The ranks split into those of these pipeline stages with equal dp and tp; whoever is in none is alone."""
        together = {}
        for first in range(self.dp * self.tp):
            ranks = tuple(first + stage * self.dp * self.tp for stage in stages)
            together.update(dict.fromkeys(ranks, ranks))
        return list(dict.fromkeys(together.get(rank, (rank,)) for rank in range(self.num_ranks)))


def consecutive(numbers: Sequence[int]) -> list[list[int]]:
    """[0, 1, 2, 5] -> [[0, 1, 2], [5]]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2 and 7`."""
    parts = [
        part for run in consecutive(ranks) for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    *others, last = parts
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
