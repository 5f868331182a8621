"""Curves of a report: a picture, and smoothed lines."""

from __future__ import annotations

import math

import numpy as np
from report_values import records

from tekso.framework.run.report import curves


def test_curves_are_a_png_and_nothing_is_no_picture() -> None:
    train = [(i, "train", {"loss": 5 / i, "bits_per_byte": 7 / i, "perplexity": 9 / i,
                           "learning_rate": 0.1}) for i in range(1, 200)]  # fmt: skip
    dev = [(100, "dev", {"loss": math.nan, "bits_per_byte": 1.0})]
    picture = curves.draw(records(*train, *dev), title="lm.some.Model", references={"gzip": 2.0})
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert curves.draw([], title="") is None
    assert curves.draw(records((1, "train", {"loss": math.nan})), title="") is None


def test_the_first_metrics_of_evaluations_have_panels_beside_loss_and_rate() -> None:
    train = (1, "train", {"loss": 5.0, "total_loss": 6.0, "mae": 1.0, "learning_rate": 0.1,
                          "examples_seen": 8.0, "only_in_training": 1.0})  # fmt: skip
    dev = (1, "dev", {"loss": 4.0, "perplexity": 9.0, "r2": math.nan, "mae": 2.0, "accuracy": 0.5,
                      "f1": 0.4, "eval_seconds": 1.0, "elapsed_seconds": 2.0})  # fmt: skip
    found = curves._curves(records(train, dev))
    assert curves._panels(found) == ["loss", "mae", "accuracy", "learning_rate"]
    assert found["mae"] == {"train": [(1, 1.0)], "dev": [(1, 2.0)]}
    assert curves._panels(curves._curves(records(train))) == ["loss", "learning_rate"]
    assert curves.draw(records(train, dev), title="") is not None


def test_the_first_values_of_a_run_do_not_set_the_scale() -> None:
    falling = [100.0, *np.linspace(3.0, 2.0, 39)]
    assert curves._range(falling) == (2.0, 3.0 - 1 / 38)
    rising = [-0.7, *np.linspace(0.9, 0.925, 39)]
    np.testing.assert_allclose(curves._range(rising), (0.9 + 0.025 / 38, 0.925))
    assert curves._range([1.0, 1.0]) == (1.0, 1.0)


def test_smoothing_keeps_length_mean_level_and_a_straight_line() -> None:
    line = [float(i) for i in range(200)]
    np.testing.assert_allclose(curves.smoothed(line), line)
    values = np.random.default_rng(0).normal(size=400)
    smooth = curves.smoothed(list(values))
    assert len(smooth) == 400 and np.std(smooth) < 0.5 * np.std(values)
    np.testing.assert_allclose(smooth[200], values[190:211].mean())
    assert curves.smoothed([3.0, 1.0]) == [3.0, 1.0]
