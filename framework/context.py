"""Step context: what a layer knows about the step it runs in, the same for all executions.

`StepContext` itself is for one device and a whole batch, and works eagerly in a notebook. An
execution subclasses it, or passes other values, to run the same layers on a part of the batch or on
a mesh. Layers do not depend on the execution: they compute with the functions of ops.py, which take
a context and use the implementation that it selects.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import tensorflow as tf

from tekso.framework import counter_hash, draws
from tekso.framework.collected import Collected
from tekso.framework.draws import HasStream
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.lookup import fill_in_place
from tekso.framework.random_key import RandomKey
from tekso.framework.spelling import close_matches
from tekso.framework.theta import SEPARATOR
from tekso.framework.user_mistakes import MistakeError

Mode = Literal["train", "eval", "decode"]
Self = TypeVar("Self", bound="StepContext")
Context = TypeVar("Context", bound="StepContext")
Form = Callable[..., Any]


PRIMITIVE_MODULES: dict[str, str] = {}
"""{name: module} of every primitive; primitive.py adds them."""
RANDOM_NUMBERS = (
    "the context: ctx.uniform(self, shape), ctx.normal(self, shape), or "
    "ops.dropout(ctx, x, rate, self)"
)
"""Advice for error messages: what a layer uses instead of tf.random."""


_HAS_CONTEXT = contextvars.ContextVar("has_context", default=False)


@contextlib.contextmanager
def passing_context() -> Iterator[None]:
    """Rejects contexts that the code of users builds in the block, which passes one to it."""
    token = _HAS_CONTEXT.set(True)
    try:
        yield
    finally:
        _HAS_CONTEXT.reset(token)


class ContextError(MistakeError):
    """Code of a user builds a context while a step is traced."""


class Examples(NamedTuple):
    """Some examples of a global batch, which a step computes together.

    Attributes:
      mode, seed, step: as in StepContext.
      offset: position of the first example in the global batch.
      size: number of examples.
      batch_size: number of examples of the global batch.
    """

    mode: Mode
    seed: int
    step: tf.Tensor | int
    offset: tf.Tensor | int
    size: int
    batch_size: int

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of a StepContext."""
        return {
            "mode": self.mode,
            "seed": self.seed,
            "step": self.step,
            "example_offset": self.offset,
            "num_examples": self.batch_size,
        }


class StepContext:
    """The step context for one device.

    Args:
      mode: "train", "eval" or "decode".
      seed: seed of the run, in [0, 2**64).
      step: step of the run, an int or int64 scalar.
      example_offset: position in the global batch of the first example of this context.
      num_examples: size of the global batch, needed by `collect_loss` in training.
      fuse: how elementwise clusters are compiled (see primitives/fusion.py).

    Attributes:
      mode, num_examples, example_offset, fuse: as given.
      forms: {name: function} of the primitives that this context implements differently. All other
        primitives use the implementation in ops.py. The arguments are those of the primitive, the
        context first.
      collected: losses, metrics and statistics that layers have collected so far, and attention
        weights if they are requested (see `collecting_attention`).

    Raises:
      ValueError: the mode is unknown.
      ContextError: code of a user builds a context while a step is traced.
    """

    forms: Mapping[str, Form] = MappingProxyType({})

    def __init__(
        self,
        *,
        mode: Mode = "eval",
        seed: int = 0,
        step: tf.Tensor | int = 0,
        example_offset: tf.Tensor | int = 0,
        num_examples: int | None = None,
        fuse: Fuse = no_fusion,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(
                f"StepContext: mode is {mode!r}, but must be 'train', 'eval' or 'decode'"
            )
        builder = str(sys._getframe(1).f_globals.get("__name__"))
        if _HAS_CONTEXT.get() and not builder.startswith("tekso."):
            raise ContextError(
                f"a {type(self).__name__} is built while a step is traced: its mode, seed and step "
                "would not be those of the run, so dropout and random numbers would be wrong. Pass "
                "the argument ctx on: self.child.fprop(theta.child, x, ctx), or, for a part that "
                "is not trained, such as a frozen teacher, ctx.evaluating()"
            )
        self.mode = mode
        self.num_examples = num_examples
        self.example_offset = example_offset
        self.fuse = fuse
        self.collected = Collected()
        self._key = RandomKey.of_step(seed, step)

    def __getattr__(self, name: str) -> Any:
        """Raises an AttributeError that says what a layer can use instead.

        Raises:
          AttributeError: there is no such attribute.
        """
        message = f"a {type(self).__name__} has no attribute {name!r}"
        if name in PRIMITIVE_MODULES:
            package, _, module = PRIMITIVE_MODULES[name].rpartition(".")
            imported = f"from {package} import {module}" if package else f"import {module}"
            message += f": write {module}.{name}(ctx, …), with `{imported}`"
        elif not name.startswith("_"):
            names = [own for own in dir(type(self)) if not own.startswith("_")]
            close = close_matches(name, names, count=1)
            message += f"; did you mean {close[0]!r}?" if close else ";"
            message += f" It has: {', '.join(names)}" if close else f" it has: {', '.join(names)}"
            if name in ("rand", "randn", "random"):
                message += f". Take random numbers from {RANDOM_NUMBERS}"
        raise AttributeError(message)

    @property
    def is_training(self) -> bool:
        """Whether dropout is applied and batch statistics are computed."""
        return self.mode == "train"

    def evaluating(self: Self) -> Self:
        """Returns a context with mode "eval" for a part that is not trained, as a frozen teacher.

        Dropout does nothing, and batch normalization uses its moving statistics. Losses, metrics
        and statistics of the part are not reported.
        """
        other = isolated(self)
        other.mode = "eval"
        return other

    # --- layout ---

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """Adds a sharding constraint to x by dimension names; without a mesh, returns x itself.

        Shapes:
          x: any shape; `dims` has a name for each dim, or None to leave it unconstrained
          returns: x
        """
        return x

    # --- randomness ---

    def fold(self: Self, index: tf.Tensor | int) -> Self:
        """Returns the context of one loop iteration: same collection, different random numbers."""
        other = copy.copy(self)
        other._key = self._key.fold(index)
        return other

    def random_key(self, layer: HasStream, name: str = "") -> tf.Tensor:
        """Returns the uint32 key of a layer's random numbers in this step.

        Raises:
          DrawError: a step is traced, and the layer has drawn with this name on another line.
        """
        is_eager = tf.executing_eagerly()
        if not is_eager or self.collected.repeats is not None:
            graph = None if is_eager else tf.compat.v1.get_default_graph()  # branches have others
            collected = self.collected
            draws.check(collected.draws, (self._key, graph), layer, name, collected.repeats)
        stream = counter_hash.stream(f"{layer.pattern}:{name}")
        return counter_hash.fold(self._key.value(), stream)

    def uniform(
        self, layer: HasStream, shape: Sequence[int], name: str = "", *, shared: bool = False
    ) -> tf.Tensor:
        """Returns random float32 numbers in [0, 1). 0 occurs once in 2**24 draws.

        Args:
          layer: the layer that draws them.
          shape: their shape; dim 0 is the batch dimension, unless they are shared.
          name: tells several draws of a layer apart: those with one name have the same numbers.
          shared: whether all examples of the batch share the numbers, as the negatives of a
            sampled softmax. Then every device, and every accumulation step, draws the same.
        """
        first = 0 if shared else self.example_offset
        return counter_hash.uniform(self.random_key(layer, name), shape, first)

    def normal(
        self, layer: HasStream, shape: Sequence[int], name: str = "", *, shared: bool = False
    ) -> tf.Tensor:
        """Returns finite normal float32 numbers, mean 0 and variance 1; arguments as `uniform`.

        A draw of `uniform` with the same name uses the same random bits.
        """
        first = 0 if shared else self.example_offset
        return counter_hash.normal(self.random_key(layer, name), shape, first)

    # --- outputs of a layer besides its return value ---

    def collect_loss(self, name: str, value: tf.Tensor) -> None:
        """Adds an auxiliary loss.

        `value` is a sum over examples; its mean over the global batch is added to the total loss.
        Multiply a penalty on weights by the number of examples at hand, so that it counts once:
        `tf.cast(tf.shape(x)[0], tf.float32) * penalty`. Outside of training, a context without
        `num_examples`, as in decoding and predictions, ignores the value: no loss is computed.
        Evaluations do not report it, and their loss is without it: `run.keep_best` ignores it.

        Shapes:
          value: []
        Raises:
          ValueError: the context is of training and has no `num_examples`.
        """
        if self.num_examples is None and not self.is_training:
            return
        if self.num_examples is None:
            raise ValueError(
                f"auxiliary loss {name!r}: this context has no num_examples (the size of the "
                "global batch); pass StepContext(num_examples=…)"
            )
        self.collected.add("loss", name, value / self.num_examples, 1.0)

    def collect_metric(self, name: str, value: tf.Tensor, weight: tf.Tensor | float) -> None:
        """Adds a metric: the report shows sum(value) / sum(weight) over the global batch.

        Shapes:
          value, weight: []
        """
        self.collected.add("metric", name, value, weight)

    def collect_statistic(
        self, layer: HasStream, name: str, value: tf.Tensor, weight: tf.Tensor | float
    ) -> None:
        """Adds a sum and its weight; `layer.updated_statistics` gets their mean after the step.

        Shapes:
          value: any shape
          weight: that of the value, or []
        """
        path = f"{layer.path}{SEPARATOR}{name}" if layer.path else name
        self.collected.add("statistic", path, value, weight)


def isolated(ctx: Context) -> Context:
    """Returns a copy of a context with an empty collection, for a separately traced body."""
    other = copy.copy(ctx)
    other.collected = Collected(repeats=ctx.collected.repeats)
    return other


def filling_in_place(ctx: Context) -> Context:
    """Returns a context whose `ops.fill_rows` does not copy the buffer, if it can do without.

    For CPU and GPU without XLA: XLA and LiteRT have no kernel for it, and XLA does not need it.
    """
    other = copy.copy(ctx)
    other.forms = {"fill_rows": lambda _, *given: fill_in_place(*given), **ctx.forms}
    return other


def collecting_attention(ctx: Context) -> Context:
    """Returns a copy of a context that also collects the weights of the last attention layer.

        requesting = collecting_attention(ctx)
        y = self.decoder.fprop(theta.decoder, x, requesting)
        attention_weights = requesting.collected.attention_weights()

    Losses, metrics and statistics go to the collection of `ctx`.
    """
    other = copy.copy(ctx)
    other.collected = ctx.collected.requesting_attention()
    return other
