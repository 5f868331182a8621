"""Compiles the steps of shrunk experiments whole with XLA, and prints what came out; for tests.

The training step contains loss weight, gradients, the learner's update and all assignments, and the
evaluation step the sums of loss and metrics. Each becomes one XLA program.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The values do not depend on LLVM's optimizations, which take most of the time to compile.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

from collections.abc import Iterable
from typing import Any

import shrunk_experiments
import tensorflow as tf

from tekso.framework import registry, schedules, task_results
from tekso.framework.execution import DataParallel, devices
from tekso.framework.execution.base import signature_of

SEED, STEPS = 7, (3, 4)  # the learning rate of step 0 may be 0


def steps_of(key: str, *, runs: bool) -> dict[str, Any]:
    """Returns the ops of the compiled steps and, if `runs`, their results and the ordinary ones."""
    tree = shrunk_experiments.shrunk(registry.get(key)().tree())
    with tempfile.TemporaryDirectory() as assets_dir:
        input = tree.input.instantiate(seed=SEED, assets_dir=assets_dir)
        batch = input.batch(0)
        params = task_results.complete(tree.task, input)
    learner = schedules.end_with_run(tree.learner, 10)

    def program() -> Any:
        execution = DataParallel.Params(towers=1, xla="none").instantiate()
        built = execution.build(
            params.instantiate(), learner.instantiate(), seed=SEED, batch=signature_of(batch)
        )
        built.initialize()
        return built

    compiled = program()
    train = tf.function(compiled._train_graph, jit_compile=True, autograph=False)
    evaluate = tf.function(compiled._eval_graph, jit_compile=True, autograph=False)
    size = len(next(iter(batch.values())))
    tensors = {name: tf.convert_to_tensor(x) for name, x in batch.items()}
    first, part = (tensors, tf.constant(0, tf.int64)), (tensors, 0, size)
    found = {
        "ops": sorted(_ops(train, first) | _ops(evaluate, part)),
        "hlo": sorted(_hlo(train, first) | _hlo(evaluate, part)),
    }
    if not runs:
        return found
    plain = program()
    metrics = [plain.train_step(batch, i) for i in STEPS]
    found["plain"] = _numbers(metrics, plain.eval_step(batch))
    metrics = [train(tensors, tf.constant(i, tf.int64)) for i in STEPS]
    found["compiled"] = _numbers(metrics, evaluate(*part))
    return found


def _numbers(steps: Any, evaluation: Any) -> dict[str, Any]:
    names = ("loss", "total_loss", "gradient_norm")
    return {
        "steps": [{name: float(metrics[name]) for name in names} for metrics in steps],
        "evaluation": {name: [float(x) for x in pair] for name, pair in evaluation.items()},
    }


def _ops(function: Any, args: Any) -> set[str]:
    """Returns the types of the ops of a function and of all that it calls."""
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    bodies: Iterable[Any] = [graph.node, *(f.node_def for f in graph.library.function)]
    return {node.op for body in bodies for node in body}


def _hlo(function: Any, args: Any) -> set[str]:
    """Returns `instructions` of the XLA program of a function."""
    text = function.experimental_get_compiler_ir(*args)(stage="hlo")
    return instructions(text)


def instructions(hlo: str) -> set[str]:
    """Returns {"opcode type", "custom-call target type", "opcode dynamic"} of a module as text."""
    found = set()
    for line in hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?[%\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match is None:
            continue
        shape, opcode = match.groups()
        if opcode == "custom-call":
            opcode = "custom-call " + line.partition('custom_call_target="')[2].partition('"')[0]
        found |= {f"{opcode} {dtype}" for dtype in re.findall(r"\b([a-z]+\d*\w*)\[", shape)}
        if "<=" in shape:
            found.add(f"{opcode} dynamic")
    return found


def main() -> None:
    """Reads {"key", "runs"} and prints the result of `steps_of`."""
    devices.setup_cpu(logical_devices=None)
    devices.set_graph_optimizer(False)
    print(json.dumps(steps_of(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
