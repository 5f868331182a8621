"""Trains a small model for some steps, on one device or over a mesh, and prints what came out.

Started by tests. A process has one execution, so each job has one of its own. Models are small, but
that could tell one layout from another: dropout, padding, rematerialisation, auxiliary losses.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tekso.framework.execution import DataParallel, MeshSharded, devices, mesh_sharded
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.primitives.fusion import MarkedFusion
from tekso.framework.schedules import Constant
from tekso.framework.theta import flatten

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jobs import run_all
from small_models import BATCH, FROZEN, MODELS, batch
from traced_calls import call_traced


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job: a model, and how and how long it is trained; returns what came out."""
    model, accumulation = job["model"], job.get("accumulation", 1)
    print(f"job of a model: {model}", file=sys.stderr, flush=True)  # the logs of the job follow
    # TensorFlow's graph optimizer, a fifth of the time, is on in ordinary layouts.
    devices.set_graph_optimizer(job.get("optimized", False))
    # The reference is computed op by op, which takes less time than to trace its steps.
    tf.config.run_functions_eagerly(job.get("execution") is None)
    if job.get("execution") is None:
        execution = DataParallel.Params(towers=1, xla="none").instantiate()
    else:
        execution = MeshSharded.Params().set(job["execution"]).instantiate()
    if job.get("compile_all"):  # these models have no cluster that is worth it
        mesh_sharded.MarkedFusion = functools.partial(MarkedFusion, min_elements=1)
    execution.setup_devices()
    task = MODELS[model]().instantiate()
    learner = Learner.Params(
        optimizer=Momentum.Params(),
        schedule=Constant.Params(value=0.1),
        accumulation_steps=accumulation,
        clip_global_norm=1.0,
        ema_decay=0.9,
        frozen=FROZEN.get(model, []),
    ).instantiate()
    program = execution.build(task, learner, seed=2**40 + 3, batch=signature_of(batch(model, 0)))
    program.initialize()
    begin = program.state()
    digest = hashlib.sha256()
    for key in sorted(begin):
        digest.update(key.encode() + begin[key].tobytes())
    batches = [batch(model, i, size=size) for i, size in enumerate(job.get("sizes", [BATCH] * 3))]
    outputs, functions = [], []
    for i, one in enumerate(batches):
        outputs.append(program.train_step(one, 2**31 + i))
        functions.append(len(context.context().list_function_names()))
    evaluation, decoded = None, None
    if job.get("evaluate", True):
        odd = {name: array[:5] for name, array in batch(model, 99).items()}
        sums, decoded = program.eval_step(odd), float(call_traced(program, _sum_of_squares))
        evaluation = {name: [float(x) for x in pair] for name, pair in sums.items()}
    state = program.state()
    return {
        "first": digest.hexdigest(),
        "functions": functions,  # how many TensorFlow had after each step
        "steps": [{k: float(v) for k, v in o.items()} for o in outputs],
        "decoded": decoded,
        "eval": evaluation,
        "weights": {k: v.ravel().tolist() for k, v in state.items() if k.startswith("weights/")},
    }


def _sum_of_squares(theta: Any, ctx: Any) -> tf.Tensor:
    """Of all weights, as decoding gets them."""
    return tf.add_n(
        [tf.reduce_sum(tf.square(tf.cast(w, "float32"))) for w in flatten(theta).values()]
    )


if __name__ == "__main__":
    run_all(run)
