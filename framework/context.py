"""Step context: all that a layer may ask of the step it runs in. Here layers and executions meet.

`StepContext` is the plain form: one device, one whole batch. It runs eagerly in a notebook, and an
execution derives from it, or passes other values, to run the same layers on a part of the batch or
on a mesh. A layer never asks which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, get_args

import tensorflow as tf

from tekso.framework import counter_hash, loops
from tekso.framework.collected import Collected
from tekso.framework.primitives import (
    activations,
    attention,
    dropout,
    lookup,
    normalization,
    projection,
    rotation,
    softmax_cross_entropy,
    windows,
)
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.theta import SEPARATOR, Theta

Mode = Literal["train", "eval", "decode"]
Self = TypeVar("Self", bound="StepContext")

IMAGE_DIMS = ("batch", "height", "width", "channels")
"""Names of the dims of images, between any two layers."""


class HasStream(Protocol):
    """A layer, as far as random numbers and statistics need it."""

    @property
    def path(self) -> str:
        """Where it lies in theta."""
        ...

    @property
    def pattern(self) -> str:
        """The path with "*" for every index of a stack."""
        ...


class StepContext:
    """The plain step context.

    Args:
      mode: "train", "eval" or "decode".
      seed: of the run, in [0, 2**64).
      step: of the run, an int or int64 scalar.
      example_offset: position in the global batch of the first example that this context sees.
      num_examples: size of the global batch, needed by `collect_loss`.
      fuse: how elementwise stretches are compiled (see primitives/fusion.py).

    Raises:
      ValueError: the mode is another one.
    """

    def __init__(
        self,
        *,
        mode: Mode = "eval",
        seed: int = 0,
        step: Any = 0,
        example_offset: Any = 0,
        num_examples: int | None = None,
        fuse: Fuse = no_fusion,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(
                f"StepContext: mode is {mode!r}, and has to be 'train', 'eval' or 'decode'"
            )
        self.mode = mode
        self.num_examples = num_examples
        self.fuse = fuse
        self.collected = Collected()
        self._key = counter_hash.root_key(seed, step)
        self._example_offset = example_offset
        self._fills_in_place = False

    @property
    def is_training(self) -> bool:
        """Whether dropout drops and batch statistics are taken."""
        return self.mode == "train"

    # --- layout ---

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """Pins the layout of x by the names of its dims; the identity where there is no mesh.

        Shapes:
          x: any, with a name in `dims` for each dim; None leaves one free
          returns: x
        """
        return x

    def constrain_image(self, x: tf.Tensor) -> tf.Tensor:
        """Pins images; a mesh splits height and width of those only that are large enough.

        Shapes:
          x: [batch, height, width, channels]
          returns: x
        """
        return self.constrain(x, IMAGE_DIMS)

    # --- randomness ---

    def fold(self: Self, index: Any) -> Self:
        """Returns the context of one turn of a loop: other random numbers, the same collection."""
        other = copy.copy(self)
        other._key = counter_hash.fold(self._key, index)
        return other

    def random_key(self, layer: HasStream, name: str = "") -> tf.Tensor:
        """Returns the uint32 key of a layer's stream of random numbers in this step."""
        return counter_hash.fold(self._key, counter_hash.stream(f"{layer.pattern}:{name}"))

    def uniform(self, layer: HasStream, shape: Sequence[int], name: str = "") -> tf.Tensor:
        """Returns float32 numbers in [0, 1); dim 0 of `shape` counts the examples of the batch."""
        return counter_hash.uniform(self.random_key(layer, name), shape, self._example_offset)

    def dropout(self, x: tf.Tensor, rate: float, layer: HasStream, name: str = "") -> tf.Tensor:
        """Sets elements to 0 with probability `rate` and scales the others by 1 / (1 - rate).

        The identity outside training. The mask depends on the global position of each element.

        Shapes:
          x: [batch, ...]
          returns: shape and dtype of x
        """
        if not self.is_training or rate == 0.0:
            return x
        key = self.random_key(layer, name)
        return dropout.dropout(x, key, self._example_offset, rate=rate, fuse=self.fuse)

    # --- what a step returns besides its output ---

    def collect_loss(self, name: str, value: tf.Tensor) -> None:
        """Adds an auxiliary loss: `value` is a sum over examples; its mean joins the total loss.

        Shapes:
          value: []
        Raises:
          ValueError: the context does not know how many examples the global batch has.
        """
        if self.num_examples is None:
            raise ValueError(
                f"auxiliary loss {name!r}: this context has no num_examples (the size of the "
                "global batch); pass StepContext(num_examples=…)"
            )
        self.collected.add("loss", name, value / self.num_examples, 1.0)

    def collect_metric(self, name: str, value: tf.Tensor, weight: Any) -> None:
        """Adds a metric: the report shows sum(value) / sum(weight) over the global batch.

        Shapes:
          value, weight: []
        """
        self.collected.add("metric", name, value, weight)

    def collect_statistic(self, layer: HasStream, name: str, value: tf.Tensor, weight: Any) -> None:
        """Adds a sum and its weight, whose mean `layer.updated_statistics` gets after the step.

        Shapes:
          value, weight: any, the same
        """
        path = f"{layer.path}{SEPARATOR}{name}" if layer.path else name
        self.collected.add("statistic", path, value, weight)

    def sum_over_replicas(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum of x over the parts of the batch that run at the same time.

        Shapes:
          x: any
          returns: shape and dtype of x
        """
        return x

    def isolated(self: Self) -> Self:
        """Returns a context that collects for itself, for a body that is traced on its own."""
        other = copy.copy(self)
        other.collected = Collected()
        return other

    # --- buffers of decoding ---

    def filling_in_place(self: Self) -> Self:
        """Returns a context whose `fill_rows` copies no buffer, for CPU and GPU without XLA.

        XLA needs no such thing, and has no kernel for it; nor has LiteRT.
        """
        other = copy.copy(self)
        other._fills_in_place = True
        return other

    def fill_rows(self, buffer: tf.Tensor, index: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Returns a buffer with some of its rows filled, which are 0 in the one that is given.

        Shapes:
          buffer: [rows of the buffer, ...], index: [rows, 1] int, each once; rows: [rows, ...]
          returns: shape and dtype of the buffer
        """
        if self._fills_in_place:  # unlike TensorScatterUpdate, which always copies
            return tf.raw_ops.ScatterNdNonAliasingAdd(input=buffer, indices=index, updates=rows)
        return tf.tensor_scatter_nd_update(buffer, index, rows)

    # --- control flow ---

    def scan(
        self,
        body: Callable[[Theta, Any, Any, Any], tuple[Any, Any]],
        theta: Theta,
        state: Any,
        xs: Any,
        *,
        first: int = 0,
    ) -> tuple[Any, Any]:
        """Runs `state, y = body(theta, state, x, ctx)` over the leading dim of xs.

        The one loop over depth (xs: weights stacked over layers) or time (xs: inputs, time first).
        `first` is the number of the first turn, where the others are run elsewhere.

        Shapes:
          state: nest of tensors, the same shapes after every turn
          xs: nest of [turns, …]
          returns: last state, nest of [turns, …] of the ys (None where body gives None)
        """
        return loops.scan(self, body, theta, state, xs, first=first)

    def rematerialize(self, function: Callable[..., Any], theta: Theta, *inputs: Any) -> Any:
        """Returns `function(theta, *inputs, ctx)`, computed again in the backward pass.

        Only theta and the inputs are kept in between. Random numbers are the same both times.
        Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
        """
        return loops.rematerialize(self, function, theta, *inputs)

    def capture(self, nest: Any) -> Any:
        """Returns a nest of tensors for use in the body of a loop, or a branch, that it is not of.

        For control flow of one's own (`tf.while_loop`, `tf.cond`): weights and other tensors from
        outside, and the state of a loop, go through it at the beginning of the body.
        """
        return nest

    # --- primitives, with gradients of their own ---

    def project(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, num_contracted: int = 1
    ) -> tf.Tensor:
        """Contracts the last `num_contracted` dims of x with the first ones of w, and adds b.

        Shapes:
          x: [..., *inner], w: [*inner, *outer], b: [*outer]
          returns: [..., *outer]
        """
        return projection.project(x, w, b, num_contracted=num_contracted, fuse=self.fuse)

    def layer_norm(
        self, x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor | None, *, epsilon: float
    ) -> tf.Tensor:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last dim.

        Shapes:
          x: [..., dim], scale, bias: [dim]
          returns: shape and dtype of x
        """
        return normalization.layer_norm(x, scale, bias, epsilon=epsilon, fuse=self.fuse)

    def rms_norm(self, x: tf.Tensor, scale: tf.Tensor, *, epsilon: float) -> tf.Tensor:
        """X / sqrt(mean(x**2) + epsilon) * scale over the last dim.

        Shapes:
          x: [..., dim], scale: [dim]
          returns: shape and dtype of x
        """
        return normalization.rms_norm(x, scale, epsilon=epsilon, fuse=self.fuse)

    def activate(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """Applies an activation, by its name (see primitives/activations.py), to every element."""
        return activations.activate(name, x, fuse=self.fuse)

    def attend(
        self,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        *,
        scale: float,
        mask: tf.Tensor | None = None,
        bias: tf.Tensor | None = None,
        dropout_rate: float = 0.0,
        layer: HasStream | None = None,
    ) -> tf.Tensor:
        """softmax(scale * q k^T + bias, where mask) v, heads apart.

        Shapes:
          q: [batch, queries, heads, head_dim]
          k, v: [batch, keys, kv_heads, head_dim]; kv_heads divides heads (grouped queries)
          mask: bool, broadcastable to [batch, heads, queries, keys]; False is not attended to
          bias: float, broadcastable to [batch, heads, queries, keys]; gets a gradient
          returns: [batch, queries, heads, head_dim]
        """
        key = None
        if self.is_training and dropout_rate:
            if layer is None:
                raise ValueError("attend: dropout needs the layer whose random stream it uses")
            key = self.random_key(layer, "attention")
        return attention.attend(
            q,
            k,
            v,
            scale=scale,
            mask=mask,
            bias=bias,
            dropout=None if key is None else (key, self._example_offset, dropout_rate),
            fuse=self.fuse,
        )

    def attend_known(
        self,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        *,
        scale: float,
        mask: tf.Tensor | None = None,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """`attend` over keys and values that are kept from step to step; without dropout.

        Shapes:
          q: [batch, queries, heads, head_dim]
          k, v: [batch, kv_heads, keys, head_dim]; kv_heads divides heads (grouped queries)
          mask, bias: as of `attend`
          returns: [batch, queries, heads, head_dim]
        """
        return attention.attend_known(q, k, v, scale=scale, mask=mask, bias=bias)

    def rotate(self, x: tf.Tensor, sine: Any, cosine: Any) -> tf.Tensor:
        """Rotates each pair (x[i], x[i + head_dim/2]) by an angle of known sine and cosine.

        Shapes:
          x: [batch, length, heads, head_dim]
          sine, cosine: broadcastable to [batch, length, heads, head_dim/2]
          returns: shape and dtype of x
        """
        return rotation.rotate(x, sine, cosine, fuse=self.fuse)

    def lookup(self, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows of a table: [vocab, embed], ids [...] -> [..., embed]."""
        return tf.gather(table, ids)

    def lookup_shared(self, table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns rows of a table, and the table for a later use of it (a tied softmax).

        The same numbers as `lookup`; passing the returned table on makes the gradient cheaper.

        Shapes:
          table: [vocab, embed], ids: [...]
          returns: [..., embed], [vocab, embed]
        """
        return lookup.lookup_shared(table, ids)

    def logits(self, x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """Returns x table^T: [..., embed] and [vocab, embed] -> [..., vocab]."""
        lead = "abcdefgh"[: x.shape.rank - 1]
        return tf.einsum(f"{lead}y,zy->{lead}z", x, table)

    def cross_entropy(
        self,
        x: tf.Tensor,
        table: tf.Tensor,
        labels: tf.Tensor,
        *,
        bias: tf.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns -log softmax(x table^T + bias)[label] for every position, in nats.

        With label smoothing e, the target is (1 - e) on the label plus e / vocab everywhere
        (Szegedy et al. 2016, section 7).

        Shapes:
          x: [..., embed], table: [vocab, embed], labels: [...] int, bias: [vocab]
          returns: [...] float32
        """
        return softmax_cross_entropy.cross_entropy(
            x, table, labels, bias=bias, label_smoothing=label_smoothing, fuse=self.fuse
        )

    # --- windows over images ---

    def convolution(
        self,
        x: tf.Tensor,
        w: tf.Tensor,
        b: tf.Tensor | None = None,
        *,
        window: windows.Window,
    ) -> tf.Tensor:
        """Convolves images, in groups of channels if w has fewer inputs than x has channels.

        Shapes:
          x: [batch, height, width, channels], w: [*window.shape, channels / groups, outputs]
          b: [outputs]
          returns: [batch, new height, new width, outputs]
        """
        return windows.convolution(x, w, b, window=window)

    def depthwise_convolution(
        self,
        x: tf.Tensor,
        w: tf.Tensor,
        b: tf.Tensor | None = None,
        *,
        window: windows.Window,
    ) -> tf.Tensor:
        """Convolves every channel of [batch, height, width, channels] with its own kernels.

        Shapes:
          w: [*window.shape, channels, multiplier], b: [channels * multiplier]
          returns: [batch, new height, new width, channels * multiplier]
        """
        return windows.depthwise_convolution(x, w, b, window=window)

    def average_pool(self, x: tf.Tensor, window: windows.Window) -> tf.Tensor:
        """Returns the mean of every window of [batch, height, width, channels]."""
        return windows.average_pool(x, window)

    def max_pool(self, x: tf.Tensor, window: windows.Window) -> tf.Tensor:
        """Returns the largest element of every window of [batch, height, width, channels]."""
        return windows.max_pool(x, window)
