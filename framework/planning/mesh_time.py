"""Estimates the time of a step on several logical devices of this machine.

    device      ops of its graphs on its shards, reading and assigning its weights and slots, and
                its part of every collective
    step        the devices at the same time, as far as there are cores, and the call from Python

TensorFlow hands an op to another thread only if it takes more than some microseconds. So short ops
of all devices run one after the other. The collectives of a device run one after the other, and in
each the devices wait for the last one, so more time passes than they compute.

The devices are those of a mesh or of data-parallel execution. `mesh_graphs.py` has the graphs of a
device. `mesh_probes.py` measures starts on meshes; those of data-parallel execution are assumed to
take as long.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from tekso.framework.costs import stored_speeds
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.planning.mesh_graphs import DeviceGraphs
from tekso.framework.planning.step_time import StepTime

MEASURED_DEVICES = (2, 4)
_PROBES = "tekso.framework.planning.mesh_probes"  # a program


@dataclasses.dataclass(frozen=True)
class MeshStarts:
    """What a mesh needs to start its work, in seconds of CPU time unless stated otherwise.

    Attributes:
      call_s: for a call from Python, and of all devices together.
      array_s: for a device's part of an array of a batch.
      variable_s: for a weight or slot on a device.
      op_s: for an op on a device.
      collective_s: for a collective of a small tensor, on a device.
      collective_elapsed_s: time that passes in such a collective; its devices wait for each other.
      byte_s: for a byte of a collective, on a device.
    """

    call_s: float
    array_s: float
    variable_s: float
    op_s: float
    collective_s: float
    collective_elapsed_s: float
    byte_s: float


@functools.cache
def measured_starts() -> Mapping[int, MeshStarts]:
    """Returns {devices: times} of this machine, from the cache if they were measured before.

    Raises:
      ExecutionError: a process of the probes ended with an error.
    """
    return stored_speeds.stored(
        "mesh",
        lambda run: {str(n): run(_PROBES, str(n)) for n in MEASURED_DEVICES},
        _of_record,
        cost="steps on meshes, about 40 s of CPU time",
    )


def _of_record(values: Mapping[str, Mapping[str, float]]) -> dict[int, MeshStarts]:
    names = [field.name for field in dataclasses.fields(MeshStarts)]
    return {
        n: MeshStarts(*(stored_speeds.time_of(values[str(n)][name]) for name in names))
        for n in MEASURED_DEVICES
    }


def starts_of(measured: Mapping[int, MeshStarts], devices: int) -> MeshStarts:
    """Returns the times on a number of devices.

    The times of a call and that pass in a collective grow by the same amount with each device. The
    other times are those of the closest number of devices that was measured.
    """
    few, many = min(measured), max(measured)
    closest = measured[min(measured, key=lambda n: (abs(n - devices), n))]

    def grown(name: str) -> float:
        least, most = (float(getattr(measured[n], name)) for n in (few, many))
        each = max(0.0, (most - least) / (many - few))
        return max(0.0, least + (devices - few) * each)

    return dataclasses.replace(
        closest, **{name: grown(name) for name in ("call_s", "collective_elapsed_s")}
    )


def mesh_time(
    graphs: DeviceGraphs, starts: MeshStarts, machine: MachineSpeed, *, devices: int, cores: int
) -> StepTime:
    """Returns the time of a step.

    Args:
      graphs: the graphs of a device.
      starts: the times of starts on as many devices.
      machine: speed of a core.
      devices: number of devices.
      cores: number of cores.
    """
    of_mesh = dataclasses.replace(machine, op_s=starts.op_s)
    # Of a device:
    count, size = len(graphs.collectives), math.fsum(graphs.collectives)
    collectives = starts.collective_s * count + starts.byte_s * size
    variables = starts.variable_s * graphs.variables
    device = graphs.seconds(of_mesh) + variables
    short = min(device, graphs.short_seconds(of_mesh) + variables)
    # Of all devices:
    calls = graphs.calls * starts.call_s + devices * graphs.arrays * starts.array_s
    at_once = min(devices, cores)
    elapsed = devices * (short + (device - short) / at_once)
    elapsed += starts.collective_elapsed_s * count + devices * starts.byte_s * size / at_once
    started = calls + devices * (variables + collectives + starts.op_s * graphs.ops())
    return StepTime(calls + elapsed, calls + devices * (device + collectives), started)
