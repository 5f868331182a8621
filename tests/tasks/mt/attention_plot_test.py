"""Pictures of attention are PNG files of any size, with any token."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.tasks.mt import attention_plot


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (90, 70)])
def test_a_picture_grows_with_its_tokens_up_to_a_bound(rows: int, columns: int) -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(columns), rows)
    tokens = [["a", " b", "$%$", "\n", "", "日"][i % 6] for i in range(100)]
    picture = attention_plot.draw(shares, source=tokens, target=tokens, title="$5% or {$6 \\")
    height, width, _ = tf.io.decode_png(picture).shape
    assert 50 < height < 2000 and 50 < width < 2000


def test_cells_are_as_dark_as_their_share() -> None:
    names = ["p", "q", "r", "s"]

    def num_dark(shares: np.ndarray) -> int:
        picture = attention_plot.draw(shares, source=names, target=names, title="t")
        return int((tf.io.decode_png(picture).numpy()[..., 0] < 40).sum())

    letters = num_dark(np.zeros([4, 4]))
    diagonal, all_ = num_dark(np.eye(4)) - letters, num_dark(np.ones([4, 4])) - letters
    assert diagonal > 100 and all_ == pytest.approx(4 * diagonal, rel=0.25)
