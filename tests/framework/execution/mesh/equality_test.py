"""Over any mesh, a model gives the losses, gradients and weights of a single device.

Each job of `equality_program` is a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from sampling import sample

PROGRAM = Path(__file__).with_name("equality_program.py")
SLOW = pytest.mark.slow

TENSOR = "heads:model;mlp:model;vocab:model"
RULES = {
    "dense": TENSOR,
    "moe": "experts:model;vocab:model",
    "lstm": "mlp:model;vocab:model",
    "pairs": "mlp:model;vocab:model",
    "images": "height:model",
}


def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return results(processes.run([PROGRAM, json.dumps(jobs)], timeout=1200))


def results(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def check(whole: dict[str, Any], spread: dict[str, Any]) -> None:
    assert "error" not in spread, spread["error"]
    assert spread["first"] == whole["first"]  # the first weights and slots, bit by bit
    for one, other in zip(whole["steps"], spread["steps"], strict=True):
        assert set(one) == set(other)
        for name in ("loss", "total_loss", "gradient_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name
    if spread["eval"] is not None:
        assert set(spread["eval"]) == set(whole["eval"])
        for name, pair in whole["eval"].items():
            np.testing.assert_allclose(
                spread["eval"][name], pair, rtol=1e-5, atol=1e-6, err_msg=name
            )
        assert spread["decoded"] == pytest.approx(whole["decoded"], rel=1e-5)  # of weights in use
    assert set(spread["weights"]) == set(whole["weights"])
    for path, weight in whole["weights"].items():
        scale = max(np.max(np.abs(weight)), 1e-2)
        difference = np.max(np.abs(np.subtract(spread["weights"][path], weight)))
        assert difference < 2e-5 * scale, path


@functools.cache
def alone(model: str) -> dict[str, Any]:
    """Steps on one device, with which all layouts of a model are compared."""
    (found,) = run([{"model": model, "evaluate": model in EVALUATED}])
    assert "error" not in found, found
    assert all(step["gradient_norm"] > 0.1 for step in found["steps"])  # it learns: there is a task
    return found


ORDINARY = [
    ("dense", "data:2;model:2"),
    ("dense", "data:1"),
    ("moe", "data:2;model:2"),
    ("lstm", "model:4"),
    ("pairs", "data:2;model:2"),
    ("images", "data:2;model:2"),
]
EVALUATED = {*dict(ORDINARY), "repeated", "sampled", "translation"}
"""Models that are evaluated, in one layout each; the others have no op of their own in it."""


@pytest.mark.parametrize(("model", "mesh"), sample(ORDINARY, quick=[("dense", "data:2;model:2")]))
def test_steps_on_ordinary_meshes(model: str, mesh: str) -> None:
    rules = {"data": "batch:data", "model": RULES[model]}
    written = ";".join(rules[axis.partition(":")[0]] for axis in mesh.split(";"))
    execution = {"mesh": mesh, "rules": written}
    optimized = model != "pairs"  # whose loops are those of "lstm"
    (spread,) = run([{"model": model, "execution": execution, "optimized": optimized}])
    check(alone(model), spread)


# Where a layer splits several dims, one layout has all of them, each on an axis of its own.
ODD = {
    "dense": [
        {"mesh": "a:2;b:2;c:2", "rules": "batch:a;head_dim:b;mlp:b;vocab:c"},
        {"mesh": "data:2;model:2", "rules": "fsdp", "slots_axis": "model"},
    ],
    "remat": [{"mesh": "data:2;model:2", "rules": "batch:data;embed:model"}],
    "gated": [
        {"mesh": "data:2;model:2", "rules": f"batch:data;kv_heads:model;{TENSOR}"},
    ],
    "adapted": [{"mesh": "data:2;model:2", "rules": f"batch:data;{TENSOR}"}],
    "adapted_experts": [
        {"mesh": "a:2;b:2;c:2", "rules": "batch:a;experts:a;mlp:b;vocab:b;embed:c"},
    ],
    "adapted_images": [
        {"mesh": "data:2;model:2", "rules": "height:data;channels:model;out_channels:model"},
    ],
    "untied": [{"mesh": "data:2;model:2", "rules": f"length:data;{TENSOR};positions:model"}],
    "sampled": [{"mesh": "data:2;model:2", "rules": f"batch:data;{TENSOR}"}],
    # A loop over layers whose heads are split is in "adapted" and in "repeated_remat".
    "repeated": [
        {"mesh": "data:2;model:2", "rules": "batch:data;embed:model", "weights_axis": "data"},
    ],
    "repeated_remat": [{"mesh": "data:2;model:2", "rules": f"batch:data;{TENSOR}"}],
    "moe2": [{"mesh": "data:2;model:2", "rules": "batch:data;experts:data;mlp:model"}],
    "pairs_luong": [{"mesh": "data:2;model:2", "rules": "embed:data;mlp:model;vocab:model"}],
    "gru": [{"mesh": "data:2;model:2", "rules": "batch:data;mlp:model"}],
    "translation": [{"mesh": "data:2;model:2", "rules": f"length:data;{TENSOR}"}],
    "repeated_translation": [{"mesh": "data:2;model:2", "rules": f"batch:data;{TENSOR}"}],
    "untied_translation": [{"mesh": "data:2;model:2", "rules": "2d"}],
    "prefix": [{"mesh": "data:2;model:2", "rules": f"length:data;{TENSOR}"}],
    "images": [{"mesh": "a:2;b:2", "rules": "height:a;width:b"}],
}


# The cell of "gru" is in the same layout in control_flow_test.py ("repeated_recurrent"), and the
# softmax of "untied_translation" in "untied". In "adapted_experts", the router of "moe2" is frozen.
# "repeated_translation" has the loop of "repeated" and the layers of "translation", "remat" what
# "repeated_remat" has without its loop, and "pairs_luong" the layout of "lstm" and a decoder whose
# other form is in "pairs".
MATRIX = ("gru", "untied_translation", "repeated_translation", "remat", "pairs_luong")

MORE = [
    ("dense", {"mesh": "data:2;model:2", "rules": "length:model;vocab:data"}),
    ("gated", {"mesh": "data:2;model:2", "rules": f"batch:data;{TENSOR}"}),
    ("moe", {"mesh": "data:2;model:2", "rules": "2d"}),
    ("moe", {"mesh": "data:4", "rules": "batch:data;experts:data"}),
    ("moe", {"mesh": "a:2;b:2", "rules": "experts:b", "slots_axis": "a"}),
    ("translation", {"mesh": "data:2;model:2", "rules": f"batch:data;{TENSOR}"}),
    (
        "images",
        {"mesh": "data:2;model:2", "rules": "batch:data;out_channels:model", "slots_axis": "data"},
    ),
]
"""Layouts of `make test-matrix`. Above, "untied", "prefix" and "translation" split the length and
words, "gated" splits its keys as well, experts are split over either axis ("moe" of the ordinary
layouts, "moe2") and slots in "dense". The examples of pairs are split in "pairs", and out_channels
in windows_test.py."""


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.matrix if m in MATRIX else SLOW) for m in ODD],
)
def test_layers_in_odd_layouts(model: str) -> None:
    # A model is evaluated in one layout: an ordinary one, or the first of these.
    is_evaluated = [model in EVALUATED - {*RULES} and i == 0 for i in range(len(ODD[model]))]
    jobs = [
        {"model": model, "execution": execution, "evaluate": evaluate}
        for execution, evaluate in zip(ODD[model], is_evaluated, strict=True)
    ]
    for one in run(jobs):
        check(alone(model), one)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "execution"), [pytest.param(*case, id=case[0]) for case in MORE])
def test_layers_in_more_layouts(model: str, execution: dict[str, str]) -> None:
    (one,) = run([{"model": model, "execution": execution, "evaluate": False}])
    check(alone(model), one)


@SLOW
def test_parts_of_a_batch_add_up_and_bfloat16_is_near() -> None:
    mesh = {"mesh": "data:2;model:2", "rules": "batch:data;mlp:model;vocab:model"}
    job = {"model": "blocks", "evaluate": False}
    bfloat16 = {**mesh, "activation_dtype": "bfloat16"}
    whole = alone("blocks")
    parts, half = run(
        [
            {**job, "execution": mesh, "accumulation": 2},
            {**job, "execution": bfloat16, "optimized": True},
        ]
    )
    check(whole, parts)
    assert "error" not in half, half["error"]
    assert half["first"] == whole["first"]  # the masters are float32
    for one, other in zip(whole["steps"], half["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02)
        assert other["loss"] != one["loss"]


@pytest.mark.parametrize(
    "accumulation",
    # Parts of a batch are added up in the tests above and below.
    [pytest.param(1, marks=SLOW), pytest.param(2, marks=pytest.mark.matrix)],
)
def test_small_arrays_of_a_replicated_batch_are_no_constants(accumulation: int) -> None:
    # DTensor would compile the step again when their values change. With accumulation, it still
    # does so with the two small programs that add the gradients and update the weights.
    job = {"model": "blocks", "sizes": [2, 2, 2], "accumulation": accumulation, "evaluate": False}
    mesh = {"mesh": "model:2", "rules": "mlp:model"}
    whole, spread = run([job, {**job, "execution": mesh}])
    check(whole, spread)
    if accumulation == 1:
        assert len(set(spread["functions"])) == 1, spread["functions"]


@SLOW
def test_parts_of_a_batch_add_up_where_length_or_height_is_split() -> None:
    spread = [
        ("blocks", "length:data;vocab:model", [8, 7]),  # 2 parts, 1 part
        ("images", "batch:data;height:model", [8]),
    ]
    for model, rules, sizes in spread:
        job = {"model": model, "accumulation": 2, "sizes": sizes, "evaluate": False}
        execution = {"mesh": "data:2;model:2", "rules": rules}
        whole, parts = run([job, {**job, "execution": execution}])
        check(whole, parts)


@SLOW
def test_clusters_that_xla_compiles_give_the_same(tmp_path: Path) -> None:
    cases = {  # the batch is split in one, the model in the other
        "lstm": {"mesh": "data:2", "rules": "batch:data"},
        "blocks_remat": {"mesh": "model:2", "rules": "mlp:model;vocab:model"},
    }
    for model, execution in cases.items():
        job = {
            "model": model,
            "execution": {**execution, "xla": "clusters"},
            "compile_all": True,
            "evaluate": False,
        }
        compiled = tmp_path / model
        # To optimise costs more than to run.
        flags = f"--xla_backend_optimization_level=0 --xla_dump_to={compiled}"
        environment = {**os.environ, "XLA_FLAGS": flags}
        done = processes.run([PROGRAM, json.dumps([job])], env=environment, timeout=600)
        (spread,) = results(done)
        check(alone(model), spread)
        assert list(compiled.glob("*cluster*before_optimizations.txt")), "XLA compiled nothing"
