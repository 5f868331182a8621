"""Saves and restores a state that is nearly all weights, and prints memory and time; JSON.

Arguments: a folder; "save", "train" or "restore"; execution; number of weights; bytes of each
weight; for "train", the number of examples of a batch and, if you like, `run.checkpoint_buffer_mb`.
There are as many slots as weights, of the same size. For 2 GB, with a largest tensor of 256 MB:

    cd tests/framework/run
    python checkpoint_memory_program.py /tmp/run save data_parallel 4 268435456
    python checkpoint_memory_program.py /tmp/run train data_parallel 4 268435456 128
    python checkpoint_memory_program.py /tmp/run train data_parallel 4 268435456 128 2100
    python checkpoint_memory_program.py /tmp/run restore mesh_sharded 4 268435456

"train" begins a save and runs training steps until the checkpoint is complete.

state          bytes of weights and slots
more           bytes at the peak of the save or restore, above those of the state and the program;
               of "train", above the peak of steps without a save
step_s         seconds of a step without a save: the median
blocked_s      seconds until `save` or `restore` returned; of "train", also the seconds by which the
               steps until the checkpoint was complete took longer than without a save
total_s        seconds until the checkpoint was complete
equal          whether the restored state has the values that were saved
"""

from __future__ import annotations

import gc
import json
import os
import statistics
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
from tekso.framework.run.checkpoints import BUFFER_BYTES, Checkpoints, Description
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
    """Weights w [rows, COLUMNS]; the loss is the sum of all x @ w."""

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
        def first(theta: Any, flow: Flow, ctx: Any) -> Flow:
            products = [flow["x"] @ theta[f"w{i}"] for i in range(self.params.count)]
            return {**flow, "y": tf.add_n(products)}

        def last(theta: Any, flow: Flow, ctx: Any) -> Flow:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["y"]), METRICS: {}}

        return [Piece("first", {"": self}, first), Piece("last", {}, last)]


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


def batch_of(examples: int, rows: int) -> dict[str, np.ndarray]:
    return {"x": np.full((examples, rows), 1e-6, np.float32)}


def built(name: str, count: int, size_bytes: int, examples: int = 2) -> ExecutionProgram:
    execution = EXECUTIONS[name].instantiate()
    execution.setup_devices()
    rows = size_bytes // (4 * COLUMNS)
    task = Tables.Params().set({"count": count, "rows": rows}).instantiate()
    learner = Learner.Params(
        optimizer=Momentum.Params(), schedule=Constant.Params(value=0.01)
    ).instantiate()
    batch = signature_of(batch_of(examples, rows))
    return execution.build(task, learner, seed=1, batch=batch)


def train(program: ExecutionProgram, checkpoints: Checkpoints, batch: Any) -> dict[str, Any]:
    """Measures steps without a save, and a save with the steps until it is complete."""
    waits = not program.hold_updates(checkpoints.gate)
    step = 0

    def timed_step() -> float:
        nonlocal step
        begin = time.perf_counter()
        if waits:
            checkpoints.gate.wait()
        float(program.train_step(batch, step)["loss"])
        step += 1
        return time.perf_counter() - begin

    timed_step(), timed_step()
    reset_peak()
    usual_s = statistics.median(timed_step() for _ in range(3))
    usual_peak = memory("VmHWM")
    reset_peak()
    begin = time.perf_counter()
    checkpoints.save(program.shards, Description(step=step, model="m", params=""))
    blocked_s = time.perf_counter() - begin
    while not checkpoints.steps():
        blocked_s += timed_step() - usual_s
    total_s = time.perf_counter() - begin
    checkpoints.wait()
    more = memory("VmHWM") - usual_peak
    return {"step_s": usual_s, "blocked_s": blocked_s, "total_s": total_s, "more": more}


def reset_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on


def memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def main() -> None:
    """See the module."""
    folder, phase, name = sys.argv[1:4]
    program = built(name, *map(int, sys.argv[4:7]))
    specs = program.specs()
    wanted = {key: Ramp(key, spec.shape, spec.dtype) for key, spec in specs.items()}
    buffer_bytes = int(sys.argv[7]) << 20 if len(sys.argv) > 7 else BUFFER_BYTES
    checkpoints = Checkpoints(folder, buffer_bytes=buffer_bytes)
    record: dict[str, Any] = {"state": sum(spec.size_bytes for spec in specs.values())}
    if phase != "restore":
        program.restore(wanted.__getitem__, set(specs))
        checkpoints.prepare()
    if phase == "train":
        rows = int(sys.argv[5]) // (4 * COLUMNS)
        record |= train(program, checkpoints, batch_of(int(sys.argv[6]), rows))
        checkpoints.close()
        print(json.dumps(record))
        return
    reset_peak()
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
