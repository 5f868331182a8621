"""Stacks of layers: unrolled, or one traced body repeated over weights stacked along a layer dim.

Both have the same initial values, random numbers and results. Only the form of the weights differs:
`layers/3/ffn/w` [in, out] against `layers/ffn/w` [layers, in, out]. The layers of a third one,
`SharedStack`, share the weights `layer/ffn/w` [in, out].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework import ops, workarounds
from tekso.framework.context import StepContext, collecting_attention, isolated
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece, rows_of_stack
from tekso.framework.theta import SEPARATOR, Theta


class StackBase(Layer):
    """Base of the stacks: `num_layers` layers, each with the output of the previous one as input.

    `fprop`, `extend_step`, `init_cache` and `cache_memory` have the arguments and results of the
    layer's methods; every layer gets the same keyword arguments. A cache consists of the caches of
    all layers. Attention weights, if the caller requests them, are those of the last layer.

    Shapes:
      x: as for the first layer; in a Transformer, [batch, length, dim]
      returns: the output of the last layer, with shape and dtype of x if the layers are equal
    """

    class Params(Layer.Params):
        """Params of a stack."""

        num_layers: int = param("Number of layers.", default=REQUIRED)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns the output of the last layer: shape and dtype of x."""
        raise NotImplementedError(f"{type(self).__name__} has no fprop()")

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns the empty caches of all layers."""
        raise NotImplementedError(f"{type(self).__name__} has no init_cache()")

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """Returns the caches with keys and values of the memory for cross-attention."""
        raise NotImplementedError(f"{type(self).__name__} has no cache_memory()")

    def move_rows(self, cache: Any, move: Callable[..., Any]) -> Any:
        """Returns the caches with moved rows; keys and values of the memory do not change.

        Args:
          cache: caches of all layers.
          move: `move(cache, dim=…)` returns the cache of one attention with moved rows; see
            cache.py.
        """
        raise NotImplementedError(f"{type(self).__name__} has no move_rows()")

    def extend_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> tuple[tf.Tensor, Any]:
        """Returns (output of the last layer, caches) for new elements from `position`."""
        raise NotImplementedError(f"{type(self).__name__} has no extend_step()")


class UnrolledStack(StackBase):
    """Base of the stacks whose layers are computed one after the other, without a loop.

    Shapes:
      x: as for the first layer; in a Transformer, [batch, length, dim]
      returns: the output of the last layer

    Attributes:
      layers: the layers, in order.
    """

    class Params(StackBase.Params):
        """Params of UnrolledStack."""

    layers: list[Any]

    def layer_path(self, index: int) -> str:
        """Returns the path from the stack of the layer that has the weights of a layer."""
        raise NotImplementedError(f"{type(self).__name__} has no layer_path()")

    def _own(self, theta: Theta, index: int) -> Theta:
        names = self.layer_path(index).split(SEPARATOR)
        return functools.reduce(lambda node, name: node[name], names, theta)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """See StackBase."""
        for i in range(len(self.layers)):
            x = self.fprop_layer(i, theta, x, ctx, **side)
        return x

    def fprop_layer(
        self, index: int, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any
    ) -> tf.Tensor:
        """Returns the output of one layer, whose weights must be in theta."""
        return self.layers[index].fprop(self._own(theta, index), x, ctx.fold(index), **side)

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns a list with one cache per layer; see StackBase."""
        return [layer.init_cache(batch_size, max_length, dtype) for layer in self.layers]

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """See StackBase."""
        return [
            layer.cache_memory(self._own(theta, i), cache[i], memory, ctx.fold(i))
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
            weights = self._own(theta, i)
            x, new = layer.extend_step(weights, x, cache[i], position, ctx.fold(i), **side)
            caches.append(new)
        return x, caches


class Stack(UnrolledStack):
    """Unrolled layers; they may differ.

    Shapes:
      x: as for the first layer; every other layer gets the output of the layer before it
      returns: the output of the last layer; shape of x, unless `layers` change it
    Weights:
      layers/0/…, layers/1/…, …: weights of every layer
    Raises:
      ValueError: num_layers is less than 1, or not the number of `layers`.
    """

    class Params(UnrolledStack.Params):
        """Params of Stack."""

        layer: Layer.Params | None = param(
            "A layer whose output has the shape of its input.", default=None
        )
        layers: list[Layer.Params] | None = param(
            "Params of every layer, if they differ; `layer` is then ignored.", default=None
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        layers = [p.layer] * p.num_layers if p.layers is None else list(p.layers)
        if p.num_layers < 1 or len(layers) != p.num_layers or layers[0] is None:
            of_layers = "not set" if p.layers is None else f"a list of {len(p.layers)}"
            raise ValueError(
                f"Stack: num_layers is {p.num_layers}, `layers` is {of_layers}, `layer` is "
                f"{'not set' if p.layer is None else 'set'}; a stack needs at least one layer: "
                "set num_layers and either `layer`, or `layers` with Params for each layer"
            )
        self.child_list("layers", layers)

    def layer_path(self, index: int) -> str:
        """See UnrolledStack."""
        return f"layers{SEPARATOR}{index}"


class SharedStack(UnrolledStack):
    """One layer several times, with the same weights each time.

    Random numbers, such as dropout, differ between the layers.

    Shapes:
      x: as for `layer`
      returns: shape and dtype of x
    Weights:
      layer/…: weights of the layer
    Raises:
      ValueError: num_layers is less than 1.
    Source: Dehghani et al. 2018, "Universal Transformers"; Lan et al. 2019, "ALBERT", section 3.1.
    """

    class Params(UnrolledStack.Params):
        """Params of SharedStack."""

        layer: Layer.Params = param(
            "A layer whose output has the shape of its input.", default=REQUIRED
        )

    layer: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        count = self.params.num_layers
        if count < 1:
            raise ValueError(f"SharedStack: num_layers is {count}, must be at least 1")
        self.child("layer", self.params.layer)
        self.layers = [self.layer] * count

    def layer_path(self, index: int) -> str:
        """See UnrolledStack."""
        return "layer"


class RepeatedStack(StackBase):
    """Equal layers as one loop body; tracing and compilation time do not grow with depth.

    Shapes:
      x: as for `layer`
      returns: shape and dtype of x, as the state of a loop requires
    Weights:
      layers/…: weights of one layer, with a leading dim "layers" of size num_layers
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
        """Computes all layers in theta, the first of which has the index `first`; see StackBase."""
        shared, known = _tensors_apart(side)

        def body(shared: Theta, state: Any, weights: Theta, ctx: StepContext) -> Any:
            y = self.layers.fprop(weights, state[0], ctx, **shared, **known)
            return (y, *state[:-1]), None

        def run_last(ctx: StepContext) -> None:
            self.layers.fprop(_last(theta.layers, ctx), state[1], ctx, **side)

        state, _ = ops.scan(ctx, body, shared, _first_state(x, ctx), theta.layers, first=first)
        self._add_attention(ctx, run_last)
        return state[0]

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns a cache whose tensors have a leading dim of size num_layers; see StackBase."""
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

        def body(shared: Theta, state: Any, xs: Any, ctx: StepContext) -> Any:
            weights, cache = xs
            y, cache = self.layers.extend_step(weights, state[0], cache, ctx=ctx, **shared, **known)
            return (y, *state[:-1]), cache

        def run_last(ctx: StepContext) -> None:
            # Indexing is safe here, because no einsum contracts two dims of the cache; `take_row`
            # of a cache does not compile on a mesh.
            own = tf.nest.map_structure(lambda t: t[-1], cache)
            weights = _last(theta.layers, ctx)
            self.layers.extend_step(weights, state[1], own, position, ctx, **side)

        start = _first_state(x, ctx)
        state, caches = ops.scan(ctx, body, shared, start, (theta.layers, cache))
        self._add_attention(ctx, run_last)
        return state[0], caches

    def _add_attention(self, ctx: StepContext, run_last: Callable[[StepContext], None]) -> None:
        """Adds the attention weights of the last layer, which runs again outside of the loop.

        Attention weights cannot leave the loop, and those of the other layers are not needed.
        """

        def compute() -> tf.Tensor:
            last = collecting_attention(isolated(ctx).fold(self.params.num_layers - 1))
            run_last(last)
            return last.collected.attention_weights()

        ctx.collected.add_attention(compute)


def pieces_of_stack(name: str, stack: StackBase, run: Callable[..., Flow]) -> list[Piece]:
    """Returns one piece per layer of the stacks of this module, and one piece for other stacks.

    Args:
      name: path of the stack from the model.
      stack: the stack.
      run: `run(compute, theta, flow, ctx)` with theta of the model. It calls `compute`, which has
        the arguments of the stack's `fprop` and computes the layers of the piece.
    """
    if isinstance(stack, UnrolledStack):
        pieces = []
        for i, layer in enumerate(stack.layers):
            own = {f"{name}/{stack.layer_path(i)}": layer}
            part = functools.partial(run, functools.partial(stack.fprop_layer, i))
            pieces.append(Piece(f"{name}/layers/{i}", own, part, kind=f"{name}/layers"))
        return pieces
    if isinstance(stack, RepeatedStack):

        def run_rows(first: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return run(functools.partial(stack.fprop, first=first), theta, flow, ctx)

        return rows_of_stack(f"{name}/layers", {name: stack}, stack.params.num_layers, run_rows)
    return [Piece(name, {name: stack}, functools.partial(run, stack.fprop))]


def pieces_of_model(name: str, model: Any) -> list[Piece]:
    """Returns the pieces of a model that maps "x" of the flow to its output, also called "x".

    They are the pieces of its own method `pieces()`, the layers of a stack, or one piece.

    Args:
      name: name of the model, which is a child of the task.
      model: any layer whose `fprop(theta, x, ctx)` returns a tensor.
    """
    if hasattr(model, "pieces"):
        return [piece.below(name) for piece in model.pieces()]

    def run(compute: Any, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": compute(theta[name], flow["x"], ctx)}

    if isinstance(model, StackBase):
        return pieces_of_stack(name, model, run)

    def run_model(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return run(model.fprop, theta, flow, ctx)

    return [Piece(name, {name: model}, run_model)]


def _first_state(x: tf.Tensor, ctx: StepContext) -> tuple[tf.Tensor, ...]:
    """Returns the state of a loop over layers before the first layer, whose input is x.

    After a layer, the state is (output,), or (output, input) if attention weights are requested.
    """
    return (x, x) if ctx.collected.requests_attention else (x,)


def _last(weights: Any, ctx: StepContext) -> Any:
    """Returns the weights of the last layer from weights stacked over layers."""
    return tf.nest.map_structure(lambda t: workarounds.take_row(ctx, t, t.shape[0] - 1), weights)


def _tensors_apart(side: dict[str, Any]) -> tuple[Theta, dict[str, Any]]:
    """Splits keyword arguments into tensors, which are inputs of the loop, and other values."""
    tensors = Theta((name, value) for name, value in side.items() if tf.is_tensor(value))
    return tensors, {name: value for name, value in side.items() if name not in tensors}
