"""A pipeline as text, as an object for JSON and as a picture: its stages, then its schedule."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from tekso.framework.planning.mesh_figures import MeshFigures
from tekso.framework.planning.stage_figures import PipelineFigures, StageFigures
from tekso.framework.planning.timeline_drawing import draw_png, draw_text
from tekso.framework.run.report.lines import WIDTH, magnitude, size

UNIT = "the time that the slowest stage works on a micro-batch"
_INDENT = "  "
_MANY_ROWS, _MOST_ROWS = 16, 40
_COSTS = {
    "traced": "cost: operations and bytes that are moved, of the traced graphs of the pieces",
    "measured": "cost: the time of each kind of piece, forward and backward, as measured here",
}


def record(figures: PipelineFigures) -> dict[str, Any]:
    """Returns all figures in a form that JSON can hold."""
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


def text(model: str, figures: PipelineFigures, *, width: int = WIDTH) -> str:
    """Returns the stages, what every device holds, and the simulated timeline."""
    lines = [model, "", *textwrap.wrap(_layout(figures), width), ""]
    lines += [*_stages(figures, width), ""]
    if figures.on_mesh is None or not figures.on_mesh.is_program:
        lines += [*_devices(figures, width), ""]
    if figures.on_mesh is not None:
        lines += [*_shards(figures.on_mesh, width), ""]
    lines += [*textwrap.wrap(_course(figures), width), ""]
    lines += draw_text({f"simulated {figures.schedule}": figures.timeline}, width=width)
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
    text = f"{_count(len(figures.stages), 'stage')} on {where} in a row"
    if plan.num_replicas > 1:
        text += f", {plan.num_replicas} such rows"
    text += f"; {_count(plan.batch_size, 'example')} in "
    if plan.num_parts > 1:
        text += f"{plan.num_parts} parts of "
    text += _count(plan.num_micro_batches, "micro-batch", "es")
    size = plan.micro_batch_size
    text += f" of {plan.num_replicas} × {size}" if plan.num_replicas > 1 else f" of {size}"
    return f"{text}; rematerialisation: {plan.rematerialize}"


def _stages(figures: PipelineFigures, width: int) -> list[str]:
    """Two lines for each stage: its figures, and its pieces."""
    header = ("stage", "device", "weights", "bytes", "optimizer", "flops", "+backward",
              "hands on", "cost")  # fmt: skip
    rows = [
        _Row(
            (each.stage.index, each.device),
            (
                f"{each.weights:,}",
                size(each.weight_bytes + each.copy_bytes),
                size(each.slot_bytes),
                _flops(each.flops),
                _flops(each.flops_with_backward),
                size(each.handed_bytes),
                f"{share:.1%}",
            ),
            each.stage.piece_names,
        )
        for each, share in zip(figures.stages, figures.cost_shares, strict=True)
    ]
    return [*_table(header, rows, width), *_notes(figures, width)]


def _notes(figures: PipelineFigures, width: int) -> list[str]:
    """What the table leaves open."""
    total = sum(each.weights for each in figures.stages)
    notes = [
        f"together {total:,} weights; flops and bytes that are handed on are of a micro-batch",
        _COSTS[figures.plan.costs],
    ]
    notes += [
        f"stage {each.stage.index} is given copies of {', '.join(each.copies)} "
        f"({size(each.copy_bytes)}, among its bytes), which an earlier stage keeps"
        for each in figures.stages
        if each.copies
    ]
    return [line for note in notes for line in textwrap.wrap(note, width)]


def _devices(figures: PipelineFigures, width: int) -> list[str]:
    """A line for each device: what it holds between and in the steps."""
    header = ("device", "weights, optimizer, gradients", "micro-batches held", "their bytes")
    rows = []
    for device, held in enumerate(figures.timeline.held):
        fixed = sum(
            each.weight_bytes + each.copy_bytes + each.slot_bytes + each.gradient_bytes
            for each in figures.on_device(device)
        )
        cells = size(fixed), f"{held:.4g}", size(figures.held_bytes[device])
        rows.append(_Row((device,), cells))
    return _table(header, rows, width)


def _shards(on_mesh: MeshFigures, width: int) -> list[str]:
    """A line for each stage: what every device of its mesh holds."""
    layout = on_mesh.layout
    rules = str(layout.rules) or "none"
    said = f"a device above is a mesh; each of its devices holds, by the rules {rules}:"
    if on_mesh.is_program:
        said = (
            f"one program over the mesh {layout.mesh}, rules {rules}: what is before and after "
            "the stack is on all stages, which share what a rule splits; a device holds:"
        )
    header = ("stage", "weights", "copies", "optimizer", "gradients")
    rows = [
        _Row((i,), tuple(map(size, (each.weights, each.copies, each.slots, each.gradients))))
        for i, each in enumerate(on_mesh.stages)
    ]
    return [*textwrap.wrap(said, width), *_table(header, rows, width)]


def _course(figures: PipelineFigures) -> str:
    plan, timeline = figures.plan, figures.timeline
    times = 1 + (not plan.is_apart) + plan.recomputes_some
    backward = f"{('as', 'twice as', 'three times as')[times - 1]} long as a forward"
    if plan.recomputes_some:
        backward += ", which it computes again"
        if plan.keeps_some:
            backward += " but for the last micro-batch"
    if plan.is_apart:
        backward += ", a weight gradient as long as a forward"
    takes = "takes" if plan.num_micro_batches == 1 else "take"
    return (
        f"{figures.schedule}: {_count(plan.num_micro_batches, 'micro-batch', 'es')} {takes} "
        f"{timeline.makespan:.2f}, of which the devices are idle {timeline.idle_share:.1%}. 1 is "
        f"{UNIT}, stage {figures.slowest}; a backward takes {backward}, a handover takes no time."
    )


class _Row(NamedTuple):
    """Of a table: numbers that grow from row to row, the other cells, and what stands below."""

    numbers: tuple[int, ...]
    cells: tuple[str, ...]
    pieces: tuple[str, ...] = ()


def _table(header: Sequence[str], rows: Sequence[_Row], width: int) -> list[str]:
    """Columns to the right; in a long table neighbours that are alike are one row."""
    groups = [[row] for row in rows]
    if len(rows) > _MANY_ROWS:
        groups = _alike(rows)
    left_out = len(groups) - _MOST_ROWS
    if left_out > 0:
        groups = [*groups[: _MOST_ROWS // 2], [], *groups[-_MOST_ROWS // 2 :]]
    lines = [(*map(_range, zip(*(r.numbers for r in g), strict=True)), *g[0].cells) if g else None
             for g in groups]  # fmt: skip
    columns = zip(header, *(line for line in lines if line), strict=True)
    widths = [max(map(len, column)) for column in columns]
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= width else " "
    text = [gap.join(f"{cell:>{w}}" for cell, w in zip(header, widths, strict=True))]
    for group, line in zip(groups, lines, strict=True):
        if line is None:
            text.append(f"… {left_out} more; --format=json has all of them …")
            continue
        text.append(gap.join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)))
        if group[0].pieces:
            text.append(
                _INDENT + textwrap.shorten(_pieces(group), width - len(_INDENT), placeholder=" …")
            )
    return text


def _alike(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Groups of neighbours whose cells are the same and whose numbers all go up by one."""
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
