"""Layouts that cannot be, and the nearest that can: checks of [parallel] beside the other sections. Pure."""

from collections.abc import Iterator

from colonnade.config.model import ModelConfig
from colonnade.config.numbers import counted, divisors, either, multiples_around, nearest_divisors, one_of
from colonnade.config.schema import Config

Messages = Iterator[str]
SIXTEEN_BIT = ("bf16", "fp16")


def units_for_every_chunk(config: Config) -> Messages:
    """Every chunk of every stage holds at least one unit."""
    parallel, units = config.parallel, config.model.num_units
    chunks = parallel.pp * parallel.virtual_stages
    if chunks <= units:
        return
    held = f"{units_in_words(config.model)} are {units} units"
    if parallel.virtual_stages > 1:
        yield (
            f"parallel.pp × parallel.virtual_stages = {parallel.pp} × {parallel.virtual_stages} = {chunks} chunks, but "
            f"{held}: each chunk needs one. Use {_fewer_chunks(config)}."
        )
    else:
        yield (
            f"parallel.pp = {parallel.pp} stages, but {held}: each stage needs one. "
            f"Use at most {units}, or more layers."
        )


def _fewer_chunks(config: Config) -> str:
    """What is left of virtual stages where there are too many chunks."""
    parallel, most = config.parallel, config.model.num_units // config.parallel.pp
    if most == 0:
        return "fewer stages, or more layers"
    plain = ' with schedule = "1f1b",' if most == 1 and parallel.schedule == "interleaved" else ""
    return f"virtual_stages = {most}{plain} or fewer stages"


def cuts_fit(config: Config) -> Messages:
    """Explicit cuts name every unit once."""
    parallel, units = config.parallel, config.model.num_units
    chunks = parallel.pp * parallel.virtual_stages
    if not parallel.cuts:
        return
    needed = f"Give {counted(chunks, 'number')}, {units} in all."
    if len(parallel.cuts) != chunks:
        yield (
            f"parallel.cuts has {counted(len(parallel.cuts), 'number')}, but parallel.pp × parallel.virtual_stages = "
            f"{parallel.pp} × {parallel.virtual_stages} = {chunks}: a number for each chunk. {needed}"
        )
    elif sum(parallel.cuts) != units:
        yield (
            f"parallel.cuts = {list(parallel.cuts)} sums to {sum(parallel.cuts)}, but the model has {units} units: "
            f"{units_in_words(config.model)}. {needed}"
        )


def virtual_stages_have_their_schedule(config: Config) -> Messages:
    """Only one schedule knows virtual stages, and it needs them."""
    parallel = config.parallel
    if parallel.virtual_stages > 1 and parallel.schedule != "interleaved":
        yield (
            f"parallel.virtual_stages = {parallel.virtual_stages} does not go with parallel.schedule = "
            f'"{parallel.schedule}", which runs one chunk a stage. Use schedule = "interleaved", or virtual_stages = 1.'
        )
    if parallel.virtual_stages == 1 and parallel.schedule == "interleaved":
        yield (
            'parallel.schedule = "interleaved" with parallel.virtual_stages = 1 has nothing to interleave. Use '
            'virtual_stages = 2 or more, or schedule = "1f1b".'
        )


def microbatches_fill_rounds(config: Config) -> Messages:
    """Interleaving hands micro-batches round in groups of pp."""
    parallel, train = config.parallel, config.train
    num_microbatches = train.num_microbatches(parallel.dp)
    if parallel.schedule != "interleaved" or parallel.virtual_stages == 1 or num_microbatches % parallel.pp == 0:
        return
    whole = train.micro_batch_size * parallel.dp * parallel.pp
    below, above = multiples_around(train.global_batch_size, whole)
    yield (
        f"a step has {num_microbatches} micro-batches (train.global_batch_size ÷ train.micro_batch_size ÷ parallel.dp "
        f"= {train.global_batch_size} ÷ {train.micro_batch_size} ÷ {parallel.dp}), which parallel.pp = {parallel.pp} "
        f"does not divide: the interleaved schedule hands them round in groups of pp. Use "
        f'{_samples_for(config)}{_stages_for(config)}schedule = "1f1b" with virtual_stages = 1; or, in a new run, a '
        f"global_batch_size of {either(below, above)}."
    )


def _samples_for(config: Config) -> str:
    """Another size of micro-batches with which the same batch fills rounds, in words."""
    rounds = config.parallel.dp * config.parallel.pp
    total, micro = config.train.global_batch_size, config.train.micro_batch_size
    return (
        f"a micro_batch_size of {one_of(nearest_divisors(total // rounds, micro))}, or " if total % rounds == 0 else ""
    )


def _stages_for(config: Config) -> str:
    """Another number of stages that divides the micro-batches, in words."""
    most = config.model.num_units // config.parallel.virtual_stages
    possible = [pp for pp in divisors(config.train.num_microbatches(config.parallel.dp)) if 1 < pp <= most]
    return f"pp = {one_of(possible)}, or " if possible else ""


def sequence_cut_by_tp(config: Config) -> Messages:
    """Every tp rank has an equal part of the sequence."""
    tp, model = config.parallel.tp, config.model
    lengths = {"seq_length": model.seq_length}
    if model.decoder_layers:
        lengths["decoder_seq_length"] = model.decoder_length
    for key, length in lengths.items():
        if config.parallel.sequence_parallel and length % tp:
            below, above = multiples_around(length, tp)
            yield (
                f"parallel.sequence_parallel cuts the sequence in parallel.tp = {tp} equal parts, and model.{key} = "
                f"{length} is not divisible by it. Use a {key} of {either(below, above)}, or "
                "sequence_parallel = false."
            )


def offload_has_a_master_copy(config: Config) -> Messages:
    """Only 16-bit training has master weights that can be elsewhere."""
    if config.parallel.offload and config.train.precision not in SIXTEEN_BIT:
        yield (
            f"parallel.offload keeps master weights in CPU memory, but under train.precision = "
            f'"{config.train.precision}" there is no master copy: the optimizer updates the parameters themselves. '
            'Use precision = "bf16", or offload = false.'
        )


def narrow_reduction_of_narrow_gradients(config: Config) -> Messages:
    """16-bit reduction rounds to the compute format, which must be one of 16 bits."""
    if config.train.reduce_precision == "16-bit" and config.train.precision not in SIXTEEN_BIT:
        yield (
            f'train.reduce_precision = "16-bit" rounds gradients to the compute format, which under train.precision = '
            f'"{config.train.precision}" is none of 16 bits. Use precision = "bf16", or reduce_precision = "fp32".'
        )


def groups_are_recomputed(config: Config) -> Messages:
    """A group's length means something only where groups are recomputed."""
    every, kind = config.parallel.recompute_every, config.parallel.recompute
    if every > 1 and kind != "full":
        yield (
            f'parallel.recompute_every = {every} has no effect with parallel.recompute = "{kind}". Use recompute = '
            '"full", or leave recompute_every out.'
        )


def loss_scale_above_its_minimum(config: Config) -> Messages:
    """The loss scale starts within its range."""
    start, least = config.train.loss_scale, config.train.min_loss_scale
    if start < least:
        yield (
            f"train.loss_scale = {start:g} is below train.min_loss_scale = {least:g}: the first overflow would end the "
            f"run. Use a loss_scale of {least:g} or more."
        )


def units_in_words(model: ModelConfig) -> str:
    """What there is to cut between."""
    first, second = model.num_layers, model.decoder_layers
    if not second:
        return f"{first} blocks, the embedding and the head"
    return f"{first} and {second} blocks, two embeddings and the head"


UNITS = ("model.kind", "model.num_layers", "model.num_decoder_layers")
"""Keys that say how many units there are."""
LAYOUT_CHECKS = (
    (("parallel.pp", "parallel.virtual_stages", *UNITS), units_for_every_chunk),
    (("parallel.cuts", "parallel.pp", "parallel.virtual_stages", *UNITS), cuts_fit),
    (("parallel.virtual_stages", "parallel.schedule"), virtual_stages_have_their_schedule),
    (
        (
            "parallel.schedule",
            "parallel.virtual_stages",
            "parallel.pp",
            "parallel.dp",
            "train.global_batch_size",
            "train.micro_batch_size",
        ),
        microbatches_fill_rounds,
    ),
    (
        (
            "parallel.sequence_parallel",
            "parallel.tp",
            "model.kind",
            "model.seq_length",
            "model.decoder_seq_length",
        ),
        sequence_cut_by_tp,
    ),
    (("parallel.offload", "train.precision"), offload_has_a_master_copy),
    (("train.reduce_precision", "train.precision"), narrow_reduction_of_narrow_gradients),
    (("parallel.recompute", "parallel.recompute_every"), groups_are_recomputed),
    (("train.loss_scale", "train.min_loss_scale"), loss_scale_above_its_minimum),
)
