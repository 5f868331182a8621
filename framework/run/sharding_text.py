"""Shows a layout as text: the mesh, the effect of the rules, the shards, the collectives."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tekso.framework.counting import counted
from tekso.framework.planning import layout_drawing
from tekso.framework.planning.collectives import StepCollectives
from tekso.framework.planning.sharding import ShardedWeight, Sharding
from tekso.framework.run import weight_groups
from tekso.framework.run.report.lines import WIDTH
from tekso.framework.tables import table
from tekso.framework.units import bytes_text

HOW_COUNTED = "in the program that TensorFlow compiles for this mesh, without running it"

_INDENT = "  "
_MOST_ROWS = 200


def sharding_text(model: str, sharding: Sharding, *, width: int | None = None) -> str:
    """Returns the layout as text, without the collectives.

    Args:
      model: title of the text.
      sharding: the layout.
      width: columns of the terminal; None: tables have any width.
    """
    layout, prose = sharding.layout, width or WIDTH
    lines = [model, "", f"mesh {layout.mesh}: {counted(layout.mesh.size, 'device')}, by number"]
    lines += [
        _INDENT + line for line in layout_drawing.draw(layout.mesh, width=prose - len(_INDENT))
    ]
    rules = _rules(sharding)
    lines += ["", "rules" if rules else "no rules: every device stores and computes everything"]
    lines += table((), rules, width=width, indent=_INDENT)
    for remark in sharding.remarks():
        lines += textwrap.wrap(
            remark, prose, initial_indent=f"{_INDENT}note: ", subsequent_indent=_INDENT * 2
        )
    lines += ["", *_weight_table(sharding.weights, width), "", *_totals(sharding)]
    return "\n".join(lines)


def collectives_text(found: StepCollectives, *, width: int | None = None) -> str:
    """Returns the collectives of a training step as text."""
    heading = f"collectives of a device in a training step, counted {HOW_COUNTED}"
    lines = ["", *textwrap.wrap(heading, width or WIDTH)]
    if not found.collectives:
        return "\n".join([*lines, f"{_INDENT}none"])
    rows = [(c.kind, c.axis, f"{c.count:,}", bytes_text(c.bytes)) for c in found.collectives]
    header = ("kind", "axis", "tensors", "bytes")
    lines += table(header, rows, right=(2, 3), width=width, indent=_INDENT)
    lines += [f"note: a loop of unknown length counts once: {name}" for name in found.unknown_loops]
    return "\n".join(lines)


def _rules(sharding: Sharding) -> list[tuple[str, str]]:
    """Returns each rule and its effect."""
    layout = sharding.layout
    rows = []
    for dim, axis in layout.rules.pairs:
        split = sharding.split_by(dim, axis)
        sizes = sorted({w.spec.shape[w.spec.dims.index(dim)] for w in split})
        parts = ", ".join(f"{n} into {n // layout.mesh.size_of(axis)} per device" for n in sizes)
        weights = counted(len(split), "weight")
        does = f"shards {weights}: {parts}" if split else "shards only activations"
        rows.append((f"{dim}:{axis}", does))
    if layout.weights_axis:
        count = f"{len(sharding.split_further())} of {counted(len(sharding.weights), 'weight')}"
        does = f"shards {count} between steps; all-gathered for use"
        rows.append((f"weights_axis={layout.weights_axis}", does))
    if layout.slots_axis:
        does = "shards the optimizer slots and the update"
        does = does if sharding.slots_are_split_further() else "shards nothing"
        rows.append((f"slots_axis={layout.slots_axis}", does))
    return rows


def _weight_table(weights: Sequence[ShardedWeight], width: int | None) -> list[str]:
    """Returns two lines for each weight; weights that differ only in their layer are one row."""
    rows = []
    for alike in _alike(weights):
        first = alike[0]
        part = " × ".join(map(str, first.shard_shape)) or "scalar"
        many = f"{len(alike)} of " if len(alike) > 1 else ""
        held = sum(w.bytes_per_device for w in alike)
        slots = sum(w.optimizer_bytes_per_device for w in alike)
        rows.append(
            (
                weight_groups.joined(w.spec.path for w in alike),
                f"{many}{part}",
                bytes_text(held),
                bytes_text(slots),
                _placed(first),
            )
        )
    header = ("weight", "shard of a device", "bytes", "optimizer")
    shown = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS // 2] + rows[-_MOST_ROWS // 2 :]
    remarks = {
        number: textwrap.wrap(
            row[4], width or WIDTH, initial_indent=_INDENT * 2, subsequent_indent=_INDENT * 2
        )
        for number, row in enumerate(shown)
    }
    if len(shown) < len(rows):
        left_out = f"… {len(rows) - len(shown)} more rows; --format=json has all of them …"
        remarks[_MOST_ROWS // 2 - 1].append(left_out)
    cells = [row[:4] for row in shown]
    return table(header, cells, right=(2, 3), width=width, remarks=remarks)


def _placed(weight: ShardedWeight) -> str:
    """Returns dims with their sizes, and the axes that shard them."""
    parts = []
    placed = zip(
        weight.spec.dims, weight.spec.shape, weight.layout, weight.used_layout, strict=True
    )
    for dim, count, axis, used in placed:
        how = f" over {axis}" if axis else ""
        parts.append(f"{dim or '-'}={count}{how}{' between steps' if axis != used else ''}")
    return ", ".join(parts) or "scalar"


def _alike(weights: Sequence[ShardedWeight]) -> list[list[ShardedWeight]]:
    """Returns groups of weights that differ only in the index of their layer."""
    return weight_groups.groups(
        weights,
        lambda w: w.spec.path,
        lambda w: (w.spec.dims, w.spec.shape, w.spec.dtype, w.layout),
    )


def _totals(sharding: Sharding) -> list[str]:
    whole = [w for w in sharding.weights if not any(w.layout)]
    held = sum(w.bytes_per_device for w in whole)
    lines = [
        f"a device stores {bytes_text(sharding.weight_bytes_per_device)} of "
        f"{bytes_text(sharding.weight_bytes)} of weights, and "
        f"{bytes_text(sharding.optimizer_bytes_per_device)} of "
        f"{bytes_text(sharding.optimizer_bytes)} of the optimizer"
    ]
    if whole and sharding.layout.mesh.size > 1:
        of = f"{len(whole)} of {counted(len(sharding.weights), 'weight')}"
        lines.append(f"replicated on every device: {of}, {bytes_text(held)}")
    return lines
