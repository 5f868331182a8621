"""Tables of the GPipe paper: published beside computed, and the formulas on a model of 4 pieces."""

from __future__ import annotations

from typing import Any

import pytest

from tekso.framework.exit_codes import ExitCode
from tekso.framework.registry import UnknownExperimentError
from tekso.framework.run import quiet_tensorflow
from tekso.tools import gpipe_tables
from tekso.tools.gpipe_tables import TABLES, Model

MODEL = Model(
    weights=[1, 2, 3, 4],
    costs=[3.0, 1.0, 2.0, 2.0],
    flops=[30.0, 10.0, 20.0, 20.0],
    seconds=[5.0, 1.0, 2.0, 2.0],
    inputs=[8.0, 4.0, 2.0, 6.0],
    products=[20.0, 40.0, 60.0, 80.0],
    saved=lambda first, end: 100.0 * (end - first),
)


def test_activations_are_inputs_of_all_examples_and_the_rest_of_a_micro_batch() -> None:
    assert MODEL.stages(2) == [(0, 2), (2, 4)]
    found = gpipe_tables.activations(MODEL, 2, 4, 12, "products")
    assert found == [12 * 4 + 3 * 30, 12 * 1 + 3 * 70]
    found = gpipe_tables.activations(MODEL, 2, 4, 12, "saved")
    assert found == [12 * 8 + 3 * 192, 12 * 2 + 3 * 198]
    assert gpipe_tables.activations(MODEL, 0, 1, 12, "saved") == [12 * 400]


def test_steps_of_equal_stages_take_the_time_of_the_formula() -> None:
    for stages, parts in ((1, 1), (2, 1), (2, 4), (4, 3)):
        found = gpipe_tables.step_time(MODEL.costs, MODEL.stages(stages), parts)
        largest = {1: 1.0, 2: 0.5, 4: 3 / 8}[stages]
        # Forward and backward: all stages once, and the largest one for each further micro-batch.
        assert found == pytest.approx((1 + (parts - 1) * largest) / parts)


def test_tables_have_the_published_figures_beside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def traced(key: str, settings: Any) -> Model:
        seen.append(key)
        wide = [n * 20_000_000 for n in MODEL.weights] * 32
        parts = {
            name: getattr(MODEL, name) * 32
            for name in ("costs", "flops", "seconds", "inputs", "products")
        }
        return Model(wide, saved=MODEL.saved, **parts)

    monkeypatch.setattr(gpipe_tables, "model_of", traced)
    assert gpipe_tables.main(["x", "transformer"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert [row.key for row in TABLES["transformer"].rows] == seen[1:]
    (row,) = [line for line in text.splitlines() if line.startswith("Pipeline-8, 103 layers")]
    weights = 200_000_000 * 32
    assert row.split()[3:6] == [f"{weights:,}", "59.5", f"{12 * weights / 2**30:.2f}"]
    (row,) = [line for line in text.splitlines() if line.split()[:3] == ["8", "32", "6.30"]]
    assert row.split()[3] == "6.56"  # 8 equal stages: 2 * 32 * 8 / (2 * 39)
    assert row.split()[5] == "6.56" and row.split()[-2] == "12.5%"
    assert gpipe_tables.main(["x", "resnet"]) == ExitCode.WRONG_USAGE
    assert "'resnet' is none of amoebanet, transformer" in capsys.readouterr().err


@pytest.mark.slow
def test_amoebanet_is_traced_for_one_example() -> None:
    """The count of weights is published; half of the bytes are those of half of the filters."""
    found = [
        gpipe_tables.model_of(
            "image.imagenet.AmoebaNetDL18F208",
            {
                "task.model.filters": filters,
                "task.model.num_layers": 3,
                "task.model.drop_path_rate": 0.0,
            },
        )
        for filters in (64, 128)
    ]
    assert len(found[0].costs) == 3 + 6 + 1
    for one, other in zip(found[0].products[1:-2], found[1].products[1:-2], strict=True):
        assert other == 2 * one
    assert found[0].inputs[1] == 2 * 112 * 112 * 16 * 4 + 8  # x and before; label and weight
    assert found[0].saved(1, 3) > found[0].products[1] + found[0].products[2]


def test_tensorflow_is_imported_without_its_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []
    monkeypatch.setattr(quiet_tensorflow, "import_tensorflow", lambda: imported.append("quietly"))
    with pytest.raises(UnknownExperimentError):
        gpipe_tables.model_of("nope.Nope", {})
    assert imported == ["quietly"]
