"""The collectives that are counted are those that the formulas of each layout give.

The task is a scale and dense-relu-dense (`collectives_program.py`), compiled for meshes that are
not there. Besides the tensors below, a step adds up scalars of 4 bytes: over the batch the loss and
its weight, and the square of the norm of every gradient that is split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest
import tensorflow as tf

from tekso.framework.planning.partitioned_program import loop_lengths

PROGRAM = Path(__file__).with_name("collectives_program.py")
BATCH, LENGTH, EMBED, MLP = 64, 6, 96, 128  # as in the program
ACTIVATION = 4 * BATCH * LENGTH * EMBED  # bytes of [batch, length, embed]
WEIGHTS = 4 * (EMBED + 2 * EMBED * MLP)
SCALAR = 4

CASES: dict[str, dict[str, Any]] = {
    "model": {"mesh": "model:4", "rules": "mlp:model", "plan": True},
    "data": {"mesh": "data:4", "rules": "batch:data"},
    "512 devices": {"mesh": "data:16;model:32", "rules": "batch:data;mlp:model"},
    "weights over data": {"mesh": "data:4", "rules": "fsdp"},
    "loop": {"mesh": "data:2;model:4", "rules": "batch:data;mlp:model", "layers": 5},
    "loop over time": {"mesh": "model:4", "rules": "mlp:model", "over_time": True},
    "parts": {"mesh": "data:4", "rules": "batch:data", "accumulation_steps": 4},
    "one device": {"mesh": "data:1", "rules": "batch:data"},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = processes.run([str(PROGRAM), *map(json.dumps, CASES.values())], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def rows(found: dict[str, Any], case: str) -> list[tuple[str, str, int, int]]:
    """(kind, axis, tensors, bytes)."""
    return [(c["kind"], c["axis"], c["count"], c["bytes"]) for c in found[case]["collectives"]]


def test_split_mlp_costs_one_all_reduce_forward_and_one_backward(found: Any) -> None:
    norms = 2  # of w and v
    assert rows(found, "model") == [
        ("all-reduce", "model", 2 + norms, 2 * ACTIVATION + norms * SCALAR)
    ]


def test_the_graphs_of_a_device_have_the_collectives_and_the_products_of_its_shards(
    found: Any,
) -> None:
    for case in ("model", "data", "parts"):
        device, counted = found[case]["device"], found[case]["collectives"]
        assert device["collectives"] == sum(c["count"] for c in counted)
        assert device["bytes"] == sum(c["bytes"] for c in counted)
    # Two products, each with two gradients; a device has a quarter of each in both layouts.
    products = 2 * 3 * 2 * BATCH * LENGTH * EMBED * MLP
    for case in ("model", "data"):
        assert products / 4 < found[case]["device"]["flops"] < 1.1 * products / 4
    # 4 parts, the sum of their gradients, and the update.
    assert [found[c]["device"]["calls"] for c in ("model", "parts")] == [1, 6]
    # An activation is whole on a device, or a quarter of it, with the gradients of all weights.
    assert found["model"]["device"]["peak_bytes"] > ACTIVATION
    assert ACTIVATION / 4 + WEIGHTS < found["data"]["device"]["peak_bytes"] < ACTIVATION + WEIGHTS


def test_the_body_of_a_loop_counts_as_often_as_it_runs(found: Any) -> None:
    device, (collectives,) = (found["loop over time"][key] for key in ("device", "collectives"))
    forward, backward, norms = LENGTH, LENGTH, 2
    assert device["collectives"] == collectives["count"] == forward + backward + norms
    assert device["bytes"] == collectives["bytes"] == 2 * ACTIVATION + norms * SCALAR
    # Two products, each with two gradients; the backward loop computes one of them again.
    product = 2 * BATCH * LENGTH * EMBED * MLP
    assert 7 * product / 4 < device["flops"] < 1.1 * 7 * product / 4
    # The buffer of the states of all time steps, and that of the gradients of the inputs.
    assert device["peak_bytes"] > 2 * ACTIVATION


def test_a_step_on_a_mesh_of_this_machine_is_planned_by_the_graphs_of_its_devices(
    found: Any,
) -> None:
    plan = found["model"]["plan"]
    collectives = 4  # two of activations, two of norms
    assert plan["core_seconds"] == pytest.approx(100.0 + 4 * collectives, rel=1e-6)
    # "scale" is whole on each device; w and v are sharded. SGD has no slots but a counter.
    assert plan["memory"]["weights"] == 4 * EMBED + 4 * 2 * EMBED * MLP / 4
    assert plan["devices"] == plan["sharing_devices"] == 4
    assert plan["name"] == "mesh_sharded, model:4  mlp:model"
    assert plan["memory"]["tensors of a step"] == found["model"]["device"]["peak_bytes"]


def test_split_batch_costs_one_all_reduce_a_weight(found: Any) -> None:
    losses = 2
    assert rows(found, "data") == [("all-reduce", "data", 3 + losses, WEIGHTS + losses * SCALAR)]


def test_mesh_of_512_devices_exchanges_parts(found: Any) -> None:
    gradients = 4 * (EMBED + 2 * EMBED * MLP // 32)
    assert rows(found, "512 devices") == [
        ("all-reduce", "data", 3 + 2, gradients + 2 * SCALAR),
        ("all-reduce", "model", 2 + 2, 2 * ACTIVATION // 16 + 2 * SCALAR),
    ]


def test_weights_that_are_split_further_are_gathered_once(found: Any) -> None:
    gathered = [row for row in rows(found, "weights over data") if row[0] == "all-gather"]
    assert gathered == [("all-gather", "data", 3, WEIGHTS)]


def test_collectives_in_a_loop_count_as_often_as_it_runs(found: Any) -> None:
    layers, norms, losses = 5, 2, 2
    # Each turn adds up the gradients of its layer.
    gradients = 4 * (EMBED + layers * 2 * EMBED * MLP // 4)
    over_data, over_model = rows(found, "loop")
    counts = 1 + 2 * layers + losses, gradients + losses * SCALAR
    assert over_data == ("all-reduce", "data", *counts)
    # Forward and backward in each layer; a third where the backward loop computes y again, which
    # no gradient needs.
    assert over_model in [
        ("all-reduce", "model", times + norms, times * ACTIVATION // 2 + norms * SCALAR)
        for times in (2 * layers, 3 * layers)
    ]
    assert found["loop"]["unknown_loops"] == []


def test_each_part_of_a_batch_adds_up_the_gradients(found: Any) -> None:
    parts = 4
    (_, _, count, size), *_ = [
        row for row in rows(found, "parts") if row[:2] == ("all-reduce", "data")
    ]
    scalars = count - 3 * parts
    assert size == parts * WEIGHTS + SCALAR * scalars
    assert parts <= scalars <= 4 * parts  # losses and weights of loss


def test_one_device_exchanges_nothing(found: Any) -> None:
    assert rows(found, "one device") == []


# --- loops ---


def length_of(condition: Any, body: Any, *start: Any) -> int | None:
    """The length that is read from the compiled form of a loop."""

    @tf.function(autograph=False)
    def run() -> Any:
        return tf.while_loop(condition, body, [tf.constant(x) for x in start])

    traced = run.get_concrete_function()
    functions = {f.signature.name: f for f in traced.graph.as_graph_def().library.function}
    functions[""] = traced.function_def
    (length,) = loop_lengths(functions.__getitem__, "").values()
    return length


def test_length_of_a_loop_follows_its_counter() -> None:
    assert length_of(lambda i: i < 7, lambda i: [i + 1], 0) == 7
    assert length_of(lambda i: i < 7, lambda i: [i + 3], 0) == 3
    assert length_of(lambda i: i >= 0, lambda i: [i - 1], 4) == 5
    assert length_of(lambda i: i < 7, lambda i: [i + 1], 9) == 0
    both = lambda i, j: tf.logical_and(i < 100, j > 1)  # noqa: E731
    assert length_of(both, lambda i, j: [i + 1, j - 2], 0, 10) == 5
    with_numbers = lambda i, x: [i + 1, tf.exp(x)]  # noqa: E731
    assert length_of(lambda i, x: i < 7, with_numbers, 2, 1.0) == 5


def test_length_is_unknown_where_the_data_decides() -> None:
    assert length_of(lambda i, x: x < 7.0, lambda i, x: [i + 1, x * 2.0], 0, 1.0) is None
