"""The benchmark's models: the sizes and plain settings that other frameworks are compared at."""

from __future__ import annotations

import pytest

from tekso.framework import registry
from tekso.framework.run import inspection

SIZES = {"Small": (8192, 256, 4, 4, 16), "Wide": (16_384, 512, 8, 6, 8)}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_comparison(name: str) -> None:
    vocab, d, heads, layers, batch_size = SIZES[name]
    tree = registry.get(f"lm.benchmark.{name}")().tree()

    total = inspection.model_record("", inspection.task_of(tree))["total_weights"]

    assert total == vocab * d + layers * (12 * d * d + 13 * d) + 2 * d
    assert tree.task.model.stack.layer.attention.num_heads == heads
    assert (tree.input.length, tree.input.batch_size) == (128, batch_size)
    batch = tree.input.instantiate(seed=0).batch(0)
    assert batch["ids"].shape == (batch_size, 128)
    assert batch["weights"].all()
