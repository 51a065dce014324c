"""What a step asks of a device, in order: operators with their arithmetic and bytes, and collectives begun and awaited.

    operator    what a device runs as one kernel: FLOPs (by torch's formulas), bytes that it reads and writes
    sent        a collective or transfer begins, beside what follows
    waited      whoever runs needs its result now

Operators are seen where torch dispatches them. What makes a view, or memory without content, is none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from colonnade.mesh.ledger import Entry, Ledger, Site
from colonnade.mesh.transport import REDUCTIONS, PaperTransport, Pending
from colonnade.pipeline.schedule import Action
from colonnade.planner.live import LiveTensors
from colonnade.planner.stand_in import META, StandIn

Product = tuple[int, int, int, int]
"""(batch, m, n, k) of matrices [m, k] · [k, n]."""


class Operator(NamedTuple):
    """One kernel."""

    name: str
    flops: int
    """Of products, by torch's formulas; a causal kernel of attention counts as a full one."""
    bytes: int
    """Read and written."""
    dtype: str
    """In which it computes, as torch names it: "bfloat16"."""
    product: Product | None = None
    """The largest matrix product in it."""
    is_attention: bool = False
    is_causal: bool = False
    on_host: str = ""
    """ "": it runs where the model is. "host": on the CPU, where the model is not. "copy": between both."""
    elements: int = 0
    """Of the largest tensor that it reads or writes."""


class Sent(NamedTuple):
    """A collective or transfer has begun."""

    number: int
    """By which it is waited for."""
    entry: Entry
    ranks: tuple[int, ...]
    """Global ranks of its axis; of a transfer, this one and the other."""


class Waited(NamedTuple):
    """Its result is needed."""

    number: int


Event = Operator | Sent | Waited


@dataclass
class Section:
    """What one action of a schedule did, or what comes before the first (`before`) or behind the last (`after`)."""

    action: Action | None
    events: list[Event] = field(default_factory=list)
    units: list[tuple[int, str]] = field(default_factory=list)
    """From which event on the program was at which unit of the model."""
    most: int = 0
    """[bytes] The most that was alive at once meanwhile, beside what a rank always holds."""
    alive: list[tuple[int, int]] = field(default_factory=list)
    """(events before, bytes): what was alive from then on, beside what a rank always holds."""

    def note_alive(self, size: int) -> None:
        """So many bytes are alive now."""
        self.most = max(self.most, size)
        if not self.alive or self.alive[-1][1] != size:
            self.alive.append((len(self.events), size))

    @property
    def operators(self) -> Iterator[Operator]:
        return (event for event in self.events if isinstance(event, Operator))

    @property
    def sent(self) -> Iterator[Sent]:
        return (event for event in self.events if isinstance(event, Sent))

    @property
    def entries(self) -> Iterator[Entry]:
        return (each.entry for each in self.sent)


class Recorder(LiveTensors):  # type: ignore[no-untyped-call]
    """Within: every operator is written down in the newest section, and what is alive is counted."""

    def __init__(self, place: StandIn) -> None:
        super().__init__()
        self.place = place
        self.sections = [Section(None)]
        self.come_and_go: Callable[[], int] = lambda: 0
        """[bytes] Of buffers that are given back and taken again without an operator."""
        self.ledger: Ledger | None = None
        """Which knows the unit of the model that is at work."""
        self._sent = 0
        self._known = _known_operators()

    def begin(self, action: Action | None) -> None:
        """What follows belongs to this action; None: it is behind the last."""
        self.sections.append(Section(action))

    def sent(self, entry: Entry, ranks: tuple[int, ...], *holds: Tensor) -> Pending:
        """A collective begins, and holds on to its tensors until it is waited for."""
        self._sent += 1
        self._note_unit(self.sections[-1])
        self.sections[-1].events.append(Sent(self._sent, entry, ranks))
        return Pending(_Underway(self, self._sent, holds))

    def _note_unit(self, section: Section) -> None:
        unit = "" if self.ledger is None else self.ledger.unit
        if not section.units or section.units[-1][1] != unit:
            section.units.append((len(section.events), unit))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        section, kwargs = self.sections[-1], kwargs or {}
        given = _tensors((*args, *kwargs.values()))
        hosted = tuple(map(self.place.is_on_host, given))
        key = (func, _shown(args), tuple(map(_shown, kwargs.items())), hosted)
        known = self._known.get(key)
        out = func(*args, **kwargs) if known is None or known.out is None else _again(known.out, given)
        made = _tensors((out,) if isinstance(out, Tensor) else out)
        self.note(made, given)
        if known is None:
            silent = is_nothing(func) or not (writes(func) or _is_fresh(made, given))
            what = None if silent else operator_of(func, args, kwargs, given, made, self.place)
            known = self._known[key] = _Known(what, _recipe(out, made, given))
        if known.operator is not None:
            self._note_unit(section)
            section.events.append(known.operator)
        if hosted and all(hosted) and not name_of(func).endswith("_copy"):
            self.place.put_on_host(*made)
        section.note_alive(sum(self.bytes.values()) + self.come_and_go())
        return out


class _Known(NamedTuple):
    """What an operator did with arguments of some shapes, and will do again."""

    operator: Operator | None
    out: Any
    """How its results are made: see `_recipe`."""


@cache
def _known_operators() -> dict[Any, _Known]:
    """Of all steps of this process: stages, ranks and layouts have most of their operators in common."""
    return {}


def _tensors(values: Any) -> list[Tensor]:
    """All of a call's arguments or results: none lies deeper than in a list."""
    found: list[Tensor] = []
    for each in values if isinstance(values, tuple | list) else (values,):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            found += [x for x in each if isinstance(x, Tensor)]
    return found


def _shown(value: Any) -> Any:
    """What decides about an operator's results: of tensors, all but the numbers."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type, value.storage_offset(), value.is_conj()
    if isinstance(value, tuple | list):
        return tuple(map(_shown, value))
    return type(value), value


def _recipe(out: Any, made: list[Tensor], given: list[Tensor]) -> Any:
    """Of results that are new memory or arguments: (as a list?, each an argument's place or sizes). None: run it."""
    places = [next((at for at, x in enumerate(given) if x is each), None) for each in made]
    known = {x.untyped_storage()._cdata for x in given}
    single = isinstance(out, Tensor)
    if not single and (not isinstance(out, tuple | list) or len(out) != len(made)):
        return None
    for each, place in zip(made, places, strict=True):
        if place is None and (each.untyped_storage()._cdata in known or each.storage_offset() or not each.is_meta):
            return None
    sizes = [(x.shape, x.stride(), x.dtype) if at is None else at for x, at in zip(made, places, strict=True)]
    return None if single else type(out), sizes


def _again(recipe: Any, given: list[Tensor]) -> Any:
    kind, sizes = recipe
    made = [
        given[each] if isinstance(each, int) else torch.empty_strided(each[0], each[1], dtype=each[2], device=META)
        for each in sizes
    ]
    return made[0] if kind is None else kind(made)


@dataclass
class _Underway:
    recorder: Recorder
    number: int
    holds: tuple[Tensor, ...]

    def wait(self) -> None:
        self.holds = ()
        self.recorder.sections[-1].events.append(Waited(self.number))


class TracingTransport(PaperTransport):
    """Moves nothing and computes nothing: results have the right shape, and a recorder is told."""

    def __init__(self, axis: str, ranks: tuple[int, ...], rank: int, ledger: Ledger, recorder: Recorder) -> None:
        """`rank`: this one's global number."""
        super().__init__(axis, len(ranks), ledger)
        self.ranks, self.rank, self.recorder = ranks, rank, recorder

    def _begin(self, operation: str, x: Tensor, site: Site, *holds: Tensor, peer: int | None = None) -> Pending:
        entry = self.ledger.open(operation, self.axis, x, site, peer)
        self.ledger.close(entry)
        ends = self.ranks if peer is None else (self.rank, self.ranks[peer])
        return self.recorder.sent(entry, ends, x, *holds)

    def _note(self, operation: str, x: Tensor, site: Site, peer: int | None = None) -> Pending:
        return self._begin(operation, x, site, peer=peer)

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        assert op in REDUCTIONS, f"{op} is no reduction"
        return self._begin("all_reduce", x, site)

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        return self._begin("all_gather", x, site, out)

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        return self._begin("reduce_scatter", x, site, out)

    def broadcast_(self, x: Tensor, source: int, site: Site) -> None:
        self._begin("broadcast", x, site).wait()


# --- operators --------------------------------------------------------------------------------------------------------

_IN_PLACE = MappingProxyType({"addmm_": torch.ops.aten.addmm, "baddbmm_": torch.ops.aten.baddbmm})
"""What torch's counter of FLOPs leaves out, and what it is one of."""
_MEMORY_ALONE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_GATHER = ("embedding", "index", "index_select", "gather")
_SCATTER = ("index_add", "index_add_", "index_put_", "_index_put_impl_", "scatter_add_", "embedding_dense_backward")
_ATTENTION_CPU = "_scaled_dot_product_flash_attention_for_cpu"


def operator_of(
    func: Any, args: Any, kwargs: Mapping[str, Any], given: list[Tensor], made: list[Tensor], place: StandIn
) -> Operator:
    """What a device does for a call of a torch operator."""
    name = name_of(func)
    flops, product = _arithmetic(func, name, args, kwargs, made)
    attention = "attention" in name
    causal = attention and bool(_argument(func, args, kwargs, "is_causal"))
    widest = max((x.dtype for x in given[:2] if x.is_floating_point()), key=lambda t: t.itemsize, default=torch.float32)
    dtype = str(given[0].dtype if flops and given else widest).removeprefix("torch.")
    if flops and "addmm" in name and len(given) > 1:
        dtype = str(given[1].dtype).removeprefix("torch.")
    hosted = {place.is_on_host(x) for x in (*given, *made) if x.ndim}
    where = "" if hosted <= {False} else "copy" if hosted == {True, False} and "copy" in name else "host"
    largest = max((x.numel() for x in (*given, *made)), default=0)
    if _argument(func, args, kwargs, "approximate") == "tanh":
        name += "_tanh"  # an approximation that takes another time
    return Operator(name, flops, _traffic(func, name, given, made), dtype, product, attention, causal, where, largest)


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    return str(func.overloadpacket.__name__)


@lru_cache(maxsize=4096)
def is_nothing(func: Any) -> bool:
    """Whether no kernel runs for an operator: it makes a view, or memory alone."""
    return bool(func.is_view) or name_of(func) in (*_MEMORY_ALONE, "detach", "alias", "_reshape_alias", "set_")


@lru_cache(maxsize=4096)
def writes(func: Any) -> bool:
    """Whether an operator changes an argument."""
    return bool(func._schema.is_mutable)


def _is_fresh(made: list[Tensor], given: list[Tensor]) -> bool:
    """Whether some result is new memory."""
    known = {x.untyped_storage()._cdata for x in given}
    return any(x.untyped_storage()._cdata not in known for x in made)


def _traffic(func: Any, name: str, given: list[Tensor], made: list[Tensor]) -> int:
    """Bytes read and written. Of a table, only the rows that are looked up or added to."""
    if name in _GATHER:
        return 2 * sum(map(_bytes, made))
    if name in _SCATTER:
        return 3 * min(map(_bytes, (x for x in given if x.is_floating_point())), default=0)
    read = {(x.untyped_storage()._cdata, x.storage_offset()): _bytes(x) for x in given}
    return sum(read.values()) + (_written(func, given, made, read))


def _written(func: Any, given: list[Tensor], made: list[Tensor], read: Mapping[Any, int]) -> int:
    fresh = [x for x in made if (x.untyped_storage()._cdata, x.storage_offset()) not in read]
    if fresh or not writes(func):
        return sum(map(_bytes, fresh))
    if name_of(func) == "_fused_adamw_":
        return sum(map(_bytes, given)) * 3 // 4  # of weights, gradients and two moments, all but gradients
    if name_of(func) == "_foreach_copy_":
        return sum(map(_bytes, given[: len(given) // 2]))
    if name_of(func) in ("zero_", "fill_"):
        return 0  # nothing is read: what counts as read is what is written
    return max(map(_bytes, given[:1]), default=0)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size() if 0 not in x.stride() else _distinct(x)


def _distinct(x: Tensor) -> int:
    """Of what was expanded, each number once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return prod(sizes) * x.element_size()


def _arithmetic(
    func: Any, name: str, args: Any, kwargs: Mapping[str, Any], made: list[Tensor]
) -> tuple[int, Product | None]:
    if name.startswith(_ATTENTION_CPU):
        q, k, v = args[1:4] if name.endswith("backward") else args[:3]
        if name.endswith("backward"):
            count = sdpa_backward_flop_count(args[0].shape, q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
        else:
            count = sdpa_flop_count(q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
        return int(count), _attention_product(q, k)
    formula = flop_registry.get(_IN_PLACE.get(name, func.overloadpacket))
    if formula is None:
        return 0, None
    if "attention" in name:
        q, k = args[1:3] if name.endswith("backward") else args[:2]
        return int(formula(*args, **kwargs, out_val=tuple(made))), _attention_product(q, k)
    operands = args[:3] if "add" in name else args[:2]  # behind them, a type for the result
    flops, (a, b) = int(formula(*operands, out_val=made[0])), operands[-2:]
    batch = a.shape[0] if a.ndim == 3 else 1
    return flops, (batch, a.shape[-2], b.shape[-1], a.shape[-1])


def _attention_product(q: Tensor, k: Tensor) -> Product:
    return q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3]


def _argument(func: Any, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = _places(func).get(name)
    return args[place] if place is not None and place < len(args) else None


@lru_cache(maxsize=256)
def _places(func: Any) -> Mapping[str, int]:
    return MappingProxyType({each.name: place for place, each in enumerate(func._schema.arguments)})
