"""Stacks of layers: unrolled, or one traced body repeated over weights stacked along a layer dim.

Both start from the same values, draw the same random numbers and give the same results; weights
differ in form alone: `layers/3/ffn/w` [in, out] against `layers/ffn/w` [layers, in, out].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece, rows_of_stack
from tekso.framework.theta import Theta


class StackBase(Layer):
    """What both stacks have in common: `num_layers` layers, each on the output of the one before.

    `fprop`, `extend_step`, `init_cache` and `cache_memory` take and return what the layer's own do;
    keyword arguments are handed to every layer alike. A cache holds those of all layers.
    """

    class Params(Layer.Params):
        """Params of a stack."""

        num_layers: int = param("Number of layers.", default=REQUIRED)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns the output of the last layer: shape and dtype of x."""
        raise NotImplementedError(f"{type(self).__name__} has no fprop()")

    def look(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns where the last layer looks, given the arguments of `fprop`: its `look`."""
        raise NotImplementedError(f"{type(self).__name__} has no look()")

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns the empty caches of all layers."""
        raise NotImplementedError(f"{type(self).__name__} has no init_cache()")

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """Returns the caches with what the layers' cross-attention needs of the memory."""
        raise NotImplementedError(f"{type(self).__name__} has no cache_memory()")

    def move_rows(self, cache: Any, move: Callable[..., Any]) -> Any:
        """Returns the caches with other rows: those of what was read, none of the memory.

        Args:
          cache: of all layers.
          move: `move(cache, dim=…)` returns that of one attention with other rows; see cache.py.
        """
        raise NotImplementedError(f"{type(self).__name__} has no move_rows()")

    def extend_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any]:
        """Returns (output of the last layer, caches) for further elements from `position` on."""
        raise NotImplementedError(f"{type(self).__name__} has no extend_step()")

    def look_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any, tf.Tensor]:
        """Returns what `extend_step` does, and where the last layer looks: its `look_step`."""
        raise NotImplementedError(f"{type(self).__name__} has no look_step()")


class Stack(StackBase):
    """Layers that are written out one after the other: may differ, and may be cut into stages.

    Weights:
      layers/0/…, layers/1/…, …: those of every layer
    Raises:
      ValueError: num_layers is less than 1, or not the number of `layers`.
    """

    class Params(StackBase.Params):
        """Params of Stack."""

        layer: Layer.Params | None = param(
            "A layer whose output has the shape of its input.", default=None
        )
        layers: list[Layer.Params] | None = param(
            "Params of every layer, where they differ; `layer` is then not used.", default=None
        )

    layers: list[Any]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        layers = [p.layer] * p.num_layers if p.layers is None else list(p.layers)
        if p.num_layers < 1 or len(layers) != p.num_layers or layers[0] is None:
            of_layers = "not set" if p.layers is None else f"a list of {len(p.layers)}"
            raise ValueError(
                f"Stack: num_layers is {p.num_layers}, `layers` is {of_layers}, `layer` is "
                f"{'not set' if p.layer is None else 'set'}; want at least one layer: num_layers "
                "times `layer`, or `layers` with Params for each of them"
            )
        self.child_list("layers", layers)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """See StackBase."""
        for i in range(len(self.layers)):
            x = self.fprop_layer(i, theta, x, ctx, **side)
        return x

    def fprop_layer(
        self, index: int, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any
    ) -> tf.Tensor:
        """Returns the output of one layer; of theta, its weights alone are used."""
        return self.layers[index].fprop(theta.layers[str(index)], x, ctx.fold(index), **side)

    def look(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """See StackBase."""
        last = len(self.layers) - 1
        for i in range(last):
            x = self.fprop_layer(i, theta, x, ctx, **side)
        return self.layers[last].look(theta.layers[str(last)], x, ctx.fold(last), **side)

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """See StackBase; returns one cache a layer."""
        return [layer.init_cache(batch_size, max_length, dtype) for layer in self.layers]

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """See StackBase."""
        return [
            layer.cache_memory(theta.layers[str(i)], cache[i], memory, ctx.fold(i))
            for i, layer in enumerate(self.layers)
        ]

    def move_rows(self, cache: Any, move: Callable[..., Any]) -> Any:
        """See StackBase."""
        return [layer.move_rows(c, move) for layer, c in zip(self.layers, cache, strict=True)]

    def extend_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any]:
        """See StackBase."""
        caches = []
        for i, layer in enumerate(self.layers):
            weights = theta.layers[str(i)]
            x, new = layer.extend_step(weights, x, cache[i], position, ctx.fold(i), **side)
            caches.append(new)
        return x, caches

    def look_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any, tf.Tensor]:
        """See StackBase."""
        caches, last = [], len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            step = layer.extend_step if i < last else layer.look_step
            weights = theta.layers[str(i)]
            x, new, *looks = step(weights, x, cache[i], position, ctx.fold(i), **side)
            caches.append(new)
        return x, caches, looks[0]


class RepeatedStack(StackBase):
    """Equal layers as one body in a loop: the time to trace and compile does not grow with depth.

    Weights:
      layers/…: those of one layer, with a leading dim "layers" of size num_layers
    """

    class Params(StackBase.Params):
        """Params of RepeatedStack."""

        layer: Layer.Params = param(
            "A layer whose output has the shape of its input.", default=REQUIRED
        )

    layers: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_stack("layers", self.params.layer, self.params.num_layers)

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, first: int = 0, **side: Any
    ) -> tf.Tensor:
        """See StackBase; theta may hold some layers only, of which the first is number `first`."""
        shared, known = _tensors_apart(side)

        def body(shared: Theta, x: tf.Tensor, weights: Theta, ctx: StepContext) -> Any:
            return self.layers.fprop(weights, x, ctx, **shared, **known), None

        return ops.scan(ctx, body, shared, x, theta.layers, first=first)[0]

    def look(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """See StackBase."""
        shared, known = _tensors_apart(side)

        def body(shared: Theta, state: Any, weights: Theta, ctx: StepContext) -> Any:
            x, _ = state
            return (self.layers.fprop(weights, x, ctx, **shared, **known), x), None

        (_, given), _ = ops.scan(ctx, body, shared, (x, x), theta.layers)
        return self.layers.look(_last(theta.layers), given, self._in_last(ctx), **side)

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """See StackBase; returns a cache whose tensors have a leading dim of size num_layers."""
        cache = self.layers.init_cache(batch_size, max_length, dtype)
        return tf.nest.map_structure(
            lambda t: tf.zeros([self.params.num_layers, *t.shape], t.dtype), cache
        )

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """See StackBase."""

        def body(memory: Theta, state: tf.Tensor, xs: Any, ctx: StepContext) -> Any:
            weights, cache = xs
            return state, self.layers.cache_memory(weights, cache, memory["memory"], ctx)

        shared = Theta(memory=memory)
        return ops.scan(ctx, body, shared, tf.constant(0), (theta.layers, cache))[1]

    def move_rows(self, cache: Any, move: Callable[..., Any]) -> Any:
        """See StackBase."""
        return self.layers.move_rows(cache, lambda nest, dim=0: move(nest, dim=dim + 1))

    def extend_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any]:
        """See StackBase."""
        shared, known = _tensors_apart({**side, "position": tf.convert_to_tensor(position)})

        def body(shared: Theta, x: tf.Tensor, xs: Any, ctx: StepContext) -> Any:
            weights, cache = xs
            return self.layers.extend_step(weights, x, cache, ctx=ctx, **shared, **known)

        return ops.scan(ctx, body, shared, x, (theta.layers, cache))

    def look_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any, tf.Tensor]:
        """See StackBase."""
        shared, known = _tensors_apart({**side, "position": tf.convert_to_tensor(position)})

        def body(shared: Theta, state: Any, xs: Any, ctx: StepContext) -> Any:
            (x, _), (weights, cache) = state, xs
            y, cache = self.layers.extend_step(weights, x, cache, ctx=ctx, **shared, **known)
            return (y, x), cache

        (x, given), caches = ops.scan(ctx, body, shared, (x, x), (theta.layers, cache))
        # Not by `_last`, which a mesh does not compile here; nothing contracts two dims of it.
        last = tf.nest.map_structure(lambda t: t[-1], cache)
        _, _, looks = self.layers.look_step(
            _last(theta.layers), given, last, position, self._in_last(ctx), **side
        )
        return x, caches, looks

    def _in_last(self, ctx: StepContext) -> StepContext:
        return ctx.fold(self.params.num_layers - 1)


def pieces_of_stack(name: str, stack: StackBase, run: Callable[..., Flow]) -> list[Piece]:
    """Returns every layer of a stack as a piece; a stack of a kind of its own is one.

    Args:
      name: path of the stack from the model.
      stack: the stack.
      run: `run(compute, theta, flow, ctx)` with theta of the model; it calls `compute`, which takes
        what the stack's `fprop` does, for the part of the stack.
    """
    if isinstance(stack, Stack):
        pieces = []
        for i, layer in enumerate(stack.layers):
            path, compute = f"{name}/layers/{i}", functools.partial(stack.fprop_layer, i)
            part = functools.partial(run, compute)
            pieces.append(Piece(path, {path: layer}, part, kind=f"{name}/layers"))
        return pieces
    if isinstance(stack, RepeatedStack):

        def run_rows(first: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return run(functools.partial(stack.fprop, first=first), theta, flow, ctx)

        return rows_of_stack(f"{name}/layers", {name: stack}, stack.params.num_layers, run_rows)
    return [Piece(name, {name: stack}, functools.partial(run, stack.fprop))]


def _last(weights: Any) -> Any:
    """Of weights that are stacked over layers, those of the last layer.

    DTensor mistakes which dim of `t[-1]` is split, and then contracts what does not fit.
    """
    return tf.nest.map_structure(lambda t: tf.identity(tf.gather(t, t.shape[0] - 1)), weights)


def _tensors_apart(side: dict[str, Any]) -> tuple[Theta, dict[str, Any]]:
    """Returns the tensors, which a loop has to be given, and what is known when it is traced."""
    tensors = Theta((name, value) for name, value in side.items() if tf.is_tensor(value))
    return tensors, {name: value for name, value in side.items() if name not in tensors}
