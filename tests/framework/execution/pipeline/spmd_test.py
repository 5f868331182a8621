"""A pipeline that is one program gives the losses, gradients and weights of a single device."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import small_models
from equality_test import check
from mesh_stages_test import run

from tekso.framework import ops, registry
from tekso.framework.context import ContextError, StepContext
from tekso.framework.draws import DrawError
from tekso.framework.execution import ExecutionError, SpmdPipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline.saving_loop import SavingLoop
from tekso.framework.execution.pipeline.spmd_loop import SpmdLoop, run_tick
from tekso.framework.foreign_variables import ForeignVariableError, refused
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.pieces import LOSS_SUM, METRICS, Piece, rows_of_stack
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.run import pipeline_plan
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.linear import Linear
from tekso.models.layers.stack import RepeatedStack


def pipeline(stages: int, micro_batches: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_stages": stages, "num_micro_batches": micro_batches}
    return {"execution": "spmd_pipelined", **sizes, **more}


# The test of a mask, which is quick, also evaluates. The others only train, as what they are about
# is in the gradient. TensorFlow's graph optimizer is on in that of packed texts.


@pytest.mark.slow
def test_stages_and_micro_batches_change_nothing() -> None:
    sizes = [12, 7]  # 2 accumulation steps, 1 that is not a pipeline
    execution = pipeline(4, 2, rematerialize="all")
    job = {"sizes": sizes, "size": 12, "accumulation": 2, "optimized": False, "evaluate": False}
    alone, piped = run("stacked_blocks", execution, **job)
    check(alone, piped)


@pytest.mark.parametrize(
    "rematerialize",
    # The other tests rematerialize. Without, the gradients of sums are those of tensors outside of
    # the loop.
    [pytest.param("all", marks=pytest.mark.matrix), pytest.param("none", marks=pytest.mark.slow)],
)
def test_experts_in_the_stack_and_parts_of_a_batch(rematerialize: str) -> None:
    piped = pipeline(2, 2, rematerialize=rematerialize)
    alone, found = run(
        "stacked_moe", piped, size=16, accumulation=2, optimized=False, evaluate=False
    )
    check(alone, found)


@pytest.mark.slow
def test_what_layers_read_besides_goes_with_its_micro_batch() -> None:
    job = {"size": 16, "packed": True, "evaluate": False}
    alone, piped = run("stacked", pipeline(2, 2, num_replicas=2), **job)
    check(alone, piped)


def test_a_mask_of_minus_infinity_is_fine_and_a_step_that_is_not_finite_is_skipped() -> None:
    # With replicas, the axis of the batch shards only examples, though no layer constrains them.
    pipelines = (pipeline(2, 4, num_replicas=2), pipeline(2, 2, rematerialize="all"))
    alone, *piped = run("masked", *pipelines, size=16, steps=3, poisoned=[1], optimized=False)
    for one in (alone, *piped):
        check(alone, one)
        assert [step["nonfinite_total"] for step in one["steps"]] == [0, 1, 1]
        assert [step["nonfinite_consecutive"] for step in one["steps"]] == [0, 1, 0]


@pytest.mark.slow
def test_a_convolution_before_the_stack() -> None:
    # DTensor compiles its gradient only if the shape of the images is a constant.
    alone, piped = run("stacked_images", pipeline(1, 2), size=4, optimized=False, evaluate=False)
    check(alone, piped)


@pytest.mark.slow
def test_padding_of_the_vocabulary_and_what_a_rematerialized_layer_collects_are_constants() -> None:
    alone, piped = run("padded_remat_moe", pipeline(1, 2), size=8, optimized=False, evaluate=False)
    check(alone, piped)


@pytest.mark.slow
@pytest.mark.parametrize("rematerialize", ["none", "all"])
def test_ticks_are_a_loop_of_the_program(rematerialize: str) -> None:
    two, eight = (pipeline(2, count, rematerialize=rematerialize) for count in (2, 8))
    of_two, of_eight = run("masked", two, eight, size=32, graph_sizes=True)
    assert of_eight == of_two


# --- what is refused, before any device is used ---


def build(model: str = "repeated", size: int = 8, **changes: Any) -> None:
    params = SpmdPipelined.Params(num_stages=3, num_micro_batches=2).set(changes)
    task = small_models.MODELS[model]().instantiate()
    batch = signature_of(small_models.batch(model, 0, size=size))
    params.instantiate().plan(task, batch, parts=1)


def test_what_goes_together_is_accepted() -> None:
    build(rematerialize="all", num_replicas=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "dense"}, r"the task has no repeated stack among its \d+ pieces"),
        ({"num_stages": 2}, r"num_stages 2 does not divide the 3 layers of .*: 1, 3;"),
        ({"size": 9}, r"batch_size 9 does not divide"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExecutionError, match=f"(?s){said}"):
        build(**changes)


@pytest.mark.parametrize("field", SpmdPipelined.Params.old_fields)
def test_what_one_program_cannot_do_is_no_field(field: str) -> None:
    reason = re.escape(SpmdPipelined.Params.old_fields[field].instead)
    with pytest.raises(
        AttributeError, match=f"SpmdPipelined.Params has no field {field}: {reason}"
    ):
        SpmdPipelined.Params().set_text(field, "gpipe")
    with pytest.raises(TypeError, match=r"rematerialize: must be .*'none', 'all'"):
        SpmdPipelined.Params(rematerialize="except_last")


def test_one_program_cannot_be_traced_by_the_host() -> None:
    tree = registry.get("lm.python_source.TinySpmdPipeline")().tree()
    with pytest.raises(ExecutionError, match=r"--trace_pipeline .* use --execution=pipelined"):
        pipeline_plan.check_can_be_traced(tree)


def test_layers_that_cannot_be_vectorized_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    task = ConvolutionStack.Params().instantiate()
    batch = {"images": ((4, 4, 4, 2), "float32")}
    execution = SpmdPipelined.Params(num_stages=2, num_micro_batches=2).instantiate()
    with pytest.raises(ExecutionError, match=r"^the layers of stack/.*Conv2D.* use --exec.*ed$"):
        execution.plan(task, batch, parts=1)
    assert not capfd.readouterr().err


class Activated(Layer):
    """Returns a function of its input and a weight."""

    function: Any = None

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [small_models.DIM], dims=("embed",), init=Zeros.Params())

    def fprop(self, theta: Theta, x: Any, ctx: Any, **side: Any) -> Any:
        x = ops.layer_norm(ctx, x, theta.w, None, epsilon=1e-6)  # has its own gradient too
        return Activated.function(x)


@tf.custom_gradient
def reversal(x: Any) -> Any:
    return tf.identity(x), lambda dy: -dy


@custom_gradient
def reversal_of_the_framework(x: Any) -> Any:
    return tf.identity(x), lambda dy: -dy


@pytest.mark.parametrize(
    "function", [reversal, reversal_of_the_framework, tf.grad_pass_through(tf.sign)]
)
def test_custom_gradients_of_layers_of_the_stack_are_refused_with_their_line(
    monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    stack = RepeatedStack.Params(num_layers=2, layer=Activated.Params())
    task = small_models.language_model(stack).instantiate()
    batch = signature_of(small_models.batch("dense", 0))
    execution = SpmdPipelined.Params(num_stages=2, num_micro_batches=2).instantiate()
    said = (
        r"^\S+spmd_test\.py:\d+: return Activated.function\(x\): one program .* loses .*pipelined$"
    )
    monkeypatch.setattr(Activated, "function", function)
    with pytest.raises(ExecutionError, match=said):
        execution.plan(task, batch, parts=1)
    monkeypatch.setattr(Activated, "function", tf.nn.silu)
    execution.plan(task, batch, parts=1)


def test_lists_of_a_loop_of_tensorflow_are_refused_with_their_line() -> None:
    def iteration(index: Any, theta: Any, state: Any, x: Any) -> Any:
        return [tf.map_fn(lambda row: row * theta[0], state[0])], [], []

    context: Any = types.SimpleNamespace(is_training=True)
    loop = SavingLoop(context, iteration, 2, [None])
    with pytest.raises(ExecutionError, match=r"spmd_test\.py:\d+: return \[tf\.map_fn.*ops\.scan"):
        loop.run([tf.ones([4])], [tf.ones([3, 4])], [tf.ones([2])])


def test_learned_tensors_from_outside_of_the_loop_are_refused_with_both_lines() -> None:
    def iteration(index: Any, theta: Any, state: Any, x: Any) -> Any:
        return [state[0] * theta[0] * scale], [], []

    context: Any = types.SimpleNamespace(is_training=True, reshard=lambda x, axes: x)
    scale = tf.constant(0.0)  # not yet the tensor that the iteration reads

    def run(w: tf.Tensor) -> Any:
        nonlocal scale
        with tf.GradientTape() as tape:
            tape.watch(w)
            scale = w + 1.0
            after = SavingLoop(context, iteration, 2, [None]).run(*([tf.ones([4])],) * 2, [])
        return tape.gradient(after, w)

    function = tf.function(run, autograph=False)
    with pytest.raises(
        ExecutionError,
        match=r"spmd_test\.py:\d+: return \[state.*from outside of its loop here, float32 \[4\], "
        r"of .*spmd_test\.py:\d+: scale = w \+ 1\.0; its gradient would be lost: .*pipelined$",
    ):
        function.get_concrete_function(tf.TensorSpec([4], tf.float32))


class ConvolutionStack(Task):
    """A repeated stack of convolutions: TensorFlow has no kernel for several filters at once."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        layer = Conv2D.Params(input_dim=2, output_dim=2)
        self.child("stack", RepeatedStack.Params(num_layers=2, layer=layer))

    def pieces(self) -> list[Piece]:
        def rows(first: int, theta: Theta, flow: Any, ctx: Any) -> Any:
            images = self.stack.fprop(theta.stack, flow["images"], ctx, first=first)
            return {**flow, "images": images}

        def loss(theta: Theta, flow: Any, ctx: Any) -> Any:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["images"]), METRICS: {}}

        stack = rows_of_stack("stack", {"stack": self.stack}, 2, rows)
        return [Piece("start", {}, lambda theta, flow, ctx: flow), *stack, Piece("loss", {}, loss)]


@pytest.mark.parametrize(
    ("way", "kind", "said"),
    [
        ("draws", DrawError, "Linear draws the same random numbers twice"),
        ("context", ContextError, "a StepContext is built while a step is traced"),
        ("variable", ForeignVariableError, "creates the variable"),
        ("value", ExecutionError, "cannot be computed for all stages at once, .* a bad value;"),
    ],
)
def test_mistakes_of_layers_are_not_taken_for_limits_of_one_program(
    way: str, kind: type[Exception], said: str
) -> None:
    layer = Linear.Params(input_dim=4, output_dim=4).instantiate()

    def rows(first: Any, theta: Any, flow: Any, ctx: Any) -> Any:
        x = flow["x"]
        if way == "draws":
            x = x + ctx.uniform(layer, [3, 4])
            x = x - ctx.uniform(layer, [3, 4])
        elif way == "context":
            ctx = StepContext(mode="train")
        elif way == "variable":
            x = x * tf.Variable(2.0)
        else:
            raise ValueError("a bad value")
        return {"x": x}

    stack = types.SimpleNamespace(name="stack", theta=lambda weights: weights)
    parts: Any = types.SimpleNamespace(stack=stack, run_rows=rows)
    loop = SpmdLoop(parts, num_stages=2, num_micro_batches=1, rematerialize=False)

    def tick() -> Any:
        ctx = StepContext(mode="train", num_examples=3)
        weights, state = {"w": tf.ones([2, 1])}, {"x": tf.ones([2, 3, 4])}
        with refused(layer):
            return run_tick(loop, weights, state, {}, tf.zeros([2], tf.int32), lambda first: ctx)

    with pytest.raises(kind, match=said):
        tf.function(tick, autograph=False).get_concrete_function()


class Mixing(Layer):
    """Takes the mean over the batch away."""

    couples_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("mean", [16], dims=("embed",), init=Zeros.Params(), trainable=False)

    def fprop(self, theta: Theta, x: Any, ctx: Any, **side: Any) -> Any:
        return x - theta.mean


def test_statistics_of_a_batch_are_refused() -> None:
    stack = RepeatedStack.Params(num_layers=2, layer=Mixing.Params())
    task = small_models.language_model(stack).instantiate()
    batch = signature_of(small_models.batch("dense", 0))
    execution = SpmdPipelined.Params(num_stages=2, num_micro_batches=2).instantiate()
    with pytest.raises(ExecutionError, match=r"stack/layers \(Mixing\) couples the examples"):
        execution.plan(task, batch, parts=1)
