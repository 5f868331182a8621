"""Layer: declares weights and children when built, and computes in a pure `fprop(theta, x, ctx)`.

A layer has no variables and does not depend on devices. It declares weight specs. An execution, or
`layer.init(seed)` in a notebook, creates the tensors and passes them to `fprop` as theta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.foreign_methods import attribute_hint, made_in_trace, missing_fprop, not_called
from tekso.framework.initializers import Fans, Initializer
from tekso.framework.layer_notes import name_in_errors
from tekso.framework.params import Configurable, Params, param
from tekso.framework.theta import SEPARATOR, Theta
from tekso.framework.weight_shapes import checked_shape
from tekso.framework.weight_spec import ANY_INDEX, SpecPlace, WeightSpec

_RENAMED = {"mixes_examples": "couples_examples"}
"""{former name of an attribute of layers: its current name}."""


class Layer(Configurable):
    """Base class of all layers.

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
    """Whether the layer couples the examples of a batch in training, as batch statistics do."""

    gathers_examples = False
    """Whether the layer couples all examples of the global batch by `ops.sum_over_replicas`: its
    result is the same for every number of replicas, but not for parts of a batch that run one after
    the other. Such a layer also sets `couples_examples`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Rejects attributes with a former name, which would have no effect.

        Raises:
          TypeError: the class has such an attribute; the message gives its current name.
        """
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old} was renamed to {new}: write {new} = …")
        name_in_errors(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Rejects attributes that would have no effect: former names, and `trainable = False`.

        Raises:
          AttributeError: the name is a former name, or freezes a layer of Keras or PyTorch; the
            message says what to write instead.
        """
        if name in _RENAMED:
            new = _RENAMED[name]
            raise AttributeError(f"{type(self).__name__}: self.{name} was renamed to self.{new}")
        if value is False and name in ("trainable", "requires_grad"):
            kind = type(self).__name__
            raise AttributeError(f"{kind}.{name} = False has no effect{attribute_hint(name)}")
        super().__setattr__(name, value)

    def __init__(self, params: Layer.Params) -> None:
        super().__init__(params)
        self._weights: dict[str, WeightSpec] = {}
        self._children: dict[str, Layer | list[Layer]] = {}
        self._parent: Layer | None = None
        self._name = ""
        self._indexed = False  # whether this layer belongs to a child_list
        self._stack_size: int | None = None  # number of layers if this is a child_stack

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an AttributeError, with a hint if a subclass did not call `Layer.__init__`."""
            kind = type(self).__name__
            if name in ("params", "_weights", "_children", "_parent"):
                raise AttributeError(f"{kind}.__init__ must begin with super().__init__(params)")
            if name in self._weights:
                where = f"theta.{name}, of the theta that fprop is given"
                raise AttributeError(f"{kind}.{name} is a weight: read it as {where}")
            hint = attribute_hint(name, self.params.fields())
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Raises a TypeError that says how to compute the layer."""
            raise TypeError(not_called(type(self), self._name, is_indexed=self._indexed))

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
        scale: float | None = None,
        most: float | None = None,
    ) -> None:
        """Declares a weight of this layer.

        Args:
          name: name of the weight in theta.
          shape: its shape.
          dims: a dimension name, or None, for every dim.
          init: Params of its Initializer.
          fan_in: number of inputs of each output unit; by default the product of all dims but the
            last.
          fan_out: number of outputs of each input unit; by default the size of the last dim.
          trainable: False for statistics that are not learned.
          dtype: by default the dtype in the layer's Params.
          scale: the factor of products with the weight, if the layer's Params determine it.
          most: every update limits the elements to this value; None: no limit.

        Raises:
          TypeError: `init` is not Params of an Initializer, the dtype is unknown, the shape or the
            dims are no sequence, or a size is no whole number.
          ValueError: the name is taken or cannot be an attribute of theta, a size is not positive,
            the number of dims differs from the rank of the shape, or a dim is named twice.
        """
        where = f"{type(self).__name__}.weight({name!r})"
        self._check_name(name, where)
        shape = checked_shape(where, shape, dims)
        _check_params(init, f"{where}: init", "Normal")
        owner = init.owner
        if not isinstance(owner, type) or not issubclass(owner, Initializer):
            raise TypeError(
                f"{where}: init is {type(init).__qualname__}, but must be Params of an Initializer"
            )
        try:
            dtype = str(tf.as_dtype(dtype or self.params.dtype).name)
        except TypeError:
            raise TypeError(f"{where}: unknown dtype {dtype or self.params.dtype!r}") from None
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
            scale=scale,
            most=most,
        )

    def child(self, name: str, params: Any) -> Any:
        """Builds a child layer from its Params, stores it as attribute `name` and returns it.

        Raises:
          TypeError: `params` is not Params of a layer.
          ValueError: the name is taken, or cannot be an attribute of theta.
        """
        layer = self._adopt(name, params)
        self._keep(name, layer)
        return layer

    def child_stack(self, name: str, params: Any, size: int) -> Any:
        """Builds one child for `size` layers; a leading dim "layers" of its weights stacks them.

        Use it with `ops.scan` over `theta[name]`. The initial values of layer i are the same as for
        `child_list(name, …)[i]`.

        Raises:
          ValueError: `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"{type(self).__name__}.{name}: {size} layers, must be at least 1")
        layer = self._adopt(name, params)
        layer._stack_size = size
        self._keep(name, layer)
        return layer

    def child_list(self, name: str, params: Sequence[Any]) -> list[Any]:
        """Builds children `name/0`, `name/1`, … and stores them as a list in attribute `name`.

        The children in theta are not ordered; index the list and theta with the same number:

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
                f"{where}: {self.path} is already built; declare weights and children in __init__"
            )
        if name in self._weights or name in self._children:
            raise ValueError(f"{where}: the name is taken")
        if not name.isidentifier() or name.startswith("__") or hasattr(Theta, name):
            raise ValueError(
                f"{where}: theta.{name} could not be used; a name must be a Python identifier and "
                "not a method of dict"
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
            kind = "a method" if callable(getattr(type(self), name, None)) else "an attribute"
            raise ValueError(f"{where} has the name of {kind} of {type(self).__name__}: rename it")
        self._children[name] = value
        setattr(self, name, value)

    # --- declared weights and children ---

    @property
    def path(self) -> str:
        """Path of this layer from the root: "decoder/layers/ffn"; "" for the root."""
        return self._join(self._name, lambda parent: parent.path)

    def stack_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the repeated stacks that contain this layer, outermost first."""
        above = self._parent.stack_sizes() if self._parent is not None else ()
        return above if self._stack_size is None else (*above, self._stack_size)

    @property
    def pattern(self) -> str:
        """The path with "*" for every index of a stack or list; random streams are named by it."""
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
        """Yields (name, layer) for every direct child; layers of a list as "name/0", …."""
        for name, value in self._children.items():
            if isinstance(value, Layer):
                yield name, value
            else:
                yield from ((f"{name}{SEPARATOR}{i}", one) for i, one in enumerate(value))

    def walk(self) -> Iterator[Layer]:
        """Yields this layer and all its descendants."""
        yield self
        for _, layer in self.children():
            yield from layer.walk()

    def specs(self) -> dict[str, WeightSpec]:
        """Returns {path from this layer: spec} for the weights of this layer and descendants."""
        specs = dict(self._weights)
        for name, layer in self.children():
            layer._add_specs(specs, SpecPlace().of_child(name, layer._stack_size))
        return specs

    def _add_specs(self, specs: dict[str, WeightSpec], place: SpecPlace) -> None:
        """Adds the specs of this layer and its descendants; each is copied once, at any depth."""
        inherits = type(self).specs is Layer.specs
        for spec in (self._weights if inherits else self.specs()).values():
            specs[place.path + spec.path] = spec.below(place)
        for name, layer in self.children() if inherits else ():
            layer._add_specs(specs, place.of_child(name, layer._stack_size))

    def init(self, seed: int = 0) -> Theta:
        """Returns a theta of values drawn from `seed`, for notebooks and tests; fails in a step."""
        if not tf.executing_eagerly():
            raise made_in_trace(self)
        specs = self.specs().items()
        return self.theta({path: tf.constant(spec.initial_value(seed)) for path, spec in specs})

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """Returns {path from this layer: tensor} as a nested theta, with a node for every child.

        Raises:
          KeyError: a weight is missing; the message is its path.
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
        raise NotImplementedError(missing_fprop(type(self)))

    def new_statistics(
        self, weights: Mapping[str, tf.Tensor], means: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Returns {path: new value} of the untrained weights that the statistics of a step change.

        Call it on the root layer.

        Args:
          weights: {path: weight}, at least those of the layers in `means`.
          means: {"<layer path>/<name>": mean} of the values given to `ctx.collect_statistic`.
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

    @property
    def has_statistics(self) -> bool:
        """Whether the layer tracks batch statistics: it has its own `updated_statistics`."""
        return type(self).updated_statistics is not Layer.updated_statistics

    def updated_statistics(
        self, theta: Theta, statistics: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Returns {path: new value} of untrained weights: of this layer, or of layers inside of it.

        Args:
          theta: the weights of this layer, before the step; in a pipeline, those of the stage.
          statistics: {name: mean over the global batch} of the values given to
            `ctx.collect_statistic`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} collects statistics {sorted(statistics)} but has no "
            "updated_statistics()"
        )


def _check_params(value: Any, what: str, example: str) -> None:
    if isinstance(value, Params):
        return
    kind = type(value).__name__
    given = value.__name__ if isinstance(value, type) else f"an object of type {kind}"
    raise TypeError(f"{what} is {given}, but must be Params, for example {example}.Params(…)")
