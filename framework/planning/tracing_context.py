"""The step context with which a step is traced: primitives record their work.

A primitive returns a new placeholder. The body of a loop is traced once and counted once per
iteration. On a mesh, the backward pass of a loop recomputes every iteration. Elsewhere, a loop
saves the activations of all iterations.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import primitive
from tekso.framework.context import StepContext, isolated
from tekso.framework.draws import HasStream
from tekso.framework.nests import as_tensors
from tekso.framework.planning.dim_names import joined_dims, sizes_of
from tekso.framework.planning.step_work import (
    Dims,
    Halo,
    MatrixProduct,
    Part,
    Passes,
    Reduction,
    ReplicaSum,
    Reshard,
    Work,
)
from tekso.framework.planning.work_recorder import Recorder, Region
from tekso.framework.primitives.windows import Window
from tekso.framework.symbolic import placeholder
from tekso.framework.theta import Theta

_POSITION_DIMS = ("batch", "length", None, None)


class TracingContext(StepContext):
    """A step context whose primitives record their work; its copies share the recorder."""

    def __init__(
        self, recorder: Recorder, *, recomputes_loops: bool, is_replica: bool = False, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self._recorder, self._region = recorder, recorder.whole
        self._recomputes_loops = recomputes_loops
        self.forms = primitive.forms("planning")
        if is_replica:
            self.forms = {**self.forms, "sum_over_replicas": _sum_over_replicas}

    def _new(
        self, shape: Sequence[int], dims: Sequence[str | None], dtype: Any, *inputs: tf.Tensor
    ) -> tf.Tensor:
        """Returns a placeholder for the output of a primitive."""
        names = self._recorder.names
        x = placeholder(tf.TensorSpec(shape, dtype))
        return names.register(x, tuple(dims), learned=any(names.of(t).learned for t in inputs))

    def _laid_out_like(self, x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return self.constrain(x, self._dims(other))

    def _like(self, x: tf.Tensor) -> tf.Tensor:
        return self._new(x.shape, self._dims(x), x.dtype, x)

    def _add(self, work: Work) -> None:
        self._recorder.add(work, self._region)

    def _multiply(self, form: str, a: tf.Tensor, b: tf.Tensor, out: tf.Tensor) -> None:
        self._recorder.multiply(form, a, b, out, self._region)

    def _sum_over_replicas(self, x: tf.Tensor) -> tf.Tensor:
        """Records the sum of `ops.sum_over_replicas`."""
        self._add(ReplicaSum(self._recorder.part(x)))
        return self._like(x)

    def _save(self, *tensors: tf.Tensor) -> None:
        for x in tensors:
            self._recorder.save(x, self._region)

    def _dims(self, x: tf.Tensor) -> Dims:
        return self._recorder.names.of(x).dims

    # --- layout ---

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """See `StepContext`."""
        before, after = self._dims(x), self._recorder.part(x, tuple(dims))
        if x.dtype.is_floating and before != tuple(dims):
            self._add(Reshard(before, after))
        y = tf.identity(x)
        self._recorder.names.rename(y, tuple(dims))
        return y

    # --- control flow ---

    def _inside(self, *, iterations: int, is_recomputed: bool = True) -> TracingContext:
        inner: TracingContext = isolated(self)
        outer = self._region
        inner._region = Region(
            outer.count * iterations, iterations, outer.recomputed + is_recomputed,
            first=self._recorder.num_ops, within=None if is_recomputed else outer,
        )  # fmt: skip
        self._recorder.regions.append(inner._region)
        return inner

    def scan(
        self,
        body: Callable[[Theta, Any, Any, Any], tuple[Any, Any]],
        theta: Theta,
        state: Any,
        xs: Any,
        *,
        first: int = 0,
    ) -> tuple[Any, Any]:
        """See `ops.scan`."""
        state, xs = as_tensors((state, xs))
        iterations = tf.nest.flatten(xs)[0].shape[0]
        names = self._recorder.names

        def one(x: tf.Tensor) -> tf.Tensor:
            known = names.of(x)
            y = placeholder(tf.TensorSpec(x.shape[1:], x.dtype))
            return names.register(y, known.dims[1:], learned=known.learned, weight=known.weight)

        def all_of(y: tf.Tensor | None) -> tf.Tensor | None:
            if y is None:
                return None
            return self._new([iterations, *y.shape], (None, *self._dims(y)), y.dtype, y)

        def in_loop(x: tf.Tensor, dims: Dims) -> tf.Tensor:
            return names.register(placeholder(x), dims, learned=x.dtype.is_floating)

        if self._recomputes_loops:
            for x in tf.nest.flatten(state):
                self._recorder.save(x, self._region, count=iterations)
        flat, xs = tf.nest.flatten(state), tf.nest.map_structure(one, xs)
        dims, is_settled = [self._dims(x) for x in flat], False
        while not is_settled:
            # A state that starts with zeros gets the names of its dims from the body: its first
            # layout is sliced for free.
            start = self._recorder.mark()
            inner = self._inside(iterations=iterations, is_recomputed=self._recomputes_loops)
            given = [in_loop(x, names) for x, names in zip(flat, dims, strict=True)]
            after, y = body(theta, tf.nest.pack_sequence_as(state, given), xs, inner.fold(0))
            inner._region.last = self._recorder.num_ops
            found = [
                joined_dims(names, self._dims(x))
                for names, x in zip(dims, tf.nest.flatten(after), strict=True)
            ]
            is_settled = found == dims
            if not is_settled:
                self._recorder.forget(start)
                dims = found
        # The state has the same layout after every iteration.
        after = tf.nest.map_structure(inner._laid_out_like, after, state)
        sums = inner.collected.sums
        statistics = tf.nest.map_structure(all_of, sums["statistic"])
        self.collected.merge({**sums, "statistic": statistics})
        return tf.nest.map_structure(self._like, after), tf.nest.map_structure(all_of, y)

    def rematerialize(self, function: Callable[..., Any], theta: Theta, *inputs: Any) -> Any:
        """See `ops.rematerialize`."""
        self._save(*(x for x in tf.nest.flatten(inputs) if tf.is_tensor(x)))
        inner = self._inside(iterations=1)
        output = function(theta, *inputs, inner)
        inner._region.last = self._recorder.num_ops
        self.collected.merge(inner.collected.sums)
        return output

    # --- primitives ---

    def project(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, num_contracted: int = 1
    ) -> tf.Tensor:
        """See `ops.project`."""
        num_lead, letters = x.shape.rank - num_contracted, string.ascii_lowercase
        lead, inner = letters[:num_lead], letters[num_lead : x.shape.rank]
        outer = letters[x.shape.rank : num_lead + w.shape.rank]
        dims = self._dims(x)[:num_lead] + self._dims(w)[num_contracted:]
        shape = (*x.shape[:num_lead], *w.shape[num_contracted:])
        y = self._new(shape, dims, x.dtype, x, w)
        self._multiply(f"{lead}{inner},{inner}{outer}->{lead}{outer}", x, w, y)
        return y

    def _elementwise(self, x: tf.Tensor, *, forward: int, backward: int, saves: bool) -> tf.Tensor:
        self._add(Passes(self._recorder.part(x), forward, backward))
        if saves:
            self._save(x)
        return self._like(x)

    def _normalise(self, x: tf.Tensor, *, sums: int) -> tf.Tensor:
        dims, shape = self._dims(x), sizes_of(x) or ()
        if dims and dims[-1] is not None:
            part = Part(dims[:-1], shape[:-1], 4)
            self._add(Reduction(part, (dims[-1],), forward=sums, backward=sums))
        return self._elementwise(x, forward=3, backward=4, saves=True)

    def layer_norm(
        self, x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor | None, *, epsilon: float
    ) -> tf.Tensor:
        """See `ops.layer_norm`."""
        return self._normalise(x, sums=2)

    def rms_norm(self, x: tf.Tensor, scale: tf.Tensor, *, epsilon: float) -> tf.Tensor:
        """See `ops.rms_norm`."""
        return self._normalise(x, sums=1)

    def activate(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """See `ops.activate`."""
        if name == "identity":
            return x
        return self._elementwise(x, forward=2, backward=3, saves=True)

    def dropout(self, x: tf.Tensor, rate: float, layer: HasStream, name: str = "") -> tf.Tensor:
        """See `ops.dropout`."""
        return self._elementwise(x, forward=2, backward=2, saves=False) if rate else x

    def rotate(self, x: tf.Tensor, sine: Any, cosine: Any) -> tf.Tensor:
        """See `ops.rotate`; a sharded head is gathered to be rotated, in both passes."""
        part = self._recorder.part(x)
        whole = dataclasses.replace(part, dims=(*part.dims[:-1], None))
        self._add(Reshard(part.dims, whole))
        self._add(Reshard(whole.dims, part))
        return self._elementwise(x, forward=3, backward=3, saves=False)

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
        """See `ops.attend`; constrained as on a mesh, with a separate dim for key positions."""
        q = self.constrain(q, ("batch", "length", "heads", "head_dim"))
        k, v = (self._of_every_head(x, q.shape[2]) for x in (k, v))
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        dims = ("batch", "heads", "length", "memory_length")
        scores = self._new(sizes, dims, q.dtype, q, k)
        probs = self._new(sizes, dims, q.dtype, q, k)
        y = self._new(q.shape, ("batch", "length", "heads", "head_dim"), q.dtype, q, k, v)
        self._multiply("bqnh,bknh->bnqk", q, k, scores)
        self._add(Passes(self._recorder.part(scores), 5, 4))
        self._multiply("bnqk,bknh->bqnh", probs, v, y)
        return y

    def _of_every_head(self, x: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Repeats the heads of keys or values to the number of query heads, as on a mesh."""
        if x.shape[2] != num_heads:
            x = self.constrain(x, ("batch", "memory_length", None, "head_dim"))
            x = self._new([*x.shape[:2], num_heads, x.shape[3]], self._dims(x), x.dtype, x)
        return self.constrain(x, ("batch", "memory_length", "heads", "head_dim"))

    def lookup(self, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """See `ops.lookup`."""
        rank = ids.shape.rank
        lead = string.ascii_lowercase[:rank]
        named = _POSITION_DIMS[:rank] if rank > 1 else (None,) * rank
        table_dims = self._dims(table)
        y = self._new((*ids.shape, table.shape[1]), (*named, table_dims[1]), table.dtype, table)
        part = self._recorder.part
        places = Part(
            (*named, table_dims[0]), (*ids.shape, table.shape[0]), table.dtype.size, learned=False
        )
        self._add(
            MatrixProduct(f"{lead}y,yz->{lead}z", places, part(table), part(y), is_lookup=True)
        )
        return y

    def lookup_shared(self, table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `ops.lookup_shared`."""
        return self.lookup(table, ids), table

    def logits(self, x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """See `ops.logits`."""
        rank = x.shape.rank
        lead = string.ascii_lowercase[: rank - 1]
        dims = (*_POSITION_DIMS[: rank - 1], self._dims(table)[0])
        y = self._new((*x.shape[:-1], table.shape[0]), dims, x.dtype, x, table)
        self._multiply(f"{lead}y,zy->{lead}z", x, table, y)
        return y

    def cross_entropy(
        self,
        x: tf.Tensor,
        table: tf.Tensor,
        labels: tf.Tensor,
        *,
        bias: tf.Tensor | None = None,
        label_smoothing: float = 0.0,
        classes: int | None = None,
    ) -> tf.Tensor:
        """See `ops.cross_entropy`; maxima, sums, logits and biases of labels are all-reduced."""
        logits = self.logits(x, table)
        dims = self._dims(logits)
        y = self._new(labels.shape, dims[:-1], tf.float32, x, table)
        sums = 3 + bool(label_smoothing) + (bias is not None)
        if dims[-1] is not None:
            self._add(Reduction(self._recorder.part(y), (dims[-1],), forward=sums))
        self._add(Passes(self._recorder.part(logits), 5, 3))
        self._save(logits)
        return y

    # --- windows over images ---

    def _windows(self, x: tf.Tensor, window: Window) -> list[int]:
        """Returns the spatial sizes after a window; records the halos that its parts need."""
        for d in range(len(window.shape)):
            width = (window.shape[d] - 1) * window.dilations[d] + 1 - window.strides[d]
            if width > 0:
                self._add(Halo(self._recorder.part(x), 1 + d, width))
        return list(window.output_sizes(x))

    def _convolve(
        self, x: tf.Tensor, w: tf.Tensor, window: Window, *, depthwise: bool
    ) -> tf.Tensor:
        part, w_dims = self._recorder.part, self._dims(w)
        image, sizes = part(x), self._windows(x, window)
        count = len(sizes)
        space, kernel = "xyz"[:count], "jkl"[:count]
        if depthwise:
            form, first = f"b{space}c,{kernel}cm->b{space}cm", count
        else:
            form, first = f"b{space}i,{kernel}io->b{space}o", count + 1
            # With grouped channels, an output depends only on the inputs of its group.
            image = dataclasses.replace(image, shape=(*image.shape[:-1], w.shape[-2]))
        outer, names = w.shape[first:], w_dims[first:]
        dims = self._dims(x)[:-1]
        out = self._new([x.shape[0], *sizes, *outer], dims + names, x.dtype, x, w)
        self._add(MatrixProduct(form, image, part(w), part(out)))
        self._save(x)
        channels = math.prod(outer)
        return self._new([x.shape[0], *sizes, channels], (*dims, names[0]), x.dtype, x, w)

    def convolution(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
    ) -> tf.Tensor:
        """See `window_ops.convolution`."""
        return self._convolve(x, w, window, depthwise=False)

    def depthwise_convolution(
        self, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
    ) -> tf.Tensor:
        """See `window_ops.depthwise_convolution`."""
        return self._convolve(x, w, window, depthwise=True)

    def _pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        sizes = self._windows(x, window)
        y = self._new([x.shape[0], *sizes, x.shape[-1]], self._dims(x), x.dtype, x)
        self._add(Passes(self._recorder.part(x), 1 + math.prod(window.shape), 3))
        self._save(x, y)
        return y

    def average_pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        """See `window_ops.average_pool`."""
        return self._pool(x, window)

    def max_pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        """See `window_ops.max_pool`."""
        return self._pool(x, window)


def _sum_over_replicas(ctx: TracingContext, x: tf.Tensor, layer: HasStream) -> tf.Tensor:
    return ctx._sum_over_replicas(x)
