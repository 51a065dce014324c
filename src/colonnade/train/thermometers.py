"""The thermometers of a run: at a measured step, numbers of each block's activations, gradients and updates.

    begin           layers' probe reads from here on               activations, by unit and site
    gradients       after they are summed, before clipping         by part
    watch           around the change of each slice of weights     by part
    finish          what ranks have found is put together          sent over all ranks: 2 all-reduces

A rank adds its samples, its shards of weights and heads, its part of a sequence, its slice under ZeRO. Of weights that
several ranks have alike one adds; a stream that all tp ranks have alike is read by each of them, all of it equally
often, and what is told of activations are extremes, means and shares. So the numbers are those of the serial run.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.architecture.sites import GRADIENTS, UPDATES, Site, parts, sites
from colonnade.architecture.statement import Architecture
from colonnade.config.model import ModelConfig
from colonnade.config.thermometers import ALL_SITES, ThermometersConfig
from colonnade.data_parallel.clip import is_copy, is_counted
from colonnade.data_parallel.zero import Ownership
from colonnade.kernels.probe import NUM_EXTREMES, NUM_SUMS, Probe, nothing
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.optim.norm import squared_norm
from colonnade.optim.param_slice import ParamSlice, Watch, unwatched

OF_A_PART = 3
"""Sums of a part: squares of gradients, of what weights changed by, and of weights before."""


class Activations(NamedTuple):
    """Of all numbers at a site in a step; None where there is none that is finite."""

    minimum: float | None
    maximum: float | None
    rms: float | None
    zeros: float
    """[share] That are 0."""
    non_finite: float
    """[share] That are infinite or NaN."""
    near_limit: float
    """[share] Within a factor of two of the largest number of the compute format."""

    @property
    def largest(self) -> float:
        """The largest absolute value; infinite where some are not finite."""
        if self.non_finite or self.minimum is None or self.maximum is None:
            return math.inf
        return max(-self.minimum, self.maximum)


class Part(NamedTuple):
    """Of the trained weights of a bucket in a step; None where a number is not finite, or nothing was updated."""

    gradient_norm: float | None
    gradient_maximum: float | None
    """The largest absolute value."""
    update: float | None
    """[1] Norm of what the weights changed by, over their norm before."""


@dataclass(frozen=True)
class Reading:
    """What a measured step shows, equal on all ranks."""

    step: int
    activations: tuple[tuple[Site, Activations], ...]
    parts: tuple[tuple[str, Part], ...]
    chosen: tuple[str, ...] = ALL_SITES
    """As thermometers.sites: of parts, None stands for what is not among them too."""

    def to_json(self) -> dict[str, Any]:
        """For thermometers.jsonl."""
        by_unit: dict[str, dict[str, Any]] = {}
        for (unit, site), found in self.activations:
            by_unit.setdefault(unit, {})[site] = found._asdict()
        gradients = self.parts if GRADIENTS in self.chosen else ()
        updates = self.parts if UPDATES in self.chosen else ()
        return {
            "step": self.step,
            "activations": by_unit,
            "gradients": {
                name: {"norm": part.gradient_norm, "maximum": part.gradient_maximum} for name, part in gradients
            },
            "updates": {name: part.update for name, part in updates},
        }

    def summary(self) -> dict[str, float]:
        """The extremes over the model of what was measured, by name: for who shows a few curves only."""
        largest: dict[str, float] = {}
        for (_, site), found in self.activations:
            largest[f"largest_{site}"] = max(largest.get(f"largest_{site}", 0.0), found.largest)
        updates = [part.update for _, part in self.parts if part.update is not None]
        for name in ("non_finite", "near_limit") if self.activations else ():
            largest[name] = max(getattr(found, name) for _, found in self.activations)
        return {**largest, **({"largest_update": max(updates)} if updates else {})}


@dataclass
class Thermometers:
    """One rank's."""

    sites: tuple[Site, ...]
    parts: tuple[str, ...]
    """Of the whole model, as the sites are; none where nothing of them is measured."""
    owned: Ownership
    probe: Probe
    dtype: torch.dtype
    """Of the computation."""
    config: ThermometersConfig
    _step: int | None = None
    """The step that is being measured."""
    _sums: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float64 [parts, 3]"""
    _largest: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float64 [parts]: of gradients."""

    def begin(self, step: int) -> None:
        """Measure this step, if its turn has come; before the first forward pass."""
        if not self.config.measures(step):
            return
        self._step = step
        self._sums = torch.zeros(len(self.parts), OF_A_PART, dtype=torch.float64, device=self._device)
        self._largest = torch.zeros(len(self.parts), dtype=torch.float64, device=self._device)
        self.probe.begin(self.dtype, {site for _, site in self.sites})

    @torch.no_grad()
    def gradients(self, scale: float) -> None:
        """Read the reduced gradients, which are `scale` times too large."""
        self.probe.end()
        if self._step is None or GRADIENTS not in self.config.sites:
            return
        for bucket in self.owned.buckets.values():
            row = self.parts.index(bucket.name)
            for group, at in bucket.local_groups():
                if self._adds(bucket.name) and is_counted(group, self.owned.mesh.tp):
                    mine = bucket.reduced[at]
                    low, high = torch.aminmax(mine)
                    self._sums[row, 0] += squared_norm(mine) / scale**2
                    most = torch.maximum(-low, high).double() / scale
                    self._largest[row] = torch.maximum(self._largest[row], most)

    @property
    def watch(self) -> Watch:
        """Around the changes of slices' weights; `unwatched` where no change is measured."""
        return unwatched if self._step is None or UPDATES not in self.config.sites else self._watch

    def _watch(self, params: ParamSlice) -> AbstractContextManager[None]:
        """Holds a copy of the weights meanwhile."""
        return self._watched(params) if params.counted and self._adds(params.part) else unwatched(params)

    @contextmanager
    def _watched(self, params: ParamSlice) -> Iterator[None]:
        before = params.weights.clone()
        yield
        row = self._sums[self.parts.index(params.part)]
        row[2] += squared_norm(before).to(row.device)
        row[1] += squared_norm(before.sub_(params.weights)).to(row.device)

    def finish(self, mesh: Mesh) -> Reading | None:
        """What the step shows, on all ranks; None where it is not measured. Sends 7 numbers a site and 4 a part over
        all ranks.
        """
        if self._step is None:
            return None
        none = torch.zeros(0, NUM_EXTREMES + NUM_SUMS, dtype=torch.float64, device=self._device)
        rows = torch.cat([none, *(self.probe.rows.get(site, nothing(self._device))[None] for site in self.sites)])
        extremes, sums = rows[:, :NUM_EXTREMES], rows[:, NUM_EXTREMES:]
        most = all_reduce(torch.cat([extremes.flatten(), self._largest]), mesh.world, "max").tolist()
        total = all_reduce(torch.cat([sums.flatten(), self._sums.flatten()]), mesh.world).tolist()
        activations, trained = tuple(self._activations(most, total)), tuple(self._parts(most, total))
        reading = Reading(self._step, activations, trained, self.config.sites)
        self._step, self.probe.rows = None, {}
        return reading

    @property
    def _device(self) -> torch.device:
        return self.owned.every[0].parameters.device

    def _adds(self, part: str) -> bool:
        """Whether what this rank has of a part is not another's as well: of an earlier stage, or a copy over dp."""
        bucket, dp = self.owned.buckets[part], self.owned.mesh.dp
        return not is_copy(bucket, self.owned) and (self.owned.zero > 0 or dp.rank == 0)

    def _activations(self, most: list[float], total: list[float]) -> Iterator[tuple[Site, Activations]]:
        for number, site in enumerate(self.sites):
            low, high = most[number * NUM_EXTREMES :][:NUM_EXTREMES]
            squares, zeros, non_finite, near, count = total[number * NUM_SUMS :][:NUM_SUMS]
            finite = count - non_finite
            rms = math.sqrt(squares / finite) if finite else None
            count = max(count, 1.0)
            yield (
                site,
                Activations(
                    _finite(-low), _finite(high), _finite(rms), zeros / count, non_finite / count, near / count
                ),
            )

    def _parts(self, most: list[float], total: list[float]) -> Iterator[tuple[str, Part]]:
        largest, sums = most[-len(self.parts) :], total[-len(self.parts) * OF_A_PART :]
        has_norm = GRADIENTS in self.config.sites
        for number, name in enumerate(self.parts):
            gradient, change, before = sums[number * OF_A_PART :][:OF_A_PART]
            norm = _finite(_root(gradient)) if has_norm else None
            maximum = None if norm is None else _finite(largest[number])
            yield name, Part(norm, maximum, _finite(_root(change / before)) if before else None)


def thermometers(
    config: ThermometersConfig,
    model: ModelConfig,
    architecture: Architecture,
    *,
    owned: Ownership,
    probe: Probe,
    dtype: torch.dtype,
) -> Thermometers:
    """Those of a model that computes in `dtype`."""
    places, trained = sites(model, architecture, config.sites), parts(architecture, config.sites)
    return Thermometers(places, trained, owned, probe, dtype, config)


def _root(square: float) -> float:
    """√, NaN of what has none."""
    return math.sqrt(square) if square >= 0 else math.nan


def _finite(number: float | None) -> float | None:
    """As JSON has it."""
    return number if number is not None and math.isfinite(number) else None
