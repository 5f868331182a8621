"""Loops on a mesh give the gradients of the plain ones, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework.execution.mesh import control_flow

PROGRAM = Path(__file__).with_name("control_flow_program.py")

RECURRENT = [
    "data:2;model:2 batch:data;mlp:model;vocab:model",
    "model:2 embed:model",
]
TRANSFORMER = [
    "model:2 embed:model",
    "data:2 length:data",
    "model:2 head_dim:model",
    "model:3 layers:model",
]


def differences(*arguments: str) -> dict[str, dict[str, Any]]:
    done = processes.run([str(PROGRAM), *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""

    class Context:
        is_training = True

    def iteration(i: Any, theta: Any, state: Any, x: Any) -> Any:
        return state, [theta[0] * x[0]], []

    loop = control_flow.Loop(Context(), iteration, 320, [None])
    with tf.GradientTape() as tape:
        w = tf.ones([2], tf.bfloat16)
        tape.watch(w)
        _, (stacked,), _ = loop.run([w], [tf.constant(0.0)], [tf.ones([320, 2], tf.bfloat16)])
    gradient = tape.gradient(stacked, w)
    assert gradient.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), [320, 320])


def check(report: dict[str, dict[str, Any]]) -> None:
    for layout, found in report.items():
        # float32 sums in another order; of a weight, relative to its largest gradient.
        assert found["outputs"] < 2e-6, (layout, found)
        assert found["gradients"] < 1e-5, (layout, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    # "gru" is GruCell(reset="after"), which has one weight more than "repeated_recurrent".
    [("lstm", RECURRENT), ("repeated_recurrent", RECURRENT), ("gru", RECURRENT[:1])],
)
def test_loop_over_time_on_a_mesh_equals_the_plain_one(model: str, layouts: list[str]) -> None:
    check(differences(model, *layouts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [("repeated", TRANSFORMER), ("repeated_moe", ["model:4 experts:model"])],
)
def test_loop_over_depth_on_a_mesh_equals_the_plain_one(model: str, layouts: list[str]) -> None:
    check(differences(model, *layouts))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lstm"])
def test_parts_of_a_batch_add_up_on_a_mesh(model: str) -> None:
    check(differences(model, "--accumulation=2", "data:2;model:2 batch:data;mlp:model;vocab:model"))
