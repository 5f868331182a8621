"""LSTM and GRU cells: one step against NumPy; weights, dims and the state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.recurrent_cells import GruCell, LstmCell, RecurrentCell


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm(
    w: dict[str, np.ndarray], x: np.ndarray, state: dict[str, np.ndarray], forget_bias: float
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One step, gate by gate."""
    i, f, g, o = (
        x @ w["w_input"][:, k] + state["output"] @ w["w_recurrent"][:, k] + w["b"][k]
        for k in range(4)
    )
    memory = sigmoid(f + forget_bias) * state["memory"] + sigmoid(i) * np.tanh(g)
    output = sigmoid(o) * np.tanh(memory)
    if "w_projection" in w:
        output = output @ w["w_projection"]
    return output, {"memory": memory, "output": output}


def gru(
    w: dict[str, np.ndarray], x: np.ndarray, state: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    h = state["output"]
    x_r, x_z, x_n = (x @ w["w_input"][:, k] + w["b"][k] for k in range(3))
    r = sigmoid(x_r + h @ w["w_recurrent"][:, 0])
    z = sigmoid(x_z + h @ w["w_recurrent"][:, 1])
    if "b_candidate" in w:
        new = np.tanh(x_n + r * (h @ w["w_candidate"] + w["b_candidate"]))
    else:
        new = np.tanh(x_n + (r * h) @ w["w_candidate"])
    output = z * h + (1 - z) * new
    return output, {"output": output}


def random(cell: RecurrentCell) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    weights = {path: rng.normal(size=spec.shape) for path, spec in cell.specs().items()}
    state = {name: rng.normal(size=(2, n)) for name, n in cell.state_sizes.items()}
    return weights, rng.normal(size=(2, 3)), state


def run(cell: RecurrentCell, weights: Any, x: np.ndarray, state: Any) -> Any:
    theta = cell.theta({path: tf.constant(w) for path, w in weights.items()})
    ctx = StepContext()
    gates = cell.project_inputs(theta, tf.constant(x), ctx)
    assert gates.shape == (2, cell.num_gates, cell.params.hidden_dim)
    return cell.step(theta, gates, {k: tf.constant(v) for k, v in state.items()}, ctx)


@pytest.mark.parametrize("projection_dim", [None, 4])
@pytest.mark.parametrize("forget_bias", [0.0, 1.5])
def test_lstm_step(projection_dim: int | None, forget_bias: float) -> None:
    params = LstmCell.Params(input_dim=3, hidden_dim=5, projection_dim=projection_dim)
    cell = params.set(forget_bias=forget_bias).instantiate()
    weights, x, state = random(cell)
    y, after = run(cell, weights, x, state)
    expected, expected_after = lstm(weights, x, state, forget_bias)
    np.testing.assert_allclose(y, expected, rtol=1e-10)
    assert set(after) == set(expected_after) == set(cell.state_sizes)
    for name in after:
        np.testing.assert_allclose(after[name], expected_after[name], rtol=1e-10)
    assert cell.output_dim == y.shape[-1] == (projection_dim or 5)


@pytest.mark.parametrize("reset", ["before", "after"])
def test_gru_step(reset: Any) -> None:
    cell = GruCell.Params(input_dim=3, hidden_dim=5, reset=reset).instantiate()
    weights, x, state = random(cell)
    assert ("b_candidate" in weights) == (reset == "after")
    y, after = run(cell, weights, x, state)
    expected, _ = gru(weights, x, state)
    np.testing.assert_allclose(y, expected, rtol=1e-10)
    np.testing.assert_allclose(after["output"], expected, rtol=1e-10)


def test_weights_dims_and_fans() -> None:
    specs = LstmCell.Params(input_dim=3, hidden_dim=5, projection_dim=4).instantiate().specs()
    assert {path: (s.shape, s.dims, tuple(s.fans)) for path, s in specs.items()} == {
        "w_input": ((3, 4, 5), ("embed", None, "mlp"), (3, 5)),
        "w_recurrent": ((4, 4, 5), ("embed", None, "mlp"), (4, 5)),
        "b": ((4, 5), (None, "mlp"), (4, 5)),
        "w_projection": ((5, 4), ("mlp", "embed"), (5, 4)),
    }
    specs = GruCell.Params(input_dim=3, hidden_dim=5, reset="after").instantiate().specs()
    assert {path: (s.shape, s.dims, tuple(s.fans)) for path, s in specs.items()} == {
        "w_input": ((3, 3, 5), ("embed", None, "mlp"), (3, 5)),
        "w_recurrent": ((5, 2, 5), ("embed", None, "mlp"), (5, 5)),
        "w_candidate": ((5, 5), ("embed", "mlp"), (5, 5)),
        "b": ((3, 5), (None, "mlp"), (3, 5)),
        "b_candidate": ((5,), ("mlp",), (1, 5)),
    }


def test_state_starts_at_zero_in_the_type_of_the_weights() -> None:
    cell = LstmCell.Params(input_dim=3, hidden_dim=5, projection_dim=4, dtype="bfloat16")
    state = cell.instantiate().zero_state(2)
    assert {name: (tuple(v.shape), v.dtype) for name, v in state.items()} == {
        "memory": ((2, 5), tf.bfloat16),
        "output": ((2, 4), tf.bfloat16),
    }
    assert all(float(tf.reduce_max(abs(v))) == 0 for v in state.values())
    assert cell.instantiate().zero_state(2, tf.float64)["memory"].dtype == tf.float64


@pytest.mark.parametrize("kind", [LstmCell, GruCell])
def test_every_tensor_of_the_state_has_dims(kind: Any) -> None:
    cell = kind.Params(input_dim=3, hidden_dim=5).instantiate()
    assert set(cell.state_dims) == set(cell.state_sizes)
    assert all(dims[0] == "batch" for dims in cell.state_dims.values())
