"""Checks which rules of a layout cannot be applied to a model's tensors, and finds alternatives.

Each problem is a sentence with the rule, the first tensor it concerns and legal alternatives.

Source:
  Illegal layouts: Shazeer et al. 2018, "Mesh-TensorFlow" (arXiv 1811.02084). A rule that names
  no dim of the model is an error here; Mesh-TensorFlow ignores it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tekso.framework.execution.mesh.rules import MeshShape, Rules, no_axis
from tekso.framework.spelling import close_matches

PADDING_FIELDS = {"vocab": "vocab_multiple"}
"""{dim that a model can pad: the field of its Params that sets the multiple}."""

OTHER_NAMES = {
    "d_ff": "mlp",
    "d_model": "embed",
    "d_kv": "head_dim",
    "d_k": "head_dim",
    "d_v": "head_dim",
    "sequence": "length",
}
"""{name of a dim in Mesh-TensorFlow's models: its name here}."""


MAY_STAY_WHOLE = ("depth", "height", "width", "channels")
"""Dims of images and volumes, whose sizes differ from layer to layer: a rule must fit one."""


class _Layout(Protocol):
    """The layout to check: a mesh, rules, and the two extra axes."""

    @property
    def mesh(self) -> MeshShape: ...

    @property
    def rules(self) -> Rules: ...

    @property
    def weights_axis(self) -> str | None: ...

    @property
    def slots_axis(self) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A weight or an activation: its name, dims and sizes (None: an unknown size)."""

    name: str
    dims: tuple[str | None, ...]
    shape: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise ValueError(
                f"{self.name}: dims {list(self.dims)} do not fit shape {list(self.shape)}; "
                "give a name (or None) for each dim"
            )

    def __str__(self) -> str:
        sizes = ["?" if size is None else str(size) for size in self.shape]
        parts = [f"{d}={n}" if d else n for d, n in zip(self.dims, sizes, strict=True)]
        return f"{self.name} [{', '.join(parts)}]"


def of_rules(layout: _Layout, tensors: Sequence[Tensor]) -> list[str]:
    """Returns the extra axes that are not in the mesh, and the rules for unknown dims, as texts."""
    problems = []
    for field in ("weights_axis", "slots_axis"):
        axis = getattr(layout, field)
        if axis is not None and axis not in layout.mesh.names:
            problem = no_axis(axis, layout.mesh.names)
            problems.append(f"{layout.mesh.params}.{field} is {axis!r}: {problem}")
    known = list(dict.fromkeys(dim for t in tensors for dim in t.dims if dim is not None))
    for dim, axis in layout.rules.pairs:
        if dim in known:
            continue
        if dim in layout.mesh.names and axis in known:
            hint = f"a rule is dim:axis, did you mean {axis}:{dim}?"
        elif OTHER_NAMES.get(dim) in known:
            hint = f"did you mean {OTHER_NAMES[dim]}?"
        else:
            close = close_matches(dim, known)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            hint += f"there are: {', '.join(known) or 'none'}"
        problems.append(f"rule {dim}:{axis}: no tensor of the model has a dim {dim}; {hint}")
    return problems


def of_tensors(layout: _Layout, tensors: Sequence[Tensor]) -> list[str]:
    """Returns the problems of rules on these tensors, in the order of the rules."""
    problems = []
    for i, (dim, axis) in enumerate(layout.rules.pairs):
        if axis not in layout.mesh.names:
            problems.append(f"rule {dim}:{axis}: {no_axis(axis, layout.mesh.names)}")
            continue
        problems += _uneven(layout, dim, axis, tensors)
        for other, other_axis in layout.rules.pairs[i:]:
            if axis == other_axis:
                problems += _clash(layout, dim, other, axis, tensors)
    return problems


def _uneven(layout: _Layout, dim: str, axis: str, tensors: Sequence[Tensor]) -> Iterator[str]:
    count = layout.mesh.size_of(axis)
    sizes = _by_size(dim, tensors)
    if dim in MAY_STAY_WHOLE:
        some = any(size % count == 0 for size in sizes)
        sizes = {} if some else dict(list(sizes.items())[:1])
    for size, having in sizes.items():
        if size % count == 0:
            continue
        fixed = [d for d, a in layout.rules.pairs if a == axis and d not in PADDING_FIELDS]
        common = math.gcd(size, *(n for d in fixed for n in _by_size(d, tensors)))
        mesh = f"axis {axis} of {_either(near_divisors(size, count))}"
        if near_divisors(common, count) != near_divisors(size, count):
            suits = _either(near_divisors(common, count))
            mesh += f" ({suits} for all dims that the rules shard over it)"
        below = size - size % count
        choices = [mesh, f"{dim} of {_either([n for n in (below, below + count) if n])}"]
        if dim in PADDING_FIELDS:
            choices.append(f"{PADDING_FIELDS[dim]}={count}, which pads {dim} to {below + count}")
        choices += _without(layout, dim, tensors)
        yield (
            f"rule {dim}:{axis}: {dim} of {size} does not divide evenly over the {count} devices "
            f"of axis {axis}: {_named(having)}; alternatives: {', or '.join(choices)}"
        )


def _clash(
    layout: _Layout, dim: str, other: str, axis: str, tensors: Sequence[Tensor]
) -> Iterator[str]:
    twice = dim == other
    having = [
        t for t in tensors if (t.dims.count(dim) > 1 if twice else {dim, other} <= set(t.dims))
    ]
    if not having:
        return
    if twice:
        rules = f"rule {dim}:{axis} would shard two dims {dim}"
        choices = _without(layout, dim, tensors)
    else:
        rules = f"rules {dim}:{axis} and {other}:{axis} would shard two dims"
        choices = _without(layout, dim, tensors) + _without(layout, other, tensors)
    yield (
        f"{rules} of one tensor over axis {axis}: {_named(having)}; alternatives: "
        f"{', or '.join(choices)}"
    )


def _without(layout: _Layout, dim: str, tensors: Sequence[Tensor]) -> list[str]:
    """Returns the alternatives for a dim: another axis, or no rule."""
    rest = [pair for pair in layout.rules.pairs if pair[0] != dim]
    having = [t for t in tensors if dim in t.dims]
    moved = []
    for name, count in layout.mesh.axes:
        taken = any(a == name and d in t.dims for t in having for d, a in rest)
        twice = any(t.dims.count(dim) > 1 for t in having)
        divides = all(size % count == 0 for size in _by_size(dim, tensors))
        if (dim, name) not in layout.rules.pairs and divides and not taken and not twice:
            moved.append(f"{dim}:{name}")
    text = ";".join(f"{d}:{a}" for d, a in rest)
    return [*moved, f"no rule for {dim} ({layout.rules.params}.rules={text!r})"]


def _by_size(dim: str, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Returns {size of a dim: tensors in which it has this size}."""
    sizes: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        for size in {n for d, n in zip(tensor.dims, tensor.shape, strict=True) if d == dim}:
            if size is not None:
                sizes.setdefault(size, []).append(tensor)
    return sizes


def near_divisors(size: int, near: int) -> list[int]:
    """Returns the divisors of a size closest to a number: up to two not above it, and one above.

    1 is among them only if it is the only divisor not above the number.
    """
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    divisors = sorted({*small, *(size // d for d in small)})
    below = [d for d in divisors if d <= near]
    above = [d for d in divisors if d > near]
    return (below[1:][-2:] or below) + above[:1]


def _named(tensors: Sequence[Tensor]) -> str:
    others = len(tensors) - 1
    more = f" and {others} other tensor{'s' if others > 1 else ''}" if others else ""
    return f"{tensors[0]}{more}"


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
