"""Every workaround for DTensor works, and is still needed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import processes
import pytest
import tensorflow as tf

PROGRAM = Path(__file__).with_name("workarounds_program.py")
DEFECTS = (
    "changing_integer",
    "concatenated_shards",
    "contraction_of_activations",
    "contraction_of_two_dims",
    "cross_product",
    "diagonal",
    "inner_relayout",
    "loop_gradient",
    "loop_input_in_custom_gradient",
    "loop_input_in_loop",
    "loop_name_in_use",
    "loop_name_in_use_of_cut",
    "negative_step",
    "new_axis",
    "resharded_gather",
    "row_of_a_buffer",
    "row_of_replicated_weights",
    "row_of_stacked_weights",
    "scalar_where",
    "softmax_sums_in_16_bits",
    "sorted_values",
    "sums_in_16_bits",
    "sums_over_dims_of_one_operand",
    "wait_with_lock",
)


@functools.cache
def results() -> dict[tuple[str, bool], dict[str, Any]]:
    jobs = [{"defect": name, "avoided": avoided} for name in DEFECTS for avoided in (False, True)]
    done = processes.run([PROGRAM, json.dumps(jobs)], timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {(j["defect"], j["avoided"]): r for j, r in zip(jobs, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_workaround_works_and_is_still_needed(defect: str) -> None:
    assert results()[defect, True] == {"right": True}
    is_mended = results()[defect, False].get("right", False)
    assert not is_mended, f"workaround {defect} is no longer needed by TensorFlow {tf.__version__}"
