"""A pipeline before it is built: its figures against formulas, for models of any size."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from sampling import sample
from traced_pieces import traced_once

from tekso.framework import registry
from tekso.framework.costs import piece_traces
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.actions import BACKWARD, FORWARD, WEIGHT_GRADIENT
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.pieces import LOSS_SUM, METRICS, Piece
from tekso.framework.planning.saved_bytes import saved_bytes, together
from tekso.framework.planning.stage_figures import PipelineFigures, durations
from tekso.framework.run import pipeline_plan, pipeline_text
from tekso.models.layers.linear import Linear

__all__ = ["traced_once"]

D, MLP, VOCAB, LENGTH = 2048, 8192, 32_000, 1024


def figures(key: str, settings: dict[str, Any] | None = None, **execution: Any) -> PipelineFigures:
    tree = registry.get(key)().tree()
    if execution:
        tree.execution = Pipelined.Params(**execution)
    tree.set(settings or {})
    return pipeline_plan.figures(tree)


def tiny(settings: dict[str, Any] | None = None, **execution: Any) -> PipelineFigures:
    text = {"input.corpus.root": str(Path(pipeline_plan.__file__).parent)}  # no whole library
    return figures("lm.python_source.Tiny", {**text, **(settings or {})}, **execution)


@functools.cache
def deep() -> PipelineFigures:
    return figures("lm.gpipe.Layers103")


# --- what stages hold and compute ---


def test_weights_and_bytes_of_stages_are_those_of_the_formula() -> None:
    found = deep()
    layer = 12 * D * D + 13 * D
    counts = [each.weights for each in found.stages]
    sizes = [len(each.stage.piece_names) for each in found.stages]
    assert sizes == [14, 13, 13, 13, 13, 13, 13, 14]  # embedding; softmax and loss; 103 layers
    assert counts == [
        VOCAB * D + 13 * layer, *[13 * layer] * 6, 12 * layer + VOCAB * D + VOCAB
    ]  # fmt: skip
    assert [each.weight_bytes for each in found.stages] == [4 * count for count in counts]
    assert [each.gradient_bytes for each in found.stages] == [4 * count for count in counts]
    # RMSProp: a slot a weight. The counts of the learner are on the host.
    slots = [each.slot_bytes for each in found.stages]
    assert slots == [4 * count for count in counts]


def test_work_and_handovers_of_a_stage_are_those_of_the_formula() -> None:
    stage = deep().stages[3]  # 13 layers, an example of 1024 tokens
    assert stage.handed_bytes == LENGTH * D * 4
    products = 2 * LENGTH * (4 * D * D + 2 * D * MLP) + 2 * 2 * LENGTH * LENGTH * D
    # All else (norms, activations, softmax of attention) is elementwise: well below a hundredth.
    assert 13 * products < stage.flops < 1.01 * 13 * products
    assert stage.flops_with_backward == 3 * stage.flops


@pytest.mark.slow
def test_deepest_model_on_128_devices_is_traced_piece_by_piece_of_a_kind_and_needs_no_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[str] = []
    trace = piece_traces._trace

    def noted(piece: Piece, *rest: Any) -> Any:
        traced.append(piece.name)
        return trace(piece, *rest)

    monkeypatch.setattr(piece_traces, "_trace", noted)
    found = figures(
        "lm.gpipe.Layers1663", {"execution.num_micro_batches": 128, "input.batch_size": 128}
    )
    text = pipeline_text.text("m", found)
    # One of 1663 layers for all: the others would take minutes.
    assert traced == ["model/embedding", "model/stack/layers/0", "model/softmax", "loss"]
    assert sum(each.weights for each in found.stages) == 83_876_910_336
    assert (len(found.stages), len(found.timeline.held)) == (128, 128)
    names = [name for each in found.stages for name in each.stage.piece_names]
    assert len(names) == 1663 + 3 and len(set(names)) == len(names)
    assert "1-126   1-126  654,657,536" in text
    assert "model/stack/layers/13 … model/stack/layers/1650 (126 × 13)" in text


def test_tied_table_is_kept_by_one_stage_and_copied_to_another() -> None:
    tied = {"task.model.softmax": None, "task.model.stack.num_layers": 2}
    first, last = tiny(tied, num_stages=2, num_micro_batches=4).stages
    assert (first.copies, last.copies) == ((), ("model/embedding/table",))
    assert last.copy_bytes == 256 * 128 * 4
    assert last.gradient_bytes == last.weight_bytes + last.copy_bytes
    assert (
        "stage 1 gets copies of model/embedding/table from an earlier stage (131 kB"
        in pipeline_text.text("m", tiny(tied, num_stages=2, num_micro_batches=4), width=120)
    )


def test_value_that_jumps_stages_is_handed_to_each_that_reads_it() -> None:
    found = tiny(num_stages=4, num_micro_batches=8)
    x = 2 * 128 * 128 * 4
    assert [each.handed_bytes for each in found.stages] == [x, x, x, 0]
    ids, labels, weights, num_bytes = 2 * 128 * 4, 2 * 128 * 4, 2 * 128 * 4, 2 * 4
    assert found.stages[0].memory.inputs == ids
    assert found.stages[3].memory.inputs == x + labels + weights + num_bytes


def test_interleaved_stages_lie_round_the_devices() -> None:
    found = tiny({"input.batch_size": 6}, num_stages=3, num_micro_batches=6,
                 schedule="interleaved_1f1b")  # fmt: skip
    assert [each.device for each in found.stages] == [0, 1, 2, 0, 1, 2]
    assert [each.stage.index for each in found.on_device(1)] == [1, 4]
    assert found.schedule == "interleaved_1f1b"


# --- the schedule ---


@pytest.mark.parametrize(
    ("rematerialize", "schedule", "expected"),
    [
        # Of a forward pass of the first stage, and of the last, which has no outputs: it leaves to
        # its backward pass what that computes again.
        ("none", "1f1b", {FORWARD: (1, 1), BACKWARD: (2, 2)}),
        ("all", "gpipe", {FORWARD: (1, 0), BACKWARD: (3, 3)}),
        ("except_last", "1f1b", {FORWARD: (1, 1 / 8), BACKWARD: (23 / 8, 23 / 8)}),  # 7 of 8 again
        ("none", "zero_bubble_h1", {FORWARD: (1, 1), BACKWARD: (1, 1), WEIGHT_GRADIENT: (1, 1)}),
        ("all", "zero_bubble_h1", {FORWARD: (1, 0), BACKWARD: (2, 2), WEIGHT_GRADIENT: (1, 1)}),
    ],
)
def test_durations_are_one_for_the_slowest_stage(
    rematerialize: str, schedule: str, expected: dict[Any, tuple[float, float]]
) -> None:
    options = {"rematerialize": rematerialize, "schedule": schedule}
    plan = figures("image.digits.Mlp", num_stages=2, num_micro_batches=8, **options).plan
    found = durations(plan, [3.0, 6.0])
    assert found == pytest.approx(
        {(s, kind): t[s] * (3, 6)[s] / 18 for s in (0, 1) for kind, t in expected.items()}
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_makespan_of_unequal_stages_is_that_of_the_slowest_and_a_way_through_all(
    schedule: str,
) -> None:
    of = {"execution.schedule": schedule, "execution.rematerialize": "none"}
    found = figures("lm.gpipe.Layers103", of)
    costs = [each.forward_cost for each in found.stages]
    assert found.slowest == 7
    # The last stage is the slowest and never waits once it has begun; before and after it the
    # first and the last micro-batch pass the others.
    expected = 32 + sum(costs[:7]) / costs[7]
    assert found.timeline.makespan == pytest.approx(expected)
    busy = 32 * sum(costs) / costs[7]
    assert found.timeline.idle_share == pytest.approx(1 - busy / (8 * expected))


def test_micro_batches_held_are_those_of_the_schedule() -> None:
    assert tiny(num_stages=4, num_micro_batches=8).timeline.held == (4, 3, 2, 1)
    found = tiny(num_stages=4, num_micro_batches=8, schedule="gpipe")
    assert found.timeline.held == (8, 8, 8, 8)


def test_bytes_held_are_of_all_or_of_the_inputs_and_one_that_is_computed_again() -> None:
    found = tiny(num_stages=2, num_micro_batches=4, schedule="gpipe")
    kept = [each.saved_bytes for each in found.stages]
    inputs = [each.memory.inputs for each in found.stages]
    assert all(k > 5 * i for k, i in zip(kept, inputs, strict=True))
    assert found.held_bytes == pytest.approx([4 * k for k in kept])
    again = tiny(num_stages=2, num_micro_batches=4, schedule="gpipe", rematerialize="all")
    expected = [4 * i + k - i for i, k in zip(inputs, kept, strict=True)]
    assert again.held_bytes == pytest.approx(expected)
    last = tiny(num_stages=2, num_micro_batches=4, schedule="gpipe", rematerialize="except_last")
    expected = [4 * i + 2 * (k - i) for i, k in zip(inputs, kept, strict=True)]
    assert last.held_bytes == pytest.approx(expected)


def test_bytes_kept_are_the_factors_of_products_and_what_derivatives_need() -> None:
    linear = Linear.Params(input_dim=3, output_dim=5, use_bias=False).instantiate()

    def product(theta: Any, flow: Any, ctx: Any) -> Any:
        y = linear.fprop(theta.linear, flow["x"], ctx)
        return {**flow, "y": tf.reshape(tf.tanh(y), [2, 5, 1])}  # a view takes no memory

    def loss(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, LOSS_SUM: tf.reduce_sum(flow["y"]), METRICS: {}}

    pieces = [Piece("product", {"linear": linear}, product), Piece("loss", {}, loss)]
    specs = {f"linear/{path}": spec for path, spec in linear.specs().items()}
    batch = {"x": ((2, 3), "float32")}
    traces = trace_all(pieces, specs, batch)
    x, y = 2 * 3 * 4, 2 * 5 * 4  # the weight is no micro-batch's; a sum keeps nothing
    first, last = saved_bytes(pieces, traces, specs, set(specs), batch)
    assert together([first]) == (x + y, x + y)  # for the weights y: the gradient of the product
    assert together([last]) == (0, 0)


def test_equal_ops_of_a_piece_are_one_saved_tensor() -> None:
    def waves(theta: Any, flow: Any, ctx: Any) -> Any:
        mean = tf.reduce_mean(flow["x"], 0)
        # Both derivatives need the difference, which TensorFlow computes once.
        return {**flow, "y": tf.sin(flow["x"] - mean) + tf.cos(flow["x"] - mean)}

    def loss(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, LOSS_SUM: tf.reduce_sum(flow["y"]), METRICS: {}}

    def learned(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, "x": linear.fprop(theta.linear, flow["x"], ctx)}

    linear = Linear.Params(input_dim=3, output_dim=5, use_bias=False).instantiate()
    pieces = [
        Piece("learned", {"linear": linear}, learned),
        Piece("waves", {}, waves),
        Piece("loss", {}, loss),
    ]
    specs = {f"linear/{path}": spec for path, spec in linear.specs().items()}
    batch = {"x": ((2, 3), "float32")}
    found = saved_bytes(pieces, trace_all(pieces, specs, batch), specs, set(specs), batch)
    assert sum(found[1].for_backward.values()) == 2 * 5 * 4


def test_a_loss_of_several_parts_saves_what_their_sum_saves() -> None:
    def learned(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, "x": linear.fprop(theta.linear, flow["x"], ctx)}

    def parts(theta: Any, flow: Any, ctx: Any) -> Any:
        loss = tf.stack([tf.reduce_sum(tf.square(flow["x"])), tf.reduce_sum(tf.sin(flow["x"]))])
        return {**flow, LOSS_SUM: loss, METRICS: {}}

    def whole(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, LOSS_SUM: tf.reduce_sum(parts(theta, flow, ctx)[LOSS_SUM]), METRICS: {}}

    linear = Linear.Params(input_dim=3, output_dim=5).instantiate()
    specs = {f"linear/{path}": spec for path, spec in linear.specs().items()}
    batch, found = {"x": ((2, 3), "float32")}, []
    for loss in (parts, whole):
        pieces = [Piece("learned", {"linear": linear}, learned), Piece("loss", {}, loss)]
        traces = trace_all(pieces, specs, batch)
        found.append(saved_bytes(pieces, traces, specs, set(specs), batch)[1].for_backward)
    assert found[0] == found[1] and sum(found[0].values()) > 0


def looped_piece(most: int | None) -> Any:
    """Returns the saved tensors of a piece y = tanh(y) of 6 iterations, and all that it writes."""
    linear = Linear.Params(input_dim=3, output_dim=5, use_bias=False).instantiate()

    def learned(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, "x": linear.fprop(theta.linear, flow["x"], ctx)}

    def loop(theta: Any, flow: Any, ctx: Any) -> Any:
        step = lambda i, y: (i + 1, tf.tanh(y))  # noqa: E731
        start = (tf.constant(0), flow["x"])
        is_on = lambda i, y: i < 6 if most else tf.reduce_sum(y) < 6  # noqa: E731
        y = tf.while_loop(is_on, step, start, maximum_iterations=most)[1]
        return {**flow, "y": tf.ensure_shape(y, [2, 5])}

    def loss(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, LOSS_SUM: tf.reduce_sum(flow["y"]), METRICS: {}}

    pieces = [
        Piece("learned", {"linear": linear}, learned), Piece("loop", {}, loop),
        Piece("loss", {}, loss),
    ]  # fmt: skip
    specs = {f"linear/{path}": spec for path, spec in linear.specs().items()}
    batch = {"x": ((2, 3), "float32")}
    traces = trace_all(pieces, specs, batch)
    return saved_bytes(pieces, traces, specs, set(specs), batch)[1], traces[1].bytes_written


def test_the_list_of_a_loop_has_an_item_for_each_iteration() -> None:
    found, _ = looped_piece(6)
    row = 2 * 5 * 4
    items = [size for name, size in found.for_backward.items() if str(name).endswith("]")]
    assert items == [row] * 6
    assert together([found], least=row)[0] == 6 * row  # the statistics see each item by itself
    assert together([found], least=row + 1)[0] == 0


def test_a_loop_of_unknown_length_is_assumed_to_save_all_that_its_piece_writes() -> None:
    found, written = looped_piece(None)
    assert written > 0 and together([found])[0] == written


def test_outputs_of_a_piece_may_be_in_another_order_than_their_names() -> None:
    linear = Linear.Params(input_dim=3, output_dim=5, use_bias=False).instantiate()

    def product(theta: Any, flow: Any, ctx: Any) -> Any:
        y = tf.tanh(linear.fprop(theta.linear, flow["x"], ctx))
        return {**flow, "x": y, "before": flow["x"]}  # the input is an output too

    def loss(theta: Any, flow: Any, ctx: Any) -> Any:
        total = tf.reduce_sum(flow["x"]) + tf.reduce_sum(flow["before"])
        return {**flow, LOSS_SUM: total, METRICS: {}}

    pieces = [Piece("product", {"linear": linear}, product), Piece("loss", {}, loss)]
    specs = {f"linear/{path}": spec for path, spec in linear.specs().items()}
    batch = {"x": ((2, 3), "float32")}
    first, _ = saved_bytes(pieces, trace_all(pieces, specs, batch), specs, set(specs), batch)
    assert together([first]) == (2 * 3 * 4 + 2 * 5 * 4,) * 2


def test_bytes_held_between_the_gradients_are_those_that_the_weights_need() -> None:
    found = tiny(num_stages=2, num_micro_batches=4, schedule="zero_bubble_h1")
    kept = [each.saved_bytes for each in found.stages]
    between = [each.memory.between for each in found.stages]
    assert min(between) > 0
    # Device 0: two forwards, then one backward and its weights at a time. Device 1: its weights
    # wait for the next backward.
    assert found.held_bytes[0] == pytest.approx(max(2 * kept[0], kept[0] + between[0]))
    assert found.held_bytes[1] == pytest.approx(max(kept[1] + between[1], 2 * between[1]))


@pytest.mark.slow
def test_costs_that_are_measured_are_those_of_the_figures() -> None:
    small = {"task.model.dim": 16, "task.model.stack.layer.feed_forward.hidden_dim": 32}
    found = tiny(small, num_stages=2, num_micro_batches=4, costs="measured", balance=[7, 1])
    costs = found.plan.piece_costs
    assert len(costs) == 8 and len(set(costs[1:5])) == 1 and min(costs) > 0  # four layers alike
    share = math.fsum(costs[:7]) / math.fsum(costs)
    assert found.cost_shares == pytest.approx([share, 1 - share])
    record, text = pipeline_text.record(found), pipeline_text.text("m", found)
    assert record["costs"] == "measured" and "cost: measured time" in text
    assert "in the traced graphs" in pipeline_text.text("m", tiny(num_stages=2))


# --- what does not fit ---


def test_too_many_stages_for_the_pieces_show_the_pieces_and_the_most_devices() -> None:
    with pytest.raises(ExecutionError) as error:
        tiny(num_stages=9, num_micro_batches=4)
    text = str(error.value)
    assert "a pipeline of 9 stages needs at least 9 pieces, and the task has 8:" in text
    assert "model/stack/layers/3\n" in text and text.endswith("num_stages to at most 8")


def test_too_many_stages_of_interleaved_devices_are_reported_in_devices() -> None:
    with pytest.raises(ExecutionError) as error:
        tiny({"input.batch_size": 5}, num_stages=5, num_micro_batches=5,
             schedule="interleaved_1f1b")  # fmt: skip
    text = str(error.value)
    assert "10 stages (2 on each of 5 devices) needs at least 10 pieces, and the task has 8" in text
    assert "set execution.num_stages to at most 4, or choose an execution.schedule with" in text


def test_an_experiment_without_a_pipeline_is_an_error_that_says_how_to_get_one() -> None:
    with pytest.raises(ExecutionError, match=r"is DataParallel, .* --execution=pipelined --set"):
        tiny()


# --- as text ---


@pytest.mark.parametrize(
    "key",
    sample(
        ["lm.gpt.T1", "lm.gpt.M3600", "lm.python_source.TinyMoe"],
        quick=["lm.python_source.TinyMoe"],
    ),
)
def test_text_of_any_size_fits_the_width(key: str) -> None:
    text = pipeline_text.text("m", figures(key, num_stages=3, num_micro_batches=4), width=80)
    assert max(map(len, text.splitlines())) <= 80


def test_stages_on_one_host_add_up_what_exists_at_the_same_time() -> None:
    """One micro-batch is in one stage at a time; four are in all stages."""

    def of(parts: int, rematerialize: str) -> PipelineFigures:
        return tiny(
            num_stages=2, num_micro_batches=parts, schedule="gpipe", rematerialize=rematerialize
        )

    one = of(1, "all")
    inputs = [each.memory.inputs for each in one.stages]
    state = sum(each.state_bytes for each in one.stages)
    own = [max(each.memory.recomputed) for each in one.stages]
    assert one.peak_bytes == pytest.approx([i + m for i, m in zip(inputs, own, strict=True)])
    # The inputs of both stages are there while the backward pass of one runs; the last one frees
    # its own.
    expected = max(inputs[0] + inputs[1] + own[1], inputs[0] + own[0])
    assert one.shared_bytes == pytest.approx(state + expected)
    assert one.shared_bytes < state + sum(one.peak_bytes)
    four = of(4, "none")
    assert all(p > h for p, h in zip(four.peak_bytes, four.held_bytes, strict=True))
    most = [each.memory.backward for each in four.stages]
    held = sum(4 * each.saved_bytes for each in four.stages)
    # All micro-batches are saved when the last stage begins its backward passes.
    assert held + most[1] <= four.shared_bytes - state + 1 <= held + sum(most) + 1
    assert four.counted_bytes < four.shared_bytes


def test_what_pieces_compute_alike_from_a_value_is_one_saved_tensor() -> None:
    linear = Linear.Params(input_dim=3, output_dim=5, use_bias=False).instantiate()

    def learned(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, "x": linear.fprop(theta.linear, flow["x"], ctx), "y": flow["x"]}

    def relu(theta: Any, flow: Any, ctx: Any) -> Any:
        return {**flow, "y": tf.square(tf.nn.relu(flow["x"]))}

    def loss(theta: Any, flow: Any, ctx: Any) -> Any:
        same, other = tf.nn.relu(flow["x"]), tf.nn.elu(flow["x"])
        total = tf.reduce_sum(tf.square(same) + tf.square(other)) + tf.reduce_sum(flow["y"])
        return {**flow, LOSS_SUM: total, METRICS: {}}

    pieces = [
        Piece("learned", {"linear": linear}, learned),
        Piece("relu", {}, relu),
        Piece("loss", {}, loss),
    ]
    specs = {f"linear/{path}": spec for path, spec in linear.specs().items()}
    batch = {"x": ((2, 3), "float32")}
    found = saved_bytes(pieces, trace_all(pieces, specs, batch), specs, set(specs), batch)
    y = 2 * 5 * 4
    assert together(found[1:2])[0] == y  # its ReLU
    assert together(found[2:])[0] == 2 * y  # the same ReLU, and the other function
    assert together(found[1:])[0] == 2 * y
    # A square's gradient needs no more than the ReLU; the loss gives the gradient of y.
    assert found[1].working.recomputed >= y
