"""Trains a pipeline, and prints the peak of TensorFlow's statistics and the planned one as JSON.

Started by a test in a process of its own, because an allocator remembers what was freed before.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tekso.framework import registry, schedules
from tekso.framework.costs import this_machine
from tekso.framework.costs.graph_memory import COUNTED_BYTES
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning.pipeline_memory import PipelineMemory
from tekso.framework.planning.stage_figures import durations
from tekso.framework.run import inspection
from tekso.framework.step import Step


def main() -> None:
    """Prints both figures."""
    tree = registry.get("image.digits.Mlp")().tree()
    tree.set({"task.model.hidden_dims": [1024, 512], "input.batch_size": 1024})
    tree.execution = Pipelined.Params(num_stages=2, num_micro_batches=4)
    task = inspection.task_of(tree, assets_dir=None)
    learner = schedules.end_with_run(tree.learner, 20).instantiate()
    batch = tree.input.instantiate().batch(0)
    execution = tree.execution.instantiate()
    execution.setup_devices()
    plan = execution.plan(task, signature_of(batch), parts=1)
    planned = PipelineMemory(
        Step(task, learner, seed=0), plan, signature_of(batch), this_machine.only(op_s=1e-6)
    ).peak_bytes(durations(plan, [1.0, 1.0]), least=COUNTED_BYTES)
    program = execution.build(task, learner, seed=0, batch=signature_of(batch))
    program.initialize()
    for step in range(6):
        program.train_step(batch, step)
        if step == 2:
            tf.config.experimental.reset_memory_stats("CPU:0")
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    with tf.device("CPU:0"):
        sent = tf.random.stateless_uniform([1024], [1, 2])
    with tf.device("CPU:1"):
        taken = tf.identity(sent)
    shared = np.shares_memory(*(np.asarray(memoryview(x)) for x in (sent, taken)))
    found = {"planned": planned, "measured": measured, "is_handed_over_without_a_copy": shared}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
