"""How long a pipeline waits, without a simulation: to fill and to empty, for micro-batches to come back, on its links.

    stage 0   F0 F1 F2 F3 ·· B0 F4 ·· B1 F5        what begins before the first is back is one round; so do any later
    stage 1      F0 F1 F2 ·· B0 F3 ··              stages, with fewer micro-batches, whose links may be the slow ones

    stage 0   F0.0 F1.0 ·· F0.1 F1.1 F2.0          of two interleaved stages: what comes forward to the next chunk of a
    stage 1      F0.0 F1.0 ·· F0.1                 stage is a lap, for which it waits where nothing comes back, too

A search has many thousands of layouts: the simulator (`pipeline/simulate.py`) takes too long for it. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from colonnade.config.schema import Config


class Work(NamedTuple):
    """[s] Of a micro-batch on a stage."""

    forward: float
    backward: float
    """But for weight gradients."""
    weights: float

    @property
    def whole(self) -> float:
        return sum(self)


class Hop(NamedTuple):
    """[s] Of a micro-batch's message from a chunk to the next, and of that back, which is as large."""

    whole: float
    on_link: float
    """That no other message can be on the link."""
    returns: bool = True
    """Whether gradients come back: not to a chunk in which, and before which, nothing is trained."""

    @property
    def there_and_back(self) -> float:
        """[s]"""
        return self.whole * (1 + self.returns)


def filling(times: Sequence[Work], config: Config) -> float:
    """[s] That the pipeline takes to fill and to empty: all stages but the slowest, one after the other. Under
    zero_bubble weight gradients fill some of it, as far as there are micro-batches.
    """
    parallel, shown = config.parallel, _shown(times, config)
    if parallel.schedule == "zero_bubble":
        share = min(1.0, (config.train.num_microbatches(parallel.dp) - 1) / max(1, parallel.pp - 1))
        shown = [each - share * min(work) for each, work in zip(shown, times, strict=True)]
    slowest = max(range(len(times)), key=lambda stage: times[stage].whole)
    return sum(shown) - shown[slowest]


def waiting(times: Sequence[Work], hops: Sequence[Hop], config: Config) -> float:
    """[s] More than one micro-batch takes there and back: in rounds, in laps, or on the link longest at work."""
    return max(_rounds(times, hops, config), _laps(times, hops, config), _shared(times, hops, config))


def _rounds(times: Sequence[Work], hops: Sequence[Hop], config: Config) -> float:
    """[s] That a stage waits, all micro-batches together, for one to come back from a later chunk: it begins `begun` of
    a chunk meanwhile, a round. Of the first round some go `ahead` that do not come back in turn: each is later than the
    one before by what the slowest link between takes longer than the stages. The most of all stages and later chunks.
    A chunk to which nothing comes back waits for nothing.
    """
    parallel, shown = config.parallel, _shown(times, config)
    pp, virtual, count = parallel.pp, parallel.virtual_stages, config.train.num_microbatches(parallel.dp)
    slowest, others, found = max(work.whole for work in times) / virtual, count * virtual - 1, 0.0
    trained = sum(not hop.returns for hop in hops)
    for first in range(trained, trained + pp):
        there_and_back, late = times[first % pp].whole / virtual, 0.0
        for n, hop in enumerate(hops[first:], 2):
            last, begun = (first + n - 1) % pp, n if virtual == 1 else 2 * n - 1
            there_and_back += hop.there_and_back + shown[last]
            late = max(late, hop.on_link - slowest)
            ahead = min(_ahead(last, config), others)
            found = max(found, (others - ahead) / begun * (there_and_back - begun * slowest) + ahead * late)
    return found


def _laps(times: Sequence[Work], hops: Sequence[Hop], config: Config) -> float:
    """[s] That a stage waits, all micro-batches together, for them to come forward from one of its chunks to its next,
    a lap: pp of them follow one another in each chunk, and others behind these in the last. The most of all stages.
    """
    parallel, laps = config.parallel, config.parallel.virtual_stages - 1
    pp, groups = parallel.pp, config.train.num_microbatches(parallel.dp) // parallel.pp
    forward, slowest = sum(work.forward for work in times), max(work.whole for work in times)
    longest = max(sum(hop.whole for hop in hops[stage : stage + laps * pp]) for stage in range(pp))
    return (longest + laps * (forward - pp * slowest) / (laps + 1)) * (groups - 1)


def _shared(times: Sequence[Work], hops: Sequence[Hop], config: Config) -> float:
    """[s] That messages wait for each other, all micro-batches together, on the link that is longest at work, where
    some go ahead before the first gradients come. Of two stages, activations and gradients of all chunks share links.
    """
    parallel, shown = config.parallel, _shown(times, config)
    pp, virtual, count = parallel.pp, parallel.virtual_stages, config.train.num_microbatches(parallel.dp)
    slowest, on_links = max(work.whole for work in times), [0.0] * pp
    for chunk, hop in enumerate(hops):
        on_links[chunk % pp] += hop.on_link
        if pp == 2:
            on_links[1 - chunk % pp] += hop.on_link * hop.returns
    found = 0.0
    for stage, on_link in enumerate(on_links):
        to = (stage + 1) % pp
        behind = sum(hop.there_and_back + shown[chunk % pp] for chunk, hop in enumerate(hops[to:], to + 1))
        ahead = max(0.0, _ahead(to, config) * on_link / virtual - behind)
        found = max(found, (count - 1) * (on_link - slowest) + ahead)
    return found


def _shown(times: Sequence[Work], config: Config) -> list[float]:
    """[s] Of each stage, that a micro-batch takes in a chunk on its way there and back."""
    split, virtual = config.parallel.schedule == "zero_bubble", config.parallel.virtual_stages
    return [(work.forward + work.backward if split else work.whole) / virtual for work in times]


def _ahead(stage: int, config: Config) -> int:
    """Chunks that a stage runs forward before its first backward, but for the last of them."""
    pp, virtual = config.parallel.pp, config.parallel.virtual_stages
    return pp - 1 - stage if virtual == 1 else 2 * (pp - 1 - stage) + (virtual - 1) * pp
