"""A trained model in use: opened from its checkpoint, it writes text or is measured on one."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.checkpoint.confined import read_plain
from colonnade.checkpoint.load import check_model, check_tensors, load
from colonnade.checkpoint.manifest import (
    Manifest,
    check_hash,
    check_sizes,
    read_manifest,
    remedy,
)
from colonnade.checkpoint.plan import Shard
from colonnade.config.compare import model_metadata
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig
from colonnade.data.chat_template import ChatTemplate, TemplateFault
from colonnade.data.conversation import Chat
from colonnade.data.t5_dataset import GAP, end_and_start, text_with_gaps
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError, DataError, LayoutError
from colonnade.examples.conversations import Conversation
from colonnade.generation.prompts import control_note
from colonnade.generation.sample import Stages, generate
from colonnade.generation.sampling import Sampling
from colonnade.generation.stream import TextDelta, end_note, prompt_tokens, stream_text
from colonnade.huggingface.folder import is_published
from colonnade.huggingface.peft import is_peft
from colonnade.launch.agreement import on_all_ranks
from colonnade.launch.devices import choose_device
from colonnade.launch.join import joined
from colonnade.launch.launch import ask_for_queues, num_local_ranks
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.model.gpt import GPT
from colonnade.model.model import Transformer
from colonnade.model.precision import DTYPES
from colonnade.model.t5 import T5
from colonnade.outputs import json_of
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.serving.memory_limit import InUse, within_memory
from colonnade.serving.options import device_problems, layout_problems, no_checkpoint
from colonnade.tasks.task import Hidden
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements
from colonnade.tokenizer_files import CONFIG as CHAT
from colonnade.train.base import BaseMetadata, base_path, check_base, check_given_base, content_together
from colonnade.train.init_from import origin_together
from colonnade.train.metadata import MOST_BYTES, RunMetadata, config_of, metadata_of
from colonnade.train.newest import as_rank_0, checkpoint_at
from colonnade.train.products import served_by, slices_of
from colonnade.train.published import ends_of, object_of, start_of, unsaid_end, with_end_of
from colonnade.train.recovery import OPTIMIZER, shard
from colonnade.train.state import build_model


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model, with what is needed to use it."""

    path: Path
    """The checkpoint."""
    model: Transformer
    """This rank's part."""
    mesh: Mesh
    hidden: Hidden
    """How the ranks compute what goes into the losses."""
    tokenizer: Tokenizer
    config: Config
    step: int
    precision: str
    """In which it computes."""
    base: BaseMetadata | None = None
    """Of adapters."""
    base_at: Path | None = None
    """Where it was said to lie now; None: where it lay."""
    template: ChatTemplate | None = None
    """How conversations are written down, where the checkpoint says it."""
    labels: tuple[str, ...] = ()
    """Names of what a classifier tells apart, where the checkpoint says them."""
    is_converted: bool = False
    """Whether the checkpoint is a published model as it was converted."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a text, where the checkpoint says them."""
    start: int | None = None
    """The token that a T5's own text begins with, where the checkpoint says it."""

    @cached_property
    def chat(self) -> Chat:
        """For what answers. ConfigError for a model that was not told how conversations are written down."""
        if self.template is None or not isinstance(self.model, GPT):
            raise ConfigError(
                f"the checkpoint has no {CHAT} with a chat template, as runs on conversations have: how a question is "
                "put is not known. Fine-tune it on files of `colonnade data examples chat`, or leave out --chat."
            )
        return Chat(self.template, self.tokenizer)

    @property
    def stages(self) -> Stages:
        """For what writes text. ConfigError for a model that does not."""
        if isinstance(self.model, T5):
            start = end_and_start(self.tokenizer)[1] if self.start is None else self.start
            return Stages(self.model, self.mesh.tp, self.mesh.pp, self.hidden, start)
        if not isinstance(self.model, GPT):
            raise ConfigError(f"a model of kind {self._kind} does not go on with a text. {_HELD_OUT}")
        return Stages(self.model, self.mesh.tp, self.mesh.pp, self.hidden)

    @property
    def left_to_right(self) -> GPT:
        """The model, if it gives every token of a text a chance. ConfigError for one that does not."""
        if not isinstance(self.model, GPT):
            raise ConfigError(f"a model of kind {self._kind} gives the tokens of a text no chances. {_HELD_OUT}")
        return self.model

    @property
    def _kind(self) -> str:
        return f'"{self.config.model.kind}"'

    @property
    def stop(self) -> frozenset[int]:
        """The tokens that end what is written: where the checkpoint says none, the one that ends documents; and of a
        run that knows how conversations are written down, the one that ends an answer.
        """
        knows_turns = isinstance(self.model, GPT) and self.template is not None and not self.is_converted
        found = (*(self.ends or (self._end,)), self.chat.end_of_turn if knows_turns else None)
        return frozenset(token for token in found if token is not None)

    @property
    def _end(self) -> int | None:
        """The token that ends documents."""
        is_t5 = isinstance(self.model, T5)
        return end_and_start(self.tokenizer)[0] if is_t5 else self.tokenizer.end_of_document

    def spelled(self, text: str) -> list[str]:
        """Names of control tokens that a prompt has and that are read as text, unless it is asked otherwise."""
        read = GAP.findall(text) if isinstance(self.model, T5) else ()
        return [name for name in self.tokenizer.spelled(text) if name not in read]

    def prompt(self, text: str, *, control: bool = False) -> list[int]:
        """Its tokens: a T5 reads texts with gaps, and an end. `control`: names of control tokens in it are these."""
        if isinstance(self.model, T5):
            return [*text_with_gaps(self.tokenizer, text, control=control), end_and_start(self.tokenizer)[0]]
        return prompt_tokens(self.tokenizer, text, control=control)


_HELD_OUT = "`evaluate --part validation` and `--part test` measure it on the held-out parts of its run's data."


@contextmanager
def opened(
    path: Path,
    *,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    device: str,
    precision: str | None,
    threads: int = 0,
    to_take_less: Sequence[str] = (),
    base: Path | None = None,
) -> Iterator[tuple[Trained, Mesh]]:
    """A checkpoint's model, cut over tp × pp ranks whatever it was trained on, of which each of the dp
    groups has one; every rank enters this.

    Memory that is refused within the block is a MemoryShortError; `to_take_less`: what its user can set. `threads`: of
    a rank on CPUs; 0: as in training (`train.threads`). `base`: where the base of adapters lies; None: where it lay
    when they were trained.
    """
    checkpoint = find(path)
    problems = list(device_problems(device, precision))
    if problems:
        raise ConfigError("\n".join(problems))
    seen = described(checkpoint, looks=False)  # a rank that is refused alone would be waited for
    manifest, config, metadata = seen
    check_given_base(checkpoint, metadata.base, base)
    _check_layout(checkpoint, config.model, tp, pp)
    ask_for_queues()
    choose_device(device, torch.cuda.device_count(), num_local_ranks(), by_option=True)
    size = trained_architecture(config, metadata.model.vocab_size).num_parameters
    used = InUse(checkpoint, size, precision or config.train.precision, tuple(to_take_less))
    with joined(Layout(tp=tp, pp=pp, dp=dp), device, threads) as (mesh, place), within_memory(used, mesh, place):
        checkpoint = as_rank_0(checkpoint, mesh.world)
        trained = open_trained(checkpoint, mesh, place, precision, base=base, seen=seen)
        if mesh.rank == 0 and (note := unsaid_end(trained.tokenizer, checkpoint, manifest)):
            print(note, file=sys.stderr, flush=True)
        yield trained, mesh


def open_another(path: Path, mesh: Mesh, beside: Trained) -> Trained:
    """A further checkpoint on the ranks, device and precision of one that is open, and of adapters of the same base
    beside that; every rank calls this.
    """
    checkpoint = as_rank_0(find(path), mesh.world)
    seen = on_all_ranks(lambda: described(checkpoint, looks=False), mesh.world)
    _, config, metadata = seen
    _check_layout(checkpoint, config.model, mesh.tp.size, mesh.pp.size)
    both = metadata.base is not None and beside.base is not None and metadata.base.files == beside.base.files
    device, base = next(beside.model.parameters()).device, beside.base_at if both else None
    return open_trained(checkpoint, mesh, device, beside.precision, base=base, seen=seen)


def _check_layout(checkpoint: Path, model: ModelConfig, tp: int, pp: int) -> None:
    problems = list(layout_problems(checkpoint, model, tp, pp))
    if problems:
        raise LayoutError("\n".join(problems))


def print_continuations(
    trained: Trained,
    mesh: Mesh,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    as_json: bool,
    chats: Sequence[Conversation] | None = None,
    control_tokens: bool = False,
) -> None:
    """Print every prompt with what the model makes of it, token by token; as JSON all at the end (rank 0 prints).

    `chats`: conversations to answer in place of the prompts. `control_tokens`: names of these in prompts are these;
    else a note on standard error says where there are any.
    """
    tokenizer, stop = trained.tokenizer, trained.stop
    if chats is None:
        ids = [trained.prompt(prompt, control=control_tokens) for prompt in prompts]
        note = None if control_tokens else control_note([trained.spelled(prompt) for prompt in prompts])
        if note is not None and mesh.rank == 0:
            print(note, file=sys.stderr, flush=True)
    else:
        ids, turn = _asked(trained.chat, chats), trained.chat.end_of_turn
        stop = stop if turn is None else stop | {turn}
        prompts = [each.messages[-1]["content"] for each in chats]
    made = generate(trained.stages, ids, max_new_tokens=max_new_tokens, **asdict(sampling), stop=stop)
    is_t5 = isinstance(trained.model, T5)
    answers = is_t5 or chats is not None
    deltas = stream_text(made, tokenizer, prompts=None if answers else ids, skip_special=not is_t5)
    if mesh.rank != 0:
        for _ in deltas:
            pass
    elif as_json:
        print(json_of({"step": trained.step, "texts": _texts(prompts, deltas)}))
    else:
        shown = [f"{prompt}\n" for prompt in prompts] if answers else prompts
        _stream(shown, deltas, trained.config.model.seq_length)


def _asked(chat: Chat, conversations: Sequence[Conversation]) -> list[list[int]]:
    """The tokens that come before each answer. DataError names the first conversation that has none."""
    found = []
    for number, each in enumerate(conversations, 1):
        try:
            found.append(chat.prompt(each.messages, each.tools))
        except TemplateFault as fault:
            raise DataError(f"conversation {number:,} cannot be written down: {fault}.") from fault
    return found


def _stream(prompts: Sequence[str], deltas: Iterable[TextDelta], seq_length: int) -> None:
    """Texts as they grow, with an empty line between two."""
    begun = -1
    for delta in deltas:
        if delta.prompt != begun:
            print("\n" * (delta.prompt > 0), prompts[delta.prompt], sep="", end="", flush=True)
            begun = delta.prompt
        print(delta.text, end="", flush=True)
        if delta.end is not None:
            note = end_note(delta.end, seq_length=seq_length)
            print("" if note is None else f"\n[{note}]", flush=True)


def _texts(prompts: Sequence[str], deltas: Iterable[TextDelta]) -> list[dict[str, Any]]:
    """What was added to each prompt, in how many tokens (the end of document is one), and why it ends."""
    texts: list[dict[str, Any]] = [{"prompt": prompt, "text": "", "tokens": 0, "end": None} for prompt in prompts]
    for delta in deltas:
        text = texts[delta.prompt]
        text["text"] += delta.text
        text["tokens"] += 1
        text["end"] = delta.end
    return texts


def find(path: Path) -> Path:
    """The checkpoint that `path` names: itself, or the newest of a run's folder."""
    found = checkpoint_at(path)
    if found is not None:
        return found
    if is_peft(path) or is_published(path):
        what, base = ("adapters of PEFT", " --base BASE") if is_peft(path) else ("a folder of Hugging Face", "")
        raise CheckpointError(
            f"{path} is {what}, and no checkpoint. `colonnade convert {path} TARGET{base}` makes one; name TARGET then."
        )
    raise CheckpointError(no_checkpoint(path))


def open_trained(
    path: Path,
    mesh: Mesh,
    device: torch.device,
    precision: str | None = None,
    *,
    base: Path | None = None,
    seen: "Described | None" = None,
) -> Trained:
    """Read the model of a checkpoint on any tp × pp ranks, whatever layout it was written under, and beside adapters
    that of their base. `seen`: what a look at a checkpoint, mostly this one, has shown before.
    """
    manifest, config, metadata = _described_together(path, mesh.world, seen)
    vocab_size = metadata.model.vocab_size
    used = precision or config.train.precision
    dtype, sizes = DTYPES[used], slices_of(config, vocab_size, mesh.tp.size)
    architecture = trained_architecture(config, vocab_size)
    (chunk,) = chunks_of_stage(architecture, ParallelConfig(pp=mesh.pp.size), mesh.pp.rank)
    parallel = Parallel(mesh.tp, products=served_by(metadata.products, used, sizes, device, mesh.world))
    names = [unit.name for unit in chunk]
    model = build_model(config.model, vocab_size, parallel, dtype=dtype, units=names, architecture=architecture)
    for parameter in model.parameters():
        parameter.data.zero_()  # padding rows stay zero
    shards = list(_weights(model, mesh.tp))
    if metadata.base is not None:
        shards = _read_base(path, metadata.base, shards, mesh, base)
    load(path, shards, model=model_metadata(config.model, vocab_size), unread=(OPTIMIZER,), known=manifest)
    model = model.to(device=device, dtype=dtype).requires_grad_(False).eval()
    inference = Inference([Chunk(chunk, model, ResidentWeights())], model, mesh.pp, ResidentWeights())
    tokenizer = tokenizer_of(path, manifest)
    return Trained(
        path=path,
        model=model,
        mesh=mesh,
        hidden=inference.hidden,
        tokenizer=tokenizer,
        config=config,
        step=metadata.step,
        precision=used,
        base=metadata.base,
        base_at=base,
        template=template_of(path, manifest),
        labels=metadata.labels,
        is_converted="converted_from" in manifest.metadata,
        ends=ends_of(path, manifest, tokenizer),
        start=start_of(manifest, vocab_size),
    )


def _read_base(
    path: Path, wanted: BaseMetadata, shards: Sequence[Shard], mesh: Mesh, given: Path | None
) -> list[Shard]:
    """Fill those shards that are the base's, and give back the others. CheckpointError where the base has changed."""
    origin = origin_together(on_all_ranks(lambda: base_path(path, wanted, given), mesh.world), mesh.world, "the base")
    check_base(path, wanted, origin.path, content_together(origin.path, mesh.world))
    names = frozenset(wanted.weights)
    origin.fill([shard for shard in shards if shard.name in names])
    return [shard for shard in shards if shard.name not in names]


class Described(NamedTuple):
    """What a checkpoint says of its model, all of it checked."""

    manifest: Manifest
    config: Config
    metadata: RunMetadata


def _described_together(path: Path, ranks: Axis, known: Described | None) -> Described:
    """As `described`, raised on all ranks; the first one looks at the files. Every rank calls this."""
    return on_all_ranks(lambda: described(path, known, looks=ranks.rank == 0), ranks)


def described(path: Path, known: Described | None = None, *, looks: bool = True) -> Described:
    """What the checkpoint in folder `path` is. CheckpointError if its model is not the one whose tensors it holds.

    Before memory is taken for it: configuration, metadata and tensors may be a stranger's, but the files are there.
    `known`: what was seen before, which is given back where the checkpoint is still that one. `looks`: whether this is
    the rank that looks at all files for the others.
    """
    manifest = read_manifest(path, None if known is None else known.manifest)
    if looks:
        check_sizes(path, manifest)
    if known is not None and manifest is known.manifest:
        return known
    config, metadata = config_of(path, manifest), metadata_of(path, manifest)
    check_model(path, manifest, model_metadata(config.model, metadata.model.vocab_size))
    if metadata.base is None and config.model.num_layers > len(manifest.tensors):
        raise CheckpointError(
            f"{path} is damaged: its model has {config.model.num_layers} layers, and its manifest only "
            f"{len(manifest.tensors)} tensors. {remedy(path)}"
        )
    with torch.device("meta"):
        architecture = trained_architecture(config, metadata.model.vocab_size)
        model = build_model(
            config.model,
            metadata.model.vocab_size,
            Parallel(Axis("tp")),
            dtype=torch.float32,
            units=architecture.unit_names,
            architecture=architecture,
        )
    elsewhere = frozenset(() if metadata.base is None else metadata.base.weights)
    check_tensors(path, manifest, [each for each in _weights(model, Axis("tp")) if each.name not in elsewhere])
    return Described(manifest, config, metadata)


def tokenizer_of(path: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer that a checkpoint carries, with the end of its run's documents. CheckpointError where there is
    none.
    """
    file = path / "tokenizer.json"
    if file.name in manifest.files:
        check_hash(path, manifest, file.name)
    elif not os.path.lexists(file):
        raise CheckpointError(
            f"{path} has no tokenizer.json, because the run had no data.tokenizer: text cannot be turned into its "
            "tokens. Copy the tokenizer.json that made the token files into it."
        )
    try:
        text = read_plain(file, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is damaged: it is not text ({error.reason}). {remedy(path)}") from None
    return with_end_of(Tokenizer.from_json(text, source=str(file)), path, manifest)


def template_of(path: Path, manifest: Manifest) -> ChatTemplate | None:
    """The chat template that a checkpoint carries. CheckpointError if it is damaged."""
    return ChatTemplate.from_json(object_of(path, manifest, CHAT))


def _weights(model: Transformer, tp: Axis) -> Iterator[Shard]:
    for bucket, places in named_placements(model.bucket_modules(), tp).items():
        for place in places:
            yield from shard(f"{bucket}.{place.name}", place, place.parameter.data)
