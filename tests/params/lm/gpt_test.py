"""The GPT experiments: counts by the formula of the Megatron papers, and as they are printed."""

from __future__ import annotations

import pytest

from tekso.framework import registry
from tekso.framework.run.inspection import model_record, task_of

# Name: layers, width, length, billions of weights in table 1 of Narayanan et al. 2021.
SIZES = {
    "M124": (12, 768, 1024, None),
    "M345": (24, 1024, 1024, None),
    "M1700": (24, 2304, 2048, 1.7),
    "M3600": (30, 3072, 2048, 3.6),
    "M7500": (36, 4096, 2048, 7.5),
    "B18": (40, 6144, 2048, 18.4),
    "B39": (48, 8192, 2048, 39.1),
    "B76": (60, 10_240, 2048, 76.1),
    "B146": (80, 12_288, 2048, 145.6),
    "B310": (96, 16_384, 2048, 310.1),
    "B530": (105, 20_480, 2048, 529.6),
    "T1": (128, 25_600, 2048, 1008.0),
}


@pytest.mark.parametrize("name", SIZES)
def test_counts_are_those_of_the_formula_and_the_final_norm(name: str) -> None:
    layers, h, length, printed = SIZES[name]

    total = model_record("", task_of(registry.get(f"lm.gpt.{name}")().tree()))["total_weights"]

    vocab = 51_200
    # Narayanan et al. 2021, eq. 2, times its own denominators; it leaves out the final norm.
    formula = 12 * layers * h**2 + 13 * layers * h + (vocab + length) * h
    assert total == formula + 2 * h
    if printed is not None:
        assert round(total / 1e9, 1) == pytest.approx(printed, abs=0.1001)


def test_all_sizes_of_the_module_are_checked() -> None:
    keys = [entry.key for entry in registry.list_experiments("lm.gpt.*")]
    # tests/models/gpt2_layout_test.py checks Gpt2, which has another vocabulary.
    assert sorted(keys) == sorted(f"lm.gpt.{name}" for name in (*SIZES, "Gpt2"))


def test_heads_divide_the_width_into_heads_of_a_common_size() -> None:
    for name in SIZES:
        tree = registry.get(f"lm.gpt.{name}")().tree()
        model = tree.task.model
        head_dim, rest = divmod(model.dim, model.stack.layer.attention.num_heads)
        assert rest == 0
        assert head_dim in (64, 96, 128, 160)
