"""What XLA compiles on a mesh depends on the cores that its devices have."""

from __future__ import annotations

import pytest

from tekso.framework.cores import num_cores
from tekso.framework.execution import MeshSharded
from tekso.framework.execution.cluster import Cluster
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.primitives.fusion import MarkedFusion, no_fusion


def test_devices_have_cores_if_those_of_all_processes_of_the_machine_do() -> None:
    assert mesh_devices.have_cores(None)  # there is one device in a process that set none up
    assert mesh_devices.have_cores(None, num_cores())
    assert not mesh_devices.have_cores(None, num_cores() + 1)
    here = Cluster(("127.0.0.1:1", "127.0.0.1:2"), 0)
    elsewhere = Cluster(("127.0.0.1:1", "192.0.2.7:2"), 0)
    assert not mesh_devices.have_cores(here, num_cores())
    assert mesh_devices.have_cores(elsewhere, num_cores())


@pytest.mark.parametrize(
    ("xla", "device_type", "cores", "compiles"),
    [
        ("auto", "CPU", True, True),
        ("auto", "CPU", False, False),
        ("auto", "GPU", True, False),
        ("clusters", "CPU", False, True),
        ("none", "CPU", True, False),
    ],
)
def test_auto_compiles_on_cpu_where_every_device_has_a_core(
    monkeypatch: pytest.MonkeyPatch, xla: str, device_type: str, cores: bool, compiles: bool
) -> None:
    monkeypatch.setattr(mesh_devices, "have_cores", lambda cluster: cores)
    execution = MeshSharded.Params(mesh="data:2", xla=xla).instantiate()
    execution._device_type = device_type
    fuse = execution._fuse()
    assert isinstance(fuse, MarkedFusion) if compiles else fuse is no_fusion
