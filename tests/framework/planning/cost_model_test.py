"""Costs of a step: collectives, time and memory against formulas written out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest
import tensorflow as tf
from cost_models import DEVICE, model_of, sent

from tekso.framework.costs import device_types
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.params import REQUIRED, param
from tekso.framework.planning.cost_model import Cost
from tekso.framework.task import LossSums, Task
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack, Stack

B, L, D, F, V, N, H = 8, 4, 24, 48, 40, 6, 2  # batch, length, embed, mlp, vocab, heads, head_dim
ACTIVATION = 4 * B * L * D  # bytes of [batch, length, embed] in float32


class Through(Task):
    """vectors -> a matrix [None, embed] -> a layer of dim D -> their sum."""

    class Params(Task.Params):
        layer: Any = param("The layer.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child(
            "enter", Linear.Params(input_dim=3, output_dim=D, use_bias=False, dims=(None, "embed"))
        )
        self.child("layer", self.params.layer)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = tf.cast(batch["x"], theta.enter.w.dtype)
        x = self.enter.fprop(theta.enter, x, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        y = self.layer.fprop(theta.layer, x, ctx)
        return LossSums(tf.reduce_sum(ctx.constrain(y, ("batch", "length", "embed"))))


class Words(Task):
    """ids -> embedding -> softmax."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("embedding", Embedding.Params(vocab_size=V, dim=D))
        self.child("softmax", Softmax.Params(vocab_size=V, input_dim=D))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = self.embedding.fprop(theta.embedding, batch["ids"], ctx)
        return LossSums(
            tf.reduce_sum(self.softmax.cross_entropy(theta.softmax, x, batch["ids"], ctx))
        )


VECTORS = {"x": ((B, L, 3), "float32")}
IDS = {"ids": ((B, L), "int32")}
FEED_FORWARD = FeedForward.Params(input_dim=D, hidden_dim=F, use_bias=False)
ATTENTION = MultiHeadAttention.Params(input_dim=D, num_heads=N, head_dim=H, use_bias=False)


def cost_of(layer: Any, mesh: str, rules: str, **rest: Any) -> Cost:
    names = "parts", "dtype", "recomputes_loops"
    options = {name: rest.pop(name) for name in names if name in rest}
    layout = MeshLayout(MeshShape.parse(mesh), Rules.parse(rules), **rest)
    if layer is Words:
        return model_of(Words.Params().instantiate(), IDS, **options).cost(layout)
    task = Through.Params(layer=layer).instantiate()
    return model_of(task, VECTORS, **options).cost(layout)


def test_dense_block_with_split_units_reduces_once_forwards_and_once_backwards() -> None:
    assert sent(cost_of(FEED_FORWARD, "model:4", "mlp:model")) == {
        ("all-reduce", "model", "activations"): (2, 2 * ACTIVATION)
    }


def test_dense_block_with_split_batch_reduces_once_for_every_weight() -> None:
    assert sent(cost_of(FEED_FORWARD, "data:4", "batch:data")) == {
        ("all-reduce", "data", "gradients"): (3, 4 * (3 * D + 2 * D * F))
    }


def test_two_axes_divide_what_either_sends() -> None:
    assert sent(cost_of(FEED_FORWARD, "data:2;model:4", "batch:data;mlp:model")) == {
        ("all-reduce", "model", "activations"): (2, 2 * ACTIVATION / 2),
        ("all-reduce", "data", "gradients"): (3, 4 * (3 * D + 2 * D * F / 4)),
    }


def test_queries_keys_and_values_of_split_heads_share_the_reduction_of_their_input() -> None:
    assert sent(cost_of(ATTENTION, "model:2", "heads:model")) == {
        ("all-reduce", "model", "activations"): (2, 2 * ACTIVATION)
    }


def test_split_length_gathers_keys_and_values_and_reduces_their_gradients() -> None:
    heads = 4 * B * L * N * H
    assert sent(cost_of(ATTENTION, "model:2", "length:model")) == {
        # The batch itself is not split along its length: the gradient of what is made of it is
        # gathered, and that of the first weight needs no reduction.
        ("all-gather", "model", "activations"): (2 + 1, 2 * heads + ACTIVATION),
        ("all-reduce", "model", "activations"): (2 + 1, 2 * heads + 4),  # and the loss
        ("all-reduce", "model", "gradients"): (4, 4 * 4 * D * N * H),
    }


def test_split_inside_of_heads_reduces_scores_and_their_gradients() -> None:
    scores = 4 * B * N * L * L
    assert sent(cost_of(ATTENTION, "model:2", "head_dim:model")) == {
        ("all-reduce", "model", "activations"): (4, 2 * ACTIVATION + 2 * scores)
    }


def test_split_vocabulary_gathers_neither_the_table_nor_the_logits() -> None:
    positions = 4 * B * L
    assert sent(cost_of(Words, "model:4", "vocab:model")) == {
        # Rows looked up and the gradient of x; maxima, sums and logits of labels.
        ("all-reduce", "model", "activations"): (2 + 3, 2 * ACTIVATION + 3 * positions)
    }


def test_slots_over_the_data_axis_scatter_gradients_and_gather_weights() -> None:
    weights = 4 * (3 * D + 2 * D * F)
    for field, count in (("slots_axis", 3), ("weights_axis", 3)):
        cost = cost_of(FEED_FORWARD, "data:4", "batch:data", **{field: "data"})
        assert sent(cost) == {
            ("reduce-scatter", "data", "gradients"): (count, weights),
            ("all-gather", "data", "weights"): (count, weights),
        }


def test_memory_is_what_the_division_says() -> None:
    weights = 4 * (3 * D + 2 * D * F)
    # The batch; x; hidden units before and after the activation.
    waiting = 4 * B * L * (3 + D + 2 * F)
    counters = 3 * 8

    plain = cost_of(FEED_FORWARD, "data:4", "batch:data").memory
    assert (plain.weights, plain.used_weights, plain.gradients) == (weights, 0, weights)
    assert plain.slots == 2 * weights + counters
    assert plain.activations == waiting / 4
    assert plain.workspace == 2 * 4 * B * L * F / 4

    slots = cost_of(FEED_FORWARD, "data:4", "batch:data", slots_axis="data").memory
    assert (slots.weights, slots.gradients) == (weights, weights / 4)
    assert slots.slots == 2 * weights / 4 + counters

    stored = cost_of(FEED_FORWARD, "data:4", "batch:data", weights_axis="data").memory
    assert (stored.weights, stored.used_weights) == (weights / 4, weights)

    split = cost_of(FEED_FORWARD, "model:4", "mlp:model").memory
    assert split.weights == 4 * (3 * D + 2 * D * F / 4)
    assert split.activations == 4 * B * L * (3 + D + 2 * F / 4)


def test_flops_are_three_times_those_of_the_forward_pass_on_the_share_of_a_device() -> None:
    # The input of the first product gets no gradient.
    total = 2 * B * L * (2 * 3 * D + 3 * 2 * D * F)
    whole = cost_of(FEED_FORWARD, "data:1", "batch:data")
    assert (whole.flops, whole.redundancy) == (total, 1)
    shared = cost_of(FEED_FORWARD, "data:2;model:4", "batch:data;mlp:model")
    assert shared.flops == 2 * B * L / 2 * (2 * 3 * D + 3 * 2 * D * F / 4)
    assert shared.redundancy == pytest.approx(8 * shared.flops / total)


def test_time_is_that_of_the_formulas() -> None:
    cost = cost_of(FEED_FORWARD, "model:4", "mlp:model")
    n, size = 4, ACTIVATION
    one = 2 * (n - 1) / n * size / DEVICE.link_bytes_per_s + 2 * (n - 1) * DEVICE.link_latency_s
    assert cost.communication_s == pytest.approx(2 * one)

    def product(rows: int, inner: float, outer: float, passes: int) -> float:
        flops = 2 * rows * inner * outer / (1e9 * 0.5)
        moved = 4 * (rows * inner + inner * outer + rows * outer) / 1e8
        return passes * max(flops, moved)

    rows = B * L
    expected = product(rows, 3, D, 2) + 2 * product(rows, D, F / 4, 3)
    relu = 4 * rows * F / 4 * (2 + 3) / 1e8  # read, written; read twice, written
    assert cost.compute_s == pytest.approx(expected + relu)
    weights = 4 * (3 * D + 2 * D * F / 4)
    # Weights read and written, gradients read; two slots and three counters read and written.
    assert cost.update_s == pytest.approx((3 * weights + 2 * (2 * weights + 3 * 8)) / 1e8)


def test_parts_of_a_batch_repeat_all_but_the_update() -> None:
    once = cost_of(FEED_FORWARD, "data:4", "batch:data")
    thrice = cost_of(FEED_FORWARD, "data:4", "batch:data", parts=3)
    assert thrice.compute_s == pytest.approx(3 * once.compute_s)
    assert thrice.communication_s == pytest.approx(3 * once.communication_s)
    assert thrice.update_s == once.update_s
    assert thrice.memory.activations == once.memory.activations
    assert thrice.memory.gradients == 2 * once.memory.gradients


def test_bfloat16_activations_halve_what_is_sent_and_keep_copies_of_weights() -> None:
    wide = cost_of(FEED_FORWARD, "model:4", "mlp:model")
    narrow = cost_of(FEED_FORWARD, "model:4", "mlp:model", dtype="bfloat16")
    assert narrow.sent_bytes() == wide.sent_bytes() / 2
    assert narrow.memory.used_weights == wide.memory.weights / 2
    assert narrow.memory.weights == wide.memory.weights


def test_repeated_layers_cost_what_written_out_ones_do_and_the_recomputation() -> None:
    iterations = 3
    stack = Stack.Params(num_layers=iterations, layer=FEED_FORWARD)
    repeated = RepeatedStack.Params(num_layers=iterations, layer=FEED_FORWARD)
    one, other = (
        cost_of(layer, "data:2;model:4", "batch:data;mlp:model") for layer in (stack, repeated)
    )
    assert sent(one) == sent(other)
    again = 2 * B * L / 2 * D * F / 4  # the first product; no gradient needs the second again
    assert other.flops - one.flops == pytest.approx(iterations * again)
    assert other.memory.weights == one.memory.weights
    # States of all turns; in the workspace, what one turn keeps.
    assert other.memory.activations == 4 * B * L / 2 * (3 + iterations * D)
    assert other.memory.workspace == 4 * B * L / 2 * (D + 2 * F / 4) + 2 * 4 * B * L / 2 * D


@pytest.mark.parametrize("num_layers", [1, 4])
def test_repeated_layers_that_are_not_recomputed_cost_what_written_out_ones_do(
    num_layers: int,
) -> None:
    options: dict[str, Any] = {"num_layers": num_layers, "layer": FEED_FORWARD}
    one, other = (
        cost_of(kind.Params(**options), "data:2", "batch:data", recomputes_loops=False)
        for kind in (Stack, RepeatedStack)
    )
    assert other.flops == one.flops
    assert other.memory == one.memory
    assert other.seconds == pytest.approx(one.seconds)
    # The input of a layer, its hidden units and their activations.
    assert one.memory.activations == 4 * B * L / 2 * (3 + num_layers * (D + 2 * F))


def test_recomputed_layer_keeps_its_input_alone() -> None:
    layer = Rematerialize.Params(layer=FEED_FORWARD)
    kept = cost_of(FEED_FORWARD, "model:4", "mlp:model")
    again = cost_of(layer, "model:4", "mlp:model")
    assert again.memory.activations == 4 * B * L * (3 + D)
    assert again.flops - kept.flops == 2 * B * L * D * F / 4
    assert sent(again) == sent(kept)


def test_unknown_device_type_is_reported_with_what_is_close() -> None:
    with pytest.raises(ExecutionError, match="no device type 'tpu_v22'; did you mean tpu_v2"):
        device_types.find("tpu_v22")


AGREEING = (
    "lm.python_source.Tiny data:4 batch:data",
    "lm.python_source.Tiny data:4 batch:data data",
    "lm.python_source.Tiny data:2;model:2 batch:data;mlp:model;heads:model;vocab:model",
    "lm.python_source.Tiny model:2 embed:model",
    "lm.python_source.Tiny model:2 head_dim:model",
    "lm.python_source.Tiny data:2;model:2;model2:2 "
    "batch:data;mlp:model;heads:model;vocab:model;length:model2",
    "lm.python_source.TinyMoe data:2;model:2 batch:data;mlp:model",
)
# Not TinyLstm: its loop over time reduces the gradient of the recurrent weights at every turn, 8
# times the bytes of the model, which reduces it once.
SCALARS = 256  # bytes: norms of gradients, the loss and its weight are not in the model


@pytest.mark.slow
@pytest.mark.parametrize("case", AGREEING)
def test_bytes_are_those_of_the_program_that_dtensor_makes(case: str) -> None:
    program = Path(__file__).with_name("cost_model_program.py")
    result = processes.run([str(program), case], timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert found["model"].keys() == found["program"].keys()
    for kind, size in found["program"].items():
        assert found["model"][kind] == pytest.approx(size, abs=SCALARS), kind
