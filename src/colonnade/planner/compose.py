"""What a layout is expected to take, put together from what a micro-batch costs in one unit of each kind.

    step    = (m − 1) · slowest stage + Σ stages / v + messages there and back, once and in each round, or on the link
              that is longest at work
              + gradients and parameters over dp + gradients that several stages have + optimizer + reading
    memory  = buffers (exact) + live micro-batches · (what units keep + what they share) + one unit at work

Under zero_bubble a stage that waits runs weight gradients: of the other stages' F + B + W, W and min(F, B, W) are
hidden, this as far as there are micro-batches (`pipeline/theory.py`). What layouts share is worked out once: a search
has many thousands.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeVar

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Unit
from colonnade.config.schema import Config
from colonnade.pipeline.partition import chunks, cut, holders
from colonnade.pipeline.recompute import groups
from colonnade.pipeline.schedule import Kind, actions
from colonnade.pipeline.simulate import peak_activations, peak_microbatches
from colonnade.planner.cost import Cost
from colonnade.planner.counting import enough
from colonnade.planner.memory import Memory, buffer_bytes
from colonnade.planner.step import BYTES, Step
from colonnade.planner.teacher import readable_teacher, with_model
from colonnade.planner.teacher_time import teacher_costs, teacher_seconds
from colonnade.planner.unit_times import Costs, unit_costs
from colonnade.planner.waiting import Hop, Work, filling, waiting
from colonnade.train.teacher import cut_problems

READ_AND_WRITTEN = 28
"""[bytes] By the optimizer for each parameter: weights, gradients and two moments, all but gradients written too."""
PARTITIONS = ("layers", "parameters", "flops")
NOTHING = Memory(0, 0, 0, 0, 0)
T = TypeVar("T")


class Moment(NamedTuple):
    """[elements] Of weights, while backward is at a unit."""

    whole: int
    """Those whose gradients a rank has whole from ZeRO 2 on: they are being computed, or are under way."""
    under_way: int
    """Those of the two buckets whose gradients are being summed over dp."""
    gathered: int
    """All whose parameters are there under ZeRO 3: of the unit and of the next."""


class Kept(NamedTuple):
    """[bytes] On a stage."""

    each: int
    """Of each live micro-batch and chunk."""
    once: int
    """While one unit is at work."""
    shared: int
    """Of each live micro-batch, whatever chunks it is in: what units have in common."""
    moments: frozenset[Moment]
    """All that there are."""


class Live(NamedTuple):
    """The most that backward is to come for at once, on a stage."""

    chunks: int
    """Each of a micro-batch."""
    microbatches: int
    """Some chunk of each."""


class Lengths(NamedTuple):
    """[elements] Of the weights that a rank of a stage computes with."""

    trained: int
    frozen: int


class Composer:
    """Puts layouts of one model on one machine together."""

    def __init__(self, config: Config, vocab_size: int, cost: Cost) -> None:
        self.vocab_size, self.cost, self.device = vocab_size, cost, cost.hardware.kind
        self.architecture = trained_architecture(config, vocab_size)
        self.teacher = readable_teacher(config)
        self._known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def compose(self, config: Config) -> tuple[float, int, dict[str, float]]:
        """(seconds of a step, bytes of a rank, [s] by what for)."""
        parallel, held = config.parallel, self._held(config)
        lengths = self._once(("lengths", parallel.tp, held), lambda: self._lengths(held, parallel.tp))
        key = self._key(config)
        seconds, spent = self._step(self.times(config), lengths, config)
        taught = self._teacher_seconds(config)
        if taught:
            seconds, spent = seconds + taught, {**spent, "teacher": taught}
        stages = self._unlike(held) if self.teacher is None else range(parallel.pp)
        memory = max(
            self._memory(stage, lengths[stage], self._kept(stage, held, key, config), config)
            + self._teacher_memory(stage, config)
            for stage in stages
        )
        return seconds, memory, spent

    # --- cuts ---------------------------------------------------------------------------------------------------------

    def ways_to_cut(self, config: Config) -> Iterator[dict[str, Any]]:
        """The keys of each way to spread the units over the stages that differs from those before."""
        parallel, seen = config.parallel, set[tuple[int, ...]]()
        for partition in PARTITIONS:
            keys = {"partition": partition, "cuts": ()}
            counts = self._counts(config.model_copy(update={"parallel": parallel.model_copy(update=keys)}))
            if counts not in seen:
                seen.add(counts)
                yield keys
        by_time = self._cut_by_time(config)
        if by_time not in seen:
            yield {"partition": "layers", "cuts": by_time}

    def _counts(self, config: Config) -> tuple[int, ...]:
        """Units of each chunk."""
        parallel = config.parallel
        if parallel.cuts:
            return parallel.cuts
        key = "counts", parallel.pp, parallel.virtual_stages, parallel.partition
        return self._once(key, lambda: tuple(map(len, chunks(self.architecture, parallel))))

    def _cut_by_time(self, config: Config) -> tuple[int, ...]:
        """Units of each chunk, weighed by their planned time in tenths of the longest: the same for many layouts."""
        units, costs, again = self.architecture.units, self._costs(config), config.parallel.recompute == "full"
        each = [_unit_work(costs, unit, again).whole for unit in units]
        weights = tuple(max(1, round(10 * seconds / max(each))) for seconds in each)
        num_chunks = config.parallel.pp * config.parallel.virtual_stages
        return self._once(("cut", num_chunks, weights), lambda: tuple(cut(weights, num_chunks)))

    def _held(self, config: Config) -> tuple[tuple[int, ...], int]:
        """What says which units each stage has: units of each chunk, and the number of stages."""
        return self._counts(config), config.parallel.pp

    def _units(self, held: tuple[tuple[int, ...], int]) -> list[list[Unit]]:
        """Of each stage."""

        def make() -> list[list[Unit]]:
            counts, num_stages = held
            stages: list[list[Unit]] = [[] for _ in range(num_stages)]
            left = iter(self.architecture.units)
            for chunk, count in enumerate(counts):
                stages[chunk % num_stages] += [next(left) for _ in range(count)]
            return stages

        return self._once(("units", held), make)

    def _unlike(self, held: tuple[tuple[int, ...], int]) -> list[int]:
        """The first of the stages with the same kinds of units: those behind it have no more live micro-batches."""

        def make() -> list[int]:
            kinds = [tuple(unit.kind for unit in units) for units in self._units(held)]
            return [kinds.index(each) for each in dict.fromkeys(kinds)]

        return self._once(("unlike", held), make)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _costs(self, config: Config) -> Costs:
        return self._once(("costs", _kind(config)), lambda: unit_costs(config, self.vocab_size, self.cost, self.device))

    def times(self, config: Config) -> list[Work]:
        """Of each stage."""

        def make() -> list[Work]:
            costs, again = self._costs(config), config.parallel.recompute == "full"
            stages = ([_unit_work(costs, unit, again) for unit in units] for units in self._units(self._held(config)))
            return [Work(*map(sum, zip(*works, strict=True))) for works in stages]

        return self._once(("times", self._key(config)), make)

    def _key(self, config: Config) -> Hashable:
        """Of what a micro-batch costs on each stage, all that layouts differ in."""
        return *_kind(config), config.parallel.recompute_group, self._held(config)

    def _step(
        self, times: Sequence[Work], lengths: Sequence[Lengths], config: Config
    ) -> tuple[float, dict[str, float]]:
        parallel, cost, sizes = config.parallel, self.cost, self._sizes(config)
        length = max(each.trained for each in lengths)
        fetched = max(map(sum, lengths)) if parallel.zero == 3 else length
        count, group = config.train.num_microbatches(parallel.dp), range(0, parallel.dp * parallel.tp, parallel.tp)
        reduce = cost.slowest("all_reduce" if not parallel.zero else "reduce_scatter", sizes.reduced * length, group)
        gather = cost.slowest("all_gather", sizes.width * fetched // parallel.dp, group) if parallel.zero else 0.0
        if parallel.zero >= 2:
            gathered = gather if parallel.zero == 3 else 0.0
            times = [_with_traffic(each, gathered, reduce) for each in times]
        slowest, last = max(each.whole for each in times), max(each.backward + each.weights for each in times)
        hops = self._hops(config)
        messages = sum(hop.there_and_back for hop in hops)
        waits = self._once(
            ("waits", parallel.schedule, count, tuple(times), tuple(hops)),
            lambda: waiting(times, hops, config),
        )
        pipeline = filling(times, config) + messages + waits
        over_dp = max(reduce - last, reduce / max(1, len(self.architecture.units) // parallel.pp), 0.0)
        over_dp += max(0.0, gather - times[0].forward) if parallel.zero in (1, 2) else 0.0
        ends, optimizer = self._ends(config), self._optimizer(length, config)
        seconds = count * slowest + pipeline + over_dp + ends + optimizer
        reading = cost.reading(config, seconds)
        costs = self._costs(config)
        total = max(sum(costs.spent.values()), 1e-12)
        spent = {what: count * slowest * each / total for what, each in costs.spent.items()}
        spent |= {"pipeline": pipeline, "dp": over_dp, "ends": ends, "optimizer": optimizer, "data": reading}
        return seconds + reading, spent

    def _hops(self, config: Config) -> list[Hop]:
        """From each chunk but the last to the next."""
        units, held, parallel = self.architecture.units, self._held(config), config.parallel
        beside, pp = parallel.dp * parallel.tp, parallel.pp

        def hop(size: int, stage: int, returns: bool) -> Hop:
            whole, empty = (self.cost.message(each, (stage, (stage + 1) % pp), beside) for each in (size, 0))
            return Hop(whole, whole - empty, returns)

        def make() -> list[Hop]:
            sizes, starts = self._sizes(config), accumulate(held[0][:-1])
            into = [(units[start], chunk % pp) for chunk, start in enumerate(starts)]
            places = [(sizes.message(unit), stage, unit.sends_back) for unit, stage in into]
            known = {place: hop(*place) for place in set(places)}
            return [known[place] for place in places]

        return self._once(("hops", _kind(config), held, parallel.dp), make)

    def _ends(self, config: Config) -> float:
        """[s] Of gradients that several stages have a copy of, such as those of a tied table."""
        parallel, exact = config.parallel, self._sizes(config).exact
        shares, apart = parallel.dp if parallel.zero else 1, parallel.dp * parallel.tp
        return sum(
            self.cost.slowest(
                "all_reduce",
                self._bucket(bucket, parallel.tp).trained // shares * exact,
                [stage * apart for stage in stages],
            )
            for bucket, stages in self._holders(config).items()
        )

    def _holders(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Which stages have a copy of each bucket with trained weights that several have."""
        held = self._held(config)

        def make() -> dict[str, tuple[int, ...]]:
            found = holders(self.architecture, self._units(held), config.parallel.pp)
            return {bucket: stages for bucket, stages in found.items() if self._bucket(bucket, 1).trained}

        return self._once(("holders", held), make)

    def _sizes(self, config: Config) -> Step:
        """What says how many bytes a rank sends."""
        return Step(
            config.model,
            config.parallel,
            config.train,
            config.optim.name,
            self.vocab_size,
            0,
            cuda=self.device == "cuda",
            stated=self.architecture,
        )

    def _optimizer(self, length: int, config: Config) -> float:
        hardware, parallel = self.cost.hardware, config.parallel
        mine = length / (parallel.dp if parallel.zero else 1)
        if parallel.offload:
            return mine * (READ_AND_WRITTEN / hardware["host.memory_bandwidth"] + 6 / hardware["host.link_bandwidth"])
        return mine * READ_AND_WRITTEN / (hardware["device.memory_bandwidth"] * hardware["products.memory"])

    # --- teacher ------------------------------------------------------------------------------------------------------

    def cuts_teacher(self, config: Config) -> bool:
        """Whether the teacher can be cut as the run is."""
        teacher, parallel = self.teacher, config.parallel
        key = "teacher cut", parallel.tp, parallel.pp, parallel.dp, config.train.micro_batch_size
        return teacher is None or self._once(key, lambda: not cut_problems(teacher, config))

    def _teacher_seconds(self, config: Config) -> float:
        teacher, parallel, size = self.teacher, config.parallel, config.train.micro_batch_size
        if teacher is None:
            return 0.0
        costs = self._once(
            ("teacher costs", parallel.tp, size),
            lambda: teacher_costs(config, teacher, self.vocab_size, self.cost, self.device),
        )
        return self._once(
            ("teacher time", parallel.tp, parallel.pp, parallel.dp, size),
            lambda: teacher_seconds(config, teacher, self.vocab_size, costs),
        )

    def _teacher_memory(self, stage: int, config: Config) -> int:
        """[bytes] Of the teacher, and of what it says."""
        parallel, held = config.parallel, self._held(config)

        def make() -> int:
            units, on = self._units(held)[stage], self.device
            beside = with_model(NOTHING, config, self.teacher, self.vocab_size, units=units, stage=stage, device=on)
            return beside.total

        return self._once(
            ("teacher memory", stage, parallel.tp, parallel.dp, config.train.micro_batch_size, held), make
        )

    # --- memory -------------------------------------------------------------------------------------------------------

    def live(self, config: Config, stage: int) -> Live:
        """The most that live at once. Raises LayoutError for what cannot be scheduled."""
        parallel = config.parallel
        count = config.train.num_microbatches(parallel.dp)
        few = enough(parallel, count) if count % parallel.pp == 0 else count

        def make() -> Live:
            order = actions(parallel.schedule, stage, parallel.pp, few, parallel.virtual_stages)
            freed_by: Kind = "W" if parallel.schedule == "zero_bubble" else "B"
            return Live(peak_activations(order, freed_by), peak_microbatches(order))

        return self._once(("live", parallel.schedule, stage, parallel.pp, few, parallel.virtual_stages), make)

    def _lengths(self, held: tuple[tuple[int, ...], int], tp: int) -> list[Lengths]:
        """Of each stage."""
        return [self._length(units, tp) for units in self._units(held)]

    def _length(self, units: Sequence[Unit], tp: int) -> Lengths:
        each = self._buckets(units, tp)
        return Lengths(sum(length.trained for length in each), sum(length.frozen for length in each))

    def _buckets(self, units: Sequence[Unit], tp: int) -> list[Lengths]:
        """Of each that some of these units have."""
        return [self._bucket(bucket, tp) for bucket in {bucket for unit in units for bucket in unit.buckets}]

    def _bucket(self, bucket: str, tp: int) -> Lengths:
        def make() -> Lengths:
            found = [0, 0]
            for weight in self.architecture.buckets[bucket]:
                found[weight.is_frozen] += prod(weight.local_shape(tp))
            return Lengths(*found)

        return self._once(("bucket", bucket, tp), make)

    def _kept(self, stage: int, held: tuple[tuple[int, ...], int], key: Hashable, config: Config) -> Kept:
        units, costs = self._units(held)[stage], self._costs(config)
        split = config.parallel.schedule == "zero_bubble"
        is_ring = config.train.num_microbatches(config.parallel.dp) > 1  # the first unit follows the last

        def make() -> Kept:
            first = min((costs.of(unit).handed for unit in units if not unit.is_loss), default=0)
            each = once = 0
            shared: dict[str, int] = {}
            for group, again in groups(units, config.parallel.recompute_group):
                kept = sum(costs.of(unit).kept for unit in group)
                working = max(costs.of(unit).working for unit in group)
                common = {unit.usual_kind: costs.of(unit).shared for unit in group}
                stays = group[0].has_backward and not again
                shared |= common if stays else {}
                each += first if again else kept
                once = max(once, working if stays else working + kept + sum(common.values()))
            moments = self._moments(units, config.parallel.tp, is_ring=is_ring, split=split)
            return Kept(each, once, sum(shared.values()), frozenset(moments))

        return self._once(("kept", stage, key, is_ring, split), make)

    def _moments(self, units: Sequence[Unit], tp: int, *, is_ring: bool, split: bool) -> Iterator[Moment]:
        """Backward at each unit, and behind the first one: in a ring (`is_ring`) forward and backward of other
        micro-batches follow. `split`: weight gradients come later, unit by unit. Backward has memory for those of all
        units that it has passed, as it computes some itself (of norms), and each is whole until they have come.
        """
        around = units[:3] if is_ring else []
        ring, first = [*units, *around], self._all_of(units[:1], tp)
        pairs = [self._all_of(units[at : at + 2], tp) for at in range(len(units))]
        for at in range(-1, len(units)):
            earlier, later = (
                {b for unit in part for b in unit.buckets} for part in (units[: at + 1], units[max(at, 0) :])
            )
            gathered = pairs[max(at - 1, 0)] if at >= 0 else max(pairs) * is_ring
            if split:
                yield self._moment(later, around, gathered, tp)
                yield self._moment(earlier, units[at + 1 : at + 4], first, tp)  # fetched for what follows
            else:  # what units on both sides of it have is being added up
                yield self._moment(earlier & later, ring[at + 1 : at + 4], gathered, tp)

    def _moment(self, own: Collection[str], before: Sequence[Unit], gathered: int, tp: int) -> Moment:
        """With gradients of `own` buckets, behind those of units, the latest first, of which two are under way."""
        others = dict.fromkeys(bucket for unit in before for bucket in reversed(unit.buckets) if bucket not in own)
        two = sum([size for each in others if (size := self._bucket(each, tp).trained)][:2])
        return Moment(sum(self._bucket(bucket, tp).trained for bucket in own) + two, two, gathered)

    def _all_of(self, units: Sequence[Unit], tp: int) -> int:
        """[elements] Of their weights, frozen or not."""
        return sum(map(sum, self._buckets(units, tp)))

    def _memory(self, stage: int, lengths: Lengths, kept: Kept, config: Config) -> int:
        parallel = config.parallel
        fixed = buffer_bytes(lengths.trained, parallel, config.train, frozen=lengths.frozen)
        live = self.live(config, stage)
        stays = live.chunks * (kept.each // parallel.virtual_stages) + live.microbatches * kept.shared
        return int(fixed + stays + kept.once + max(_under_way(moment, config) for moment in kept.moments))


def _under_way(moment: Moment, config: Config) -> float:
    """[bytes] What a rank holds of gradients and parameters for a while. Those under way over dp are copied where they
    are summed in 16 bits; from ZeRO 2 on a rank gets its part of them, and has the others whole beside them.
    """
    parallel, train = config.parallel, config.train
    width, exact = BYTES[train.precision], max(BYTES[train.precision], 4)
    if parallel.dp == 1:
        return 0
    whole = moment.whole * exact if parallel.zero >= 2 else 0
    whole += width * moment.gathered if parallel.zero == 3 else 0
    if train.reduce_precision == "16-bit":
        return whole + moment.under_way * width * (1 + (1 / parallel.dp if parallel.zero else 0))
    return whole + (moment.under_way * exact / parallel.dp if parallel.zero >= 2 else 0)


def _kind(config: Config) -> tuple[int, bool, bool, int]:
    """Of what the costs of units depend on, all that layouts differ in."""
    parallel = config.parallel
    return parallel.tp, parallel.sequence_parallel, parallel.recompute == "selective", config.train.micro_batch_size


def _unit_work(costs: Costs, unit: Unit, again: bool) -> Work:
    """`again`: whole layers are computed again in backward."""
    each = costs.of(unit)
    return Work(each.forward, each.backward + each.forward * _is_recomputed(unit, again), each.weights)


def _is_recomputed(unit: Unit, again: bool) -> bool:
    return again and unit.recomputes and unit.has_backward


def _with_traffic(work: Work, gather: float, reduce: float) -> Work:
    """Where parameters are gathered and gradients summed beside each micro-batch, the slower of both counts."""
    longer = max(0.0, gather + reduce - work.backward - work.weights)
    return Work(max(work.forward, gather), work.backward + longer, work.weights)
