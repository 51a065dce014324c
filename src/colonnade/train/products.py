"""By which kernels a run multiplies: decided once, before its layers are built, and the same on all ranks.

    train.products set               that, if it is exact on every rank's processor
    the run goes on, same processor  what its checkpoint says: the same bits as before
    the run goes on elsewhere        as below, and this is said
    products too small to matter     the usual ones
    otherwise                        measured (`kernels/timing.py`), once a machine: later runs remember it

One rank of each kind of processor measures, and all ranks choose from all that was measured. The compiled kernels
(`kernels/compiled.py`) are among what is measured where every rank has them.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from colonnade import gpu_kernels
from colonnade.architecture.families import architecture_of
from colonnade.checkpoint.manifest import Manifest, read_manifest
from colonnade.checkpoint.names import newest_in
from colonnade.checkpoint.schema import clip
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.kernels import compiled, timing
from colonnade.kernels.choice import USES, WIDENED, Kernel, Kernels, Products, has_onednn, usual
from colonnade.kernels.timing import Seconds, Slices
from colonnade.launch import launch
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.agreement import broadcast_text, gather_texts
from colonnade.mesh.mesh import Axis
from colonnade.model.precision import DTYPES
from colonnade.train.machine import processor
from colonnade.train.metadata import ProductMetadata, metadata_of
from colonnade.train.remembered import recall, remember
from colonnade.train.run_folder import checkpoints

KEY = "train.products"
WORTH_IT = 2.0**26
"""[FLOP] Of the largest product of a micro-batch: where it is below a millisecond, nothing is measured."""
LARGEST = Slices(tokens=256, inputs=1024, outputs=1024, rows=8128, width=512, heads=8, positions=256, head_width=256)
"""Of what is timed: whatever the model, it takes about a second. Logits of so many rows leave a core's own caches, as a
model's do, and their distance is no multiple of a page, as a vocabulary's hardly is."""

_FROM_HERE = "numbers may differ in rounding from here on"


@dataclass(frozen=True)
class Decision:
    """By which kernels all ranks of a run multiply, and why by these."""

    precision: str
    kernels: Kernels | None
    """For operands of `precision`. None: there is nothing to choose."""
    how: str = ""
    """"set", "kept", "usual", "measured" or "remembered"."""
    processors: tuple[str, ...] = ()
    """Of all ranks, each once."""
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """[GFLOP/s] Of a core, by use and kernel, as far as it was measured; of several processors the slowest's."""
    notes: tuple[str, ...] = ()
    """What one would not expect."""

    @property
    def products(self) -> Products:
        """For the layers."""
        return usual() if self.kernels is None else usual().having(self.precision, self.kernels)

    def metadata(self) -> dict[str, Any] | None:
        """For a checkpoint: what a run that goes on there needs to do the same."""
        if self.kernels is None:
            return None
        return {
            "precision": self.precision,
            "kernels": self.kernels.table(),
            "processor": _joined(self.processors),
            "torch": torch.__version__,
            "how": self.how,
            "compiled": compiled.version() if _has_compiled(self.kernels) else "",
        }

    def event(self) -> dict[str, Any] | None:
        """For events.jsonl."""
        metadata = self.metadata()
        rounded = {use: {name: round(rate, 1) for name, rate in of.items()} for use, of in self.rates.items()}
        return None if metadata is None else {**metadata, "gflops": rounded}

    def line(self) -> str:
        """For people: '' where there was nothing to choose."""
        if self.kernels is None:
            return ""
        parts = [f"{_words(use)} {kernel}{self._rate(use, kernel)}" for use, kernel in self._shown()]
        return f"{', '.join(parts)} ({WHY[self.how]})" if parts else ""

    def _shown(self) -> list[tuple[str, str]]:
        """Use and kernel, where there is more than one to choose from; all in one where that says as much."""
        assert self.kernels is not None, "there is a choice"
        several = [use for use in USES if len(timing.candidates(DTYPES[self.precision], use)) > 1]
        shown = [(str(use), self.kernels.table()[use]) for use in several]
        return [("all", shown[0][1])] if not self.rates and len({kernel for _, kernel in shown}) == 1 else shown

    def _rate(self, use: str, kernel: str) -> str:
        rate = self.rates.get(use, {}).get(kernel)
        return "" if rate is None else f" {rate:,.0f}"


WHY: Mapping[str, str] = MappingProxyType(
    {
        "set": f"as {KEY} says",
        "kept": "as before",
        "usual": "not measured: products are small",
        "measured": "GFLOP/s of a core, measured now",
        "remembered": "GFLOP/s of a core, measured before on this machine",
    }
)


def settle(
    config: Config, vocab_size: int, world: Axis, device: torch.device, known: Manifest | None = None
) -> Decision:
    """Decide; every rank calls this. ConfigError on all of them where train.products asks for what is not exact.
    `known`: what rank 0 has read of the newest checkpoint.
    """
    train = config.train
    if device.type == "cuda" or train.precision == "fp64":
        notes = *_without_effect(train.products, device, train.precision), *_without_kernels(device, world)
        return Decision(train.precision, None, notes=notes)
    ranks, before = _ranks(train.precision, world), _before(config, world, known)
    if train.products != "auto":
        lacking = _prepare(world, ranks) if train.products == "compiled" else ""
        by_all = on_all_ranks(lambda: by_hand(train.products, train.precision, lacking), world)
        notes = *ranks.notes, *_other_version(before, by_all)
        return Decision(train.precision, by_all, "set", ranks.processors, notes=notes)
    if before.metadata is not None and _same_place(before.metadata, ranks.processors, train.precision):
        kernels = Kernels(**before.metadata.kernels)
        if not _has_compiled(kernels) or not _prepare(world, ranks):
            notes = *ranks.notes, *_other_version(before, kernels)
            return Decision(train.precision, kernels, "kept", ranks.processors, notes=notes)
    sizes = slices_of(config, vocab_size, config.parallel.tp)
    lacking = "" if sizes is None else _prepare(world, ranks)
    fresh = _fresh(train.precision, sizes, world, ranks, without="compiled" if lacking else "")
    assert fresh.kernels is not None, "there is a choice"
    again = _why_again(before, ranks.processors, other=fresh.kernels != ranks.usual)
    other = () if again else _other_version(before, fresh.kernels)
    return replace(fresh, notes=(*ranks.notes, *_without_compiled(lacking), *again, *other))


@dataclass(frozen=True)
class _Ranks:
    """Of all ranks: what they run on."""

    processors: tuple[str, ...]
    """Each once."""
    measures: bool
    """Whether this rank is the first of its processor."""
    usual: Kernels
    """That all of them have."""

    @property
    def notes(self) -> tuple[str, ...]:
        names = _names(self.processors)
        several = (f"ranks run on different processors ({names}): products are those that suit all of them",)
        return several if len(self.processors) > 1 else ()


def _ranks(precision: str, world: Axis) -> _Ranks:
    own: Kernels = getattr(usual(), precision)
    mine = {"processor": processor(), "usual": own.table()}
    everyone = [json.loads(text) for text in gather_texts(json.dumps(mine), world)]
    first = {each["processor"]: rank for rank, each in reversed(list(enumerate(everyone)))}
    alike = all(each["usual"] == mine["usual"] for each in everyone)
    return _Ranks(tuple(sorted(first)), world.rank in first.values(), own if alike else WIDENED)


def _has_compiled(kernels: Kernels) -> bool:
    return "compiled" in kernels.table().values()


def prepare_here() -> str:
    """Load the compiled kernels into this process: '' or why there are none."""
    return compiled.prepare(launch.cache_folder(), processor())


def _prepare(world: Axis, ranks: _Ranks) -> str:
    """Load them on every rank: '' or why some rank has none. Of each processor one rank compiles, the others find what
    it has made.
    """
    if ranks.measures:
        prepare_here()
    gather_texts("", world)  # whoever compiles has done so
    return next((why for why in gather_texts(prepare_here(), world) if why), "")


def _without_compiled(lacking: str) -> tuple[str, ...]:
    slower = "attention, the output layer and AdamW take longer, and in 16 bits weight gradients too"
    return (f"kernels could not be compiled on this machine ({clip(lacking)}): {slower}",) if lacking else ()


def _fresh(precision: str, sizes: Slices | None, world: Axis, ranks: _Ranks, *, without: str) -> Decision:
    """`without`: a kernel that some rank has and another has not."""
    if sizes is None:
        return Decision(precision, ranks.usual, "usual", ranks.processors)
    found = _measured(sizes, precision, world, measures=ranks.measures)
    seconds: list[Seconds] = [
        {use: {k: t for k, t in times.items() if k != without} for use, times in each.items()} for each, _ in found
    ]
    how = "measured" if any(now for _, now in found) else "remembered"
    return Decision(precision, timing.chosen(seconds, ranks.usual), how, ranks.processors, _rates(sizes, seconds))


def by_hand(kernel: str, precision: str, lacking: str = "") -> Kernels:
    """What train.products says for each use. ConfigError if it is not to be had, or not exact, on this processor.
    `lacking`: why there are no compiled kernels.
    """
    dtype = DTYPES[precision]
    if kernel == "native" and dtype.itemsize > 2:
        why = f"{precision} has one way to be multiplied as it is: it is native to bf16 and fp16"
        raise _refused(kernel, why, dtype)
    if kernel == "compiled" and lacking:
        raise _refused(kernel, lacking, dtype)
    if kernel == "onednn" and not has_onednn():
        raise _refused(kernel, "this torch was built without oneDNN", dtype)
    table = {use: _nearest(kernel, timing.candidates(dtype, use)) for use in USES}
    for use, each in table.items():
        error, allowed = timing.error(each, use, dtype)
        if error > allowed:
            why = (
                f"on this processor ({_names([processor()])}) its product of {precision} matrices ({_words(use)}) is "
                f"off by {error:.1e} of its norm, where rounding explains {allowed:.1e}"
            )
            raise _refused(kernel, why, dtype)
    return Kernels(**table)


def _nearest(kernel: str, there: Sequence[Kernel]) -> Kernel:
    """`kernel`, or where a use has not got it what comes closest: bf16 units with an fp32 result are oneDNN's."""
    next_best = {"native": ["onednn"], "compiled": ["native"]}
    wanted = [kernel, *next_best.get(kernel, []), "blas"]
    return next(each for name in wanted for each in there if each == name)


def _refused(kernel: str, why: str, dtype: torch.dtype) -> ConfigError:
    exact = [each for each in timing.candidates(dtype, "forward") if timing.is_exact(each, "forward", dtype)]
    there = ", ".join(f'"{name}"' for name in ["auto", *exact] if name != kernel)
    return ConfigError(f'{KEY} = "{kernel}" cannot be used here: {why}. Use one of {there}.')


def slices_of(config: Config, vocab_size: int, tp: int) -> Slices | None:
    """What of this model's products is timed, for one of `tp` ranks; None where they are too small to matter."""
    model = config.model
    weights = architecture_of(model, vocab_size).weights().values()
    cut = [weight for weight in weights if len(weight.shape) == 2 and weight.cut is not None]
    outputs, inputs = max(weight.local_shape(tp) for weight in cut if not weight.is_vocabulary)
    rows, width = max(weight.local_shape(tp) for weight in cut if weight.is_vocabulary)
    tokens = model.sample_length * config.train.micro_batch_size
    if 2.0 * tokens * max(outputs * inputs, rows * width) < WORTH_IT:
        return None
    sizes = (tokens, inputs, outputs, rows, width, model.num_heads // tp, model.seq_length, model.head_width)
    return Slices(*(min(size, most) for size, most in zip(sizes, LARGEST, strict=True)))


def _measured(sizes: Slices, precision: str, world: Axis, *, measures: bool) -> list[tuple[Seconds, bool]]:
    """By one rank of each processor: seconds, and whether they are fresh. Every rank gets all of them."""
    mine: tuple[Seconds, bool] | None = None
    if measures:
        ours = compiled.version() if compiled.is_loaded() else ""
        names = (processor(), torch.__version__, precision, dict(sizes._asdict()), ours)
        name, folder = json.dumps(names), launch.cache_folder()
        seconds = recall(folder, name)
        mine = (timing.measure(DTYPES[precision], sizes), True) if seconds is None else (seconds, False)
        if seconds is None:
            remember(folder, name, mine[0])
    everyone = [json.loads(text) for text in gather_texts(json.dumps(mine), world)]
    return [(seconds, fresh) for seconds, fresh in filter(None, everyone)]


def _rates(sizes: Slices, measured: Sequence[Seconds]) -> dict[str, dict[str, float]]:
    slowest: dict[str, dict[str, float]] = {}
    for seconds in measured:
        for use, times in seconds.items():
            for kernel, each in times.items():
                rates = slowest.setdefault(use, {})
                rates[kernel] = min(rates.get(kernel, float("inf")), sizes.flops[use] / each / 1e9)
    return slowest


class _Before(NamedTuple):
    """What the newest checkpoint of the run says."""

    exists: bool
    metadata: ProductMetadata | None = None


def _before(config: Config, world: Axis, known: Manifest | None) -> _Before:
    """As rank 0 reads it: a faulty checkpoint is the business of who resumes."""
    found = _read(Path(config.run.folder), known) if world.rank == 0 else _Before(False)
    mine = [found.exists, None if found.metadata is None else found.metadata.model_dump()]
    exists, metadata = json.loads(broadcast_text(json.dumps(mine), world))
    return _Before(exists, None if metadata is None else ProductMetadata.model_validate(metadata))


def _read(run: Path, known: Manifest | None) -> _Before:
    try:
        path = newest_in(checkpoints(run))
        return _Before(False) if path is None else _Before(True, metadata_of(path, read_manifest(path, known)).products)
    except (ColonnadeError, OSError):
        return _Before(False)


def _same_place(before: ProductMetadata, processors: Sequence[str], precision: str) -> bool:
    here = (_joined(processors), torch.__version__, precision)
    return before.how != "set" and (before.processor, before.torch, before.precision) == here


def _other_version(before: _Before, kernels: Kernels) -> tuple[str, ...]:
    """What is not the same though the kernels are: compiled ones of an older or newer version of this program."""
    metadata = before.metadata
    if metadata is None or not _has_compiled(kernels) or "compiled" not in metadata.kernels.values():
        return ()
    if metadata.compiled == compiled.version():
        return ()
    which = "was computed by another" if metadata.compiled else "does not say by which"
    return (f"the checkpoint {which} version of the compiled kernels: {_FROM_HERE}",)


def _why_again(before: _Before, processors: Sequence[str], *, other: bool) -> tuple[str, ...]:
    """Why what a run did before is not kept. `other`: whether it now multiplies by others than the usual kernels."""
    metadata = before.metadata
    if metadata is None:
        unknown = before.exists and other
        return (f"the checkpoint does not say by what its matrices were multiplied: {_FROM_HERE}",) if unknown else ()
    if metadata.processor != _joined(processors):
        there, here = clip(_names(metadata.processor.split(_AND))), _names(processors)
        where = f"{there}, now {here}" if there != here else f"{there}, now with other vector units"
        return (f"products were chosen on another processor ({where}), and are chosen again: {_FROM_HERE}",)
    if metadata.torch != torch.__version__:
        return (f"products were chosen under torch {clip(metadata.torch)}, and are chosen again: {_FROM_HERE}",)
    if metadata.how != "set" and "compiled" in metadata.kernels.values():
        return (f"products were computed by compiled kernels, and are chosen again without: {_FROM_HERE}",)
    return ()


_AND = " + "


def _joined(processors: Sequence[str]) -> str:
    return _AND.join(processors)


def _words(use: str) -> str:
    return use.replace("_", " ")


def _names(processors: Sequence[str]) -> str:
    return _AND.join(dict.fromkeys(each.partition(";")[0] for each in processors))


def _without_effect(products: str, device: torch.device, precision: str) -> tuple[str, ...]:
    where = "on CUDA" if device.type == "cuda" else f"in {precision}"
    note = f'{KEY} = "{products}" has no effect {where}, where matrices are multiplied as they are'
    return () if products == "auto" else (note,)


def _without_kernels(device: torch.device, world: Axis) -> Iterator[str]:
    """Why ranks do without kernels of this program's own, all of them if one has to; every rank calls this."""
    if device.type != "cuda":
        return
    found = Counter(gather_texts(gpu_kernels.lacking(), world))
    gpu_kernels.agree(found)
    for why, count in found.items():
        if why:
            yield f"on {counted(count, 'rank')} {why}: masks and norms take several kernels each, on all ranks"


def served_by(
    metadata: ProductMetadata | None, precision: str, sizes: Slices | None, device: torch.device, world: Axis
) -> Products:
    """For a trained model in use, on all ranks: what it was trained with, on the same processors, where it is to be
    had; else what is fastest here, remembered or measured now. Kernels are not compiled for that: it takes longer than
    many uses. `sizes`: of its products; None: they are too small to matter.
    """
    if device.type == "cuda" or precision == "fp64":
        return usual()
    ranks = _ranks(precision, world)
    here = (_joined(ranks.processors), torch.__version__, precision)
    if metadata is not None and (metadata.processor, metadata.torch, metadata.precision) == here:
        kernels = Kernels(**metadata.kernels)
        if not _has_compiled(kernels) or not _prepare(world, ranks):
            return usual().having(precision, kernels)
    return _fresh(precision, sizes, world, ranks, without="compiled").products
