"""Values are computed in float32 at least."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tekso.framework.primitives.precision import widen


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"),
     ("float64", "float64")],
)  # fmt: skip
def test_narrow_types_become_float32_and_no_type_becomes_narrower(given: str, wanted: str) -> None:
    assert widen(tf.ones([2, 3], given)).dtype == wanted
