"""The Mesh-TensorFlow experiments: exact counts at all sizes, printed or not."""

from __future__ import annotations

import pytest

from tekso.framework import registry
from tekso.framework.inspection import model_record, task_of

PRINTED = {4096: 142_619_648, 8192: 218_117_120}


@pytest.mark.parametrize("d_ff", [4096 * 2**i for i in range(7)])
def test_counts_are_exact(d_ff: int) -> None:
    tree = registry.get(f"lm.one_billion_words.Dff{d_ff}")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    heads = d_ff // 1024
    a_layer = 4 * 1024 * 256 * heads + 2 * 1024 * d_ff + 2048
    assert total == 6 * a_layer + 1024 + 2 * 32_768 * 1024
    assert total == PRINTED.get(d_ff, total)


def test_word_lstm_counts_four_gates_projections_and_two_tables() -> None:
    tree = registry.get("lm.one_billion_words.LstmWord")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    units, size, words = 8192, 1024, 793_472
    a_layer = 4 * units * (size + size + 1) + units * size
    assert total == 2 * a_layer + 2 * words * size + words
