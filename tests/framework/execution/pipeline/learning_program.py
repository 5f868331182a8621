"""Trains with all that a learner can do, on one device and in pipelines, and prints the states.

Argument: {case: {"learner": Params of a Learner, "poisoned": steps whose loss is not finite,
"pipelines": names of pipelines}} as JSON. Prints {case: [what came out of each execution, one
device first]}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import equality_program as equality
from traced_calls import op_by_op

from tekso.framework.execution import DataParallel, Pipelined, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.schedules import Constant

SIZE, STEPS = 16, 3
PIPELINES: dict[str, dict[str, Any]] = {
    "replicas": {"num_stages": 2, "num_micro_batches": 2, "num_replicas": 2},
}


def run(execution: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Returns metrics of every step, the whole state after it, and what is evaluated at last."""
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.05))
    batches = [equality.batch_of("skipping", step, SIZE) for step in range(STEPS)]
    for step in case.get("poisoned", ()):
        batches[step]["target"][5, 2] = np.inf
        batches[step]["weights"][5] = 1.0
    task = equality.task_of("skipping")
    by = learner.set(case["learner"]).instantiate()
    program = execution.build(task, by, seed=7, batch=signature_of(batches[0]))
    program.initialize()
    metrics, states = [], []
    for step, batch in enumerate(batches):
        found = program.train_step(batch, step)
        metrics.append({name: float(value) for name, value in found.items()})
        states.append({key: value.ravel().tolist() for key, value in program.state().items()})
    evaluation = program.eval_step(equality.batch_of("skipping", 99, SIZE - 3))
    sums = {name: [float(x) for x in pair] for name, pair in evaluation.items()}
    return {"metrics": metrics, "states": states, "eval": sums, "misplaced": misplaced(program)}


def misplaced(program: Any) -> list[str]:
    """Returns weights and gradients of a pipeline that do not lie on the device of their stage."""
    if not isinstance(program, PipelineProgram):
        return []
    found = []
    replicas = program.plan.num_replicas
    weights_of = program._state.with_copies(program._state.used(), replicas=replicas)
    for (replica, stage), weights in weights_of.items():
        device = program.plan.device_of(replica, stage)
        given = {**weights, **program._functions[replica, stage].totals}
        found += [f"{n} on {x.device}" for n, x in given.items() if not x.device.endswith(device)]
    return found


def main() -> None:
    """See the module."""
    cases = json.loads(sys.argv[1])
    Pipelined.Params(num_stages=4).instantiate().setup_devices()
    devices.set_graph_optimizer(False)  # it is on in the slow test of float64 of equality_test.py
    alone = DataParallel.Params(towers=1, xla="none")
    results = {}
    for name, case in cases.items():
        piped = [Pipelined.Params(**PIPELINES[one]) for one in case["pipelines"]]
        with op_by_op():
            results[name] = [run(alone.instantiate(), case)]
        results[name] += [run(execution.instantiate(), case) for execution in piped]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
