"""Saves and restores a state that is nearly all weights, and prints memory and time; JSON.

Arguments: a folder; "save" or "restore"; execution; number of weights; bytes of each weight.
There are as many slots as weights, of the same size. For 2 GB, with a largest tensor of 256 MB:

    cd tests/framework/run
    python checkpoint_memory_program.py /tmp/run save data_parallel 4 268435456
    python checkpoint_memory_program.py /tmp/run restore mesh_sharded 4 268435456

state          bytes of weights and slots
more           bytes at the peak of the save or restore, above those of the state and the program
blocked_s      seconds until `save` or `restore` returned
total_s        seconds until the checkpoint was complete
equal          whether the restored state has the values that were saved
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import numpy as np
import tensorflow as tf

import conftest  # noqa: F401  # registers this checkout as tekso
from tekso.framework.execution import DataParallel, MeshSharded, Pipelined
from tekso.framework.execution.base import ExecutionProgram, signature_of
from tekso.framework.initializers import Zeros
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.restore import restore
from tekso.framework.schedules import Constant
from tekso.framework.task import Task

COLUMNS = 1024
EXECUTIONS: dict[str, Any] = {
    "data_parallel": DataParallel.Params(),
    "mesh_sharded": MeshSharded.Params(mesh="x:2", rules="rows:x"),
    "pipelined": Pipelined.Params(num_stages=2, num_micro_batches=1),
}


class Tables(Task):
    """Weights [rows, COLUMNS], which nothing reads."""

    class Params(Task.Params):
        """Params of Tables."""

        count: int = param("Number of weights.", default=1)
        rows: int = param("Rows of each weight.", default=1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for i in range(params.count):
            shape = [params.rows, COLUMNS]
            self.weight(f"w{i}", shape, dims=("rows", None), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def pieces(self) -> list[Piece]:
        def last(theta: Any, flow: Flow, ctx: Any) -> Flow:
            return {**flow, LOSS_SUM: tf.constant(0.0), METRICS: {}}

        own = {"": self}
        return [Piece("first", own, lambda theta, flow, ctx: flow), Piece("last", {}, last)]


class Ramp:
    """A tensor of which every value is its row, plus a number for its key."""

    def __init__(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self._dtype, self._first = shape, dtype, len(key) + ord(key[-1])

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray:
        shape = [s.stop - s.start for s in where]
        if not shape:
            return np.asarray(self._first, self._dtype)
        rows = np.arange(where[0].start, where[0].stop, dtype=self._dtype) + self._first
        return np.broadcast_to(rows[:, np.newaxis], shape)


def built(name: str, count: int, size_bytes: int) -> ExecutionProgram:
    execution = EXECUTIONS[name].instantiate()
    execution.setup_devices()
    rows = size_bytes // (4 * COLUMNS)
    task = Tables.Params().set({"count": count, "rows": rows}).instantiate()
    learner = Learner.Params(
        optimizer=Momentum.Params(), schedule=Constant.Params(value=0.01)
    ).instantiate()
    batch = signature_of({"x": np.ones((2, 1), np.float32)})
    return execution.build(task, learner, seed=1, batch=batch)


def memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def main() -> None:
    """See the module."""
    folder, phase, name = sys.argv[1:4]
    program = built(name, *map(int, sys.argv[4:]))
    specs = program.specs()
    wanted = {key: Ramp(key, spec.shape, spec.dtype) for key, spec in specs.items()}
    checkpoints = Checkpoints(folder)
    record: dict[str, Any] = {"state": sum(spec.size_bytes for spec in specs.values())}
    if phase == "save":
        program.restore(wanted.__getitem__, set(specs))
        checkpoints.prepare()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before, begin = memory("VmRSS"), time.perf_counter()
    if phase == "save":
        checkpoints.save(program.shards, Description(step=1, model="m", params=""))
        record["blocked_s"] = time.perf_counter() - begin
        checkpoints.wait()
        record["total_s"] = time.perf_counter() - begin
        record["more"] = memory("VmHWM") - before
    else:
        good = checkpoints.resume()
        assert good is not None
        restore(program, good)
        record["blocked_s"] = time.perf_counter() - begin
        record["more"] = memory("VmHWM") - before - record["state"]
        record["equal"] = all(
            np.array_equal(np.asarray(shard.read()), wanted[shard.key][shard.where])
            for shard in program.shards()
        )
    checkpoints.close()
    print(json.dumps(record))


if __name__ == "__main__":
    main()
