"""Presets: named layouts, for a number of devices or for a given mesh.

| name   | rules                                    | mesh of N devices                        |
|--------|------------------------------------------|------------------------------------------|
| data   | batch:data                               | data:N                                   |
| fsdp   | batch:data, and stored weights over data | data:N                                   |
| tensor | mlp, heads and vocab over model          | model:N                                  |
| 2d     | data and tensor, and experts over data   | data:A;model:B, as even as possible, A≥B |

A rule of a preset for a dim that the model does not have (experts in a dense model) is dropped. A
size that is not a multiple of the axis size is an error, as with explicit rules. Otherwise `tensor`
with 4 heads on 8 devices would compute all heads on every device, and nothing would report it. The
error suggests alternatives: a smaller model axis (`2d`, or an explicit mesh such as
data:2;model:4), or the rules without heads:model.

Source:
  fsdp: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), stage 3. tensor: Shazeer et al. 2018,
  "Mesh-TensorFlow" (arXiv 1811.02084); Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout, MeshShape, Rules
from tekso.framework.spelling import close_matches

DATA, MODEL = "data", "model"

_BATCH = (("batch", DATA),)
_TENSOR = tuple((dim, MODEL) for dim in ("mlp", "heads", "vocab"))


@dataclasses.dataclass(frozen=True)
class Preset:
    """The rules of a preset, for the axes "data" and "model"."""

    rules: Rules
    weights_axis: str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the rules use."""
        return tuple(dict.fromkeys(axis for _, axis in self.rules.pairs))

    def mesh(self, num_devices: int) -> MeshShape:
        """Returns the mesh of all devices, as even as possible, with the larger axis for data."""
        if len(self.axes) == 1:
            return MeshShape(((self.axes[0], num_devices),))
        data, model = even_factors(num_devices)
        return MeshShape(((DATA, data), (MODEL, model)))


PRESETS = {
    "data": Preset(Rules(_BATCH)),
    "fsdp": Preset(Rules(_BATCH), weights_axis=DATA),
    "tensor": Preset(Rules(_TENSOR)),
    "2d": Preset(Rules((*_BATCH, *_TENSOR, ("experts", DATA)))),
}


def resolve(
    rules: str,
    mesh: str | None,
    *,
    num_devices: int | None,
    dims: Collection[str] | None = None,
    weights_axis: str | None = None,
    slots_axis: str | None = None,
    params: str = "execution",
) -> MeshLayout:
    """Returns the layout of the fields `rules` and `mesh` of the Params of an execution.

    Args:
      rules: explicit rules ("batch:data;mlp:model"), or the name of a preset.
      mesh: a mesh ("data:2;model:4"); None for all devices, as the preset defines.
      num_devices: number of devices; None for the number that the mesh needs.
      dims: the dims of the model's weights and activations: rules of a preset for other dims are
        dropped. None keeps all rules. Explicit rules are never dropped.
      weights_axis: as in `MeshLayout`; None for the weights axis of the preset.
      slots_axis: as in `MeshLayout`.
      params: path of the Params that have these fields, for errors.

    Raises:
      LayoutError: the mesh or the rules are malformed; the mesh needs more devices than there are,
        or lacks an axis of the preset; no rule of a preset uses one of its axes; or the rules are
        explicit and there is no mesh.
    """
    preset = _preset(rules, params)
    written = Rules.parse(rules, params=params) if preset is None else preset.rules
    if mesh is not None:
        shape = MeshShape.parse(mesh, params=params)
    elif preset is None:
        raise LayoutError(
            f"{params}.mesh is not set, and {params}.rules {rules!r} is not a preset: set the "
            f"axes and their sizes{_example(written, num_devices)}"
        )
    elif num_devices is None:
        raise LayoutError(
            f"{params}.mesh is not set, and the number of devices is not known: set the mesh, for "
            f"example to {str(preset.mesh(8))!r}"
        )
    else:
        shape = dataclasses.replace(preset.mesh(num_devices), params=params)
    if num_devices is not None:
        shape.check_devices(num_devices)
    if preset is not None:
        written = _for_model(rules, preset, shape, dims)
        weights_axis = weights_axis or preset.weights_axis
    return MeshLayout(shape, written, weights_axis=weights_axis, slots_axis=slots_axis)


def even_factors(n: int) -> tuple[int, int]:
    """Returns the two factors of n that are closest to each other, the larger one first."""
    small = next((d for d in range(math.isqrt(max(n, 0)), 0, -1) if n % d == 0), 1)
    return n // small, small


def _preset(rules: str, params: str) -> Preset | None:
    name = rules.strip()
    if name in PRESETS:
        return PRESETS[name]
    if not name or any(mark in name for mark in ":;, \t\n"):
        return None
    close = close_matches(name, PRESETS, count=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise LayoutError(
        f"{params}.rules is {rules!r}: neither a preset ({', '.join(PRESETS)}) nor rules such as "
        f"'batch:data;mlp:model'{hint}"
    )


def _for_model(name: str, preset: Preset, mesh: MeshShape, dims: Collection[str] | None) -> Rules:
    params = mesh.params
    lacking = [axis for axis in preset.axes if axis not in mesh.names]
    if lacking:
        raise LayoutError(
            f"{params}.rules {name!r} shards over the axis {' and '.join(lacking)}, which "
            f"{params}.mesh {str(mesh)!r} does not have: name its axes as in "
            f"{str(preset.mesh(mesh.size))!r}, or set explicit rules"
        )
    pairs = tuple(pair for pair in preset.rules.pairs if dims is None or pair[0] in dims)
    kept = Rules(pairs, params=params)
    for axis in preset.axes:
        if mesh.size_of(axis) > 1 and axis not in {used for _, used in kept.pairs}:
            wished = [dim for dim, used in preset.rules.pairs if used == axis]
            raise LayoutError(
                f"{params}.rules {name!r} shards {', '.join(wished)} over axis {axis}, but the "
                f"model has none of these dims; it has: {', '.join(sorted(dims or ()))}"
            )
    return kept


def _example(rules: Rules, num_devices: int | None) -> str:
    axes = list(dict.fromkeys(axis for _, axis in rules.pairs))
    if not axes or len(axes) > 2:
        return ""
    n = num_devices or 8
    sizes = (n,) if len(axes) == 1 else even_factors(n)
    return f", for example {';'.join(f'{a}:{s}' for a, s in zip(axes, sizes, strict=True))!r}"
