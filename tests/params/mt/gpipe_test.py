"""The multilingual experiments of GPipe: exact counts from specs alone, and what is printed."""

from __future__ import annotations

import pytest

from tekso.framework import registry
from tekso.framework.run.inspection import model_record, task_of

# Layers of each side, feed-forward, heads, stages, billions as printed.
SIZES = [
    (6, 8192, 16, 2, None),
    (12, 16_384, 32, 2, 1.3),
    (24, 8192, 16, 4, 1.3),
    (32, 16_384, 32, 8, 3),
    (64, 16_384, 32, 16, 6),
]


def formula(num_layers: int, f: int, heads: int, *, d: int = 1024, vocab: int = 64_000) -> int:
    width = 64 * heads
    attention = 4 * d * width + 3 * width + d
    feed_forward, norm = 2 * d * f + f + d, 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return num_layers * (encoder_layer + decoder_layer) + 2 * norm + 3 * vocab * d + vocab


@pytest.mark.parametrize("size", SIZES)
def test_counts_are_exact_and_as_printed(size: tuple[int, int, int, int, float | None]) -> None:
    num_layers, f, heads, stages, printed = size
    tree = registry.get(f"mt.gpipe.T{num_layers}H{f}A{heads}")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    assert total == formula(num_layers, f, heads)
    assert tree.execution.num_stages == stages
    assert tree.input.batch_size % tree.execution.num_micro_batches == 0
    if printed is not None:
        digits = 1 if printed < 2 else 0
        assert round(total / 1e9, digits) == printed


def test_every_layer_may_begin_a_stage() -> None:
    tree = registry.get("mt.gpipe.T6H8192A16")().tree()

    names = [piece.name for piece in task_of(tree).pieces()]

    layers = [n for n in names if "/layers/" in n]
    assert layers == [f"model/{s}/layers/{i}" for s in ("encoder", "decoder") for i in range(6)]


def test_languages_have_tokens_of_their_own() -> None:
    tree = registry.get("mt.gpipe.T6H8192A16")().tree()
    tree.set({"input.corpus.languages": ["de", "fr", "ta"]})

    total = model_record("", task_of(tree))["total_weights"]

    assert total == formula(6, 8192, 16, vocab=64_003)
