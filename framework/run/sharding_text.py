"""Shows a layout as text: the mesh, the effect of the rules, the shards, the collectives."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence

from tekso.framework.planning import layout_drawing
from tekso.framework.planning.collectives import StepCollectives
from tekso.framework.planning.sharding import ShardedWeight, Sharding
from tekso.framework.run.report.lines import WIDTH, size

HOW_COUNTED = "in the program that TensorFlow compiles for this mesh, without running it"

_INDENT = "  "
_MOST_ROWS = 200
_INDEX = re.compile(r"(?<=/)\d+(?=/)")  # index of a layer in a path


def sharding_text(model: str, sharding: Sharding, *, width: int = WIDTH) -> str:
    """Returns the layout as text, without the collectives."""
    layout = sharding.layout
    lines = [model, "", f"mesh {layout.mesh}: {_devices(layout.mesh.size)}, by number"]
    lines += [
        _INDENT + line for line in layout_drawing.draw(layout.mesh, width=width - len(_INDENT))
    ]
    rules = _rules(sharding)
    lines += ["", "rules" if rules else "no rules: every device stores and computes everything"]
    lines += [_INDENT + line for line in rules]
    for remark in sharding.remarks():
        lines += textwrap.wrap(
            remark, width, initial_indent=f"{_INDENT}note: ", subsequent_indent=_INDENT * 2
        )
    lines += ["", *_table(sharding.weights, width), "", *_totals(sharding)]
    return "\n".join(lines)


def collectives_text(found: StepCollectives, *, width: int = WIDTH) -> str:
    """Returns the collectives of a training step as text."""
    heading = f"collectives of a device in a training step, counted {HOW_COUNTED}"
    lines = ["", *textwrap.wrap(heading, width)]
    if not found.collectives:
        return "\n".join([*lines, f"{_INDENT}none"])
    rows = [("kind", "axis", "tensors", "bytes")]
    rows += [(c.kind, c.axis, f"{c.count:,}", size(c.bytes)) for c in found.collectives]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{x:<{w}}" if i < 2 else f"{x:>{w}}" for i, (x, w) in
                 enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(_INDENT + "  ".join(cells).rstrip())
    lines += [f"note: a loop of unknown length counts once: {name}" for name in found.unknown_loops]
    return "\n".join(lines)


def _devices(count: int) -> str:
    return f"{count:,} device{'s' if count > 1 else ''}"


def _rules(sharding: Sharding) -> list[str]:
    layout = sharding.layout
    rows = []
    for dim, axis in layout.rules.pairs:
        split = sharding.split_by(dim, axis)
        sizes = sorted({w.spec.shape[w.spec.dims.index(dim)] for w in split})
        parts = ", ".join(f"{n} into {n // layout.mesh.size_of(axis)} per device" for n in sizes)
        does = f"shards {_weights(len(split))}: {parts}" if split else "shards only activations"
        rows.append((f"{dim}:{axis}", does))
    if layout.weights_axis:
        count = f"{len(sharding.split_further())} of {_weights(len(sharding.weights))}"
        does = f"shards {count} between steps; all-gathered for use"
        rows.append((f"weights_axis={layout.weights_axis}", does))
    if layout.slots_axis:
        does = "shards the optimizer slots and the update"
        does = does if sharding.slots_are_split_further() else "shards nothing"
        rows.append((f"slots_axis={layout.slots_axis}", does))
    longest = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{longest}}  {does}" for name, does in rows]


def _weights(count: int) -> str:
    return f"{count} weight{'s' if count != 1 else ''}"


def _table(weights: Sequence[ShardedWeight], width: int) -> list[str]:
    """Returns two lines for each weight; weights that differ only in their layer are one row."""
    rows = []
    for alike in _alike(weights):
        first = alike[0]
        part = " × ".join(map(str, first.shard_shape)) or "scalar"
        many = f"{len(alike)} of " if len(alike) > 1 else ""
        held = sum(w.bytes_per_device for w in alike)
        slots = sum(w.optimizer_bytes_per_device for w in alike)
        rows.append((_path(alike), f"{many}{part}", size(held), size(slots), _placed(first)))
    header = ("weight", "shard of a device", "bytes", "optimizer")
    shown = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS // 2] + rows[-_MOST_ROWS // 2 :]
    ends = [max(len(row[i]) for row in [header, *shown]) for i in range(4)]
    ends[0] = min(ends[0], width - sum(ends[1:]) - 6)
    lines = [_line(header, ends)]
    for number, row in enumerate(shown):
        if number == _MOST_ROWS // 2 and len(shown) < len(rows):
            lines.append(f"… {len(rows) - len(shown)} more rows; --format=json has all of them …")
        lines.append(_line(row, ends))
        lines += textwrap.wrap(
            row[4], width, initial_indent=_INDENT * 2, subsequent_indent=_INDENT * 2
        )
    return lines


def _line(row: Sequence[str], ends: Sequence[int]) -> str:
    name = row[0] if len(row[0]) <= ends[0] else f"…{row[0][len(row[0]) - ends[0] + 1 :]}"
    return f"{name:<{ends[0]}}  {row[1]:<{ends[1]}}  {row[2]:>{ends[2]}}  {row[3]:>{ends[3]}}"


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
    groups: dict[tuple[object, ...], list[ShardedWeight]] = {}
    for w in weights:
        key = (_INDEX.sub("*", w.spec.path), w.spec.dims, w.spec.shape, w.spec.dtype, w.layout)
        groups.setdefault(key, []).append(w)
    return list(groups.values())


def _path(alike: Sequence[ShardedWeight]) -> str:
    """Returns the path of a group, with ranges of layer indices where its paths differ."""
    paths = [w.spec.path.split("/") for w in alike]
    return "/".join(_numbers(part) for part in zip(*paths, strict=True))


def _numbers(texts: Sequence[str]) -> str:
    if len(set(texts)) == 1:
        return texts[0]
    numbers = sorted({int(text) for text in texts})
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    text = ",".join(runs)
    return "{" + (text if len(text) <= 12 else f"{len(numbers)} layers") + "}"


def _totals(sharding: Sharding) -> list[str]:
    whole = [w for w in sharding.weights if not any(w.layout)]
    held = sum(w.bytes_per_device for w in whole)
    lines = [
        f"a device stores {size(sharding.weight_bytes_per_device)} of "
        f"{size(sharding.weight_bytes)} of weights, and "
        f"{size(sharding.optimizer_bytes_per_device)} of {size(sharding.optimizer_bytes)} of the "
        "optimizer"
    ]
    if whole and sharding.layout.mesh.size > 1:
        of = f"{len(whole)} of {_weights(len(sharding.weights))}"
        lines.append(f"replicated on every device: {of}, {size(held)}")
    return lines
