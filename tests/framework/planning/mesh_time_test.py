"""The time of a step on a mesh of this machine, from times of ops, calls and collectives."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import processes
import pytest
import tensorflow as tf

from tekso.framework.costs import reference_work, stored_speeds, this_machine
from tekso.framework.costs.reference_work import Reference
from tekso.framework.planning import mesh_probes, mesh_time, start_probes
from tekso.framework.planning.mesh_graphs import DeviceGraphs
from tekso.framework.planning.mesh_probes import ARRAYS, DEEP, EQUATIONS, SMALL, SUMMED, WIDE
from tekso.framework.planning.mesh_time import MeshStarts

SPEED = this_machine.only(op_s=7.0)
"""Only the start of an op takes time."""
STARTS = MeshStarts(
    call_s=100.0, array_s=20.0, variable_s=3.0, op_s=1.0, collective_s=10.0,
    collective_elapsed_s=14.0, byte_s=0.5,
)  # fmt: skip
OPS = 5


def graphs(*collectives: float) -> DeviceGraphs:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        for _ in range(OPS):
            x = tf.sin(x)
        return x

    traced = function.get_concrete_function(tf.TensorSpec([2]))
    return DeviceGraphs([(2, traced.graph)], collectives, variables=4, arrays=3, calls=2)


@pytest.mark.parametrize(("devices", "cores", "at_once"), [(2, 2, 2), (4, 2, 2), (2, 8, 2)])
def test_devices_share_the_cores_and_take_turns_with_variables(
    devices: int, cores: int, at_once: int
) -> None:
    found = mesh_time.mesh_time(graphs(8.0, 4.0), STARTS, SPEED, devices=devices, cores=cores)
    ops, handled, exchanged = 2 * OPS * 1.0, 4 * 3.0, 2 * 10.0 + 12 * 0.5
    called = 2 * 100.0 + devices * 3 * 20.0  # arrays
    assert found.core_seconds == pytest.approx(called + devices * (ops + handled + exchanged))
    parallel = devices * (ops + 12 * 0.5) / at_once + 2 * 14.0  # devices wait in collectives
    assert found.seconds == pytest.approx(called + parallel + devices * handled)
    assert found.start_seconds == pytest.approx(found.core_seconds)


def test_short_ops_of_all_devices_run_one_after_the_other() -> None:
    starts = MeshStarts(
        0.0, 0.0, 0.0, op_s=1e-6, collective_s=0.0, collective_elapsed_s=0.0, byte_s=0.0
    )
    found = mesh_time.mesh_time(graphs(), starts, SPEED, devices=2, cores=2)
    assert found.seconds == pytest.approx(found.core_seconds) == pytest.approx(4 * OPS * 1e-6)


def test_collectives_are_not_ops_of_the_graph_as_well() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}
        return tf.raw_ops.CollectiveReduceV2(input=x, **keys, merge_op="Add", final_op="Id")

    traced = function.get_concrete_function(tf.TensorSpec([2]))
    found = DeviceGraphs([(1, traced.graph)], (8.0,), variables=0, arrays=0, calls=0)
    fast = dataclasses.replace(SPEED, op_s=1e-6)
    assert (found.ops(), found.seconds(fast), found.short_seconds(fast)) == (0, 0.0, 0.0)


def test_a_cluster_that_xla_compiles_starts_as_one_op() -> None:
    @tf.function(jit_compile=True, autograph=False)
    def cluster(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x * x) + x

    traced = tf.function(lambda x: cluster(-x), autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec([2])).graph
    found = DeviceGraphs([(3, graph)], (), variables=0, arrays=0, calls=0)
    assert found.ops() == 3 * 2
    time = mesh_time.mesh_time(found, STARTS, SPEED, devices=2, cores=2)
    assert time.start_seconds == pytest.approx(2 * found.ops() * STARTS.op_s)


def test_the_first_run_of_a_graph_in_a_step_reads_what_others_moved_out_of_the_caches() -> None:
    small, large = (
        tf.function(tf.negative).get_concrete_function(tf.TensorSpec([size])).graph
        for size in (2, 100)
    )
    found = DeviceGraphs([(3, small), (1, large)], (), variables=0, arrays=0, calls=0)
    # A byte that is used again after 100 others takes 1 s, after more 1000 s.
    slow = dataclasses.replace(SPEED, op_s=0.0, streams=[(100.0, 1.0), (101.0, 1e-3)])
    assert found.seconds(slow) == pytest.approx(16 * 1000 + 2 * 16 + 800 * 1000)
    fast = dataclasses.replace(SPEED, op_s=0.0, streams=[(100.0, 1e9), (101.0, 1e-3)])
    assert found.short_seconds(fast) == pytest.approx(2 * 16 / 1e9)  # the others are not short
    alone = DeviceGraphs([(1, small)], (), variables=0, arrays=0, calls=0)
    assert alone.seconds(slow) == pytest.approx(16)


def test_gradients_exist_while_another_graph_runs() -> None:
    def peak_bytes(found: DeviceGraphs, **least: float) -> float:
        return found.peak_bytes(SPEED, devices=2, cores=2, **least)

    (_, graph), *_ = graphs().graphs
    alone = peak_bytes(
        DeviceGraphs([(1, graph)], (), variables=4, arrays=1, calls=1, between=(100.0,))
    )
    assert alone == 8.0  # of [2], written over its input
    for runs in ([(1, graph), (1, graph)], [(2, graph)]):
        found = DeviceGraphs(runs, (), variables=4, arrays=1, calls=1, between=(100.0, 20.0))
        assert peak_bytes(found) == alone + 120.0
        assert peak_bytes(found, least=50.0) == 100.0
    packed = dataclasses.replace(found, packed=130.0)
    assert peak_bytes(packed) == 120.0 + 130.0
    assert peak_bytes(packed, least=125.0) == 130.0 and peak_bytes(packed, least=131.0) == 0.0


def test_a_call_and_a_collective_take_longer_with_each_device() -> None:
    few = MeshStarts(10.0, 9.0, 1.0, 2.0, 3.0, 5.0, 4.0)
    many = MeshStarts(14.0, 9.0, 5.0, 6.0, 7.0, 11.0, 8.0)
    calls = [mesh_time.starts_of({2: few, 4: many}, n) for n in (1, 2, 3, 4, 8)]
    assert [one.call_s for one in calls] == [8.0, 10.0, 12.0, 14.0, 22.0]
    assert [one.collective_elapsed_s for one in calls] == [2.0, 5.0, 8.0, 11.0, 23.0]
    assert [one.op_s for one in calls] == [2.0, 2.0, 2.0, 6.0, 6.0]


def test_the_times_of_the_probes_are_those_of_the_equation() -> None:
    names = ("op_s", "array_s", "variable_s", "collective_s")
    counts = {
        SMALL: (57, 1, 6, 0), DEEP: (357, 1, 6, 0), ARRAYS: (65, 9, 6, 0), WIDE: (506, 1, 54, 0),
        SUMMED: (524, 1, 54, 18),
    }  # fmt: skip
    planted = dict(zip(names, (2.0, 11.0, 5.0, 7.0), strict=True))
    times = {
        probe: (
            200.0 + sum(planted[name] * n for name, n in zip(names, found, strict=True)),
            dict(zip(names, found, strict=True)),
        )
        for probe, found in counts.items()
    }
    found = start_probes.solve(times, EQUATIONS, SMALL)
    assert found == pytest.approx({"call_s": 200.0, **planted})
    slow = {**times, SMALL: (1e6, times[SMALL][1])}  # while other programs ran
    assert min(start_probes.solve(slow, EQUATIONS, SMALL).values()) >= 0.0


def test_probes_count_what_all_devices_start_in_a_step() -> None:
    assert mesh_probes.counts_of(graphs(8.0, 4.0, 2.0), 5) == {
        "op_s": 5 * 2 * OPS,
        "array_s": 5 * 3,
        "variable_s": 5 * 4,
        "collective_s": 5 * 3,
    }


def test_the_measured_times_are_stored_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = {
        "call_s": 1.0,
        "array_s": 6.0,
        "variable_s": 2.0,
        "op_s": 3.0,
        "collective_s": 4.0,
        "collective_elapsed_s": 7.0,
        "byte_s": 5.0,
    }
    runs: list[tuple[str, ...]] = []

    def measure(*words: str) -> dict[str, float]:
        runs.append(words)
        return printed

    monkeypatch.setattr(stored_speeds, "printed_by", measure)
    monkeypatch.setattr(stored_speeds, "_read", {})
    monkeypatch.setattr(stored_speeds, "_reference", lambda: Reference(1.0, 1.0))
    monkeypatch.setattr(reference_work, "measure", lambda: Reference(1.0, 1.0))
    for _ in range(2):
        found = mesh_time.measured_starts.__wrapped__()
        assert found == dict.fromkeys((2, 4), MeshStarts(1.0, 6.0, 2.0, 3.0, 4.0, 7.0, 5.0))
    assert [words[1] for words in runs] == ["2", "4"]
    (file,) = tmp_path.glob("tekso/mesh_*.json")
    assert sorted(json.loads(file.read_text())["speeds"]) == ["2", "4"]


@pytest.mark.slow
def test_the_probes_measure_meshes_of_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", processes.interpreter(tmp_path / "python"))
    paths = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = stored_speeds.printed_by("brief_mesh_probes", "2")
    assert sorted(found) == sorted(field.name for field in dataclasses.fields(MeshStarts))
    # On two cores, two devices compute a collective side by side, and wait for each other.
    assert found["collective_elapsed_s"] > 0.5 * found["collective_s"] > 0.0
    assert 1e-5 < found["call_s"] < 1.0 and 0.0 <= found["op_s"] < 1e-3
