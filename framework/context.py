"""Step context: what a layer knows of the step that it runs in. Here layers and executions meet.

`StepContext` is the plain form: one device, one whole batch. It works eagerly in a notebook. An
execution derives from it, or passes other values, to run the same layers on a part of the batch or
on a mesh. A layer never asks which. What layers compute with are the functions of ops.py, which
take a context: it says in which form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, get_args

import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.collected import Collected
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.theta import SEPARATOR

Mode = Literal["train", "eval", "decode"]
Self = TypeVar("Self", bound="StepContext")
Context = TypeVar("Context", bound="StepContext")
Form = Callable[..., Any]


PRIMITIVE_NAMES: set[str] = set()
"""The names of the functions of ops.py, which adds them."""


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
      fuse: how elementwise clusters are compiled (see primitives/fusion.py).

    Attributes:
      mode, num_examples, example_offset, fuse: as given.
      forms: {name: form} of the primitives that this context computes in a form of its own; all
        others are computed as in ops.py. A form is called as the primitive is, the context first.
      collected: what layers have collected so far.

    Raises:
      ValueError: the mode is another one.
    """

    forms: Mapping[str, Form] = MappingProxyType({})

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
        self.example_offset = example_offset
        self.fuse = fuse
        self.collected = Collected()
        self._key = counter_hash.root_key(seed, step)

    def __getattr__(self, name: str) -> Any:
        """Says where a function is that layers compute with.

        Raises:
          AttributeError: there is no such attribute.
        """
        message = f"a {type(self).__name__} has no attribute {name!r}"
        if name in PRIMITIVE_NAMES:
            message += f": write ops.{name}(ctx, …), with `from tekso.framework import ops`"
        raise AttributeError(message)

    @property
    def is_training(self) -> bool:
        """Whether dropout drops and batch statistics are taken."""
        return self.mode == "train"

    # --- layout ---

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """Constrains the sharding of x by the names of its dims; the identity without a mesh.

        Shapes:
          x: any, with a name in `dims` for each dim; None leaves one free
          returns: x
        """
        return x

    # --- randomness ---

    def fold(self: Self, index: Any) -> Self:
        """Returns the context of one iteration: other random numbers, the same collection."""
        other = copy.copy(self)
        other._key = counter_hash.fold(self._key, index)
        return other

    def random_key(self, layer: HasStream, name: str = "") -> tf.Tensor:
        """Returns the uint32 key of a layer's stream of random numbers in this step."""
        return counter_hash.fold(self._key, counter_hash.stream(f"{layer.pattern}:{name}"))

    def uniform(self, layer: HasStream, shape: Sequence[int], name: str = "") -> tf.Tensor:
        """Returns float32 numbers in [0, 1); dim 0 of `shape` counts the examples of the batch."""
        return counter_hash.uniform(self.random_key(layer, name), shape, self.example_offset)

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


def isolated(ctx: Context) -> Context:
    """Returns a context that collects for itself, for a body that is traced on its own."""
    other = copy.copy(ctx)
    other.collected = Collected()
    return other
