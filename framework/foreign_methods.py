"""What layers have in other frameworks, for error messages that name what to write instead."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Container
from types import FrameType
from typing import Any

from tekso.framework.source_lines import place_of

_FOREIGN = {"forward": "PyTorch", "call": "Keras", "__call__": "Flax and Haiku"}
"""{name of a method: frameworks in which it computes the output of a layer}."""
_LAYER = "tekso.framework.layer"  # the module of the class Layer, whose __call__ is an error

_FPROP_CALL = re.compile(r"(\S+\.fprop)\(\) (?:takes|missing) ")

_WEIGHT = "self.weight(name, shape, dims=…, init=…"  # and more arguments
_REPLACEMENTS = (
    (
        ("add_variable", "add_weight", "register_parameter"),
        f"declare a weight in __init__: {_WEIGHT})",
    ),
    (
        ("add_non_trainable_weight", "register_buffer"),
        f"declare a weight that is not trained: {_WEIGHT}, trainable=False)",
    ),
    (
        ("add_module", "register_module"),
        "declare a child in __init__: self.child(name, Linear.Params(…))",
    ),
    (
        ("get_weights", "load_state_dict", "named_parameters", "parameters", "state_dict",
         "trainable_variables", "trainable_weights", "variables", "weights"),
        "the weights of a layer are an argument of fprop, theta; specs() has their paths and "
        "shapes, and load_weights of tekso.framework.run.weights reads those of a run",
    ),
    (
        ("eval", "train", "training"),
        "whether a step trains is in its context: ctx.is_training",
    ),
    (
        ("requires_grad", "requires_grad_", "trainable"),
        "to train some weights only, set learner.frozen, patterns of the paths of the others; a "
        f"weight that is never trained is {_WEIGHT}, trainable=False)",
    ),
    (
        ("cpu", "cuda", "to", "zero_grad"),
        "an execution places the weights, and computes their gradients and updates",
    ),
    (
        ("add_loss",),
        "write ctx.collect_loss(name, value) in fprop; the value is a sum over examples",
    ),
    (
        ("add_metric", "register_forward_hook", "register_full_backward_hook"),
        "collect figures by ctx.collect_metric(name, sum, weight) in fprop",
    ),
)  # fmt: skip
"""(attributes of layers of other frameworks, what Tekso has for them)."""
_HINTS = {name: text for names, text in _REPLACEMENTS for name in names}

_TENSOR_REPLACEMENTS = (
    (("view", "reshape", "flatten", "ravel"), "tf.reshape(x, shape)"),
    (("permute", "transpose", "T", "t", "mT", "swapaxes"), "tf.transpose(x, perm)"),
    (("unsqueeze",), "tf.expand_dims(x, axis)"),
    (("squeeze",), "tf.squeeze(x, axis)"),
    (("expand", "broadcast_to"), "tf.broadcast_to(x, shape)"),
    (("repeat",), "tf.tile(x, multiples); tf.repeat(x, n, axis) repeats each element"),
    (("size",), "x.shape for sizes that are fixed, tf.shape(x) for others"),
    (("dim",), "x.shape.rank"),
    (("to", "type", "type_as", "astype", "float", "half", "double", "long", "int", "bool"),
     "tf.cast(x, dtype)"),
    (("masked_fill",), "tf.where(mask, value, x)"),
    (("matmul", "mm", "bmm"), "tf.matmul(x, y)"),
    (("chunk", "split"), "tf.split(x, parts, axis)"),
    (("gather",), "tf.gather(x, ids, axis=axis, batch_dims=n)"),
    (("clamp", "clip"), "tf.clip_by_value(x, low, high)"),
    (("detach",), "tf.stop_gradient(x)"),
    (("contiguous", "clone", "cpu", "cuda"), "x itself"),
    (("sum", "mean", "prod", "max", "min", "any", "all"),
     "the function tf.reduce_{name}(x, axis)"),
    (("logsumexp",), "tf.reduce_logsumexp(x, axis)"),
    (("argmax", "argmin", "abs", "exp", "sqrt", "sigmoid", "tanh", "cumsum"),
     "the function tf.{name}(x)"),
    (("log",), "tf.math.log(x)"),
    (("pow", "square"), "x ** 2"),
    (("relu", "softmax"), "tf.nn.{name}(x)"),
    (("assign", "assign_add", "assign_sub"),
     "ctx.collect_statistic(self, name, sum, weight), whose mean updated_statistics of the layer "
     "gets, as in the layer BatchNorm"),
)  # fmt: skip
"""(methods of tensors of PyTorch and NumPy, what TensorFlow has for them)."""
_OF_TENSORS = {
    name: text.replace("{name}", name) for names, text in _TENSOR_REPLACEMENTS for name in names
}


def tensor_hint(name: str) -> str:
    """Returns what to write instead of a method of a tensor of another framework, or ""."""
    if name not in _OF_TENSORS:
        return ""
    return f"a tensor of TensorFlow has no .{name}: write {_OF_TENSORS[name]}"


def missing_fprop(cls: type) -> str:
    """Returns the message of the error that a class of a layer has no `fprop`."""
    text, found = f"{cls.__name__} has no fprop()", foreign_method(cls)
    if not found:
        return text
    method = getattr(cls, found)
    return (
        f"{text}, but {found}(), the method of {_FOREIGN[found]}: define "
        f"{_with_theta_and_ctx(method)} instead{place_of(method)}"
    )


def _with_theta_and_ctx(method: Any) -> str:
    """Returns fprop as text, with the inputs of a method: "fprop(self, theta, x, ctx)"."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(method).parameters.values()
    own = [p.name for p in found if p.kind in kinds and p.name not in ("self", "theta", "ctx")]
    more = [f"{p.name}=…" for p in found if p.kind is p.KEYWORD_ONLY]
    return f"fprop({', '.join(['self', 'theta', *own, 'ctx', *(['*', *more] if more else [])])})"


def fprop_hint(error: BaseException) -> str:
    """Returns what is wrong with the fprop that a call did not fit, or ""."""
    found, place = _FPROP_CALL.match(str(error)), error.__traceback__
    if not isinstance(error, TypeError) or found is None or place is None:
        return ""
    while place.tb_next is not None:
        place = place.tb_next
    # The calling function is the last one: it has the layer, or a layer above.
    layers = [v for v in place.tb_frame.f_locals.values() if _is_layer(v)]
    kinds = {type(one) for layer in layers for one in layer.walk()}
    called = [kind for kind in kinds if kind.fprop.__qualname__ == found[1]]
    if len(called) != 1:
        return ""
    cls, method = called[0], called[0].fprop
    if method.__module__ == _LAYER:
        return missing_fprop(cls)
    names = [*inspect.signature(method).parameters]
    if names[1:2] == ["theta"] and "ctx" in names:
        return f"it is fprop({', '.join(names)}){place_of(method)}"
    return (
        f"define {_with_theta_and_ctx(method)}: fprop is given theta, the inputs and ctx"
        f"{place_of(method)}"
    )


def theta_hint(error: BaseException) -> str:
    """Returns advice if a layer was given a tensor for its weights, which come first, or ""."""
    place = error.__traceback__
    while isinstance(error, AttributeError) and place is not None:
        found = place.tb_frame.f_locals
        layer, theta = found.get("self"), found.get("theta")
        if _is_layer(layer) and type(theta).__name__.endswith("Tensor"):
            name = type(layer).__name__
            return (
                f"{name}.fprop was given a tensor as theta: the weights of the layer come first, "
                "self.child.fprop(theta.child, x, ctx)"
            )
        place = place.tb_next
    return ""


def _is_layer(value: object) -> bool:
    """Returns whether an object is a layer that was built."""
    kinds = type(value).__mro__
    return any(kind.__module__ == _LAYER for kind in kinds) and "_children" in vars(value)


def build_hint(frame: FrameType) -> str:
    """Returns the end of a message about theta: that `build` of the layer that runs is not called.

    Returns "" if the frame runs no method of a layer with a method `build`.
    """
    kind = type(frame.f_locals.get("self"))
    is_layer = any(base.__module__ == _LAYER for base in kind.__mro__)
    if not is_layer or not hasattr(kind, "build"):
        return ""
    return f"; {kind.__name__}.build() is not called: declare weights and children in __init__"


def foreign_method(cls: type) -> str:
    """Returns the method by which a layer computes its output in another framework, or ""."""
    own = {name for base in cls.__mro__ if base.__module__ != _LAYER for name in vars(base)}
    return next((name for name in _FOREIGN if name in own), "")


def attribute_hint(name: str, fields: Container[str] = ()) -> str:
    """Returns the end of a message about an attribute: ": " and what Tekso has for it, or "".

    Args:
      name: the attribute.
      fields: names of the Params of the layer.
    """
    if name in fields:
        return f": it is in the Params, so write self.params.{name}"
    return f": {_HINTS[name]}" if name in _HINTS else ""


def made_in_trace(layer: object) -> RuntimeError:
    """Returns the error that the weights of a layer are drawn while a function is traced."""
    name = type(layer).__name__
    text = (
        f"{name}.init() runs while a function is traced, such as a tf.function or that of "
        "Dataset.map: its weights would be constants, which are neither trained nor saved. Call "
        "theta = layer.init() before, and use theta in the function"
    )
    if _is_in_other_layer(layer):
        text = (
            f"{name}.init() runs while a step is traced: its weights would be constants, which are "
            "neither trained nor saved. Declare the layer in the __init__ of its parent with "
            f"self.child(name, {name}.Params(…)), and compute it with self.name.fprop(theta.name, "
            "x, ctx)"
        )
    error = RuntimeError(text)
    vars(error)["ag_pass_through"] = True  # or else AutoGraph makes a stack of the message
    return error


def _is_in_other_layer(layer: object) -> bool:
    """Returns whether a method of another layer runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        kinds = type(found).__mro__
        if found is not layer and any(kind.__module__ == _LAYER for kind in kinds):
            return True
        frame = frame.f_back
    return False


def not_called(cls: type, name: str, *, is_indexed: bool) -> str:
    """Returns the message of the error that a layer is called like a function.

    Args:
      cls: class of the layer.
      name: its name in its parent, "blocks/0" in a list; "" if it has no parent.
      is_indexed: whether it is in a list.
    """
    place = f".{name}" if name else ""
    if is_indexed:
        place = "{}[{}]".format(*place.rsplit("/", 1))
    called = f"self{place}" if place else "layer"
    return (
        f"{cls.__name__} is not called: its weights are an argument, so write "
        f"{called}.fprop(theta{place}, x, ctx)"
    )
