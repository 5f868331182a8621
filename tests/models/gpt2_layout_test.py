"""GPT-2's layout: logits against GPT-2 in NumPy, the published shapes, both directions, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.gpt2_layout import Gpt2Layout, Gpt2LayoutError
from tekso.models.layers.lora import Lora
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack
from tekso.params.lm.gpt import Gpt2

DIM, HEADS, LAYERS, VOCAB, LENGTH = 12, 3, 2, 17, 7
IDS = np.random.default_rng(3).integers(0, VOCAB, (2, 5))


def shapes(dim: int, layers: int, vocab: int, length: int) -> dict[str, tuple[int, ...]]:
    """The table of the published file."""
    found: dict[str, tuple[int, ...]] = {"wte.weight": (vocab, dim), "wpe.weight": (length, dim)}
    for i in range(layers):
        for norm in ("ln_1", "ln_2"):
            found |= {f"h.{i}.{norm}.weight": (dim,), f"h.{i}.{norm}.bias": (dim,)}
        for name, inner, outer in [
            ("attn.c_attn", dim, 3 * dim),
            ("attn.c_proj", dim, dim),
            ("mlp.c_fc", dim, 4 * dim),
            ("mlp.c_proj", 4 * dim, dim),
        ]:
            found |= {f"h.{i}.{name}.weight": (inner, outer), f"h.{i}.{name}.bias": (outer,)}
    return found | {"ln_f.weight": (dim,), "ln_f.bias": (dim,)}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    table = shapes(DIM, LAYERS, VOCAB, LENGTH)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in table.items()}


def gpt2(w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The logits of GPT-2 in NumPy float64, after Radford et al. 2018 and 2019."""
    w = {name: value.astype(np.float64) for name, value in w.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred / spread * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    length, size = ids.shape[1], DIM // HEADS
    x = w["wte.weight"][ids] + w["wpe.weight"][:length]
    for layer in range(LAYERS):
        at = f"h.{layer}."
        joined = linear(norm(x, f"{at}ln_1"), f"{at}attn.c_attn")
        attended = np.zeros_like(x)
        for head in range(HEADS):
            q, k, v = (
                joined[..., third * DIM + head * size : third * DIM + (head + 1) * size]
                for third in range(3)
            )
            scores = q @ k.swapaxes(1, 2) / math.sqrt(size)
            scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended[..., head * size : (head + 1) * size] = weights @ v
        x = x + linear(attended, f"{at}attn.c_proj")
        h = linear(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{at}mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def model(repeated: bool = False, **changes: Any) -> Any:
    params = Gpt2().task().model.copy()
    if repeated:
        layer = params.stack.layer.copy()
        params.stack = RepeatedStack.Params(num_layers=LAYERS, layer=layer)
    sizes = {"dim": DIM, "vocab_size": VOCAB, "stack.num_layers": LAYERS}
    sizes |= {"positions.max_length": LENGTH, "stack.layer.attention.num_heads": HEADS}
    sizes |= {"stack.layer.feed_forward.hidden_dim": 4 * DIM}
    return params.set({**sizes, **changes}).instantiate()


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("changes", [{}, {"embedding.vocab_multiple": 8}], ids=["", "padded"])
def test_logits_are_those_of_gpt2_and_the_way_back_is_exact(
    repeated: bool, changes: dict[str, Any]
) -> None:
    own, given = model(repeated, **changes), tensors()
    layout = Gpt2Layout(own)
    found = layout.from_gpt2(given.keys(), given.__getitem__)
    theta = own.theta({path: tf.constant(value) for path, value in found.items()})
    logits = own.logits(theta, tf.constant(IDS, tf.int32), StepContext()).numpy()
    want = gpt2(given, IDS)
    assert np.abs(want).max() > 2
    np.testing.assert_allclose(logits[..., :VOCAB], want, rtol=1e-5, atol=1e-5)
    back = layout.to_gpt2(found)
    assert back.keys() == given.keys()
    for name, value in given.items():
        np.testing.assert_array_equal(back[name], value)


def test_gpt2_has_the_shapes_of_the_published_model() -> None:
    own = Gpt2().task().model.copy().instantiate()
    assert sum(spec.size for spec in own.specs().values()) == 124_439_808
    table = shapes(768, 12, 50_257, 1024)
    assert sum(math.prod(shape) for shape in table.values()) == 124_439_808
    layout = Gpt2Layout(own)
    places = [place for path in own.specs() for place in layout._places(path)]
    assert {place.name: place.shape for place in places} == table
    assert table["h.11.attn.c_attn.weight"] == (768, 2304)


def test_names_may_have_a_prefix_masks_are_ignored_and_the_head_is_the_table() -> None:
    given = {f"transformer.{name}": value for name, value in tensors().items()}
    given["transformer.h.0.attn.bias"] = np.tril(np.ones((1, 1, LENGTH, LENGTH)))
    given["lm_head.weight"] = given["transformer.wte.weight"]
    layout = Gpt2Layout(model())
    found = layout.from_gpt2(given.keys(), given.__getitem__)
    np.testing.assert_array_equal(found["embedding/table"], tensors()["wte.weight"])
    given["lm_head.weight"] = given["lm_head.weight"] + 1
    with pytest.raises(Gpt2LayoutError, match=r"lm_head.weight differs from wte.weight"):
        layout.from_gpt2(given.keys(), given.__getitem__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ln_f.bias": None}, r"missing ln_f.bias"),
        ({"h.2.ln_1.bias": np.ones(DIM)}, r"unknown h.2.ln_1.bias"),
        (
            {"h.1.attn.c_attn.weight": np.ones((36, 12))},
            r"h.1.attn.c_attn.weight is \[36, 12\], must be \[12, 36\]",
        ),
        ({"wpe.weight": np.ones((8, 12))}, r"wpe.weight is \[8, 12\], must be \[7, 12\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    given = {**tensors(), **changes}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(Gpt2LayoutError, match=message):
        Gpt2Layout(model()).from_gpt2(given.keys(), given.__getitem__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack.layer.norm.epsilon": 1e-6}, r"norm.epsilon is 1e-06, but in GPT-2 1e-05"),
        ({"stack.layer.feed_forward.activation": "gelu"}, r"activation is 'gelu', but in GPT-2"),
        ({"softmax": Softmax.Params()}, r"softmax is set, but GPT-2 ties it"),
        ({"final_norm": RMSNorm.Params()}, r"final_norm is RMSNorm, but in GPT-2 LayerNorm"),
        ({"stack.layer.attention.use_bias": False}, r"attention.use_bias is False"),
        ({"stack.layer.attention.adapter": Lora.Params()}, r"attention.adapter is .*GPT-2 None"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Gpt2LayoutError, match=f"the model is not GPT-2: .*{message}"):
        Gpt2Layout(model(**changes))
