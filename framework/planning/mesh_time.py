"""Estimates the time of a step on several logical devices of this machine.

    device      ops of its graphs on its shards, reading and assigning its weights and slots, and
                its part of every collective
    step        the devices at the same time, as far as there are cores, and the call from Python

TensorFlow hands an op to another thread only if it takes more than some microseconds. So short ops
of all devices run one after the other.

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
    """What a mesh needs to start its work, in seconds of CPU time.

    Attributes:
      call_s: for a call from Python, and of all devices together.
      array_s: for a device's part of an array of a batch.
      variable_s: for a weight or slot on a device.
      op_s: for an op on a device.
      collective_s: for a collective of a small tensor, on a device.
      byte_s: for a byte of a collective, on a device.
    """

    call_s: float
    array_s: float
    variable_s: float
    op_s: float
    collective_s: float
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

    The time of a call grows by the same amount with each device. The other times are those of the
    closest number of devices that was measured.
    """
    few, many = min(measured), max(measured)
    closest = measured[min(measured, key=lambda n: (abs(n - devices), n))]
    each = max(0.0, (measured[many].call_s - measured[few].call_s) / (many - few))
    call = max(0.0, measured[few].call_s + (devices - few) * each)
    return dataclasses.replace(closest, call_s=call)


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
    collectives = starts.collective_s * len(graphs.collectives)
    collectives += starts.byte_s * math.fsum(graphs.collectives)
    variables = starts.variable_s * graphs.variables
    device = graphs.seconds(of_mesh) + collectives + variables
    short = min(device, graphs.short_seconds(of_mesh) + variables)
    # Of all devices:
    calls = graphs.calls * starts.call_s + devices * graphs.arrays * starts.array_s
    elapsed = devices * (short + (device - short) / min(devices, cores))
    started = calls + devices * (variables + collectives + starts.op_s * graphs.ops())
    return StepTime(calls + elapsed, calls + devices * device, started)
