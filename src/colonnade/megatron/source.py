"""A checkpoint of Megatron-LM, understood: its [model], and each of our weights, joined of what ranks have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from colonnade.architecture.huggingface.keys import Keys, Refused, lines_of, shown
from colonnade.architecture.huggingface.statement import Family
from colonnade.architecture.megatron import BERT, GPT, HEAD_WORDS, WORDS
from colonnade.checkpoint.schema import clip
from colonnade.config.model import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.huggingface.folder import Published, matched, stub
from colonnade.megatron.joined import Joined, Order, as_it_is, half, heads_first, keys_and_values, queries
from colonnade.megatron.names import LAYER, TABLES, cut_dim, is_first_of_mlp, is_query_key_value, spelled
from colonnade.megatron.rank_file import Arguments, RankFile, RankTensor, tensors_of
from colonnade.megatron.ranks import Ranks, find_ranks

_TP = ("tensor_model_parallel_size", "model_parallel_size")
_PP = ("pipeline_model_parallel_size",)
_VOCABULARY = (f"{WORDS}.weight", "lm_head.bias", *TABLES)
_MADE_DIVISIBLE_BY = 128
Chunk = Mapping[str, RankTensor]


@dataclass(frozen=True)
class _Rank:
    """A rank's file, looked at."""

    path: Path
    arguments: Mapping[str, Any]
    version: float
    iteration: int | None
    chunks: tuple[Chunk, ...]
    """Its parts of the model, in the order of the model."""


def open_megatron(path: Path, tokens: Callable[[Mapping[str, Any]], int]) -> Published:
    """Read all of a checkpoint but its numbers. `tokens`: the vocabulary's true size, given the run's arguments, of
    which padded_vocab_size has padding. CheckpointError says what is wrong with it.
    """
    found = find_ranks(path)
    stages = [[_opened(RankFile(file)) for file in stage] for stage in found.files]
    first = stages[0][0]
    _check_agreement(found, [rank for stage in stages for rank in stage])
    family, model = _model_of(found, stages, tokens(first.arguments))
    tensors: dict[str, Joined] = {}
    for name, joined in _joined(found, stages, model, first.version):
        if name in tensors:
            raise CheckpointError(
                f"{tensors[name].parts[0].file.path} and {joined.parts[0].file.path} both have {clip(name)}: they are "
                f"not stages of one pipeline. Copy the files of all ranks from one place."
            )
        tensors[name] = joined
    sources, stored = matched(found.folder, family, model, tensors, described="the run's arguments in it")
    facts = {
        "iteration": first.iteration,
        "checkpoint_version": first.version,
        "layout": f"tp={found.tp},pp={found.pp}",
    }
    assert model.vocab_size is not None, "set by `_model_of`"
    tied_by = "they are one weight of a model with a tied output layer: its stages are of different steps or runs"
    return Published(found.folder, family, model, model.vocab_size, sources, stored, facts, tied_by)


def _opened(file: RankFile) -> _Rank:
    content = file.content()
    arguments = content.get("args")
    if not isinstance(arguments, Arguments):
        raise CheckpointError(
            f"{file.path} has no args: how many heads the model has is not in its tensors. Save it once more with a "
            f"version of Megatron-LM that keeps them."
        )
    version, iteration = content.get("checkpoint_version", 0), content.get("iteration")
    if type(version) not in (int, float) or not 0 <= version < 4:
        raise CheckpointError(f"{file.path} has checkpoint_version = {shown(version)}: 0 to 3 are known.")
    if iteration is not None and type(iteration) is not int:
        raise CheckpointError(f"{file.path} has iteration = {shown(iteration)}, which is no number.")
    keys = ["model"] if "model" in content else [f"model{n}" for n in range(len(content)) if f"model{n}" in content]
    chunks = [_chunk(file, content, key) for key in keys]
    if not chunks:
        raise CheckpointError(f"{file.path} has no model and no model0: it is no checkpoint of a model.")
    return _Rank(file.path, vars(arguments), float(version), iteration, tuple(chunks))


def _chunk(file: RankFile, content: Mapping[str, Any], key: str) -> dict[str, RankTensor]:
    tensors = tensors_of(file, content, key)
    found = {spelled(name): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        raise CheckpointError(
            f"{file.path} has a tensor under two spellings of its name. Get it from where it was made."
        )
    return found


def _size_of(rank: _Rank, names: Sequence[str]) -> Any:
    return next((rank.arguments[name] for name in names if rank.arguments.get(name) is not None), None)


def _check_agreement(found: Ranks, ranks: Sequence[_Rank]) -> None:
    """All files are of one run and step, and of the layout that the folders' names say."""
    first = ranks[0]
    for rank in ranks:
        for what, here, there in (
            ("checkpoint_version", first.version, rank.version),
            ("iteration", first.iteration, rank.iteration),
            ("parts of the model (virtual stages)", len(first.chunks), len(rank.chunks)),
        ):
            if here != there:
                raise CheckpointError(
                    f"{first.path} has {what} {here}, and {rank.path} has {there}: they belong to different "
                    f"checkpoints. Copy the files of all ranks from one place."
                )
        for names, size, what in ((_TP, found.tp, "tensor"), (_PP, found.pp, "pipeline")):
            written = _size_of(rank, names)
            if written is not None and written != size:
                raise CheckpointError(
                    f"{rank.path} is of a run of {what}-parallel size {shown(written)}, and the folders beside it are "
                    f"those of {size}. Copy all mp_rank folders of that checkpoint, and no others."
                )
    if found.iteration is not None and first.iteration is not None and found.iteration != first.iteration:
        raise CheckpointError(
            f"{found.folder} has the files of iteration {first.iteration:,}: they were moved or renamed."
        )


def _model_of(found: Ranks, stages: Sequence[Sequence[_Rank]], tokens: int) -> tuple[Family, ModelConfig]:
    """The same of every rank's arguments."""
    last = stages[-1][0].chunks[-1]
    family = BERT if any(name.startswith("lm_head.dense.") for name in last) else GPT
    first, given = stages[0][0], None
    for rank in (rank for stage in stages for rank in stage):
        keys = Keys(rank.arguments)
        read = family.read(keys)
        try:
            keys.finish(unknown=False)
        except Refused as refused:
            lines = lines_of(refused.lines)
            raise CheckpointError(
                f"The arguments in {rank.path} describe a model that cannot be read:\n{lines}"
            ) from None
        given = read if given is None else given
        if read != given:
            differing = ", ".join(key for key in read if read[key] != given[key])
            raise CheckpointError(
                f"{first.path} and {rank.path} have arguments of different models ({differing}): they belong to "
                f"different runs. Copy the files of all ranks from one place."
            )
    assert given is not None, "there is a rank"
    try:
        model = ModelConfig.model_validate({**given, "vocab_size": min(tokens, given["vocab_size"])})
    except ValidationError as error:
        lines = lines_of(
            [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        )
        raise CheckpointError(f"The arguments in {first.path} describe a model that cannot be:\n{lines}") from None
    stub(found.folder, model, "fp32")
    return family, model


def true_vocabulary(arguments: Mapping[str, Any], *, given: int | None, tokenizer: int | None) -> int:
    """How many rows of the token table are tokens: `given`, those of the tokenizer, or what the arguments say.
    CheckpointError where it is unknown, or does not fit the padded table.
    """
    padded = arguments.get("padded_vocab_size")
    if type(padded) is not int:
        raise CheckpointError(
            f"The run's arguments have padded_vocab_size = {shown(padded)}, which is no number of rows."
        )
    own = arguments.get("vocab_size")
    size = given if given is not None else tokenizer if tokenizer is not None else own
    if type(size) is not int:
        raise CheckpointError(
            f"The token table has {padded:,} rows, some of them padding: which are tokens is not in the checkpoint. "
            f"Name the tokenizer with `--tokenizer PATH`, or their number with `--vocab-size N`."
        )
    if not 0 < size <= padded:
        raise CheckpointError(
            f"The token table has {padded:,} rows, and the vocabulary is said to have {size:,} tokens. Name the "
            f"tokenizer that the model was trained with (`--tokenizer PATH`), or the right number (`--vocab-size N`)."
        )
    multiple = arguments.get("make_vocab_size_divisible_by")
    rows = (multiple if type(multiple) is int and multiple > 0 else _MADE_DIVISIBLE_BY) * (
        next((arguments[name] for name in _TP if type(arguments.get(name)) is int), 1)
    )
    if given is None and -(-size // rows) * rows != padded:
        raise CheckpointError(
            f"The token table has {padded:,} rows, and {size:,} tokens would be padded to {-(-size // rows) * rows:,}: "
            f"the tokenizer is probably another one. Name the right one (`--tokenizer PATH`), or confirm the number of "
            f"tokens with `--vocab-size {size}`."
        )
    return size


def _joined(
    found: Ranks, stages: Sequence[Sequence[_Rank]], model: ModelConfig, version: float
) -> Iterator[tuple[str, Joined]]:
    """Every tensor of the model under its name without a layout. Layers are counted over stages and virtual stages."""
    offset, chunks = 0, len(stages[0][0].chunks)
    for chunk in range(chunks):
        for number, stage in enumerate(stages):
            is_first, is_last = (chunk, number) == (0, 0), (chunk, number) == (chunks - 1, found.pp - 1)
            local = _same_names(stage, chunk)
            layers = {int(match[2]) for name in local if (match := LAYER.fullmatch(name))}
            for name in local:
                match = LAYER.fullmatch(name)
                whole = name if match is None else f"{match[1]}{int(match[2]) + offset}{match[3]}"
                if is_last and not is_first and name in TABLES and model.tie_embeddings:
                    whole = HEAD_WORDS
                yield from _made_of(whole, [rank.chunks[chunk][name] for rank in stage], model, version)
            offset += max(layers) + 1 if layers else 0


def _same_names(stage: Sequence[_Rank], chunk: int) -> list[str]:
    first = stage[0]
    for rank in stage[1:]:
        differing = rank.chunks[chunk].keys() ^ first.chunks[chunk].keys()
        if differing:
            raise CheckpointError(
                f"{first.path} and {rank.path} do not have the same tensors: {clip(min(differing))} is in one of them. "
                f"Copy the files of all ranks from one place."
            )
    return list(first.chunks[chunk])


def _made_of(
    whole: str, parts: Sequence[RankTensor], model: ModelConfig, version: float
) -> Iterator[tuple[str, Joined]]:
    """The tensors that are made of one of theirs: itself; of grouped heads and gated MLPs, two."""
    per_group, d = model.num_heads // model.key_value_heads, model.head_width
    first = parts[0]
    for part in parts[1:]:
        if (part.shape, part.kind) != (first.shape, first.kind):
            raise CheckpointError(
                f"{first.file.path} has {clip(first.name)} as {list(first.shape)} in {first.kind}, and "
                f"{part.file.path} as {list(part.shape)} in {part.kind}. Copy the files of all ranks from one place."
            )
    made_of: dict[str, tuple[Order, int, int]] = {whole: (as_it_is, 1, 1)}  # its share of the rows
    if is_query_key_value(whole):
        _check_rows(first, (per_group + 2) * d)
        made_of = {whole: (heads_first(version, d), 1, 1)}
        if per_group > 1:
            made_of = {
                whole.replace("query_key_value", "query"): (queries(per_group, d), per_group, per_group + 2),
                whole.replace("query_key_value", "key_value"): (keys_and_values(per_group, d), 2, per_group + 2),
            }
    elif is_first_of_mlp(whole) and model.activation == "swiglu":
        _check_rows(first, 2)
        made_of = {whole.replace("dense_h_to_4h", "gate"): (half(0), 1, 2), whole: (half(1), 1, 2)}
    for name, (order, share, of) in made_of.items():
        dim, shape = cut_dim(whole), list(first.shape)
        if dim is not None and dim < len(shape):
            shape[dim] = shape[dim] * share // of * len(parts)
        if whole in _VOCABULARY and shape:
            assert model.vocab_size is not None, "set by `_model_of`"
            shape[0] = min(shape[0], model.vocab_size)
        yield name, Joined(tuple(parts), dim, tuple(shape), order)


def _check_rows(tensor: RankTensor, multiple: int) -> None:
    if not tensor.shape or tensor.shape[0] % multiple:
        raise CheckpointError(
            f"{tensor.file.path} has {clip(tensor.name)} as {list(tensor.shape)}: its rows are no multiple of "
            f"{multiple}, as the run's arguments say. Copy the files of all ranks from one place."
        )
