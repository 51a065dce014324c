"""Where a weight's shard lies in the logical weight: read alike by initialisation, gradient norm and checkpoint.

A cut layer says two things: which dim of which weight is cut (`sharded`, on the class) and how large the whole weight
is (`full_shapes`, on the instance). A weight that no layer names is replicated: every rank of the axis has all of it.
Of some of these each rank uses a part (`partial`, on the instance): the gradients are partial sums.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from colonnade.mesh.mesh import Axis


@dataclass(frozen=True)
class Placement:
    """One weight: this rank's shard is a box of the logical tensor `name` of shape `shape`, cut along `dim`."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """The logical weight: no padding, no layout in it."""
    dim: int | None
    """The dim that is cut; None where every rank has the whole weight."""
    offset: int
    """Where along `dim` this rank's shard begins."""
    extent: int
    """How much of the shard along `dim` is real; the rest is padding. The shard's whole length where `dim` is None."""
    is_partial: bool = False
    """Every rank has all of it, and works with what its own heads need: its gradient is a partial sum over tp."""
    learning_rate: float = 1.0
    """[factor] On the run's."""
    weight_decay: float = 1.0
    """[factor] On the run's, where the weight has any."""
    held_in: Mapping[str, nn.Parameter | None] = field(default_factory=dict, compare=False, repr=False)
    """The weights of its layer by their names there, as they are now."""
    key: str = ""
    """Its own name there."""

    @property
    def is_frozen(self) -> bool:
        """It stays as it is: no gradient, no optimizer state."""
        return not self.parameter.requires_grad

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the shard begins, in every dim."""
        return tuple(self.offset if d == self.dim else 0 for d in range(len(self.shape)))

    def real(self, shard: Tensor) -> Tensor:
        """The part of `shard` (the weight, its gradient, its optimizer state) that is no padding: a view."""
        return shard if self.dim is None else shard.narrow(self.dim, 0, self.extent)


def placements(module: nn.Module, tp: Axis) -> Iterator[Placement]:
    """Every weight of `module` once (a tied weight under its first name), in the order of the module tree."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for key, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield _placement(f"{path}.{key}".lstrip("."), key, layer, parameter, tp)


def _placement(name: str, key: str, layer: nn.Module, parameter: nn.Parameter, tp: Axis) -> Placement:
    dim: int | None = getattr(layer, "sharded", {}).get(key)
    if dim is None:
        is_partial = key in getattr(layer, "partial", ())
        whole = tuple(parameter.shape)
        return Placement(name, parameter, whole, None, 0, whole[0], is_partial, held_in=layer._parameters, key=key)
    shape: tuple[int, ...] = getattr(layer, "full_shapes")[key]  # noqa: B009  (nn.Module types attributes as Tensor | Module)
    local = parameter.shape[dim]
    offset = min(tp.rank * local, shape[dim])
    extent = min(local, shape[dim] - offset)
    return Placement(name, parameter, shape, dim, offset, extent, held_in=layer._parameters, key=key)


def named_placements(modules: Mapping[str, nn.Module], tp: Axis) -> dict[str, list[Placement]]:
    """Every weight of every module once, under the first that has it; names are without the module's own."""
    seen: set[int] = set()
    found: dict[str, list[Placement]] = {}
    for name, module in modules.items():
        places = [place for place in placements(module, tp) if id(place.parameter) not in seen]
        seen.update(id(place.parameter) for place in places)
        found[name] = places
    return found
