"""What one rank sends in one training step, by theory: how often, how many bytes, over which axis, for what. Pure.

Written from the papers and not from the program, so that the ledger can be held against it (`train --audit`):

    tensor parallelism      2 all-reduces forward and 2 backward a layer, of s·b·h numbers (Megatron-LM, section 3);
                            one more for the embedding, one for the head, two numbers a token for the loss
    sequence parallelism    each all-reduce as a reduce-scatter and an all-gather, and one all-gather more before each
                            weight gradient (Korthikanti et al., 2022, section 4.2.2); the gradients of weights that
                            all ranks have alike, summed once a step
    data parallelism        each gradient once a step; under ZeRO 2 and 3 once a micro-batch
    ZeRO 1, 2               each parameter gathered once a step (Rajbhandari et al., 2020, section 7)
    ZeRO 3                  each parameter gathered whenever its layer is about to run and is not there already
    pipeline                the residual stream forward and its gradient back, for each micro-batch and each cut
    full recomputation      everything that a layer sends forward, twice
    frozen parts            no gradients over dp; no backward where nothing at or below is trained; no all-gather for a
                            weight gradient that nobody wants

Bytes are those of the tensor that a rank puts in (or receives), as in the ledger.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.architecture.adapters import LORA_A, LORA_B
from colonnade.architecture.bert import label_outputs
from colonnade.architecture.sites import parts, sites
from colonnade.architecture.statement import Sublayer, Unit, vocab_rows_per_rank
from colonnade.pipeline.messages import sends
from colonnade.pipeline.partition import chunks
from colonnade.pipeline.recompute import groups
from colonnade.planner.local import ranges
from colonnade.planner.step import Step
from colonnade.tensor_parallel.logits import CHUNK_LOGITS, CUDA_CHUNKS

COLUMNS = ("qkv.", "query.", "key_value.", "up.", "gate.", "query_norm.", "key_norm.")
"""Of a sublayer: what comes before the layer that is cut by rows."""
OF_A_SITE, OF_A_PART = 7, 4  # numbers of the thermometers
NUMBER = 8  # bytes of one number that all ranks must agree on, float64


@dataclass(frozen=True)
class Flow:
    """One reason to send, summed over a step."""

    axis: str
    operation: str
    what: str
    count: int
    bytes: int
    """In all, not each."""


def traffic(step: Step) -> list[Flow]:
    """Everything that a rank sends in a step, by reason."""
    kinds = (
        _blocks,
        _adapters,
        _embedding,
        _head,
        _first_positions,
        _spans,
        _replicated,
        _gradients,
        _parameters,
        _shared,
        _pipeline,
        _numbers,
        _lamb,
        _thermometers,
    )
    return [flow for kind in kinds for flow in kind(step) if flow.count and step.size(flow.axis) > 1]


def totals(flows: Sequence[Flow]) -> dict[tuple[str, str], tuple[int, int]]:
    """(count, bytes) by (operation, axis)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for flow in flows:
        count, size = found.get((flow.operation, flow.axis), (0, 0))
        found[flow.operation, flow.axis] = count + flow.count, size + flow.bytes
    return found


# --- inside the model: over tp ----------------------------------------------------------------------------------------


def _over_tp(step: Step, operation: str, what: str, lengths: Sequence[int]) -> Flow:
    """An operation on a stream of each of these lengths, each micro-batch. Into an all-gather goes this rank's part."""
    cut = step.parallel.tp if operation == "all_gather" else 1
    n = step.num_microbatches
    return Flow("tp", operation, what, n * len(lengths), n * sum(step.stream(length) // cut for length in lengths))


def _blocks(step: Step) -> Iterator[Flow]:
    blocks = [unit for chunk in step.chunks for unit in chunk if unit.recomputes]
    full = step.parallel.recompute == "full"
    forward = [*blocks, *(unit for unit in blocks if full and unit.has_backward)]
    again = ", and again in recomputation" if len(forward) > len(blocks) else ""
    back = [each for unit in blocks for each in _back(step, unit)]
    into, out, gathered = ([length for each in back for length in each[place]] for place in range(3))
    entered = [length for unit in forward for each in unit.sublayers for length in _streams(unit, each)]
    left = [unit.length for unit in forward for _ in unit.sublayers]
    each, parts = _in_words(blocks)
    if not step.parallel.sequence_parallel:
        yield _over_tp(step, "all_reduce", f"{each} a layer forward, behind {parts}{again}", left)
        yield _over_tp(step, "all_reduce", f"{each} a layer backward, before {parts}", into)
        return
    yield _over_tp(step, "all_gather", f"{each} a layer forward, before {parts}{again}", entered)
    yield _over_tp(step, "reduce_scatter", f"{each} a layer forward, behind {parts}{again}", left)
    yield _over_tp(step, "all_gather", f"{each} a layer backward, behind {parts}", out)
    yield _over_tp(step, "reduce_scatter", f"{each} a layer backward, before {parts}", into)
    yield _over_tp(step, "all_gather", f"{each} a layer backward, what its weight gradients are made of", gathered)


def _in_words(blocks: Sequence[Unit]) -> tuple[str, str]:
    """How many sublayers blocks have, and which."""
    if any(each.memory for unit in blocks for each in unit.sublayers):
        return "2 or 3", "attention, cross attention and MLP"
    return "2", "attention and MLP"


def _streams(unit: Unit, sublayer: Sublayer) -> tuple[int, ...]:
    """Lengths of the streams that a sublayer reads."""
    return (unit.length, sublayer.memory) if sublayer.memory else (unit.length,)


def _back(step: Step, unit: Unit) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Of each sublayer, lengths of streams: of those that it reads and that have a gradient, of what it adds if that
    has one, of those that trained weights read. All of them, where nothing is frozen.
    """
    for sublayer, into in _sublayers(step, unit):
        name, length, memory = sublayer.name, unit.length, sublayer.memory
        own = [f"{name}.qkv.", f"{name}.query.", f"{name}.up.", f"{name}.gate."]
        others = [f"{name}.key_value."]
        reads = step.trains(unit, *(f"{each}weight" for each in (own if memory else own + others)))
        reads_memory = memory > 0 and step.trains(unit, f"{others[0]}weight")
        yield (
            [length] * into + [memory] * (memory > 0 and unit.sends_back),
            [length] * (into or _trains_inside(step, unit, name)),
            [length] * reads + [memory] * reads_memory,
        )


def _sublayers(step: Step, unit: Unit) -> Iterator[tuple[Sublayer, bool]]:
    """Each sublayer, and whether what it reads of the unit's own stream has a gradient: always where a second stream
    has one.
    """
    pre, flows = step.model.norm_position == "pre", unit.sends_back
    for sublayer in unit.sublayers:
        norm = f"{sublayer.name}_norm."
        into = flows or (pre and step.trains(unit, norm))
        yield sublayer, into
        if not step.model.parallel_residual:  # where the next sublayer does not read what this one has added to
            flows = into or step.trains(unit, f"{sublayer.name}.", norm)


def _trains_inside(step: Step, unit: Unit, name: str) -> bool:
    """Whether something is trained in a sublayer before its sum over tp."""
    return step.trains(unit, *(f"{name}.{each}" for each in (*COLUMNS, "output.weight", "down.weight")))


def _adapters(step: Step) -> Iterator[Flow]:
    """What is rank-wide between A and B of an adapter: into columns, out of rows."""
    every = [each for chunk in step.chunks for unit in chunk for each in _between(step, unit)]
    columns, rows = ([each for each in every if each.is_row == is_row] for is_row in (False, True))
    into, out = ([each.length for each in kind for _ in range(each.times)] for kind in (columns, rows))
    back = [[each.length for each in kind if each.has_gradient] for kind in (columns, rows)]
    if not step.parallel.sequence_parallel:
        yield _rank_wide(step, "all_reduce", "adapters forward", out)
        yield _rank_wide(step, "all_reduce", "adapters backward", back[0])
        return
    again = [each.length for each in columns if each.is_read]
    yield _rank_wide(step, "all_gather", "adapters", [*into, *back[1], *again])
    yield _rank_wide(step, "reduce_scatter", "adapters", [*out, *back[0]])


class _Between(NamedTuple):
    """The middle of one adapter."""

    is_row: bool
    length: int
    times: int
    """Forward, again in recomputation."""
    has_gradient: bool
    is_read: bool
    """For B's gradient."""


def _between(step: Step, unit: Unit) -> Iterator[_Between]:
    names = {weight.name: weight for bucket in unit.buckets for weight in step.architecture.buckets[bucket]}
    times = 2 if unit.recomputes and unit.has_backward and step.parallel.recompute == "full" else 1
    for sublayer, into in _sublayers(step, unit):
        for name in names:
            if not (name.endswith(LORA_A) and name.startswith(f"{sublayer.name}.")):
                continue
            module, is_row = name.removesuffix(LORA_A), names[name].cut is not None
            of_memory = sublayer.memory > 0 and module.endswith(".key_value")
            before = unit.sends_back if of_memory else into
            before = before or (is_row and _trains_columns(step, unit, sublayer))
            length = sublayer.memory if of_memory else unit.length
            yield _Between(is_row, length, times, before or step.trains(unit, name), step.trains(unit, module + LORA_B))


def _trains_columns(step: Step, unit: Unit, sublayer: Sublayer) -> bool:
    """Whether what a sublayer's row-parallel layer reads has a gradient, though what the sublayer reads has none."""
    return step.trains(unit, *(f"{sublayer.name}.{each}" for each in COLUMNS))


def _rank_wide(step: Step, operation: str, what: str, lengths: Sequence[int]) -> Flow:
    adapters = step.architecture.adapters
    each = step.train.micro_batch_size * (adapters.rank if adapters else 0) * step.width
    cut, n = step.parallel.tp if operation == "all_gather" else 1, step.num_microbatches
    size = sum(length * each // cut for length in lengths)
    return Flow("tp", operation, f"{what}, rank-wide", n * len(lengths), n * size)


def _embedding(step: Step) -> Iterator[Flow]:
    units = [unit for chunk in step.chunks for unit in chunk if unit.reads_tokens]
    every, trained = (
        [unit.length for unit in units if _trains_table(step, unit) or not only] for only in (False, True)
    )
    if not step.parallel.sequence_parallel:
        yield _over_tp(step, "all_reduce", "embedding forward", every)
        return
    yield _over_tp(step, "reduce_scatter", "embedding forward", every)
    yield _over_tp(step, "all_gather", "embedding backward", trained)


def _trains_table(step: Step, unit: Unit) -> bool:
    """Whether the first of the buckets that a unit reads, its token table, is trained."""
    return not all(weight.is_frozen for weight in step.architecture.buckets[unit.buckets[0]])


def _head(step: Step) -> Iterator[Flow]:
    """An output layer and the loss of tokens."""
    of_tokens = step.model.head in ("pretraining", "preferences")
    for unit in (unit for chunk in step.chunks for unit in chunk if unit.is_loss and of_tokens):
        n, tokens = step.num_microbatches, unit.length * step.train.micro_batch_size
        rows = vocab_rows_per_rank(step.vocab_size, step.parallel.tp)
        limit = CHUNK_LOGITS * CUDA_CHUNKS if step.cuda else CHUNK_LOGITS
        chunks = max(1, -(-tokens * rows // limit))
        chunks = -(-tokens // -(-tokens // chunks))  # equal chunks of tokens: there may be fewer
        twice = 1 + (step.model.head == "preferences")  # for what each pair weighs first
        yield Flow(
            "tp", "all_gather", "loss, 2 numbers a token", n * chunks * twice, n * 2 * tokens * step.exact * twice
        )
        back = [unit.length] * (unit.sends_back or step.trains(unit, "norm.", "dense"))
        if not step.parallel.sequence_parallel:
            yield _over_tp(step, "all_reduce", "head backward", back)
            return
        yield _over_tp(step, "all_gather", "head forward", [unit.length] * twice)
        yield _over_tp(step, "reduce_scatter", "head backward", back)


def _first_positions(step: Step) -> Iterator[Flow]:
    """A loss of each sequence's first position: a column-parallel layer, and a row-parallel one of few outputs.
    Backward as far as something is trained.
    """
    of_pairs, labels = step.num_losses > 1, step.model.head in ("classification", "choice")
    for unit in (unit for chunk in step.chunks for unit in chunk if unit.is_loss and (of_pairs or labels)):
        n, tp = step.num_microbatches, step.parallel.tp
        columns, row_parallel = (
            step.train.micro_batch_size * step.model.sequences,
            "order" if of_pairs else "classifier",
        )
        row = columns * step.model.hidden_size * step.width
        logits = columns * (2 if of_pairs else label_outputs(step.model)) * step.width
        into = n * (unit.sends_back or step.trains(unit, "norm."))
        inner = n * (into > 0 or step.trains(unit, "pooler.", f"{row_parallel}.weight"))
        if not step.parallel.sequence_parallel:
            yield Flow("tp", "all_reduce", "logits of first positions forward", n, n * logits)
            yield Flow("tp", "all_reduce", "first positions backward", into, into * row)
            return
        read = n * step.trains(unit, "pooler.weight")
        yield Flow("tp", "all_gather", "first positions forward", n, n * row)
        yield Flow("tp", "reduce_scatter", "logits of first positions forward", n, n * logits * tp)
        yield Flow("tp", "all_gather", "logits of first positions backward", inner, inner * logits)
        yield Flow("tp", "reduce_scatter", "first positions backward", into, into * row * tp)
        yield Flow("tp", "all_gather", "first positions backward, what a weight gradient is made of", read, read * row)
        yield Flow("tp", "all_reduce", "loss of first positions, from the first rank", n, n * step.exact)


def _spans(step: Step) -> Iterator[Flow]:
    """A loss of all positions of a sequence, of two logits each, which every rank computes: nothing is sent but what
    gathers the logits of a cut sequence.
    """
    for unit in (unit for chunk in step.chunks for unit in chunk if unit.is_loss and step.model.head == "spans"):
        if not step.parallel.sequence_parallel:
            return
        n, logits = step.num_microbatches, unit.length * step.train.micro_batch_size * 2 * step.width
        yield Flow("tp", "all_gather", "logits of positions forward", n, n * logits // step.parallel.tp)
        yield Flow("tp", "reduce_scatter", "logits of positions backward", n, n * logits)
        yield Flow("tp", "all_reduce", "loss of positions, from the first rank", n, n * step.exact)


def _replicated(step: Step) -> Iterator[Flow]:
    """Gradients of weights that all tp ranks have alike, of this rank's slice: under sequence parallelism all of them,
    else those of which each rank uses a shard.
    """
    every = step.parallel.sequence_parallel
    numbers = sum(
        _in_slice(step, bucket, start, stop)
        for bucket, weights in step.weights.items()
        for kind, start, stop in ranges(weights)
        if kind.is_partial or (every and kind.is_replicated)
    )
    yield Flow("tp", "all_reduce", "gradients of replicated weights", int(numbers > 0), numbers * step.exact)


def _in_slice(step: Step, bucket: str, start: int, stop: int) -> int:
    """How many elements of a range of a bucket lie in this rank's slice."""
    share = step.lengths[bucket] // step.shares
    first = share * (step.place["dp"] if step.parallel.zero else 0)
    return max(0, min(stop, first + share) - max(start, first))


# --- ownership: over dp, and between the ends of the pipeline ---------------------------------------------------------


def _gradients(step: Step) -> Iterator[Flow]:
    zero, n = step.parallel.zero, step.num_microbatches
    times, often = (n, "micro-batch") if zero >= 2 else (1, "step")
    operation = "reduce_scatter" if zero else "all_reduce"
    count, size = times * len(step.lengths), times * sum(step.lengths.values()) * step.reduced
    yield Flow("dp", operation, f"gradients of each bucket once a {often}", count, size)


def _parameters(step: Step) -> Iterator[Flow]:
    zero = step.parallel.zero
    if zero < 3:
        times = dict.fromkeys(step.lengths, int(zero in (1, 2) and not step.skipped))
        yield _gathered(step, "updated parameters of each bucket", times, step.lengths)
        return
    yield _gathered(step, "parameters of each bucket for each use", _gathers(step), step.lengths)
    yield _gathered(step, "frozen parameters of each bucket for each use", _gathers(step), step.frozen_lengths)


def _gathered(step: Step, what: str, times: Mapping[str, int], lengths: Mapping[str, int]) -> Flow:
    size = sum(times[bucket] * length // step.parallel.dp * step.width for bucket, length in lengths.items())
    return Flow("dp", "all_gather", what, sum(times[bucket] for bucket in lengths), size)


def _gathers(step: Step) -> dict[str, int]:
    """ZeRO 3: how often each bucket is gathered, if what is used twice in a row is kept."""
    wanted = [set(unit.buckets) for unit in _uses(step)]
    counts, here = dict.fromkeys([*step.lengths, *step.frozen_lengths], 0), set[str]()
    for buckets in wanted:
        for bucket in buckets - here:
            counts[bucket] += 1
        here = buckets
    return counts


def _uses(step: Step) -> Iterator[Unit]:
    """The units that this rank runs in a step, forward and backward, in their order."""
    for action in step.schedules[step.place["pp"]]:
        if action.kind == "F":
            yield from step.chunks[action.chunk]
        elif action.kind == "B":
            for group, again in reversed(groups(step.chunks[action.chunk], step.parallel.recompute_group)):
                yield from (unit for unit in [*(group if again else []), *reversed(group)] if unit.has_backward)


def _shared(step: Step) -> Iterator[Flow]:
    for bucket, stages in step.holders.items():
        size = step.lengths.get(bucket, 0) // step.shares * step.exact
        what = f"gradients of {bucket}, which stages {', '.join(map(str, stages))} have"
        yield Flow(step.layout.axis_of(stages), "all_reduce", what, int(size > 0), size)


# --- the pipeline, and what all ranks agree on ------------------------------------------------------------------------


def _pipeline(step: Step) -> Iterator[Flow]:
    stage = step.place["pp"]
    sent = sends(step.schedules, step.parallel.pp * step.parallel.virtual_stages, step.first_trained)
    out = [each for each in sent[stage] if each.to != stage]
    come = [each for other, all_ in enumerate(sent) if other != stage for each in all_ if each.to == stage]
    starts = [units[0] for units in chunks(step.architecture, step.parallel)]
    for operation, messages in (("send", out), ("receive", come)):
        for kind, what in (("F", "residual stream"), ("B", "its gradient")):
            taken = [starts[each.message.chunk + (kind == "F")] for each in messages if each.message.kind == kind]
            tensors, size = sum(len(unit.takes) for unit in taken), sum(map(step.message, taken))
            yield Flow("pp", operation, f"{what}, each micro-batch", tensors, size)


def _numbers(step: Step) -> Iterator[Flow]:
    k = step.num_losses
    yield Flow("dp", "all_reduce", "what counts in each loss, losses", 2, 2 * k * NUMBER)
    yield Flow("pp", "all_reduce", "losses, from the last stage", 1, k * NUMBER)
    yield Flow("world" if step.parallel.zero else "model", "all_reduce", "gradient norm", 1, NUMBER)


def _lamb(step: Step) -> Iterator[Flow]:
    if step.optimizer == "lamb" and not step.skipped:
        size = 2 * NUMBER * sum(map(len, step.weights.values()))
        yield Flow("stage" if step.parallel.zero else "tp", "all_reduce", "LAMB's norms, 2 a weight", 1, size)


def _thermometers(step: Step) -> Iterator[Flow]:
    if step.measured:
        places = len(sites(step.model, step.architecture, step.measured))
        trained = len(parts(step.architecture, step.measured))
        size = NUMBER * (OF_A_SITE * places + OF_A_PART * trained)
        yield Flow("world", "all_reduce", "thermometers, 7 numbers a site and 4 a part", 2, size)
