"""What layers show of their activations at a measured step: a few numbers of a tensor, added up as it is computed.

Every layer has the probe of its rank and shows what it has computed: `probe.see(site, x)`. At all other steps that is
one comparison in Python, and no operator runs. Numbers are kept as a `Summary` row, so that rows of parts (micro-
batches, ranks, slices) put together are the row of the whole, however it was cut:

    -minimum  maximum  │  Σ x²  zeros  non-finite  near the limit  count         the first two by max, others by +
"""

from collections.abc import Collection

import torch
from torch import Tensor

NUM_EXTREMES, NUM_SUMS = 2, 5
_ROW = 256  # squares are summed in rows of so many, and the rows' sums in fp64: see optim/norm.py
_SQUARES_FIT = 1e18  # in fp32, with room for a row


class Probe:
    """Reads at measured steps what layers show; shared by all layers of a rank."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Tensor] = {}
        """By unit and site."""
        self._limit: float | None = None
        self._sites: Collection[str] = ()
        self._seen: set[tuple[str, int]] = set()
        self._unit: str | None = None

    def reads(self, site: str) -> bool:
        """Whether what the unit at work shows there is read."""
        return self._unit is not None and site in self._sites

    def begin(self, dtype: torch.dtype, sites: Collection[str]) -> None:
        """Read from now on what is shown at these sites. `dtype`: of the computation, whose largest number values are
        held against.
        """
        self.rows, self._seen, self._sites = {}, set(), sites
        self._limit = torch.finfo(dtype).max / 2

    def end(self) -> None:
        """Read no more."""
        self._limit = self._unit = None

    def enter(self, unit: str, inputs: object) -> None:
        """A unit begins with a micro-batch, of which `inputs` live until the step ends. One that has been through it
        already is computed again for backward, and not read twice.
        """
        if self._limit is None:
            return
        again = (unit, id(inputs)) in self._seen
        self._seen.add((unit, id(inputs)))
        self._unit = None if again else unit

    @torch.no_grad()
    def see(self, site: str, x: Tensor) -> None:
        """Read x, of any shape; what was read at this site before counts too."""
        if self._unit is None or self._limit is None or site not in self._sites:
            return
        row, key = summary(x.detach(), self._limit), (self._unit, site)
        self.rows[key] = together(self.rows[key], row) if key in self.rows else row


def nothing(device: torch.device) -> Tensor:
    """The row of no numbers at all."""
    row = torch.zeros(NUM_EXTREMES + NUM_SUMS, dtype=torch.float64, device=device)
    row[:NUM_EXTREMES] = -torch.inf
    return row


def together(one: Tensor, other: Tensor) -> Tensor:
    """The row of two sets of numbers."""
    extremes = torch.maximum(one[:NUM_EXTREMES], other[:NUM_EXTREMES])
    return torch.cat([extremes, one[NUM_EXTREMES:] + other[NUM_EXTREMES:]])


def summary(x: Tensor, limit: float) -> Tensor:
    """The row of some numbers, float64 [7]. Those that are not finite are counted, and enter nothing else.

    `limit`: values of this size are near the largest that there is.
    """
    x = x.reshape(-1)
    if not len(x):
        return nothing(x.device)
    low, high = torch.aminmax(x)
    most = min(limit, _SQUARES_FIT)
    if not x.is_cuda and bool((low > -most) & (high < most)):  # on CUDA, asking would make the host wait
        unusual = (torch.zeros_like(low), torch.zeros_like(low))
        squares = _squares(x)
    else:
        finite = x.isfinite()
        low = torch.where(finite, x, torch.inf).amin()
        high = torch.where(finite, x, -torch.inf).amax()
        x = torch.where(finite, x, 0)
        unusual = (finite.logical_not().sum(), (x.abs() >= limit).sum())
        squares = torch.linalg.vector_norm(x, dtype=torch.float64).square()
    zeros = len(x) - torch.count_nonzero(x) - unusual[0].long()
    count = torch.full_like(squares, float(len(x)))
    return torch.stack([each.double() for each in (-low, high, squares, zeros, *unusual, count)])


def _squares(x: Tensor) -> Tensor:
    """Σ x², float64 []."""
    exact, whole = torch.promote_types(x.dtype, torch.float32), len(x) // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1, dtype=exact).double()
    rest = torch.linalg.vector_norm(x[whole:], dtype=exact).double()
    total: Tensor = rows.square().sum() + rest.square()
    return total
