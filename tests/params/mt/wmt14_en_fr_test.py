"""The translation models of Mesh-TensorFlow: exact counts at all sizes, meshes that fit."""

from __future__ import annotations

import pytest

from tekso.framework import registry
from tekso.framework.run.inspection import model_record, task_of

PRINTED = {2048: 0.15, 65_536: 2.89}  # billions, cut or rounded to two digits


@pytest.mark.parametrize("d_ff", [2048 * 2**i for i in range(6)])
def test_counts_are_exact(d_ff: int) -> None:
    tree = registry.get(f"mt.wmt14_en_fr.Dff{d_ff}")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    a, f, norm = 4 * 1024 * 128 * (d_ff // 512), 2 * 1024 * d_ff, 1024
    layers = 6 * (a + f + 2 * norm) + 6 * (2 * a + f + 3 * norm)
    assert total == layers + 2 * norm + 2 * 32_768 * 1024
    if d_ff in PRINTED:
        assert total / 1e9 == pytest.approx(PRINTED[d_ff], abs=0.006)


@pytest.mark.parametrize("d_ff", [2048 * 2**i for i in range(6)])
def test_meshes_divide_what_lies_on_them(d_ff: int) -> None:
    tree = registry.get(f"mt.wmt14_en_fr.Dff{d_ff}")().tree()
    axes = dict(axis.split(":") for axis in tree.execution.mesh.split(";"))
    model = int(axes.get("model", 1))

    heads = tree.task.model.decoder.layer.memory_attention.num_heads
    assert heads == d_ff // 512
    assert heads % model == d_ff % model == 32_768 % model == 0
    assert tree.input.batch_size % int(axes["batch"]) == 0
