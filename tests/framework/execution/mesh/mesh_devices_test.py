"""Devices of a mesh: what XLA compiles depends on their cores; the order of the cores of a TPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.dtensor.python import config, tpu_util
from tensorflow.experimental import dtensor
from tensorflow.python.tpu.topology import Topology

from tekso.framework.cluster import Cluster
from tekso.framework.cores import num_cores
from tekso.framework.execution import MeshSharded, Pipelined, SpmdPipelined
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.layouts import MeshShape
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
    execution._mesh._device_type = device_type
    fuse = execution._fuse()
    assert isinstance(fuse, MarkedFusion) if compiles else fuse is no_fusion


MESHES = {
    "mesh": lambda: MeshSharded.Params(mesh="data:2"),
    "SPMD pipeline": lambda: SpmdPipelined.Params(num_stages=2, num_micro_batches=2),
}


@pytest.mark.parametrize("kind", MESHES)
def test_the_tpu_of_this_machine_reaches_dtensor(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    started: list[str] = []
    monkeypatch.setattr(dtensor, "initialize_accelerator_system", started.append)
    monkeypatch.setattr(mesh_devices.compiler, "choose_passes", lambda tpu: None)
    MESHES[kind]().instantiate().setup_devices(tpu="local")
    assert started == ["TPU"]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("failure", ["none found", "another machine", "several processes"])
def test_a_tpu_that_a_mesh_cannot_use_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: str, failure: str
) -> None:
    def initialize(device_type: str) -> None:
        raise tf.errors.NotFoundError(None, None, "no valid TPUs found.\nmore lines")

    monkeypatch.setattr(dtensor, "initialize_accelerator_system", initialize)
    monkeypatch.setattr(mesh_devices.compiler, "choose_passes", lambda tpu: None)
    execution, tpu = MESHES[kind]().instantiate(), "local"
    said = "cannot connect to the TPU 'local': no valid TPUs found.$"
    if failure == "another machine":
        tpu, said = "grpc://192.0.2.7:8470", "--tpu=grpc://192.0.2.7:8470: .* with --tpu=local$"
    if failure == "several processes":
        execution.join(Cluster(("127.0.0.1:1", "127.0.0.1:2"), 0))
        said = "this run has 2: set --cluster=none"
        monkeypatch.setattr(mesh_devices.runtime, "describe", lambda cluster: None)
    with pytest.raises(ExecutionError, match=said):
        execution.setup_devices(tpu=tpu)


def test_a_pipeline_driven_from_the_host_refuses_a_tpu() -> None:
    execution = Pipelined.Params(num_stages=2, num_micro_batches=2).instantiate()
    with pytest.raises(ExecutionError, match="cannot use the cores of a TPU: use --execution="):
        execution.setup_devices(tpu="local")


SIDE = 4  # chips


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Coordinates of the devices of a fake slice of 4x4 chips with one core each."""
    found = [[x, y, 0, 0] for y, x in itertools.product(range(SIDE), repeat=2)]

    class Device:
        def tpu_core_locations_to_ids(self, locations: Any) -> list[int]:
            return [found.index(list(one)) for one in locations]

        def set_tpu_core_ids(self, name: str, ids: list[int]) -> None:
            assert name

    shape = [SIDE, SIDE, 1, 1]
    topology = Topology(mesh_shape=shape, device_coordinates=np.array([found]))
    monkeypatch.setattr(tpu_util, "_tpu_topology", topology)
    monkeypatch.setattr(tpu_util, "_dtensor_device", Device())
    monkeypatch.setattr(config, "num_local_devices", lambda device_type: len(found))
    monkeypatch.setattr(dtensor, "num_global_devices", lambda device_type: len(found))
    return found


def torus_distances(grid: Any, axis: int) -> set[int]:
    """Returns the hops between neighbours on the rings along an axis of a grid of cores."""
    apart = np.abs(grid - np.roll(grid, 1, axis))
    return set(np.minimum(apart, SIDE - apart).sum(-1).ravel().tolist())


@pytest.mark.parametrize(
    ("mesh", "axes"), [("data:16", [0]), ("data:4;model:4", [0, 1]), ("data:2;model:8", [1])]
)
def test_the_rings_of_a_tpu_mesh_connect_neighbours(
    chips: list[list[int]], mesh: str, axes: list[int]
) -> None:
    shape = MeshShape.parse(mesh)
    made = mesh_devices.make_mesh(shape, "TPU")
    sizes = [size for _, size in shape.axes]
    assert [made.dim_size(name) for name in made.dim_names] == sizes
    placed = {number: chips[i] for i, number in enumerate(made.local_device_ids())}
    grid = np.array([placed[number] for number in range(len(chips))]).reshape(*sizes, 4)
    assert [torus_distances(grid, axis) for axis in axes] == [{1}] * len(axes)


def test_a_mesh_has_all_cores_of_a_tpu(chips: list[list[int]]) -> None:
    with pytest.raises(ExecutionError, match=r"'data:8' has 8 devices, .* there are 16"):
        mesh_devices.make_mesh(MeshShape.parse("data:8"), "TPU")
