"""Layers of a transducer besides its encoder: the prediction network and the joint network.

Legend: B batch, T frames, U labels, R = U + 1, N rows, E encoded_dim, P predicted_dim, J joint dim,
V tokens and the blank.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers import vocabulary
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.linear import Linear
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.sizes import with_sizes
from tekso.models.transducer_loss import transition_log_probs


class PredictionNetwork(Layer):
    """A language model without softmax: embedded labels, and recurrent layers over them.

    Row u of the output depends on the first u labels. The blank is the input before the first one.

    Shapes:
      labels: [B, U] int in [0, vocab_size)
      returns: [B, U + 1, P], where P is the output of the stack
    Weights:
      embedding/table: [vocab_size + 1, dim], rows padded to vocab_multiple
      stack/…, those of RecurrentStack
    Source: Graves 2012, section 2.1.
    """

    class Params(Layer.Params):
        """Params of PredictionNetwork."""

        vocab_size: int = param("Number of tokens, without the blank.", default=REQUIRED)
        vocab_multiple: int = param(vocabulary.ROWS_DOC, default=1)
        dim: int = param("Size of an embedded label.", default=128)
        stack: RecurrentStack.Params = param(
            "The recurrent layers; their input_dim is dim.",
            default=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=320)),
        )
        dropout_rate: float = param("Dropout of the embedded labels.", default=0.0)

    embedding: Embedding
    stack: RecurrentStack
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.stack.direction != "forward":
            raise ValueError(
                f"PredictionNetwork: stack.direction is {p.stack.direction!r}, must be 'forward': "
                "later labels are not known"
            )
        table = Embedding.Params(
            vocab_size=p.vocab_size + 1, vocab_multiple=p.vocab_multiple, dim=p.dim
        )
        self.child("embedding", table)
        self.child("stack", with_sizes(p.stack, input_dim=p.dim))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return self.stack.output_dim

    def fprop(self, theta: Theta, labels: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        paddings = [[0, 0], [1, 0]]
        ids = tf.pad(labels, paddings, constant_values=self.params.vocab_size)
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        x = ctx.constrain(x, ("batch", None, "embed"))
        x = self.dropout.fprop(Theta(), x, ctx)
        return self.stack.fprop(theta.stack, x, ctx)

    def start(self, theta: Theta, num_rows: int, ctx: StepContext) -> tuple[tf.Tensor, Any]:
        """Returns the output before the first label, [N, P], and the state after it."""
        blank = tf.fill([num_rows], self.params.vocab_size)
        return self.step(theta, blank, self.stack.zero_state(num_rows), ctx)

    def step(
        self, theta: Theta, labels: tf.Tensor, state: Any, ctx: StepContext
    ) -> tuple[tf.Tensor, Any]:
        """Reads one label of every row; all steps together give the same result as `fprop`.

        Shapes:
          labels: [N] int
          returns: [N, P], the next state
        """
        x = self.embedding.fprop(theta.embedding, tf.expand_dims(labels, 1), ctx)
        y, state = self.stack.extend_step(theta.stack, x, state, ctx)
        return y[:, 0], state


class Joint(Layer):
    """Scores of the tokens and the blank for every frame and every number of labels.

        scores(t, u) = tanh(encoded[t] @ w_encoded + b + predicted[u] @ w_predicted) @ w_output + b

    They are computed, and computed again for the gradient, in blocks of `block_frames` frames, so
    that there is never a tensor [B, T, R, V].

    Shapes:
      encoded: [B, T, E], predicted: [B, R, P], labels: [B, U] int
      log_probs returns: of the blank and of the next label, [B, T, R] float32 each
    Weights:
      encoded/w: [E, J], encoded/b: [J]; predicted/w: [P, J]; output/w: [J, V], output/b: [V]
    Source: Graves, Mohamed & Hinton 2013, section 3.1 (there with an output layer of its own).
    """

    class Params(Layer.Params):
        """Params of Joint."""

        vocab_size: int = param("Number of tokens, without the blank.", default=REQUIRED)
        encoded_dim: int = param("Size of the encoder's output.", default=REQUIRED)
        predicted_dim: int = param("Size of the prediction network's output.", default=REQUIRED)
        dim: int = param("Number of hidden units, J.", default=320)
        block_frames: int = param(
            "Frames whose scores are computed at once. Memory grows with block_frames * R * (J + "
            "V), run time with the number of blocks.",
            default=8,
        )

    encoded: Linear
    predicted: Linear
    output: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.block_frames < 1:
            raise ValueError(f"Joint: block_frames is {p.block_frames}, must be at least 1")
        dims = ("embed", None)
        self.child("encoded", Linear.Params(input_dim=p.encoded_dim, output_dim=p.dim, dims=dims))
        self.child(
            "predicted",
            Linear.Params(input_dim=p.predicted_dim, output_dim=p.dim, dims=dims, use_bias=False),
        )
        self.child(
            "output",
            Linear.Params(input_dim=p.dim, output_dim=p.vocab_size + 1, dims=(None, None)),
        )

    def log_probs(
        self,
        theta: Theta,
        encoded: tf.Tensor,
        predicted: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the log-probabilities of the blank and of the next label; see the class."""
        encoded = self.encoded.fprop(theta.encoded, encoded, ctx)
        predicted = self.predicted.fprop(theta.predicted, predicted, ctx)
        dims = ("batch", None, None)
        encoded, predicted = ctx.constrain(encoded, dims), ctx.constrain(predicted, dims)
        batch, frames, units = encoded.shape
        size = min(self.params.block_frames, frames)
        missing = -frames % size
        if missing:
            encoded = tf.concat([encoded, tf.zeros([batch, missing, units], encoded.dtype)], 1)
        blocks = tf.reshape(encoded, [batch, (frames + missing) // size, size, units])
        next_label = tf.one_hot(
            tf.pad(labels, [[0, 0], [0, 1]]), self.params.vocab_size + 1, dtype=tf.float32
        )
        shared = Theta(output=theta.output, predicted=predicted, next_label=next_label)

        def block(theta: Theta, state: Any, x: tf.Tensor, ctx: StepContext) -> tuple[Any, Any]:
            return state, ops.rematerialize(ctx, self._block, theta, x)

        state = {"blocks": tf.zeros([])}
        xs = tf.transpose(blocks, [1, 0, 2, 3])
        _, found = ops.scan(ctx, block, shared, state, xs)

        def joined(x: tf.Tensor) -> tf.Tensor:
            num_blocks, batch, size, rows = x.shape
            y = tf.reshape(tf.transpose(x, [1, 0, 2, 3]), [batch, num_blocks * size, rows])
            return ctx.constrain(y[:, :frames], dims)

        return joined(found[0]), joined(found[1])

    def _block(
        self, theta: Theta, encoded: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `log_probs` of some frames [B, block_frames, J], projected before."""
        hidden = tf.tanh(tf.expand_dims(encoded, 2) + tf.expand_dims(theta.predicted, 1))
        logits = self.output.fprop(theta.output, hidden, ctx)
        blank_id = self.params.vocab_size
        return transition_log_probs(logits, theta.next_label, blank_id=blank_id)

    def step(
        self, theta: Theta, encoded: tf.Tensor, predicted: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the log-probabilities of the tokens and the blank for one node per row.

        Shapes:
          encoded: [N, E], predicted: [N, P]
          returns: [N, V] float32
        """
        hidden = tf.tanh(
            self.encoded.fprop(theta.encoded, encoded, ctx)
            + self.predicted.fprop(theta.predicted, predicted, ctx)
        )
        logits = self.output.fprop(theta.output, hidden, ctx)
        return tf.nn.log_softmax(tf.cast(logits, tf.float32))
