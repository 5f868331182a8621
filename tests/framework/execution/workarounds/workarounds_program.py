"""Reproduces the defects of DTensor that `workarounds/` avoids, and tests the workarounds.

Started by tests in a process of its own: one fork for each job, {"defect": name, "avoided": bool}.
See `reproducing.py` for what a reproduction is.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mesh"))

import defects_of_loops
import defects_of_ops
import defects_of_sums
from jobs import run_all
from reproducing import MESH, ROWS, Place, values
from tensorflow.experimental import dtensor

from tekso.framework.execution import devices
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.workarounds import compiler, tensors


def wait_with_lock(place: Place, avoided: bool) -> bool:
    """While one thread waits for a value, no other thread of Python takes a turn."""
    x = place.put(values(1024, 1024) * 1e-3, ROWS)
    w = place.put(values(1024, 1024) * 1e-3)

    @tf.function(autograph=False)
    def compute(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        for _ in range(12):
            x = x @ w
        return place.reshard(tf.reduce_sum(x), ())

    place.local(compute(x, w))  # compiles
    turns, is_done = [0], threading.Event()

    def take_turns() -> None:
        while not is_done.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=take_turns)
    other.start()
    y = compute(x, w)
    before = turns[0]
    if avoided:
        tensors.first_copy(y)
    else:
        dtensor.unpack(y)
    taken = turns[0] - before
    is_done.set()
    other.join()
    return taken > 10  # it may take some before the wait begins and after it ends


REPRODUCTIONS = {
    reproduction.__name__: reproduction
    for reproduction in (
        *defects_of_loops.REPRODUCTIONS,
        *defects_of_ops.REPRODUCTIONS,
        *defects_of_sums.REPRODUCTIONS,
        wait_with_lock,
    )
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a reproduction on two devices."""
    name, avoided = job["defect"], job["avoided"]
    compiler.cut_messages()
    if name != "inner_relayout" or avoided:
        compiler.choose_passes()
    devices.setup_cpu(logical_devices=2, threads_per_op=1)
    place = Placement(mesh_devices.make_mesh(MESH, "CPU"))
    return {"right": REPRODUCTIONS[name](place, avoided)}


if __name__ == "__main__":
    run_all(run)
