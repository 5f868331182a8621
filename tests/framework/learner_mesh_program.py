"""Runs learners over sharded and over plain tensors and prints the largest differences, as JSON.

Started by a test in a process of its own, because a process has one set of devices.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"  # the default one is wrong on CPU

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import tensorflow as tf
from learner_updates import updated
from tensorflow.experimental import dtensor

from tekso.framework import initializers, optimizers, schedules
from tekso.framework.learner import Learner
from tekso.framework.weight_spec import WeightSpec

NUM_STEPS = 3
AXES = {"rows": "a", "columns": "b"}
SCHEDULE = schedules.Product.Params(
    schedules=[
        schedules.Cosine.Params(initial_value=0.1, total_steps=10, warmup_steps=2),
        schedules.PiecewiseConstant.Params(boundaries=[2], values=[1.0, 0.5]),
        schedules.InverseSquareRoot.Params(model_dim=2, warmup_steps=2),
        schedules.Exponential.Params(initial_value=1.0, rate=0.5, decay_steps=2, form="stairs"),
    ]
)


def make_spec(path: str, shape: tuple[int, ...], dims: tuple[Any, ...]) -> WeightSpec:
    zeros = initializers.Zeros.Params().instantiate()
    stacked = dims.count("layers")
    return WeightSpec(path, shape, dims, zeros, stacked=stacked, template=path)


SPECS = {
    spec.path: spec
    for spec in (
        make_spec("matrix", (4, 6), ("rows", "columns")),
        make_spec("half", (6, 5), ("columns", None)),
        make_spec("vector", (6,), ("rows",)),
        make_spec("stack", (3, 2, 8), ("layers", "rows", None)),
    )
}


def learner(name: str) -> Learner:
    optimizer = getattr(optimizers, name).Params()
    if name == "Adafactor":
        optimizer.min_dim_to_factor = 2
    return Learner.Params(
        optimizer=optimizer,
        schedule=SCHEDULE,
        clip_tensor_norm=0.5,
        clip_global_norm=1.0,
        ema_decay=0.9,
        ema_start="ramp",
    ).instantiate()


def values(specs: Mapping[str, WeightSpec], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=s.shape).astype(np.float32) for path, s in specs.items()}


def main(names: list[str]) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    mesh = dtensor.create_mesh([("a", 2), ("b", 2)], device_type="CPU")

    def layout(spec: WeightSpec) -> dtensor.Layout:
        return dtensor.Layout([AXES.get(dim, dtensor.UNSHARDED) for dim in spec.dims], mesh)

    def replicated(x: Any) -> dtensor.Layout:
        return dtensor.Layout.replicated(mesh, rank=len(np.shape(x)))

    def place(tensors: Mapping[str, Any], specs: Mapping[str, WeightSpec]) -> dict[str, Any]:
        return {
            path: dtensor.relayout(dtensor.copy_to_mesh(x, replicated(x)), layout(specs[path]))
            for path, x in tensors.items()
        }

    report = {}
    for name in names:
        one = learner(name)
        slot_specs = one.slots(SPECS)

        def step(*tensors: Any, one: Learner = one, on_mesh: bool = True) -> tuple[Any, ...]:
            made = updated(one, SPECS, *tensors, on_mesh=on_mesh)
            return made.weights, made.slots, one.evaluation_weights(made.weights, made.slots)

        compiled = tf.function(step, autograph=False)
        weights = {p: tf.constant(v) for p, v in values(SPECS, 0).items()}
        slots = {p: tf.constant(s.initial_value(0)) for p, s in slot_specs.items()}
        on_mesh = place(weights, SPECS), place(slots, slot_specs)
        for number in range(NUM_STEPS):
            gradients = {p: tf.constant(v) for p, v in values(SPECS, number + 1).items()}
            count = tf.constant(number, tf.int64)
            placed = place(gradients, SPECS), dtensor.copy_to_mesh(count, replicated(count))
            weights, slots, averages = step(weights, gradients, slots, count, on_mesh=False)
            new = compiled(on_mesh[0], placed[0], on_mesh[1], placed[1])
            on_mesh = new[:2]
        differences, moved = [0.0], []
        for plain, sharded, specs in (
            (weights, new[0], SPECS),
            (slots, new[1], slot_specs),
            (averages, new[2], SPECS),
        ):
            for path, value in plain.items():
                if dtensor.fetch_layout(sharded[path]) != layout(specs[path]):
                    moved.append(path)
                whole = dtensor.relayout(sharded[path], replicated(value)).numpy()
                differences.append(float(np.max(np.abs(whole - value.numpy()))))
        report[name] = {"difference": max(differences), "moved": moved}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
