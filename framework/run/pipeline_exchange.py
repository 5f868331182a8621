"""Finds what the devices of a pipeline send to each other in a step."""

from __future__ import annotations

import math

from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.mesh.presets import DATA
from tekso.framework.planning.collectives import Collective
from tekso.framework.planning.rings import CollectiveCost, ring
from tekso.framework.planning.stage_figures import PipelineFigures


def of_meshes(figures: PipelineFigures) -> list[CollectiveCost]:
    """Returns the collectives in a step of the device whose collectives take longest."""
    on_mesh = figures.on_mesh
    if on_mesh is None or on_mesh.is_program:
        return []
    of_devices = [
        [one for s in figures.on_device(i) for one in on_mesh.collectives[s.stage.index]]
        for i in range(figures.plan.num_devices)
    ]
    return max(of_devices, key=lambda found: math.fsum(one.seconds for one in found))


def exchange(figures: PipelineFigures) -> Collective | None:
    """Returns what a device exchanges with its copies in the other replicas in a step, if any.

    One program reduces the gradient of each weight in a ring. Otherwise the device of the first
    replica gets the gradients of all others, one after the other, and sends its weights to them:
    each weight by itself.
    """
    plan = figures.plan
    others = plan.num_replicas - 1
    if not others:
        return None
    on_devices = [figures.on_device(i) for i in range(plan.num_devices)]
    if figures.on_mesh is not None and figures.on_mesh.is_program:
        largest = max(sum(stage.gradient_bytes for stage in own) for own in on_devices)
        learned = {path for stage in figures.stages for path in stage.learned}
        return Collective("all-reduce", DATA, len(learned), largest)
    sent = [
        (
            sum(stage.gradient_bytes for stage in own),
            sum(len(stage.learned) for stage in own),
        )
        for own in on_devices
    ]
    largest, number = max(sent)
    return Collective("send", "replica", 2 * others * number, 2 * others * largest)


def exchange_seconds(figures: PipelineFigures, device: DeviceType) -> float:
    """Returns the time in which replicas exchange gradients and weights."""
    found, plan = exchange(figures), figures.plan
    if found is None:
        return 0.0
    bytes_per_s, latency_s = device.link(figures.num_devices)
    if found.kind == "send":
        return found.bytes / bytes_per_s + found.count * latency_s
    sent, hops = ring("all-reduce", plan.num_replicas, found.bytes)
    return sent / bytes_per_s + found.count * hops * latency_s


def sent_bytes(figures: PipelineFigures) -> float:
    """Returns the bytes that the device that sends most sends to other stages in a step."""
    plan = figures.plan
    most = max(
        math.fsum(s.handed_bytes + s.returned_bytes for s in figures.on_device(i))
        for i in range(plan.num_devices)
    )
    return plan.num_micro_batches * plan.num_parts * most
