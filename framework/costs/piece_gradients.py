"""Makes a function of flat tensors from a piece and its backward pass, for tracing or timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.batch_sums import Sums
from tekso.framework.context import StepContext
from tekso.framework.costs.piece_traces import PieceTrace
from tekso.framework.nests import filled, has_gradient, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.step import with_gradients
from tekso.framework.symbolic import spec_of
from tekso.framework.weight_spec import WeightSpec


class PieceGradients(NamedTuple):
    """The forward and backward pass of a piece.

    Attributes:
      function: `function(*weights, *inputs, *seeds)` returns the outputs of the piece, the
        gradients of its weights, and the gradients of its inputs. A sparse gradient (of a large
        embedding table) is returned as its rows and their indices.
      weights: TensorSpecs of the weights.
      inputs: TensorSpecs of the inputs of the piece.
      seeds: TensorSpecs of the gradients of its outputs and of the gradient of the loss.
    """

    function: Callable[..., tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]]
    weights: list[tf.TensorSpec]
    inputs: list[tf.TensorSpec]
    seeds: list[tf.TensorSpec]


def piece_gradients(
    piece: Piece,
    own: Mapping[str, WeightSpec],
    learned: Set[str],
    given: Flow,
    trace: PieceTrace,
    num_examples: int,
    *,
    fuse: Fuse = no_fusion,
) -> PieceGradients:
    """Returns the forward and backward pass of a piece.

    Args:
      piece: the piece.
      own: specs of the weights that it reads; of stacked weights, only its rows.
      learned: paths of the weights that get a gradient.
      given: TensorSpecs of the values of the flow that it reads.
      trace: its trace, which has the specs of its outputs.
      num_examples: number of examples of a micro-batch.
      fuse: compiles elementwise clusters.
    """
    made = {name: nest for name, nest in trace.writes.items() if name not in (LOSS_SUM, METRICS)}
    seeds = [leaf for nest in made.values() for leaf in tensors(nest) if has_gradient(leaf)]

    def whole(*flat: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        values = iter(flat)
        theta = {path: next(values) for path in own}
        flow = filled(given, values)
        weights = [theta[path] for path in own if path in learned]
        inputs = [leaf for leaf in tensors(flow) if has_gradient(leaf)]
        ctx = StepContext(mode="train", num_examples=num_examples, fuse=fuse)

        def forward() -> tuple[list[tf.Tensor], Sums]:
            after = piece.run(piece.theta(theta), flow, ctx)
            loss = tf.reduce_sum(tf.cast(after.get(LOSS_SUM, 0.0), tf.float32))  # of all parts
            loss += ctx.collected.total("loss")
            return [t for n in made for t in tensors(after[n])], Sums(loss, loss, {}, {}, {})

        *seeds, seed_of_total = values
        outputs, sums, (of_weights, of_inputs) = with_gradients(
            forward, (weights, inputs), seeds, seed_of_total=seed_of_total, returned=_parts
        )
        return [*outputs, sums.total], tf.nest.flatten(of_weights), tf.nest.flatten(of_inputs)

    return PieceGradients(
        whole,
        [*map(spec_of, own.values())],
        tensors(given),
        [*seeds, tf.TensorSpec((), tf.float32)],
    )


def _parts(gradient: Any) -> list[tf.Tensor]:
    """Returns the tensors that a gradient consists of."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    parts = [gradient.values, gradient.indices] if is_sparse else [gradient]
    return [tf.convert_to_tensor(part) for part in parts]
