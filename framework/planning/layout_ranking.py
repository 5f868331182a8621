"""A ranking of layouts in words, and as what JSON can hold."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.planning.costs import Cost
from tekso.framework.planning.layout_search import Ranked
from tekso.framework.planning.rings import GRADIENTS, WEIGHTS, CollectiveCost

TOP = 8  # layouts that are shown
_EXPLAINED = 3
_PARTS = {
    "weights": "weights",
    "used_weights": "weights as used",
    "slots": "slots",
    "gradients": "gradients",
    "activations": "activations",
    "workspace": "workspace",
}
_WORTH_SAYING = 0.01  # share of a step or of the memory


def text(model: str, ranking: Sequence[Ranked], *, top: int = TOP, width: int = 100) -> str:
    """Returns a ranking as text: a table, then the reasons of the best and of those asked for."""
    first = ranking[0]
    device = first.device
    fitting = sum(ranked.fits for ranked in ranking)
    about = (
        f"{len(ranking)} layouts over {first.layout.mesh.size} × {device.name} were compared by a "
        f"cost model; {fitting} fit in {bytes_text(device.memory_bytes)}. Nothing was run."
    )
    lines = [model, "", *_wrapped("", about, width), "", "place      step    memory  layout"]
    shown = [r for r in ranking if r.place <= top or r.is_asked]
    for ranked in shown:
        step, memory = seconds_text(ranked.cost.seconds), bytes_text(ranked.cost.memory.total)
        note = "" if ranked.fits else "  (does not fit)"
        note += "  (asked for)" if ranked.is_asked else ""
        start = f"{ranked.place:>5}{step:>10}{memory:>10}  "
        lines += _wrapped(start, layout_text(ranked.layout) + note, width)
    for ranked in shown:
        if ranked.place <= _EXPLAINED or ranked.is_asked:
            lines += ["", *_wrapped(f"{ranked.place:<3}", layout_text(ranked.layout), width)]
            for reason in reasons(ranked):
                lines += _wrapped("   - ", reason, width)
    lines += ["", *_wrapped("", verdict(ranking), width)]
    return "\n".join(lines)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """Wraps text behind a start; a number stays with its unit."""
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
    """Returns a ranking in a form that JSON can hold: the first ones, and those asked for."""
    device = ranking[0].device
    return {
        "model": model,
        "device": device.name,
        "num_devices": ranking[0].layout.mesh.size,
        "memory_limit_bytes": int(device.memory_bytes),
        "compared": len(ranking),
        "fitting": sum(ranked.fits for ranked in ranking),
        "verdict": verdict(ranking),
        "layouts": [_layout_record(r) for r in ranking if r.place <= top or r.is_asked],
    }


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
    """Returns sentences that say where the time and the memory of a layout go."""
    cost = ranked.cost
    found = [_memory(ranked), _compute(ranked)]
    worth = [e for e in cost.collectives if e.seconds >= _WORTH_SAYING * cost.seconds]
    found += [_collective(e) for e in worth]
    if not worth:
        found.append("exchanges next to nothing")
    if cost.update_s >= _WORTH_SAYING * cost.seconds:
        found.append(f"updates its weights in {seconds_text(cost.update_s)}")
    if ranked.place > 1:
        found.append(_against(cost, ranked.best))
    return found


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
    start = f"computes {seconds_text(cost.compute_s)} a device"
    if cost.redundancy < 1 + _WORTH_SAYING:
        return f"{start}; no product is computed twice"
    return (
        f"{start}; products are computed {cost.redundancy:.3g} times over, by {devices} devices "
        "together"
    )


def _collective(cost: CollectiveCost) -> str:
    times = f"{cost.count:g} × {cost.kind} over {' and '.join(cost.axes)}"
    of = {GRADIENTS: "gradients of weights", WEIGHTS: "weights"}.get(cost.of, cost.of)
    size = bytes_text(cost.bytes)
    return f"{times} of {of}: {size} a device, {seconds_text(cost.seconds)}"


def _against(cost: Cost, best: Cost) -> str:
    parts = {
        "computing": cost.compute_s - best.compute_s,
        "exchanging": cost.communication_s - best.communication_s,
        "updating weights": cost.update_s - best.update_s,
    }
    size = _WORTH_SAYING / 10 * best.seconds
    more = [f"{seconds_text(t)} more for {what}" for what, t in parts.items() if t > size]
    less = [f"{seconds_text(-t)} less for {what}" for what, t in parts.items() if -t > size]
    listed = ", ".join(more + less)
    if not listed:
        return f"as fast as the first, with {bytes_text(cost.memory.total)} of memory"
    return f"{cost.seconds / best.seconds:.3g} times the time of the first: {listed}"


def verdict(ranking: Sequence[Ranked]) -> str:
    """Returns a sentence on the best layout, and on how those asked for compare with it."""
    best = ranking[0]
    if not best.fits:
        return (
            f"Nothing fits: the smallest layout needs {bytes_text(best.cost.memory.total)} of "
            f"{bytes_text(best.device.memory_bytes)}; take more devices, a smaller batch, more "
            "learner.accumulation_steps, or recompute activations."
        )
    said = [f"The best found: {layout_text(best.layout)}."]
    for ranked in ranking:
        if ranked.is_asked and ranked.place == 1:
            said = [f"The layout asked for is the best: {layout_text(ranked.layout)}."]
        elif ranked.is_asked:
            how = "" if ranked.fits else ", which does not fit"
            factor = ranked.cost.seconds / best.cost.seconds
            said.append(
                f"The layout asked for, {layout_text(ranked.layout)}{how}, takes {factor:.3g} "
                f"times its time, at place {ranked.place}."
            )
    return " ".join(said)


def layout_text(layout: MeshLayout) -> str:
    """Returns a layout as it is written in Params, on a line."""
    extras = [
        f"  {field}={getattr(layout, field)}"
        for field in ("weights_axis", "slots_axis")
        if getattr(layout, field) is not None
    ]
    return f"{layout.mesh}  {layout.rules}{''.join(extras)}"


def seconds_text(seconds: float) -> str:
    """Returns a time: 1.23 s, 45.6 ms, 7.89 µs."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bytes_text(size_bytes: float) -> str:
    """Returns a number of bytes: 31 GB, 612 MB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.0f} B"
