"""Trains under one execution after the other, a checkpoint on the disk between them.

Arguments: a folder, and a list of legs as JSON: {"execution": name, "params": {…}, "steps": n}.
Prints, for each leg, the losses of its steps; the last checkpoint is in the folder. Each leg is a
fork of this process, which has imported everything and started nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import tensorflow as tf
from small_models import batch, block, language_model

from tekso.framework.execution import DataParallel, MeshSharded, Pipelined, devices, shards
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import tensor_files
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints, Description
from tekso.framework.schedules import Constant
from tekso.models.layers.stack import RepeatedStack

shards.CHUNK_BYTES = 1000  # so that most tensors are stored in several pieces

EXECUTIONS: dict[str, Any] = {
    "data_parallel": DataParallel,
    "mesh_sharded": MeshSharded,
    "pipelined": Pipelined,
}


def run(folder: str, leg: dict[str, Any]) -> list[float]:
    """Goes on from the newest checkpoint of the folder; returns the losses."""
    execution = EXECUTIONS[leg["execution"]].Params().set(leg["params"]).instantiate()
    execution.setup_devices(cpu_devices=leg.get("cpu_devices"))
    devices.set_graph_optimizer(False)  # it takes longer than the steps
    # The reference is computed op by op, which takes less time than to trace it.
    tf.config.run_functions_eagerly(leg["params"].get("towers") == 1)
    task = language_model(RepeatedStack.Params(num_layers=3, layer=block())).instantiate()
    learner = Learner.Params(
        optimizer=Momentum.Params(),
        schedule=Constant.Params(value=0.1),
        clip_global_norm=1.0,
        ema_decay=0.9,
    ).instantiate()
    program = execution.build(task, learner, seed=11, batch=signature_of(batch("repeated", 0)))
    checkpoints = Checkpoints(folder)
    checkpoints.prepare()
    good, first = checkpoints.newest_good(), 0
    if good is None:
        program.initialize()
    else:
        program.restore(good.stored, good.keys)
        first = good.description.step
        check_equal(program.state(), good)
    steps = range(first, first + leg["steps"])
    losses = [float(program.train_step(batch("repeated", i), i)["loss"]) for i in steps]
    checkpoints.save(program.shards, Description(step=steps.stop, model="m", params=""))
    checkpoints.close()
    check_equal(program.state(), checkpoints.open(str(steps.stop)))
    check_written_while_training(program, steps.stop)
    return losses


def check_written_while_training(program: Any, step: int) -> None:
    """Checks that a checkpoint has the state of its step, even if it is written after others."""
    before, write, may_write = program.state(), tensor_files.write, threading.Event()

    def write_later(prefix: str, part: Any) -> None:
        may_write.wait(60)
        write(prefix, part)

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        with mock.patch.object(tensor_files, "write", write_later):
            checkpoints.save(program.shards, Description(step=step, model="m", params=""))
            program.train_step(batch("repeated", step), step)
            may_write.set()
            checkpoints.close()
        check_equal(before, checkpoints.open(str(step)))
        after = program.state()
        if all(np.array_equal(after[key], value) for key, value in before.items()):
            raise ValueError("the step did not change the state")


def check_equal(state: dict[str, np.ndarray], saved: Checkpoint) -> None:
    """Raises a ValueError unless a state and a checkpoint are equal to the last bit."""
    other = [k for k, v in state.items() if saved.read(k).tobytes() != v.tobytes()]
    if other or saved.keys != state.keys():
        raise ValueError(f"not as in {saved.path}: {other or saved.keys ^ state.keys()}")


def main() -> None:
    """See the module."""
    folder, legs = sys.argv[1], json.loads(sys.argv[2])
    results = []
    for leg in legs:
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    output.write(json.dumps(run(folder, leg)))
                    output.flush()
                    code = 0
                except BaseException as error:
                    print(f"{leg}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                sys.exit(f"a leg ended with {code}")
            output.seek(0)
            results.append(json.load(output))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
