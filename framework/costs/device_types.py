"""Device types: compute, memory and link speeds from the manufacturers, for estimates.

A device is one device of a mesh: for TPU v2 and v3 a core (two per chip), for v4 a chip.

Source:
  TPU v2, v3: Jouppi et al. 2020, "A domain-specific supercomputer for training deep neural
    networks", CACM 63(7): a chip has 46 and 123 TFLOP/s (bfloat16), 16 and 32 GB at 700
    and 900 GB/s, four links of 496 and 656 Gbit/s in each direction. cloud.google.com/tpu/docs/v3.
  TPU v4: Jouppi et al. 2023 (arXiv 2304.01433): 275 TFLOP/s, 32 GiB at 1200 GB/s, six
    links of 50 GB/s. cloud.google.com/tpu/docs/v4.
  V100 (SXM2, 32 GB): NVIDIA V100 data sheet: 15.7 TFLOP/s float32, 900 GB/s, NVLink 300 GB/s in
    both directions together. It has no bfloat16.
  A100 (SXM, 80 GB): NVIDIA A100 data sheet: 156 TFLOP/s TF32, 312 bfloat16, 2039 GB/s, NVLink 600
    GB/s in both directions together.
  H100 (SXM): NVIDIA H100 data sheet, without sparsity: 495 TFLOP/s TF32, 989 bfloat16, 80 GB at
    3350 GB/s, NVLink 900 GB/s in both directions together.
  Network between nodes of eight GPUs, per GPU: DGX-1 (4 × 100 Gbit/s for eight), DGX A100 (200
    Gbit/s each), DGX H100 (400 Gbit/s each).
  Latencies, the share of the peak that programs reach, and all figures of "cpu" (one core of a
  server; devices exchange data through memory) are assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.spelling import close_matches


@dataclasses.dataclass(frozen=True)
class DeviceType:
    """Peak speeds and memory of a device of a mesh.

    Attributes:
      name: name of the type, as in --device.
      flops_per_s: {dtype: peak of matrix products}.
      memory_bytes: size of the memory.
      memory_bytes_per_s: memory bandwidth.
      link_bytes_per_s: bandwidth to its neighbour on the ring of a mesh axis.
      link_latency_s: time until the first byte arrives there.
      devices_per_node: number of devices that the fast links connect; None for all.
      network_bytes_per_s, network_latency_s: bandwidth and latency of a ring over several nodes.
      reached: share of the peaks that programs reach.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float = 1e-6
    devices_per_node: int | None = None
    network_bytes_per_s: float = 0.0
    network_latency_s: float = 5e-6
    reached: float = 0.5

    def link(self, span: int) -> tuple[float, float]:
        """Returns bytes per second and latency of a ring within `span` consecutive devices."""
        if self.devices_per_node is None or span <= self.devices_per_node:
            return self.link_bytes_per_s, self.link_latency_s
        return self.network_bytes_per_s, self.network_latency_s


def _peaks(float32: float, bfloat16: float) -> dict[str, float]:
    return {"float32": float32, "bfloat16": bfloat16}


_ALL = (
    # A TPU multiplies float32 matrices in one pass of bfloat16 by default.
    DeviceType("tpu_v2", _peaks(23e12, 23e12), 8e9, 350e9, 62e9),
    DeviceType("tpu_v3", _peaks(61.5e12, 61.5e12), 16e9, 450e9, 82e9),
    DeviceType("tpu_v4", _peaks(275e12, 275e12), 34.3e9, 1200e9, 50e9),
    DeviceType(
        "v100", _peaks(15.7e12, 15.7e12), 32e9, 900e9, 150e9, 2e-6,
        devices_per_node=8, network_bytes_per_s=6.25e9,
    ),
    DeviceType(
        "a100", _peaks(156e12, 312e12), 80e9, 2039e9, 300e9, 2e-6,
        devices_per_node=8, network_bytes_per_s=25e9,
    ),
    DeviceType(
        "h100", _peaks(495e12, 989e12), 80e9, 3350e9, 450e9, 2e-6,
        devices_per_node=8, network_bytes_per_s=50e9,
    ),
    DeviceType("cpu", _peaks(80e9, 40e9), 4e9, 10e9, 4e9, 3e-5),
)  # fmt: skip

DEVICE_TYPES = {device.name: device for device in _ALL}


def find(name: str, *, also: Sequence[str] = ()) -> DeviceType:
    """Returns the device type with this name; `also` has further names for the error.

    Raises:
      ExecutionError: the name is unknown.
    """
    if name in DEVICE_TYPES:
        return DEVICE_TYPES[name]
    known = [*DEVICE_TYPES, *also]
    close = close_matches(name, known, count=1)
    hint = f"did you mean {close[0]}? " if close else ""
    if name.lower() in ("gpu", "tpu", "cuda"):
        hint = "name the model of the device; "
    raise ExecutionError(f"there is no device type {name!r}; {hint}there are: {', '.join(known)}")
