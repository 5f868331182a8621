"""Layer: declares weights and children when built, computes in a pure `fprop(theta, x, ctx)`.

A layer holds no variables and knows no devices. What it declares are weight specs; whoever runs it
(an execution, or `layer.init(seed)` in a notebook) makes the tensors and passes them as theta.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.initializers import Fans, Initializer
from tekso.framework.params import Configurable, Params, param
from tekso.framework.theta import SEPARATOR, Theta
from tekso.framework.weight_spec import ANY_INDEX, STACK_DIM, WeightSpec

_RENAMED = {"mixes_examples": "couples_examples"}
"""{attribute of a layer: its name now}."""


class Layer(Configurable):
    """Base of all layers.

    A subclass declares weights and children in `__init__` and computes in `fprop`:

        class Scale(Layer):
            class Params(Layer.Params):
                dim: int = param("Size of the last dim.", default=REQUIRED)

            def __init__(self, params):
                super().__init__(params)
                self.weight("scale", [self.params.dim], dims=("embed",), init=Ones.Params())

            def fprop(self, theta, x, ctx):
                return x * theta.scale

        layer = Scale.Params(dim=3).instantiate()
        layer.fprop(layer.init(seed=0), tf.ones([2, 3]), StepContext())
    """

    class Params(Configurable.Params):
        """Params of a layer."""

        dtype: str = param("Data type of the weights.", default="float32")

    couples_examples = False
    """Whether training couples the examples of a batch (as batch statistics do)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses attributes that were renamed: nobody would read them.

        Raises:
          TypeError: names the attribute and what it is called now.
        """
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old} is called {new} now: write {new} = …")

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses attributes that were renamed, as `__init_subclass__` does."""
        if name in _RENAMED:
            new = _RENAMED[name]
            raise AttributeError(f"{type(self).__name__}: self.{name} is called self.{new} now")
        super().__setattr__(name, value)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._weights: dict[str, WeightSpec] = {}
        self._children: dict[str, Layer | list[Layer]] = {}
        self._parent: Layer | None = None
        self._name = ""
        self._indexed = False  # a layer of a list of children
        self._stack_size: int | None = None  # a layer whose weights are stacked

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explains what is missing where a subclass does not call `Layer.__init__`."""
            if name in ("params", "_weights", "_children", "_parent"):
                kind = type(self).__name__
                raise AttributeError(f"{kind}.__init__ has to begin with super().__init__(params)")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- declaring ---

    def weight(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dims: Sequence[str | None],
        init: Any,
        fan_in: int | None = None,
        fan_out: int | None = None,
        trainable: bool = True,
        dtype: str | None = None,
    ) -> None:
        """Declares a weight of this layer.

        Args:
          name: its name in theta.
          shape: its sizes.
          dims: a name for every dim.
          init: Params of its Initializer.
          fan_in: inputs of a unit; by default the product of all dims but the last.
          fan_out: outputs of an input; by default the last dim.
          trainable: False for statistics that are not learned.
          dtype: by default that of the layer's Params.

        Raises:
          TypeError: `init` is no Params.
          ValueError: the name is taken or cannot be an attribute of theta, a size is not positive,
            or dims do not fit the shape.
        """
        where = f"{type(self).__name__}.weight({name!r})"
        self._check_name(name, where)
        shape = tuple(int(n) for n in shape)
        if len(dims) != len(shape) or any(n <= 0 for n in shape):
            raise ValueError(
                f"{where}: shape {list(shape)} with dims {list(dims)}: "
                "sizes must be positive and each needs a dim name (or None)"
            )
        named = [d for d in dims if d is not None]
        if len(set(named)) != len(named):
            raise ValueError(
                f"{where}: dims {list(dims)} name one dim twice; a dim that no mesh axis is to "
                "shard may be None"
            )
        _check_params(init, f"{where}: init", "Normal")
        owner = init.owner
        if not isinstance(owner, type) or not issubclass(owner, Initializer):
            raise TypeError(f"{where}: init is {type(init).__qualname__}, not of an Initializer")
        try:
            dtype = str(tf.as_dtype(dtype or self.params.dtype).name)
        except TypeError:
            raise TypeError(f"{where}: there is no dtype {dtype or self.params.dtype!r}") from None
        fans = Fans(
            fan_in if fan_in is not None else math.prod(shape[:-1]),
            fan_out if fan_out is not None else (shape[-1] if shape else 1),
        )
        self._weights[name] = WeightSpec(
            path=name,
            shape=shape,
            dims=tuple(dims),
            init=init.instantiate(),
            dtype=dtype,
            trainable=trainable,
            fans=fans,
            template=name,
        )

    def child(self, name: str, params: Any) -> Any:
        """Builds a child from its Params, keeps it as attribute `name` and returns it.

        Raises:
          TypeError: given anything but the Params of a layer.
          ValueError: the name is taken, or cannot be an attribute of theta.
        """
        layer = self._adopt(name, params)
        self._keep(name, layer)
        return layer

    def child_stack(self, name: str, params: Any, size: int) -> Any:
        """Builds one child for `size` layers, its weights stacked over a leading dim "layers".

        Use it with `ops.scan` over `theta[name]`; layer i starts as `child_list(name, …)[i]` would.
        """
        if size < 1:
            raise ValueError(f"{type(self).__name__}.{name}: {size} layers, want at least 1")
        layer = self._adopt(name, params)
        layer._stack_size = size
        self._keep(name, layer)
        return layer

    def child_list(self, name: str, params: Sequence[Any]) -> list[Any]:
        """Builds children `name/0`, `name/1`, …, kept as the list attribute `name`.

        Theta has them by number, in no order; use the number of a layer for both:

            for i, block in enumerate(self.blocks):
                x = block.fprop(theta.blocks[i], x, ctx)
        """
        layers = [self._adopt(f"{name}{SEPARATOR}{i}", p) for i, p in enumerate(params)]
        for layer in layers:
            layer._indexed = True
        self._keep(name, layers)
        return layers

    def _check_name(self, name: str, where: str) -> None:
        if self._parent is not None:
            raise ValueError(
                f"{where}: {self.path} is built, and its weights are allocated: declare weights "
                "and children in __init__"
            )
        if name in self._weights or name in self._children:
            raise ValueError(f"{where}: the name is taken")
        if not name.isidentifier() or name.startswith("__") or hasattr(Theta, name):
            raise ValueError(
                f"{where}: theta.{name} would not be the weight or child; a name is a Python "
                "identifier and no method of dict"
            )

    def _adopt(self, name: str, params: Any) -> Layer:
        _check_params(params, f"{type(self).__name__}: child {name!r}", "Linear")
        layer = params.instantiate()
        if not isinstance(layer, Layer):
            raise TypeError(f"{type(self).__name__}.{name}: {type(layer).__name__} is not a Layer")
        layer._parent, layer._name = self, name
        return layer

    def _keep(self, name: str, value: Layer | list[Layer]) -> None:
        where = f"{type(self).__name__}: child {name!r}"
        self._check_name(name, where)
        if hasattr(self, name):
            raise ValueError(f"{where}: the layer has an attribute of that name")
        self._children[name] = value
        setattr(self, name, value)

    # --- what was declared ---

    @property
    def path(self) -> str:
        """Path of this layer from the root: "decoder/layers/ffn"; "" for the root."""
        return self._join(self._name, lambda parent: parent.path)

    def stack_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the repeated stacks that this layer is in, the outermost first."""
        above = self._parent.stack_sizes() if self._parent is not None else ()
        return above if self._stack_size is None else (*above, self._stack_size)

    @property
    def pattern(self) -> str:
        """The path with "*" for every index of a stack or list: names its random streams."""
        name = self._name
        if self._indexed:
            name = f"{name.rpartition(SEPARATOR)[0]}{SEPARATOR}{ANY_INDEX}"
        elif self._stack_size is not None:
            name = f"{name}{SEPARATOR}{ANY_INDEX}"
        return self._join(name, lambda parent: parent.pattern)

    def _join(self, name: str, of: Any) -> str:
        above = of(self._parent) if self._parent is not None else ""
        return SEPARATOR.join(part for part in (above, name) if part)

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Yields (name, layer) of every direct child; list children as "name/0", …."""
        for name, value in self._children.items():
            if isinstance(value, Layer):
                yield name, value
            else:
                for i, layer in enumerate(value):
                    yield f"{name}{SEPARATOR}{i}", layer

    def walk(self) -> Iterator[Layer]:
        """Yields this layer and all below it."""
        yield self
        for _, layer in self.children():
            yield from layer.walk()

    def specs(self) -> dict[str, WeightSpec]:
        """Returns {path from this layer: spec} of all weights of this layer and below."""
        specs = dict(self._weights)
        for name, layer in self.children():
            for spec in layer.specs().values():
                path = f"{name}{SEPARATOR}{spec.path}"
                template = f"{name}{SEPARATOR}{spec.template}"
                spec = dataclasses.replace(spec, path=path, template=template)
                if layer._stack_size is not None:
                    spec = dataclasses.replace(
                        spec,
                        shape=(layer._stack_size, *spec.shape),
                        dims=(STACK_DIM, *spec.dims),
                        stacked=spec.stacked + 1,
                        template=f"{name}{SEPARATOR}{ANY_INDEX}{template[len(name) :]}",
                    )
                specs[path] = spec
        return specs

    def own_specs(self) -> list[WeightSpec]:
        """Returns the specs of the weights of this layer itself, none of those below."""
        return list(self._weights.values())

    def init(self, seed: int = 0) -> Theta:
        """Returns a theta of tensors drawn from `seed`: for eager use, notebooks and tests."""
        return self.theta(
            {path: tf.constant(spec.initial_value(seed)) for path, spec in self.specs().items()}
        )

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """Returns the nested form of {path from this layer: tensor}; every child has its place.

        Raises:
          KeyError: a weight is missing; its path.
        """
        theta = theta_lib.unflatten(flat)
        self._add_places(theta)
        return theta

    def _add_places(self, theta: Theta, path: str = "") -> None:
        for name in self._weights:
            if name not in theta:
                raise KeyError(f"{path}{name}")
        for name, layer in self.children():
            node = theta
            for part in name.split(SEPARATOR):
                node = node.setdefault(part, Theta())
            layer._add_places(node, f"{path}{name}{SEPARATOR}")

    # --- computing ---

    def fprop(self, theta: Theta, x: Any, ctx: StepContext) -> Any:
        """Computes the output: a pure function of theta, the inputs and the step context."""
        raise NotImplementedError(f"{type(self).__name__} has no fprop()")

    def new_statistics(
        self, weights: Mapping[str, tf.Tensor], means: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Returns new values of all untrained weights that a step's statistics change, by path.

        Args:
          weights: at least those of the layers in `means`, by path from this layer, the root.
          means: of what `ctx.collect_statistic` was given: "<layer path>/<name>" -> mean.
        """
        new: dict[str, tf.Tensor] = {}
        theta = theta_lib.unflatten(weights) if means else Theta()
        for path, node, layer in self._nodes(theta):
            head = f"{path}{SEPARATOR}" if path else ""
            own = {
                key[len(head) :]: mean
                for key, mean in means.items()
                if key.startswith(head) and SEPARATOR not in key[len(head) :]
            }
            if own:
                changed = layer.updated_statistics(node, own)
                new.update({f"{head}{name}": value for name, value in changed.items()})
        return new

    def _nodes(self, theta: Theta, path: str = "") -> Iterator[tuple[str, Theta, Layer]]:
        yield path, theta, self
        for name, layer in self.children():
            node = theta
            for part in name.split(SEPARATOR):
                node = node.get(part, Theta())
            yield from layer._nodes(node, f"{path}{SEPARATOR}{name}" if path else name)

    def updated_statistics(
        self, theta: Theta, statistics: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Returns new values of this layer's own untrained weights, by name.

        Args:
          theta: this layer's weights.
          statistics: by name, means over the global batch of what `ctx.collect_statistic` got.
        """
        raise NotImplementedError(
            f"{type(self).__name__} collects statistics {sorted(statistics)} but has no "
            "updated_statistics()"
        )


def _check_params(value: Any, what: str, example: str) -> None:
    if isinstance(value, Params):
        return
    given = (
        value.__name__ if isinstance(value, type) else f"an object of type {type(value).__name__}"
    )
    raise TypeError(f"{what} is {given}, and has to be Params, as {example}.Params(…)")
