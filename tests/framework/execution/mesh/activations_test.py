"""Which activations layers constrain, and which rules are rejected for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tekso.framework.execution import MeshSharded
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.mesh import activations
from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small_models import BATCH, DIM, LENGTH, MLP, MODELS, SIDE, VOCAB, batch


def layout(model: str, mesh: str, rules: str) -> MeshLayout:
    execution = MeshSharded.Params(mesh=mesh, rules=rules).instantiate()
    task = MODELS[model]().instantiate()
    return execution.layout(task, signature_of(batch(model, 0)), num_devices=8)


def test_activations_are_named_by_their_dims() -> None:
    found = activations.of_task(MODELS["dense"]().instantiate(), signature_of(batch("dense", 0)))
    assert found["activation batch/length/mlp"] == (
        ("batch", "length", "mlp"), (BATCH, LENGTH, MLP)
    )  # fmt: skip
    assert found["activation batch/-/vocab"] == (("batch", None, "vocab"), (BATCH, LENGTH, VOCAB))
    assert found["activation batch/length/embed"][1] == (BATCH, LENGTH, DIM)
    images = activations.of_task(MODELS["images"]().instantiate(), signature_of(batch("images", 0)))
    name = "activation batch/height/width/channels"
    assert images[name][1] == (BATCH, SIDE, SIDE, 3)
    assert images[f"{name} (2)"][1] == (BATCH, SIDE, SIDE, 8)


@pytest.mark.parametrize(
    ("model", "mesh", "rules", "tensor"),
    [
        ("dense", "data:2", "batch:data;mlp:data", "batch/length/mlp [batch=8, length=8, mlp=32]"),
        ("gated", "data:2", "batch:data;mlp:data", "batch/length/mlp [batch=8, length=8, mlp=32]"),
        ("dense", "m:2", "length:m;mlp:m", "batch/length/mlp [batch=8, length=8, mlp=32]"),
        ("dense", "data:2", "batch:data;vocab:data", "batch/-/vocab [batch=8, 8, vocab=32]"),
        ("untied", "data:2", "batch:data;vocab:data", "batch/-/vocab [batch=8, 8, vocab=32]"),
        ("images", "a:3", "height:a", "[batch=8, height=16, width=16, channels=3]"),
        (
            "images",
            "a:2;b:3",
            "height:a;width:b",
            "width of 16 does not divide evenly over the 3 devices",
        ),
    ],
)
def test_rules_that_no_activation_can_follow_are_refused(
    model: str, mesh: str, rules: str, tensor: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        layout(model, mesh, rules)
    assert tensor in str(caught.value)


@pytest.mark.parametrize(
    ("model", "mesh", "rules"),
    [
        ("dense", "m:2", "length:m;vocab:m"),
        ("dense", "a:2;b:2", "batch:a;length:b;vocab:b"),
        ("images", "a:4", "height:a"),
    ],
)
def test_rules_that_look_as_if_they_clashed_are_legal(model: str, mesh: str, rules: str) -> None:
    assert str(layout(model, mesh, rules).rules) == rules


@pytest.mark.parametrize("model", ["dense", "gated", "translation"])
def test_the_length_of_keys_is_no_dim(model: str) -> None:
    with pytest.raises(LayoutError, match="no tensor of the model has a dim memory_length"):
        layout(model, "a:2", "memory_length:a")
