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
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).resolve().parent))

from small_models import batch, language_model, layer

from tekso.framework.execution import DataParallel, MeshSharded, Pipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.schedules import Constant
from tekso.models.layers.stack import RepeatedStack

EXECUTIONS: dict[str, Any] = {
    "data_parallel": DataParallel,
    "mesh_sharded": MeshSharded,
    "pipelined": Pipelined,
}


def run(folder: str, leg: dict[str, Any]) -> list[float]:
    """Goes on from the newest checkpoint of the folder; returns the losses."""
    execution = EXECUTIONS[leg["execution"]].Params().set(leg["params"]).instantiate()
    execution.setup_devices(cpu_devices=leg.get("cpu_devices"))
    task = language_model(RepeatedStack.Params(num_layers=3, layer=layer())).instantiate()
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
        program.restore(good.read, good.keys)
        first = good.description.step
    steps = range(first, first + leg["steps"])
    losses = [float(program.train_step(batch("repeated", i), i)["loss"]) for i in steps]
    checkpoints.save(program.state, Description(step=steps.stop, model="m", params=""))
    checkpoints.close()
    return losses


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
