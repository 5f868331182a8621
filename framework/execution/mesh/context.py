"""The step context on a mesh: one program for all devices, tensors whose dims lie on mesh axes.

Layers are unchanged: TensorFlow's DTensor propagates layouts through their ops. What is written
here are the forms of primitives that keep a tensor split where propagation would gather it, and the
pins. A weight is known by its tensor, so that a primitive can tell how it lies and pin its gradient
alike.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tekso.framework import loops
from tekso.framework.context import StepContext
from tekso.framework.execution.mesh import control_flow, unrolled, vocab, windows
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.primitives.windows import Window
from tekso.framework.theta import Theta


class MeshContext(StepContext):
    """The context of a step over a mesh.

    Args:
      placement: the devices.
      rules: the mesh and the rules.
      everything else: as StepContext.
    """

    def __init__(self, placement: Placement, rules: MeshLayout, **rest: Any) -> None:
        super().__init__(**rest)
        self._placement, self._rules = placement, rules
        self._images = windows.ImageMesh.of(rules, self.pin, self.gathered)
        # By the identity of a tensor, which is kept alive here: how a weight lies.
        self._weights: dict[int, tuple[tf.Tensor, Layout]] = {}
        self._is_turn = False

    # --- layouts ---

    def axes(self, dims: Sequence[str | None], shape: Sequence[int]) -> Layout:
        """Returns the axis of every dim of an activation; what cannot be split stays whole."""
        return self._rules.fitting(dims, shape)

    def axis_size(self, axis: str) -> int:
        """Returns over how many devices an axis goes."""
        return self._rules.mesh.size_of(axis)

    def pin(self, x: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns x laid out by axes; its gradient is laid out as x was."""
        if self._is_turn:
            return self.gathered(tf.identity(x), axes)
        return self._placement.relayout(x, axes)

    def gathered(self, weight: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns a weight laid out by axes for its use; its gradient is laid out by them too.

        DTensor's own gradient, by relayout_like, ends the process in some loops, and a gradient
        that it made cannot be laid out as the slots are. What follows a relayout may ask for
        another layout of its result only if an identity is between them.
        """
        relayout = functools.partial(self._placement.relayout, axes=axes)

        @tf.custom_gradient
        def run(weight: tf.Tensor) -> Any:
            return relayout(weight), lambda dy: tf.identity(relayout(dy))

        return run(weight)

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """See `StepContext`."""
        return self.pin(x, self.axes(dims, x.shape))

    def know(self, weights: Any, axes: Any) -> None:
        """Remembers how weights lie: a nest of tensors and the same nest of layouts."""
        for tensor, layout in zip(tf.nest.flatten(weights), axes, strict=True):
            if layout is not None:
                self._weights[id(tensor)] = (tensor, layout)

    def weight_axes(self, weight: tf.Tensor) -> Layout | None:
        """Returns how a weight lies; None if the tensor is not known as one."""
        known = self._weights.get(id(weight))
        return known[1] if known else None

    def all_weight_axes(self, weights: Any) -> list[Layout | None]:
        """Returns how every tensor of a nest lies, flat."""
        return [self.weight_axes(tensor) for tensor in tf.nest.flatten(weights)]

    # --- buffers of decoding ---

    def filling_in_place(self: Self) -> Self:
        """See `StepContext`; DTensor has the op that copies alone."""
        return self

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
        """See `StepContext`."""
        over_depth = any(axes is not None for axes in self.all_weight_axes(xs))
        form = unrolled if over_depth else control_flow
        return form.scan(self, body, theta, state, xs, first)

    def turn(self, index: Any) -> MeshContext:
        """Returns the context of one turn of `scan`, which collects for itself."""
        other = self.isolated().fold(index)
        other._is_turn = True
        return other

    def capture(self, nest: Any) -> Any:
        """See `StepContext`."""
        own = tf.nest.pack_sequence_as(nest, control_flow.own(tf.nest.flatten(nest)))
        self.know(own, self.all_weight_axes(nest))
        return own

    def rematerialize(self, function: Callable[..., Any], theta: Theta, *inputs: Any) -> Any:
        """See `StepContext`."""
        if self._is_turn:  # all of it is recomputed from the state before the turn
            return function(theta, *inputs, self)
        axes = self.all_weight_axes(theta)

        def known(theta: Theta, *rest: Any) -> Any:
            rest[-1].know(theta, axes)
            return function(theta, *rest)

        return loops.rematerialize(self, known, theta, *inputs)

    # --- primitives ---

    def project(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, num_contracted: int = 1
    ) -> tf.Tensor:
        """See `StepContext`; nothing is reshaped, so that any dim may be split."""
        names = string.ascii_lowercase
        first, last = x.shape.rank - num_contracted, x.shape.rank - num_contracted + w.shape.rank
        lead, inner = names[:first], names[first : x.shape.rank]
        outer = names[x.shape.rank : last]
        axes = self.weight_axes(w)

        @tf.custom_gradient
        def run(x: tf.Tensor, w: tf.Tensor) -> Any:
            y = tf.einsum(f"{lead}{inner},{inner}{outer}->{lead}{outer}", x, w)

            def grad(dy: tf.Tensor) -> list[tf.Tensor]:
                dx = tf.einsum(f"{lead}{outer},{inner}{outer}->{lead}{inner}", dy, w)
                dw = tf.einsum(f"{lead}{inner},{lead}{outer}->{inner}{outer}", x, dy)
                return [dx, dw if axes is None else self.pin(dw, axes)]

            return y, grad

        y = run(x, w)
        return y if b is None else y + b

    def attend(self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, **rest: Any) -> tf.Tensor:
        """See `StepContext`; keys and values are whole along their length."""
        q = self.constrain(q, ("batch", "length", "heads", "head_dim"))
        k, v = (self._of_every_head(x, q.shape[2]) for x in (k, v))
        return super().attend(q, k, v, **rest)

    def _of_every_head(self, x: tf.Tensor, num_heads: int) -> tf.Tensor:
        """[batch, keys, kv_heads, head_dim] -> [batch, keys, heads, head_dim]: as queries are."""
        kv_heads = x.shape[2]
        if kv_heads != num_heads:
            x = self.constrain(x, ("batch", None, None, "head_dim"))
            copies = tf.ones([1, 1, 1, num_heads // kv_heads, 1], x.dtype)
            x = tf.expand_dims(x, 3) * copies
            x = tf.reshape(x, [*x.shape[:2], num_heads, x.shape[-1]])
        return self.constrain(x, ("batch", None, "heads", "head_dim"))

    def logits(self, x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """See `StepContext`."""
        dims = ("batch", "length", None, None)[: x.shape.rank - 1]
        return self.constrain(super().logits(x, table), (*dims, "vocab"))

    def rotate(self, x: tf.Tensor, sine: Any, cosine: Any) -> tf.Tensor:
        """See `StepContext`; a head that is split is turned by a product, not by its halves."""
        if self.axes((None, None, None, "head_dim"), x.shape)[-1] is None:
            return super().rotate(x, sine, cosine)
        half = x.shape[-1] // 2
        swap = np.zeros([2 * half, 2 * half], np.float32)  # (a, b) -> (-b, a)
        swap[np.arange(half) + half, np.arange(half)] = -1
        swap[np.arange(half), np.arange(half) + half] = 1
        # Pinned, since parts of the halves would be joined where the product is split.
        sine, cosine = (tf.cast(tf.concat([s, s], -1), x.dtype) for s in (sine, cosine))
        dims = ("batch", "length", None, None)[-sine.shape.rank :]
        sine, cosine = self.constrain(sine, dims), self.constrain(cosine, dims)
        turned = tf.einsum("btnh,hk->btnk", x, tf.cast(swap, x.dtype))
        return x * cosine + turned * sine

    def lookup(self, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """See `StepContext`."""
        return vocab.lookup(self, table, ids)

    def lookup_shared(self, table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `StepContext`."""
        return vocab.lookup(self, table, ids), table

    def cross_entropy(
        self,
        x: tf.Tensor,
        table: tf.Tensor,
        labels: tf.Tensor,
        *,
        bias: tf.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """See `StepContext`."""
        return vocab.cross_entropy(self, x, table, labels, bias, label_smoothing)

    # --- images ---

    def constrain_image(self, x: tf.Tensor) -> tf.Tensor:
        """See `StepContext`."""
        return self._images.constrain_image(x)

    def convolution(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
    ) -> tf.Tensor:
        """See `StepContext`."""
        return windows.convolution(x, w, b, window=window, mesh=self._images)

    def depthwise_convolution(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
    ) -> tf.Tensor:
        """See `StepContext`."""
        return windows.depthwise_convolution(x, w, b, window=window, mesh=self._images)

    def average_pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        """See `StepContext`."""
        return windows.average_pool(x, window=window, mesh=self._images)

    def max_pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        """See `StepContext`."""
        return windows.max_pool(x, window=window, mesh=self._images)
