"""The published recognisers have the weights of their formulas."""

from __future__ import annotations

import math

import pytest

from tekso.framework import registry
from tekso.framework.run import inspection


@pytest.mark.parametrize(
    ("name", "tokens", "dim"), [("WordPieces", 16_328, 96), ("Graphemes", 76, 76)]
)
def test_las_has_the_weights_of_lingvo(name: str, tokens: int, dim: int) -> None:
    tree = registry.get(f"asr.librispeech.Las{name}")().tree()
    specs = inspection.task_of(tree).specs().values()
    found = sum(math.prod(spec.shape) for spec in specs if spec.trainable)

    def lstm(inputs: int) -> int:
        return 4 * 1024 * (inputs + 1024 + 1)

    convolutions = 9 * 32 + 32 + 9 * 32 * 32 + 32
    projection = 640 * 640 + 640  # 80 channels, halved twice, of 32 filters
    encoder = convolutions + projection + 2 * lstm(640) + 3 * 2 * lstm(2048)
    attention = 1024 * 128 + 2048 * 128 + 128
    decoder = lstm(dim + 2048) + attention + lstm(1024 + 2048)
    rows = -(-(tokens + 1) // 8) * 8  # with the end token
    output = rows * dim + rows * (1024 + 2048 + 1)
    assert found == encoder + decoder + output
