"""Batches of sentence pairs for tests of models: padded or packed, in the form of the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

END = 0
Pair = tuple[list[int], list[int]]


def random_pairs(seed: int, sizes: Sequence[tuple[int, int]], vocab: int) -> list[Pair]:
    """Returns pairs of so many tokens, the ends included."""
    r = np.random.default_rng(seed)
    return [
        ([*r.integers(1, vocab, s - 1).tolist(), END], [*r.integers(1, vocab, t - 1).tolist(), END])
        for s, t in sizes
    ]


def batch(
    rows: Sequence[Sequence[Pair]], source_length: int, target_length: int, *, packed: bool = False
) -> dict[str, tf.Tensor]:
    """Returns the batch whose rows hold some pairs each; with positions only where it is packed."""
    shapes = {"source": [len(rows), source_length], "target": [len(rows), target_length]}
    ids = {side: np.full(shape, END, np.int32) for side, shape in shapes.items()}
    segments = {side: np.zeros(shape, np.int32) for side, shape in shapes.items()}
    positions = {side: np.zeros(shape, np.int32) for side, shape in shapes.items()}
    labels = np.full(shapes["target"], END, np.int32)
    for r, pairs in enumerate(rows):
        at = {"source": 0, "target": 0}
        for n, (source, target) in enumerate(pairs, 1):
            read = {"source": source, "target": [END, *target[:-1]]}
            labels[r, at["target"] : at["target"] + len(target)] = target
            for side, tokens in read.items():
                here = slice(at[side], at[side] + len(tokens))
                ids[side][r, here] = tokens
                segments[side][r, here] = n
                positions[side][r, here] = np.arange(len(tokens))
                at[side] += len(tokens)
    found = {
        "target_labels": labels,
        "target_weights": (segments["target"] != 0).astype(np.float32),
        **{f"{side}_ids": ids[side] for side in ids},
        **{f"{side}_segment_ids": segments[side] for side in ids},
    }
    if packed:
        found.update({f"{side}_positions": positions[side] for side in ids})
    return {name: tf.constant(value) for name, value in found.items()}
