"""Recurrent layers against loops over time: padding, segments, direction, stacks, decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.theta import Theta
from tekso.models.layers.lora import Lora
from tekso.models.layers.recurrent import Bidirectional, Recurrent, RecurrentStack
from tekso.models.layers.recurrent_cells import GruCell, LstmCell, RecurrentCell

B, T, D = 2, 5, 3
CELLS: dict[str, RecurrentCell.Params] = {
    "lstm": LstmCell.Params(hidden_dim=4),
    "projected lstm": LstmCell.Params(hidden_dim=4, projection_dim=D),
    "gru": GruCell.Params(hidden_dim=4),
}
X = np.random.default_rng(0).normal(size=(B, T, D))
MASK = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]) > 0
RESET = np.array([[0, 0, 0, 1, 0], [0, 1, 1, 0, 0]]) > 0
FLAGS = {
    "no flags": {},
    "mask": {"mask": MASK},
    "reset": {"reset": RESET},
    "mask and reset": {"mask": MASK, "reset": RESET},
}


def with_input(cell: RecurrentCell.Params, input_dim: int = D) -> RecurrentCell.Params:
    return cell.copy().set(input_dim=input_dim)


def random_theta(layer: Layer) -> Theta:
    rng = np.random.default_rng(1)
    specs = layer.specs()
    return layer.theta({p: tf.constant(rng.normal(size=s.shape)) for p, s in specs.items()})


def tensors(flags: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(value) for name, value in flags.items()}


def example_by_example(
    cell: RecurrentCell,
    theta: Theta,
    x: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    reset: np.ndarray | None = None,
    backward: bool = False,
) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """The specification: every example alone, its padding left out, its segments from zero."""
    ctx = StepContext()
    outputs, states = np.zeros((*x.shape[:2], cell.output_dim)), []
    for b in range(x.shape[0]):
        state = cell.zero_state(1, tf.float64)
        for t in reversed(range(x.shape[1])) if backward else range(x.shape[1]):
            if reset is not None and reset[b, t]:
                state = cell.zero_state(1, tf.float64)
            if mask is None or mask[b, t]:
                gates = cell.project_inputs(theta, tf.constant(x[b : b + 1, t]), ctx)
                y, state = cell.step(theta, gates, state, ctx)
                outputs[b, t] = y[0]
        states.append({name: value.numpy() for name, value in state.items()})
    return outputs, states


@pytest.mark.parametrize(
    ("name", "flags", "graph"),
    [
        *((name, flags, False) for name in CELLS for flags in FLAGS),
        # A graph has the ops of the eager loop: all flags together, and none.
        *sample([(name, "mask and reset", True) for name in CELLS], quick=[]),
        *sample([("lstm", "no flags", True)], quick=[]),
    ],
)
def test_equals_every_example_alone(name: str, flags: str, graph: bool) -> None:
    layer = Recurrent.Params(cell=with_input(CELLS[name])).instantiate()
    theta = random_theta(layer)

    def run(x: tf.Tensor) -> Any:
        ctx = StepContext()
        state = layer.zero_state(B, tf.float64)
        given = tensors(FLAGS[flags])
        y = layer.fprop(theta, x, ctx, **given)
        return y, *layer.extend_step(theta, x, state, ctx, **given)

    y, again, state = (tf.function(run, autograph=False) if graph else run)(tf.constant(X))
    expected, states = example_by_example(layer.cell, theta.cell, X, **FLAGS[flags])
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(y, again)
    for key, value in state.items():
        np.testing.assert_allclose(value, np.concatenate([s[key] for s in states]), rtol=1e-9)


@pytest.mark.parametrize("flags", FLAGS)
def test_backward_goes_from_the_end(flags: str) -> None:
    params = Recurrent.Params(cell=with_input(CELLS["lstm"]), direction="backward")
    layer = params.instantiate()
    theta = random_theta(layer)
    y = layer.fprop(theta, tf.constant(X), StepContext(), **tensors(FLAGS[flags]))
    expected, _ = example_by_example(layer.cell, theta.cell, X, backward=True, **FLAGS[flags])
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sample(CELLS, quick=[next(iter(CELLS))]))
def test_gradients_equal_those_of_the_loop_written_out(name: str) -> None:
    layer = Recurrent.Params(cell=with_input(CELLS[name])).instantiate()
    theta, x = random_theta(layer), tf.constant(X)
    ctx = StepContext()

    def written_out(x: tf.Tensor) -> tf.Tensor:
        state = layer.zero_state(B, tf.float64)
        ys = []
        for t in range(T):
            gates = layer.cell.project_inputs(theta.cell, x[:, t], ctx)
            y, after = layer.cell.step(theta.cell, gates, state, ctx)
            there = tf.constant(MASK[:, t : t + 1])
            state = {key: tf.where(there, after[key], state[key]) for key in state}
            ys.append(tf.where(there, y, 0))
        return tf.stack(ys, 1)

    def gradients(run: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            loss = tf.reduce_sum(tf.sin(3 * run(x)))
        return tape.gradient(loss, (theta, x))

    def fast(x: tf.Tensor) -> tf.Tensor:
        return layer.fprop(theta, x, ctx, mask=tf.constant(MASK))

    expected = gradients(written_out)
    graph = tf.function(lambda: gradients(fast), autograph=False)
    compiled = tf.function(lambda: gradients(fast), autograph=False, jit_compile=True)
    for found in (gradients(fast), graph(), compiled()):
        tf.nest.map_structure(
            lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-9, atol=1e-11), found, expected
        )


def _traced(layer: Recurrent, theta: Theta, ctx: StepContext, **flags: tf.Tensor) -> Any:
    """Returns a traced function of x: the value, and the gradients of theta and x."""

    def run(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(theta, x, ctx, **flags)
            loss = tf.reduce_sum(tf.sin(3 * y))
        return y, tape.gradient(loss, (theta, x))

    return tf.function(run, autograph=False).get_concrete_function(tf.constant(X))


def _compiled_loops(traced: Any) -> int:
    """Returns the number of loops in functions that XLA compiles."""
    functions = traced.graph.as_graph_def().library.function
    compiled = [f for f in functions if f.attr["_XlaMustCompile"].b]
    return sum("While" in node.op for function in compiled for node in function.node_def)


def test_an_lstm_is_one_compiled_loop_with_the_values_of_single_steps() -> None:
    cell = with_input(CELLS["projected lstm"])
    layer = Recurrent.Params(cell=cell, direction="backward").instantiate()
    theta, flags = random_theta(layer), tensors(FLAGS["mask and reset"])
    compiled, steps = (
        _traced(layer, theta, StepContext(mode="train", fuse=fuse), **flags)
        for fuse in (XlaFusion(), no_fusion)
    )
    assert (_compiled_loops(compiled), _compiled_loops(steps)) == (2, 0)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11),
        compiled(tf.constant(X)),
        steps(tf.constant(X)),
    )


class _ClippedCell(LstmCell):
    """Clips the memory; a layer of a user.

    Shapes:
      as in LstmCell
    Weights:
      those of LstmCell
    """

    def step(
        self, theta: Theta, gates: tf.Tensor, state: Any, ctx: StepContext
    ) -> tuple[tf.Tensor, Any]:
        y, after = super().step(theta, gates, state, ctx)
        return y, {**after, "memory": tf.clip_by_value(after["memory"], -0.1, 0.1)}


@pytest.mark.parametrize(
    ("cell", "mode"),
    [
        (_ClippedCell.Params(hidden_dim=4), "train"),
        (LstmCell.Params(hidden_dim=4, adapter=Lora.Params(rank=2)), "train"),
        (LstmCell.Params(hidden_dim=4), "decode"),
        (GruCell.Params(hidden_dim=4), "train"),
    ],
    ids=["own step", "adapter", "decode", "gru"],
)
def test_other_loops_are_not_compiled(cell: RecurrentCell.Params, mode: Any) -> None:
    layer = Recurrent.Params(cell=with_input(cell)).instantiate()
    ctx = StepContext(mode=mode, fuse=XlaFusion())
    run = tf.function(lambda x: layer.fprop(random_theta(layer), x, ctx), autograph=False)
    assert _compiled_loops(run.get_concrete_function(tf.constant(X))) == 0


def test_input_projections_of_all_times_are_one_product() -> None:
    layer = Recurrent.Params(cell=with_input(CELLS["lstm"])).instantiate()
    theta = layer.init()
    run = tf.function(lambda x: layer.fprop(theta, x, StepContext()), autograph=False)
    graph = run.get_concrete_function(tf.constant(X, tf.float32)).graph
    outside = [op for op in graph.get_operations() if op.type == "MatMul"]
    assert [tuple(op.outputs[0].shape) for op in outside] == [(T * B, 4 * 4)]


def test_outputs_do_not_depend_on_padded_inputs() -> None:
    layer = Recurrent.Params(cell=with_input(CELLS["lstm"])).instantiate()
    theta = random_theta(layer)
    other = np.where(MASK[..., None], X, np.nan)
    for x in (X, other):
        y = layer.fprop(theta, tf.constant(x), StepContext(), mask=tf.constant(MASK))
        np.testing.assert_array_equal(y.numpy()[~MASK], 0)
        np.testing.assert_allclose(y[1], layer.fprop(theta, tf.constant(X), StepContext())[1])


def test_bidirectional_joins_both_directions() -> None:
    layer = Bidirectional.Params(cell=with_input(CELLS["lstm"])).instantiate()
    assert layer.output_dim == 8
    theta = random_theta(layer)
    for flags in FLAGS.values():
        y = layer.fprop(theta, tf.constant(X), StepContext(), **tensors(flags))
        ahead, _ = example_by_example(layer.forward.cell, theta.forward.cell, X, **flags)
        if "reset" in flags:  # from the end, a segment begins where the next one ends
            flags = flags | {"reset": np.pad(RESET[:, 1:], [(0, 0), (0, 1)])}
        back, _ = example_by_example(
            layer.backward.cell, theta.backward.cell, X, backward=True, **flags
        )
        np.testing.assert_allclose(y, np.concatenate([ahead, back], -1), rtol=1e-9, atol=1e-12)


def test_bidirectional_sees_no_padding_at_the_end() -> None:
    layer = Bidirectional.Params(cell=with_input(CELLS["gru"])).instantiate()
    theta = random_theta(layer)
    short = layer.fprop(theta, tf.constant(X[:, :3]), StepContext())
    mask = tf.constant([[True, True, True, False, False]] * B)
    padded = layer.fprop(theta, tf.constant(X), StepContext(), mask=mask)
    np.testing.assert_allclose(padded[:, :3], short, rtol=1e-12)


def stack(**kwargs: Any) -> tuple[RecurrentStack, Theta]:
    given = {"input_dim": D, "num_layers": 2, "cell": CELLS["projected lstm"]} | kwargs
    layer = RecurrentStack.Params(**given).instantiate()
    return layer, random_theta(layer)


@pytest.mark.parametrize("residual", ["none", "add"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_stack_is_its_layers_on_each_other(residual: Any, direction: Any) -> None:
    layer, theta = stack(residual=residual, direction=direction, num_layers=3)
    ctx = StepContext()
    expected = tf.constant(X)
    for i in range(3):
        y = layer.layers[i].fprop(theta.layers[str(i)], expected, ctx, mask=tf.constant(MASK))
        same_size = y.shape[-1] == expected.shape[-1]
        expected = expected + y if residual == "add" and same_size else y
    found = layer.fprop(theta, tf.constant(X), ctx, mask=tf.constant(MASK))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert layer.output_dim == found.shape[-1] == (D if direction == "forward" else 2 * D)


def test_stack_sets_the_sizes_of_its_layers() -> None:
    layer, _ = stack(cell=CELLS["lstm"], direction="bidirectional", num_layers=3)
    sizes = [inner.forward.cell.params.input_dim for inner in layer.layers]
    assert sizes == [D, 8, 8]
    assert list(layer.specs())[:3] == [
        "layers/0/forward/cell/w_input",
        "layers/0/forward/cell/w_recurrent",
        "layers/0/forward/cell/b",
    ]


def test_only_the_first_layer_sees_all_where_that_is_asked_for() -> None:
    layer, theta = stack(cell=CELLS["lstm"], direction="bidirectional_first", num_layers=3)
    kinds = [type(inner) for inner in layer.layers]
    assert kinds == [Bidirectional, Recurrent, Recurrent]
    assert [inner.cell.params.input_dim for inner in layer.layers[1:]] == [8, 4]
    ctx, x = StepContext(), tf.constant(X)
    for i in range(3):
        x = layer.layers[i].fprop(theta.layers[str(i)], x, ctx)
    np.testing.assert_allclose(layer.fprop(theta, tf.constant(X), ctx), x, rtol=1e-12)
    with pytest.raises(ValueError, match="cannot run step by step"):
        layer.zero_state(B)


def test_stack_drops_between_layers_with_masks_of_their_own() -> None:
    layer, theta = stack(num_layers=3, dropout_rate=0.5)
    ctx = StepContext(mode="train", seed=3)
    masks = [
        ops.dropout(ctx.fold(i), tf.ones([B, T, D], tf.float64), 0.5, layer.dropout) for i in (1, 2)
    ]
    assert (masks[0].numpy() != masks[1].numpy()).any()
    expected = tf.constant(X)
    for i in range(3):
        given = expected * masks[i - 1] if i else expected
        expected = layer.layers[i].fprop(theta.layers[str(i)], given, ctx)
    np.testing.assert_allclose(layer.fprop(theta, tf.constant(X), ctx), expected, rtol=1e-12)


@pytest.mark.parametrize("blocks", [[5], [1, 1, 1, 1, 1], [2, 3]])
def test_stack_continues_from_a_state(blocks: list[int]) -> None:
    layer, theta = stack(residual="add")
    ctx = StepContext(mode="decode")
    expected = layer.fprop(theta, tf.constant(X), ctx)
    states, outputs, start = layer.zero_state(B), [], 0
    for size in blocks:
        x = tf.constant(X[:, start : start + size])
        y, states = layer.extend_step(theta, x, states, ctx)
        outputs.append(y)
        start += size
    np.testing.assert_allclose(tf.concat(outputs, 1), expected, rtol=1e-10)


def test_what_cannot_be_built_or_extended_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers is 0, must be at least 1"):
        stack(num_layers=0)
    layer, _ = stack(direction="bidirectional")
    with pytest.raises(ValueError, match="cannot run step by step"):
        layer.zero_state(B)
    with pytest.raises(ValueError, match="input_dim is 7"):
        stack(cell=with_input(CELLS["lstm"], 7))
