"""Data that does not go together, and what does: checks of [data] and [curriculum]. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator

from colonnade.config.schema import Config
from colonnade.errors import hidden

Messages = Iterator[str]


def one_kind_of_training_data(config: Config) -> Messages:
    data = config.data
    if data.train is not None and data.blend is not None:
        yield (
            f"data.train = {data.train!r} and data.blend are both set: data.blend stands in place of data.train. Put "
            "that file into data.blend with a number, or leave one of the two out."
        )
    if data.blend is not None and not data.blend:
        yield "data.blend names no token file: there is nothing to train on. Give it at least one, with a number."


def blend_keys_go_together(config: Config) -> Messages:
    data = config.data
    if data.blend is None and data.blend_by != "samples":
        yield (
            f'data.blend_by = "{data.blend_by}" says what the numbers of data.blend are, but that is not set. Set '
            "data.blend, or leave blend_by out."
        )
    if data.blend_by == "temperature" and data.temperature is None:
        yield 'data.blend_by = "temperature" needs data.temperature. Set it to 1 or more; 3 is common for languages.'
    if data.blend_by != "temperature" and data.temperature is not None:
        yield (
            f'data.temperature = {data.temperature} has no effect with data.blend_by = "{data.blend_by}". Leave it '
            'out, or use blend_by = "temperature".'
        )


def files_of_a_blend_are_told_apart(config: Config) -> Messages:
    """By the names under which they are stored, without credentials."""
    for name, count in Counter(map(hidden, config.data.blend or ())).items():
        if count > 1:
            yield (
                f"data.blend has {count} files that are {name!r} once credentials are hidden, as they are in all that "
                "a run stores: it could not tell them apart. Give them names that differ in something else."
            )


def epochs_of_a_blend(config: Config) -> Messages:
    data = config.data
    if data.blend is None:
        return
    if data.epochs is not None:
        yield (
            f"data.epochs = {data.epochs} is for data.train alone; the files of a blend have epochs of their own. "
            'Leave it out, and use data.blend_by = "epochs" to say how often each file is read.'
        )
    if data.order == "all_epochs" and data.blend_by != "epochs":
        yield (
            'data.order = "all_epochs" shuffles all epochs of a file as one and has to know how many there are. Use '
            'data.blend_by = "epochs", or data.order = "epoch".'
        )
    parts = [value for value in data.blend.values() if value != int(value)]
    if data.order == "all_epochs" and data.blend_by == "epochs" and parts:
        yield (
            f'data.blend has {parts[0]} epochs of a file: with data.order = "all_epochs" they are whole. Use whole '
            'numbers, or data.order = "epoch".'
        )


def packing_keeps_documents_apart(config: Config) -> Messages:
    packing = config.data.packing
    if packing != "stream" and config.data.documents == "joined":
        yield (
            f'data.packing = "{packing}" puts documents side by side that have nothing to do with each other, but '
            'data.documents = "joined" lets each see the one before. Set data.documents = "separate", or packing = '
            '"stream".'
        )


def only_wholes_are_too_long(config: Config) -> Messages:
    data = config.data
    if data.too_long != "cut" and data.packing != "whole":
        yield (
            f'data.too_long = "{data.too_long}" has no effect with data.packing = "{data.packing}", which cuts '
            'documents. Set data.packing = "whole", or leave too_long out.'
        )


def phases_listed_alike(config: Config) -> Messages:
    phases = config.curriculum
    sizes = {len(phases.tokens), len(phases.seq_length), len(phases.global_batch_size)}
    if len(sizes) > 1:
        yield (
            f"curriculum.tokens has {len(phases.tokens)} places, curriculum.seq_length {len(phases.seq_length)} and "
            f"curriculum.global_batch_size {len(phases.global_batch_size)}: each phase needs one in all three lists."
        )
    if phases.tokens and phases.tokens[0] != 0:
        yield f"curriculum.tokens begins with {phases.tokens[0]:,}: the first phase begins at 0. Put a 0 there."
    for before, after in zip(phases.tokens, phases.tokens[1:], strict=False):
        if after <= before:
            yield f"curriculum.tokens goes from {before:,} to {after:,}: each phase begins after the one before."


def phases_end_at_the_model(config: Config) -> Messages:
    phases, length, batch = config.curriculum, config.model.seq_length, config.train.global_batch_size
    for each in phases.seq_length:
        if length % each:
            yield (
                f"curriculum.seq_length has {each}, which does not divide model.seq_length = {length}: samples are cut "
                "in equal pieces. Use divisors."
            )
    if phases.seq_length and phases.seq_length[-1] != length:
        yield (
            f"curriculum.seq_length ends with {phases.seq_length[-1]}, but model.seq_length = {length}: the last phase "
            f"is the whole length. End with {length}."
        )
    if phases.global_batch_size and phases.global_batch_size[-1] != batch:
        yield (
            f"curriculum.global_batch_size ends with {phases.global_batch_size[-1]}, but train.global_batch_size = "
            f"{batch}: the last phase is the whole batch. End with {batch}."
        )


def phases_cut_by_ranks(config: Config) -> Messages:
    micro, dp = config.train.micro_batch_size, config.parallel.dp
    for each in config.curriculum.global_batch_size:
        if each % (micro * dp):
            yield (
                f"curriculum.global_batch_size has {each}, which is not divisible by train.micro_batch_size × "
                f"parallel.dp = {micro} × {dp} = {micro * dp}: each data-parallel rank computes whole micro-batches. "
                f"Use multiples of {micro * dp}."
            )


def phases_cut_by_sequence_parallelism(config: Config) -> Messages:
    tp = config.parallel.tp
    for each in config.curriculum.seq_length:
        if config.parallel.sequence_parallel and each % tp:
            yield (
                f"curriculum.seq_length has {each}, which parallel.tp = {tp} does not divide: "
                f"parallel.sequence_parallel cuts the sequence in equal parts. Use multiples of {tp}, or "
                "sequence_parallel = false."
            )


def phases_fill_interleaved_rounds(config: Config) -> Messages:
    parallel, micro = config.parallel, config.train.micro_batch_size
    if parallel.schedule != "interleaved":
        return
    for each in config.curriculum.global_batch_size:
        if each % (micro * parallel.dp) == 0 and each // (micro * parallel.dp) % parallel.pp:
            yield (
                f"curriculum.global_batch_size has {each}, which makes {each // (micro * parallel.dp)} micro-batches, "
                f"and parallel.pp = {parallel.pp} does not divide them: the interleaved schedule hands them round in "
                f"groups of pp. Use multiples of {micro * parallel.dp * parallel.pp}."
            )


DATA_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Config], Messages]], ...] = (
    (("data.train", "data.blend"), one_kind_of_training_data),
    (("data.blend", "data.blend_by", "data.temperature"), blend_keys_go_together),
    (("data.blend",), files_of_a_blend_are_told_apart),
    (("data.blend", "data.blend_by", "data.order", "data.epochs"), epochs_of_a_blend),
    (("data.packing", "data.documents"), packing_keeps_documents_apart),
    (("data.packing", "data.too_long"), only_wholes_are_too_long),
    (("curriculum.tokens", "curriculum.seq_length", "curriculum.global_batch_size"), phases_listed_alike),
    (
        ("curriculum.seq_length", "curriculum.global_batch_size", "model.seq_length", "train.global_batch_size"),
        phases_end_at_the_model,
    ),
    (("curriculum.global_batch_size", "train.micro_batch_size", "parallel.dp"), phases_cut_by_ranks),
    (("curriculum.seq_length", "parallel.sequence_parallel", "parallel.tp"), phases_cut_by_sequence_parallelism),
    (
        ("curriculum.global_batch_size", "train.micro_batch_size", "parallel.dp", "parallel.pp", "parallel.schedule"),
        phases_fill_interleaved_rounds,
    ),
)
