"""Lines of a report: they fit, and have the figures that matter."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_values import MANY, VALUES

from tekso.framework.run.report import lines


def train_line(step: int = 1200, steps: int = 2000, **changes: Any) -> str:
    options: dict[str, Any] = {"speed": 13100.0, "unit": "tokens", "wait_share": 0.004}
    options["seconds_left"] = 105.0
    options.update(changes)
    return lines.train_line(step, steps, VALUES, **options)


def test_a_line_says_everything_that_was_requested() -> None:
    assert train_line(width=120) == (
        "step 1200/2000  loss 1.4568  2.102 bits/byte  grad 0.53  lr 3.0e-3  13.1k tok/s  wait  0%"
        "   1m45s left"
    )
    assert train_line(speed=None, wait_share=None, seconds_left=None, width=120) == (
        "step 1200/2000  loss 1.4568  2.102 bits/byte  grad 0.53  lr 3.0e-3"
    )


def test_a_line_of_80_columns_says_it_too() -> None:
    assert train_line() == (
        "step 1200/2000 loss 1.4568 2.102 bpb grad 0.53 lr 3.0e-3 13.1k/s wait  0%  1m45s"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_figures_of_a_line_stand_below_those_of_the_line_before(width: int) -> None:
    def line(step: int, scale: float, **more: float) -> str:
        values = {name: scale * value for name, value in VALUES.items()}
        return lines.train_line(
            step, 2000, values, speed=1e3 * more["speed"], unit="tokens", width=width,
            wait_share=more["wait"], seconds_left=more["left"],
        )  # fmt: skip

    first = line(10, 5.9, speed=9.0, wait=0.0, left=7300.0)
    for step, speed in ((1, None), (2000, 0.5)):  # the first line and the last know less
        less = lines.train_line(
            step, 2000, VALUES, speed=speed, unit="tokens", wait_share=speed, seconds_left=None,
            width=width,
        )  # fmt: skip
        for word in ("loss", "bpb", "bits/byte", "lr"):
            assert less.find(word) == first.find(word)
    for other in (
        line(100, 1.0, speed=13.1, wait=0.99, left=105.0),
        line(2000, 0.01, speed=1312.0, wait=0.07, left=2.0),
    ):
        assert len(other) == len(first) <= width
        words = [(m.start(), m[0]) for m in re.finditer(r"[a-z]{3,}", first)]
        assert words and all(other[at:].startswith(word) for at, word in words)


def test_perplexity_is_shown_where_there_are_no_bytes_and_skipped_steps_are_reported() -> None:
    values = {"loss": 1.5, "perplexity": 4.4817, "nonfinite_total": 3.0}
    line = lines.train_line(
        7, 20, values, speed=950.0, unit="examples", wait_share=0.25, seconds_left=7300.0
    )
    assert line == ("step  7/20  loss 1.5000  ppl 4.4817  skipped 3    950/s  wait 25%   2h01m")


@given(
    step=st.integers(1, 10**8),
    loss=st.floats(allow_nan=True),
    speed=st.floats(0, 1e12),
    left=st.floats(0, 1e8),
    width=st.integers(40, 200),
)
def test_a_line_fits_whatever_the_figures(
    step: int, loss: float, speed: float, left: float, width: int
) -> None:
    values = {**VALUES, "loss": loss, "gradient_norm": loss, "nonfinite_total": 12345.0}
    line = lines.train_line(
        step, 10**8, values, speed=speed, unit="tokens", wait_share=1.0, seconds_left=left,
        width=width,
    )  # fmt: skip
    assert len(line) <= width and "\n" not in line
    assert line.startswith("step") and f"loss {lines.number(loss):>6}" in line


def test_a_narrow_line_leaves_out_what_matters_least() -> None:
    line = train_line(width=60)
    assert len(line) <= 60
    assert "2.102 bpb" in line and "13.1k/s" in line and "wait" not in line and "lr" not in line


def test_an_evaluation_has_a_line() -> None:
    values = {"loss": 1.45678, "bits_per_byte": 2.10164, "perplexity": 4.2922, "accuracy": 0.5}
    assert lines.eval_line("dev", 500, values, seconds=3.14, is_best=True) == (
        "dev at step 500 loss 1.4568 2.102 bits/byte accuracy 0.5000 in 3.1s best so far"
    )


@pytest.mark.parametrize("width", [1, 40, 80])
@pytest.mark.parametrize("name", ["f1", "recall", "perplexity", "loss", "bits_per_byte"])
def test_the_line_of_an_evaluation_always_has_the_figures_that_decide(
    name: str, width: int
) -> None:
    line = lines.eval_line(
        "dev", 500, MANY, seconds=3.14, is_best=True, deciding=[name], width=width
    )
    shown = "0.610 bits/byte" if name == "bits_per_byte" else f"{name} {MANY[name]:.4f}"
    assert line.count(shown) == 1
    assert len(line) <= max(width, len(shown))
    if width == 80:
        assert line.split()[:7] == ["dev", "at", "step", "500", "loss", "0.5851", "0.610"]


def test_an_evaluation_of_any_width_has_all_figures() -> None:
    values = {"loss": 0.5851, "accuracy": 0.7133, "precision": 0.6737, "recall": 0.4912, "f1": 0.5}
    whole = lines.eval_line("dev", 500, values, seconds=3.14, width=None)
    assert len(whole) > lines.WIDTH
    assert all(f"{name} {value:.4f}" in whole for name, value in values.items())


def test_a_long_text_is_wrapped_below_its_indentation_and_words_stay_whole() -> None:
    text = "  input: text files a/long-path/of/files.txt, train: 3 texts of 1,003,854 bytes"
    assert lines.wrapped(text, 42) == [
        "  input: text files",
        "      a/long-path/of/files.txt, train: 3",
        "      texts of 1,003,854 bytes",
    ]
    assert lines.wrapped(text, 100) == [text]


def test_a_figure_and_its_share_stay_in_one_line() -> None:
    text = "  time of the run: 11s: start 4.5s (40%), evaluation 1.1s (10%)"
    assert lines.wrapped(text, 58) == [
        "  time of the run: 11s: start 4.5s (40%), evaluation",
        "      1.1s (10%)",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00298, "3.0e-3"), (0.0, "0"), (1.0, "1.0e0"), (5e-12, "5.0e-12"), (math.nan, "nan")],
)
def test_scientific(value: float, text: str) -> None:
    assert lines.scientific(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"), (1.0, "1.0000"), (0.53111, "0.5311"), (12.3456, "12.346"),
        (123456.0, "1.23e+05"), (1234.5, "1234.5"), (0.00001234, "1.23e-05"), (-2.5, "-2.5000"),
        (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert lines.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0s"), (1e-5, "1ms"), (0.0437, "44ms"), (0.05, "0.1s"),
     (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m00s"), (105, "1m45s"),
     (3599.6, "1h00m"), (11100, "3h05m"), (187_200, "2d04h")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert lines.duration(seconds) == text


def test_declared_metrics_come_before_others() -> None:
    values = {"loss": 1.0, **{f"f1/{i}": 0.25 for i in range(9)}, "macro_f1": 0.5}
    line = lines.eval_line("dev", 500, values, seconds=1.0, declared={"macro_f1"})
    assert line.startswith("dev at step 500 loss 1.0000 macro_f1 0.5000 f1/0 0.2500")
    assert "macro_f1" not in lines.eval_line("dev", 500, values, seconds=1.0)
    assert lines.others_of(values, declared={"f1/8", "f1/7"})[:3] == [
        "f1/7 0.2500",
        "f1/8 0.2500",
        "f1/0 0.2500",
    ]
