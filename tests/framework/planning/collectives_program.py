"""Counts the collectives of small tasks on meshes that are not there; prints them as JSON.

Each argument is a case: {"task", "mesh", "rules", and what else a case sets}.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from tekso.framework import ops

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tekso.framework import schedules
from tekso.framework.cores import num_cores
from tekso.framework.costs import this_machine
from tekso.framework.costs.this_machine import ThisMachine
from tekso.framework.execution.accumulation import part_of
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.initializers import Constant, Normal
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.planning import collectives, mesh_time
from tekso.framework.planning.compiled_step import CompiledStep, compiled_step
from tekso.framework.planning.mesh_graphs import device_graphs
from tekso.framework.planning.mesh_time import MeshStarts
from tekso.framework.run import local_steps
from tekso.framework.step import Step
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import Theta

BATCH, LENGTH, EMBED, MLP, LAYERS = 64, 6, 96, 128, 5


class Dense(Task):
    """A scale, then dense-relu-dense; the scale makes a gradient go through the block."""

    class Params(Task.Params):
        """Params of Dense."""

        layers: int = param("Blocks in a loop; 0: one, without a loop.", default=0)
        over_time: bool = param("Whether a loop over time has a block per step.", default=False)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        count = self.params.layers
        stack, dims = ([count], ("layers",)) if count else ([], ())
        self.weight("scale", [EMBED], dims=("embed",), init=Constant.Params(value=1.0))
        init = Normal.Params()
        self.weight("w", [*stack, EMBED, MLP], dims=(*dims, "embed", "mlp"), init=init)
        self.weight("v", [*stack, MLP, EMBED], dims=(*dims, "mlp", "embed"), init=init)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = batch["x"] * theta.scale
        if self.params.over_time:

            def step(theta: Any, y: Any, x: Any, ctx: Any) -> Any:
                return x + self._block(theta["w"], theta["v"], y, ctx), None

            weights = Theta({"w": theta.w, "v": theta.v})
            y, _ = ops.scan(ctx, step, weights, tf.zeros_like(x[:, :1]), self._steps(x))
        elif self.params.layers:

            def body(_: Any, x: Any, layer: Any, ctx: Any) -> Any:
                return x + self._block(layer["w"], layer["v"], x, ctx), None

            y, _ = ops.scan(ctx, body, Theta({}), x, {"w": theta.w, "v": theta.v})
        else:
            y = self._block(theta.w, theta.v, x, ctx)
        y = ctx.constrain(y, ("batch", "length", None))
        return LossSums(tf.reduce_sum(batch["weights"] * tf.reduce_sum(y * y, [1, 2])))

    def _steps(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [B, T, E] as [T, B, 1, E]."""
        return tf.expand_dims(tf.transpose(x, [1, 0, 2]), 2)

    def _block(self, w: Any, v: Any, x: Any, ctx: Any) -> Any:
        hidden = tf.nn.relu(ops.project(ctx, x, w))
        return ctx.constrain(ops.project(ctx, hidden, v), ("batch", "length", None))


SIGNATURE = {
    "x": ((BATCH, LENGTH, EMBED), "float32"),
    "weights": ((BATCH,), "float32"),
}


def count(case: dict[str, Any]) -> dict[str, Any]:
    task = Dense.Params(
        layers=case.get("layers", 0), over_time=case.get("over_time", False)
    ).instantiate()
    steps = case.get("accumulation_steps", 1)
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=schedules.Constant.Params(value=0.1),
        accumulation_steps=steps,
    ).instantiate()
    rest = {name: case[name] for name in ("weights_axis", "slots_axis") if name in case}
    execution = MeshSharded.Params(mesh=case["mesh"], rules=case["rules"], **rest).instantiate()
    try:
        layout = execution.layout(task, part_of(SIGNATURE, steps), num_devices=None)
        compiled = compiled_step(Step(task, learner, seed=0), layout, SIGNATURE)
        found = dataclasses.asdict(collectives.of_compiled(compiled, layout.mesh))
        found["device"] = of_device(compiled, layout.mesh.size)
        if case.get("plan"):
            parts: Any = SimpleNamespace(task=task, learner=learner, batch=SIGNATURE)
            found["plan"] = dataclasses.asdict(
                local_steps.on_mesh(parts, layout, "float32", "none")
            )
        return found
    except ExecutionError as error:
        return {"error": str(error)}


def set_speeds() -> None:
    """On this machine, each device takes a second for each collective, and next to none for ops."""
    speed = this_machine.only()
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    starts = MeshStarts(
        call_s=100.0,
        array_s=0.0,
        variable_s=0.0,
        op_s=0.0,
        collective_s=1.0,
        collective_elapsed_s=1.0,
        byte_s=0.0,
    )
    vars(this_machine)["measured"] = lambda: machine
    vars(mesh_time)["measured_starts"] = lambda: {2: starts, 4: starts}


MOST_DEVICES = 8
"""The memory of more devices is not simulated, which takes longer than to compile the step."""


def of_device(compiled: CompiledStep, devices: int) -> dict[str, Any]:
    """The graphs of one of the devices."""
    graphs = device_graphs(compiled, variables=1, arrays=1)
    speed, cores = this_machine.only(), num_cores()
    return {
        "calls": graphs.calls,
        "collectives": len(graphs.collectives),
        "bytes": sum(graphs.collectives),
        "flops": graphs.flops(),
        "peak_bytes": graphs.peak_bytes(speed, devices=devices, cores=cores)
        if devices <= MOST_DEVICES
        else None,
    }


if __name__ == "__main__":
    set_speeds()
    print(json.dumps([count(json.loads(argument)) for argument in sys.argv[1:]]))
