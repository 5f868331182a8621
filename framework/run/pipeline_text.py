"""Shows a pipeline as text, as JSON data and as a picture: its stages, then its schedule."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from tekso.framework.planning.mesh_figures import MeshFigures
from tekso.framework.planning.stage_figures import PipelineFigures, StageFigures
from tekso.framework.planning.timeline_drawing import draw_png, draw_text
from tekso.framework.run.report.lines import WIDTH, magnitude
from tekso.framework.tables import table
from tekso.framework.units import bytes_text

UNIT = "the time of the slowest stage for one micro-batch"
_INDENT = "  "
_MANY_ROWS, _MOST_ROWS = 16, 40
_COSTS = {
    "traced": "cost: operations and moved bytes, counted in the traced graphs of the pieces",
    "measured": "cost: measured time of each kind of piece, forward and backward",
}


def record(figures: PipelineFigures) -> dict[str, Any]:
    """Returns all figures as JSON data."""
    plan, timeline = figures.plan, figures.timeline
    return {
        "schedule": figures.schedule,
        "num_stages": len(figures.stages),
        "num_devices": plan.num_devices,
        "num_replicas": plan.num_replicas,
        "num_micro_batches": plan.num_micro_batches,
        "accumulation_steps": plan.num_parts,
        "batch_size": plan.batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "rematerialize": plan.rematerialize,
        "costs": plan.costs,
        "balance": [len(each.stage.piece_names) for each in figures.stages],
        "stages": [
            _stage_record(each, share)
            for each, share in zip(figures.stages, figures.cost_shares, strict=True)
        ],
        "makespan": timeline.makespan,
        "makespan_unit": UNIT,
        "slowest_stage": figures.slowest,
        "idle_share": timeline.idle_share,
        "held_micro_batches": list(timeline.held),
        "held_bytes": list(figures.held_bytes),
        "peak_bytes": list(figures.peak_bytes),
        "shared_bytes": figures.shared_bytes,
        "counted_bytes": figures.counted_bytes,
        "on_mesh": None if figures.on_mesh is None else _mesh_record(figures.on_mesh),
    }


def _mesh_record(on_mesh: MeshFigures) -> dict[str, Any]:
    layout = on_mesh.layout
    return {
        "mesh": str(layout.mesh),
        "rules": str(layout.rules),
        "weights_axis": layout.weights_axis,
        "slots_axis": layout.slots_axis,
        "is_program": on_mesh.is_program,
        "stages": [
            {
                "weight_bytes_per_device": each.weights,
                "copy_bytes_per_device": each.copies,
                "optimizer_bytes_per_device": each.slots,
                "gradient_bytes_per_device": each.gradients,
            }
            for each in on_mesh.stages
        ],
    }


def _stage_record(figures: StageFigures, cost_share: float) -> dict[str, Any]:
    return {
        "stage": figures.stage.index,
        "device": figures.device,
        "layers": list(figures.stage.piece_names),
        "weights": figures.weights,
        "weight_bytes": figures.weight_bytes,
        "copies": list(figures.copies),
        "copy_bytes": figures.copy_bytes,
        "optimizer_bytes": figures.slot_bytes,
        "gradient_bytes": figures.gradient_bytes,
        "flops": round(figures.flops),
        "flops_with_backward": round(figures.flops_with_backward),
        "handed_bytes": figures.handed_bytes,
        "cost_share": cost_share,
    }


def text(model: str, figures: PipelineFigures, *, width: int | None = None) -> str:
    """Returns the stages, the memory of every device, and the simulated timeline, as text.

    Args:
      model: title of the text.
      figures: the figures of the pipeline.
      width: columns of the terminal; None: tables have any width.
    """
    prose = width or WIDTH
    lines = [model, "", *textwrap.wrap(_layout(figures), prose), ""]
    lines += [*_stages(figures, width), ""]
    if figures.on_mesh is None or not figures.on_mesh.is_program:
        lines += [*_devices(figures, width), ""]
    if figures.on_mesh is not None:
        lines += [*_shards(figures.on_mesh, width), ""]
    lines += [*textwrap.wrap(_course(figures), prose), ""]
    lines += draw_text({f"simulated {figures.schedule}": figures.timeline}, width=prose)
    return "\n".join(lines)


def png(model: str, figures: PipelineFigures) -> bytes:
    """Returns the simulated timeline as a PNG."""
    title = f"{model}: {figures.schedule}, 1 is {UNIT}"
    return draw_png({"simulated": figures.timeline}, title=title)


def _layout(figures: PipelineFigures) -> str:
    plan = figures.plan
    where = _count(plan.num_devices, "device")
    if figures.on_mesh is not None and not figures.on_mesh.is_program:
        mesh = figures.on_mesh.layout.mesh
        of = f"{_count(mesh.size, 'device')} ({mesh})"
        where = f"{_count(plan.num_devices, 'mesh', 'es')} of {of}"
    text = f"{_count(len(figures.stages), 'stage')} on {where}"
    if plan.num_replicas > 1:
        text += f", {plan.num_replicas} replicas"
    text += f"; {_count(plan.batch_size, 'example')} in "
    if plan.num_parts > 1:
        text += f"{plan.num_parts} parts of "
    text += _count(plan.num_micro_batches, "micro-batch", "es")
    size = plan.micro_batch_size
    text += f" of {plan.num_replicas} × {size}" if plan.num_replicas > 1 else f" of {size}"
    return f"{text}; rematerialisation: {plan.rematerialize}"


def _stages(figures: PipelineFigures, width: int | None) -> list[str]:
    """Returns two lines for each stage: its figures, and its pieces."""
    header = ("stage", "device", "weights", "bytes", "optimizer", "flops", "+backward",
              "output", "cost")  # fmt: skip
    rows = [
        _Row(
            (each.stage.index, each.device),
            (
                f"{each.weights:,}",
                bytes_text(each.weight_bytes + each.copy_bytes),
                bytes_text(each.slot_bytes),
                _flops(each.flops),
                _flops(each.flops_with_backward),
                bytes_text(each.handed_bytes),
                f"{share:.1%}",
            ),
            each.stage.piece_names,
        )
        for each, share in zip(figures.stages, figures.cost_shares, strict=True)
    ]
    return [*_table(header, rows, width), *_notes(figures, width or WIDTH)]


def _notes(figures: PipelineFigures, width: int) -> list[str]:
    """Returns the notes below the table of stages."""
    total = sum(each.weights for each in figures.stages)
    notes = [
        f"total: {total:,} weights; flops and output bytes are per micro-batch",
        _COSTS[figures.plan.costs],
    ]
    notes += [
        f"stage {each.stage.index} gets copies of {', '.join(each.copies)} from an earlier stage "
        f"({bytes_text(each.copy_bytes)}, included in its bytes)"
        for each in figures.stages
        if each.copies
    ]
    return [line for note in notes for line in textwrap.wrap(note, width)]


def _devices(figures: PipelineFigures, width: int | None) -> list[str]:
    """Returns a line for each device: its memory between steps and during a step."""
    header = ("device", "weights, optimizer, gradients", "saved micro-batches", "their bytes",
              "peak")  # fmt: skip
    rows = []
    for device, held in enumerate(figures.timeline.held):
        fixed = sum(each.state_bytes for each in figures.on_device(device))
        saved, peak = bytes_text(figures.held_bytes[device]), bytes_text(figures.peak_bytes[device])
        cells = bytes_text(fixed), f"{held:.4g}", saved, peak
        rows.append(_Row((device,), cells))
    return _table(header, rows, width)


def _shards(on_mesh: MeshFigures, width: int | None) -> list[str]:
    """Returns a line for each stage: the memory of each device of its mesh."""
    layout = on_mesh.layout
    rules = str(layout.rules) or "none"
    said = f"a device above is a mesh; memory of each of its devices, with the rules {rules}:"
    if on_mesh.is_program:
        said = (
            f"one program over the mesh {layout.mesh}, rules {rules}: all stages compute the "
            "layers before and after the stack, sharded where a rule applies; memory of a device:"
        )
    header = ("stage", "weights", "copies", "optimizer", "gradients")
    rows = [
        _Row((i,), tuple(map(bytes_text, (each.weights, each.copies, each.slots, each.gradients))))
        for i, each in enumerate(on_mesh.stages)
    ]
    return [*textwrap.wrap(said, width or WIDTH), *_table(header, rows, width)]


def _course(figures: PipelineFigures) -> str:
    plan, timeline = figures.plan, figures.timeline
    times = 1 + (not plan.splits_backward) + plan.recomputes_some
    backward = f"{('as', 'twice as', 'three times as')[times - 1]} long as a forward pass"
    if plan.recomputes_some:
        backward += ", which it recomputes"
        if plan.saves_some:
            backward += " except for the last micro-batch"
    if plan.splits_backward:
        backward += ", a weight gradient takes as long as a forward pass"
    takes = "takes" if plan.num_micro_batches == 1 else "take"
    return (
        f"{figures.schedule}: {_count(plan.num_micro_batches, 'micro-batch', 'es')} {takes} "
        f"{timeline.makespan:.2f}, and the devices are idle for {timeline.idle_share:.1%} of it. "
        f"1 is {UNIT}, stage {figures.slowest}; a backward pass takes {backward}, a transfer takes "
        "no time."
    )


class _Row(NamedTuple):
    """A row of a table: numbers that increase from row to row, other cells, names below them."""

    numbers: tuple[int, ...]
    cells: tuple[str, ...]
    pieces: tuple[str, ...] = ()


def _table(header: Sequence[str], rows: Sequence[_Row], width: int | None) -> list[str]:
    """Returns right-aligned columns; in a long table, equal neighbouring rows are merged."""
    prose = width or WIDTH
    groups = [[row] for row in rows]
    if len(rows) > _MANY_ROWS:
        groups = _alike(rows)
    left_out = len(groups) - _MOST_ROWS
    if left_out > 0:
        groups = [*groups[: _MOST_ROWS // 2], *groups[-_MOST_ROWS // 2 :]]
    cells = [
        (*map(_range, zip(*(row.numbers for row in g), strict=True)), *g[0].cells) for g in groups
    ]
    remarks = {
        number: [_INDENT + textwrap.shorten(_pieces(g), prose - len(_INDENT), placeholder=" …")]
        for number, g in enumerate(groups)
        if g[0].pieces
    }
    if left_out > 0:
        left = f"… {left_out} more; --format=json has all of them …"
        remarks.setdefault(_MOST_ROWS // 2 - 1, []).append(left)
    return table(header, cells, right=range(len(header)), width=width, remarks=remarks)


def _alike(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Returns groups of neighbours with equal cells, whose numbers all increase by one."""
    groups: list[list[_Row]] = []
    for row in rows:
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and before.cells == row.cells
            and len(before.pieces) == len(row.pieces)
            and all(b + 1 == r for b, r in zip(before.numbers, row.numbers, strict=True))
        ):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _pieces(group: Sequence[_Row]) -> str:
    names = [name for row in group for name in row.pieces]
    many = f"{len(group)} × {len(group[0].pieces)}" if len(group) > 1 else str(len(names))
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({many})"


def _flops(count: float) -> str:
    for limit, letter in ((1e15, "P"), (1e12, "T")):
        if count >= limit:
            return f"{count / limit:.3g}{letter}"
    return magnitude(count)


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"
