"""A ranking of layouts, as text and in a form for JSON."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from tekso.framework.counting import counted
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.planning.cost_model import Cost
from tekso.framework.planning.layout_search import Ranked
from tekso.framework.planning.rings import GRADIENTS, WEIGHTS, CollectiveCost
from tekso.framework.tables import table
from tekso.framework.units import bytes_text, seconds_text

TOP = 8  # number of layouts shown
_EXPLAINED = 3
_PROSE_WIDTH = 100
_PARTS = {
    "weights": "weights",
    "used_weights": "gathered or cast weights",
    "slots": "slots",
    "gradients": "gradients",
    "activations": "activations",
    "workspace": "workspace",
}
_WORTH_SAYING = 0.01  # smallest share of a step or of the memory that is reported


def text(model: str, ranking: Sequence[Ranked], *, top: int = TOP, width: int | None = None) -> str:
    """Returns a ranking as text: a table, then reasons for the best and for the given layouts.

    Args:
      model: title of the text.
      ranking: the layouts, the best first.
      top: number of layouts shown.
      width: columns of the terminal; None: the table has any width.
    """
    prose = width or _PROSE_WIDTH
    first = ranking[0]
    device = first.device
    fitting = sum(ranked.fits for ranked in ranking)
    about = (
        f"{len(ranking)} layouts over {_num_devices(ranking)} × {device.name} were compared by a "
        f"cost model; {fitting} fit into {bytes_text(device.memory_bytes)}. Nothing was run."
    )
    shown = [r for r in ranking if r.place <= top or r.is_asked]
    rows = [
        (
            str(ranked.place),
            seconds_text(ranked.cost.seconds),
            bytes_text(ranked.cost.memory.total),
            layout_text(ranked.layout)
            + ("" if ranked.fits else "  (does not fit)")
            + ("  (given)" if ranked.is_asked else ""),
        )
        for ranked in shown
    ]
    lines = [model, "", *_wrapped("", about, prose), ""]
    lines += table(("place", "step", "memory", "layout"), rows, right=(0, 1, 2), width=width)
    for ranked in shown:
        if ranked.place <= _EXPLAINED or ranked.is_asked:
            lines += ["", *_wrapped(f"{ranked.place:<3}", layout_text(ranked.layout), prose)]
            for reason in reasons(ranked):
                lines += _wrapped("   - ", reason, prose)
    lines += ["", *_wrapped("", verdict(ranking), prose)]
    return "\n".join(lines)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """Wraps text after `start`, with hanging indent; keeps a number and its unit on one line."""
    lines = textwrap.wrap(
        re.sub(r"(\d) (?=[A-Za-zµ×]+)", "\\1\0", text),
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def record(model: str, ranking: Sequence[Ranked], *, top: int = TOP) -> dict[str, Any]:
    """Returns a ranking in a form for JSON: the first `top` layouts, and the given ones."""
    device = ranking[0].device
    return {
        "model": model,
        "device": device.name,
        "num_devices": _num_devices(ranking),
        "memory_limit_bytes": int(device.memory_bytes),
        "compared": len(ranking),
        "fitting": sum(ranked.fits for ranked in ranking),
        "verdict": verdict(ranking),
        "layouts": [_layout_record(r) for r in ranking if r.place <= top or r.is_asked],
    }


def _num_devices(ranking: Sequence[Ranked]) -> int:
    return max(ranked.layout.mesh.size for ranked in ranking)


def _layout_record(ranked: Ranked) -> dict[str, Any]:
    layout, cost = ranked.layout, ranked.cost
    return {
        "place": ranked.place,
        "mesh": str(layout.mesh),
        "rules": str(layout.rules),
        "weights_axis": layout.weights_axis,
        "slots_axis": layout.slots_axis,
        "fits": ranked.fits,
        "asked_for": ranked.is_asked,
        "seconds": cost.seconds,
        "compute_seconds": cost.compute_s,
        "exchange_seconds": cost.communication_s,
        "update_seconds": cost.update_s,
        "flops_per_device": cost.flops,
        "bytes_per_device": int(cost.memory.total),
        "memory": {name: int(getattr(cost.memory, name)) for name in _PARTS},
        "collectives": [
            {
                "kind": e.kind,
                "axis": "+".join(e.axes),
                "of": e.of,
                "count": e.count,
                "bytes": int(e.bytes),
                "sent_bytes": int(e.sent_bytes),
                "seconds": e.seconds,
            }
            for e in cost.collectives
        ],
        "reasons": reasons(ranked),
    }


def reasons(ranked: Ranked) -> list[str]:
    """Returns sentences on where the time and the memory of a layout go."""
    cost = ranked.cost
    found = [_memory(ranked), _compute(ranked)]
    worth = [e for e in cost.collectives if e.seconds >= _WORTH_SAYING * cost.seconds]
    found += [f"{collective_text(e)}, {seconds_text(e.seconds)}" for e in worth]
    if not worth:
        others = math.fsum(e.seconds for e in cost.collectives)
        found.append(
            f"communicates for {seconds_text(others)}" if others else "has no communication"
        )
    if cost.update_s >= _WORTH_SAYING * cost.seconds:
        found.append(f"updates the weights in {seconds_text(cost.update_s)}")
    if ranked.place > 1:
        found.append(_against(cost, ranked.best))
    if cost.unsized:
        found.append(unknown_sizes_text(cost.unsized))
    return found


def unknown_sizes_text(ops: Sequence[str]) -> str:
    """Returns a sentence on ops of a step whose results have an unknown size."""
    return (
        f"{counted(len(ops), 'op')}, such as {ops[0]}, have results whose size depends on values, "
        "as that of tf.boolean_mask, and count as one row each, so the step takes longer and needs "
        "more memory: multiply by weights instead of leaving rows out, or take a fixed number of "
        "rows with tf.gather"
    )


def _memory(ranked: Ranked) -> str:
    memory, limit = ranked.cost.memory, ranked.device.memory_bytes
    parts = sorted(((getattr(memory, n), says) for n, says in _PARTS.items()), reverse=True)
    listed = ", ".join(
        f"{says} {bytes_text(size)}" for size, says in parts if size > _WORTH_SAYING * memory.total
    )
    verb = "takes" if ranked.fits else "does not fit: needs"
    return f"{verb} {bytes_text(memory.total)} of {bytes_text(limit)}: {listed}"


def _compute(ranked: Ranked) -> str:
    cost, devices = ranked.cost, ranked.layout.mesh.size
    start = f"computes {seconds_text(cost.compute_s)} per device"
    if cost.redundancy < 1 + _WORTH_SAYING:
        return f"{start}; no product is computed twice"
    return (
        f"{start}; the {devices} devices together compute {cost.redundancy:.3g} times as much as a "
        "single device"
    )


def collective_text(cost: CollectiveCost) -> str:
    """Returns the number, the kind and the bytes of collectives."""
    times = f"{cost.count:g} × {cost.kind} over {' and '.join(cost.axes)}"
    of = {GRADIENTS: "gradients of weights", WEIGHTS: "weights"}.get(cost.of, cost.of)
    size = bytes_text(cost.bytes)
    return f"{times} of {of}: {size} per device"


def _against(cost: Cost, best: Cost) -> str:
    parts = {
        "computation": cost.compute_s - best.compute_s,
        "communication": cost.communication_s - best.communication_s,
        "the update": cost.update_s - best.update_s,
    }
    size = _WORTH_SAYING / 10 * best.seconds
    more = [f"{seconds_text(t)} more for {what}" for what, t in parts.items() if t > size]
    less = [f"{seconds_text(-t)} less for {what}" for what, t in parts.items() if -t > size]
    listed = ", ".join(more + less)
    if not listed:
        return f"is as fast as the first, with {bytes_text(cost.memory.total)} of memory"
    return f"takes {cost.seconds / best.seconds:.3g} times as long as the first: {listed}"


def verdict(ranking: Sequence[Ranked]) -> str:
    """Returns sentences on the best layout, and on how the given layouts compare with it."""
    best = ranking[0]
    if not best.fits:
        return (
            f"No layout fits: the smallest needs {bytes_text(best.cost.memory.total)} of "
            f"{bytes_text(best.device.memory_bytes)}; use more devices, a smaller batch, more "
            "learner.accumulation_steps, or rematerialisation."
        )
    said = [f"The best layout found: {layout_text(best.layout)}."]
    for ranked in ranking:
        if ranked.is_asked and ranked.place == 1:
            said = [f"The given layout is the best: {layout_text(ranked.layout)}."]
        elif ranked.is_asked:
            how = "" if ranked.fits else ", which does not fit"
            factor = ranked.cost.seconds / best.cost.seconds
            said.append(
                f"The given layout, {layout_text(ranked.layout)}{how}, takes {factor:.3g} "
                f"times as long and has rank {ranked.place}."
            )
    return " ".join(said)


def layout_text(layout: MeshLayout) -> str:
    """Returns a layout in the notation of Params, on one line."""
    if layout.mesh.size == 1:
        return "one device"
    extras = [
        f"  {field}={getattr(layout, field)}"
        for field in ("weights_axis", "slots_axis")
        if getattr(layout, field) is not None
    ]
    return f"{layout.mesh}  {layout.rules}{''.join(extras)}"
