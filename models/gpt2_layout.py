"""The public layout of GPT-2's weights, and its conversion to and from TransformerLm.

    wte.weight [V, D]   wpe.weight [T, D]   ln_f.weight, ln_f.bias [D]       the head is tied to wte
    h.0.ln_1.weight, .bias [D]              h.0.attn.c_attn.weight [D, 3 D], .bias: q, k, v
    h.0.ln_2.weight, .bias [D]              h.0.attn.c_proj.weight [D, D], .bias
    h.0.mlp.c_fc.weight [D, 4 D], .bias     h.0.mlp.c_proj.weight [4 D, D], .bias

Matrices are [inputs, outputs]. All names may begin with "transformer.".

Legend: V vocabulary, T positions, D model dim.
Source: Radford et al. 2019; the file model.safetensors of https://huggingface.co/openai-community/gpt2.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.weight_spec import WeightSpec
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import LayerNorm
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm

Read = Callable[[str], np.ndarray]

METADATA = {"format": "pt"}
"""What a file in this layout has in its metadata: other readers require it."""

_HEAD = "lm_head.weight"
_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # constants, not weights
_EPSILON = 1e-5
_MOST_PROBLEMS = 8

_WHOLE = {
    "embedding/table": "wte.weight",
    "positions/w": "wpe.weight",
    "final_norm/scale": "ln_f.weight",
    "final_norm/bias": "ln_f.bias",
}
_OF_LAYER = {
    "attention_norm/scale": "ln_1.weight",
    "attention_norm/bias": "ln_1.bias",
    "attention/out": "attn.c_proj.weight",
    "attention/out_bias": "attn.c_proj.bias",
    "feed_forward_norm/scale": "ln_2.weight",
    "feed_forward_norm/bias": "ln_2.bias",
    "feed_forward/hidden/w": "mlp.c_fc.weight",
    "feed_forward/hidden/b": "mlp.c_fc.bias",
    "feed_forward/output/w": "mlp.c_proj.weight",
    "feed_forward/output/b": "mlp.c_proj.bias",
}
_JOINED = {f"attention/{name}": i for i, name in enumerate("qkv")}


class Gpt2LayoutError(ValueError):
    """Tensors are not in the layout of GPT-2, or the model computes something else."""


class TensorPlace(NamedTuple):
    """Where the weight of one layer is: a tensor, or a third of the last dim of a tensor.

    Attributes:
      name: name of the tensor.
      third: which third: 0 q, 1 k, 2 v; None: the whole tensor.
      shape: shape of the tensor.
    """

    name: str
    third: int | None
    shape: tuple[int, ...]


class Gpt2Layout:
    """Converts the weights of a model, which must compute what GPT-2 computes.

    Args:
      model: a TransformerLm.

    Raises:
      Gpt2LayoutError: the model differs from GPT-2 in more than sizes; the text says how.
    """

    def __init__(self, model: Any) -> None:
        _check_model(model)
        self._specs: dict[str, WeightSpec] = model.specs()
        self._vocab_size: int = model.params.vocab_size

    def from_gpt2(self, names: Set[str], read: Read) -> dict[str, np.ndarray]:
        """Returns {path from the model: weight} of tensors in the layout of GPT-2.

        Padding rows of the vocabulary, which no token has, become 0.

        Args:
          names: of the tensors.
          read: returns the tensor of a name.

        Shapes:
          returns: the shapes of the specs of the model, with their dtypes
        Raises:
          Gpt2LayoutError: tensors are missing or unknown, or have other shapes; or the head is not
            tied to the embedding.
        """
        full = {_plain(name): name for name in names}
        shapes = {p.name: p.shape for path in self._specs for p in self._places(path)}
        unknown = full.keys() - shapes.keys() - {_HEAD}
        problems = [f"missing {name}" for name in shapes if name not in full]
        problems += [f"unknown {n}" for n in sorted(unknown) if not _MASKS.fullmatch(n)]
        _refuse("the tensors do not fit the model", problems)
        for name, shape in shapes.items():
            found = read(full[name]).shape
            if found != shape:
                problems.append(f"{name} is {list(found)}, must be {list(shape)}")
        if _HEAD in full and not np.array_equal(read(full[_HEAD]), read(full["wte.weight"])):
            problems.append(f"{_HEAD} differs from wte.weight, but the model ties them")
        _refuse("the tensors do not fit the model", problems)
        return {
            path: np.stack([self._read(spec, p, full, read) for p in self._places(path)])
            .reshape(spec.shape)
            .astype(tf.as_dtype(spec.dtype).as_numpy_dtype)
            for path, spec in self._specs.items()
        }

    def to_gpt2(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns tensors in the layout of GPT-2, by name; without padding rows.

        Args:
          weights: {path from the model: weight}.
        """
        tensors: dict[str, np.ndarray] = {}
        thirds: dict[str, dict[int, np.ndarray]] = {}
        for path, spec in self._specs.items():
            layers = weights[path].reshape(-1, *spec.shape[spec.stacked :])
            for place, value in zip(self._places(path), layers, strict=True):
                if place.third is not None:
                    flat = value.reshape(*place.shape[:-1], -1)
                    thirds.setdefault(place.name, {})[place.third] = flat
                else:
                    tensors[place.name] = value.reshape(-1, *place.shape[1:])[: place.shape[0]]
        joined = {
            n: np.concatenate([parts[i] for i in range(3)], -1) for n, parts in thirds.items()
        }
        return {**tensors, **joined}

    def _places(self, path: str) -> list[TensorPlace]:
        """Returns the place of a weight, or of each layer of a stacked weight."""
        spec = self._specs[path]
        indices = itertools.product(*map(range, spec.shape[: spec.stacked]))
        inner = spec.shape[spec.stacked :]
        return [self._place(spec.path_of_layer(index), inner) for index in indices]

    def _place(self, path: str, shape: tuple[int, ...]) -> TensorPlace:
        """Returns the place of the weight of one layer, given its unrolled path and its shape."""
        if path == "embedding/table":
            shape = (self._vocab_size, *shape[1:])
        if path in _WHOLE:
            return TensorPlace(_WHOLE[path], None, shape)
        found = re.fullmatch(r"stack/layers/(\d+)/(.*)", path)
        layer, name = found.groups() if found else ("", path)
        if name in _OF_LAYER:
            if name == "attention/out":
                shape = (shape[0] * shape[1], shape[2])
            return TensorPlace(f"h.{layer}.{_OF_LAYER[name]}", None, shape)
        third = _JOINED.get(name.removesuffix("_bias"))
        if third is None:
            raise Gpt2LayoutError(f"GPT-2 has no tensor for {path}")
        kind = "bias" if name.endswith("_bias") else "weight"
        shape = (*shape[:-2], 3 * shape[-2] * shape[-1])
        return TensorPlace(f"h.{layer}.attn.c_attn.{kind}", third, shape)

    def _read(
        self, spec: WeightSpec, place: TensorPlace, full: Mapping[str, str], read: Read
    ) -> np.ndarray:
        """Returns the weight of one layer from a tensor of the right shape."""
        value, shape = read(full[place.name]), spec.shape[spec.stacked :]
        if place.third is not None:
            value = np.split(value, 3, axis=-1)[place.third]
        if "vocab" in spec.dims:
            value = np.pad(value, [(0, shape[0] - len(value)), (0, 0)])
        return value.reshape(shape)


def _plain(name: str) -> str:
    return name.removeprefix("transformer.")


def _check_model(model: Any) -> None:
    """Raises a Gpt2LayoutError if a model computes something else than GPT-2."""
    if type(model) is not TransformerLm:
        raise Gpt2LayoutError(f"the model is {type(model).__name__}, but GPT-2 is a TransformerLm")
    p = model.params
    problems = [] if p.softmax is None else ["softmax is set, but GPT-2 ties it to the embedding"]
    problems += _differences("embedding", p.embedding, {"scale": "none"})
    problems += _kind("positions", p.positions, LearnedPositions)
    problems += _norm("final_norm", p.final_norm)
    for layer in model.stack.walk():
        if not isinstance(layer, TransformerLayer):
            continue
        where, own = layer.path, layer.params
        problems += _differences(where, own, {"norm_position": "pre", "memory_attention": None})
        problems += _norm(f"{where}.norm", own.norm)
        problems += _differences(f"{where}.attention", own.attention, _ATTENTION)
        problems += _kind(f"{where}.feed_forward", own.feed_forward, FeedForward)
        if type(layer.feed_forward) is FeedForward:
            problems += _differences(f"{where}.feed_forward", own.feed_forward, _FEED_FORWARD)
    if not any(isinstance(layer, TransformerLayer) for layer in model.stack.walk()):
        problems.append("the stack has no TransformerLayer")
    _refuse("the model is not GPT-2", list(dict.fromkeys(problems)))


_ATTENTION = {
    "num_kv_heads": None,
    "mask": "causal",
    "window": None,
    "positions": None,
    "query_scale": None,
    "use_bias": True,
    "adapter": None,
}
_FEED_FORWARD = {"activation": "gelu_tanh", "use_bias": True, "adapter": None}


def _norm(where: str, params: Any) -> list[str]:
    return _kind(where, params, LayerNorm) or _differences(
        where, params, {"epsilon": _EPSILON, "use_bias": True}
    )


def _kind(where: str, params: Any, wanted: type) -> list[str]:
    given = None if params is None else params.owner
    if given is wanted:
        return []
    return [f"{where} is {given.__name__ if given else None}, but in GPT-2 {wanted.__name__}"]


def _differences(where: str, params: Any, wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{where}.{name} is {params.get(name)!r}, but in GPT-2 {value!r}"
        for name, value in wanted.items()
        if params.get(name) != value
    ]


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        listed = "; ".join(problems[:_MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise Gpt2LayoutError(f"{what}: {listed}")
