"""The pictures of the documentation are those that the command draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.run.metrics_log import MetricsLog
from tekso.framework.run.report.tensorboard import TensorBoardEvents
from tekso.tools import pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORED = DOCS / "pictures"


def texts(svg: str) -> list[str]:
    """Returns the texts of a picture, with numbers replaced."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return [re.sub(r"[\d.]+", "0", text) for text in found]


def test_schedules_and_shards_in_the_docs_are_those_of_the_command() -> None:
    drawn_schedules = pictures.schedules()
    drawn_of = {
        "schedules": drawn_schedules,
        "sharding": pictures.sharding(),
        "step": pictures.training_step(),
    }
    for name, drawn in drawn_of.items():
        stored = (STORED / f"{name}.svg").read_text()
        assert texts(drawn) == texts(stored) and len(texts(stored)) > 10, "run `make pictures`"
    # 4 micro-batches and 3 further stages, of time 1 + 2 each; 3 of 7 are idle
    assert "gpipe: 21 forward passes, 42.9 % idle" in drawn_schedules


def test_shards_cover_a_tensor_once_and_are_stored_by_all_devices() -> None:
    mesh = MeshShape((("data", 2), ("model", 2)))
    layout = MeshLayout(mesh, Rules((("batch", "data"), ("mlp", "model"))))
    assert pictures.shards(layout, ("batch", "embed"), (8, 4)) == {
        ((0, 4), (0, 4)): [0, 1],
        ((4, 8), (0, 4)): [2, 3],
    }
    assert pictures.shards(layout, ("embed", "mlp"), (4, 8)) == {
        ((0, 4), (0, 4)): [0, 2],
        ((0, 4), (4, 8)): [1, 3],
    }
    assert [*pictures.shards(layout, ("batch", "mlp"), (8, 8)).values()] == [[0], [1], [2], [3]]


def test_every_picture_is_small_used_and_has_the_text_of_its_kind() -> None:
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    found = sorted(STORED.glob("*.svg"))
    kinds = ("curves", "time")
    assert {f"image.digits.Mlp.{kind}.svg" for kind in kinds} < {path.name for path in found}
    for path in found:
        assert f"](pictures/{path.name})" in pages, f"no page shows {path.name}"
        assert path.stat().st_size < 60_000, path.name
    for path in STORED.glob("*.time.svg"):
        assert {"step", "start", "seconds"} <= {*texts(path.read_text())}
    for path in STORED.glob("*.curves.svg"):
        assert {"loss", "train", "dev", "step"} <= {*texts(path.read_text())}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the figures of a run."""
    (tmp_path / "params.txt").write_text("# model: my.Model\n")
    events = TensorBoardEvents(str(tmp_path / "events"))
    for step in (10, 20):
        events.append(step, "train", {"loss": 30.0 / step, "elapsed_seconds": 1.0})
    events.append(20, "dev", {"loss": 2.0, "accuracy": 0.5})
    events.close()
    log = MetricsLog(str(tmp_path / "metrics.jsonl"))
    for step, spent in ((10, 1.0), (20, 3.0)):
        log.append({"step": step, "split": "train", "seconds": {"step": spent, "lost": 0.0}})
    log.close()
    return tmp_path


def test_points_and_seconds_are_those_that_the_run_wrote(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = pictures.points_of(run)
    assert not caplog.records  # TensorFlow warns of old ways to read event files
    assert points == {
        "loss": {"train": [(10, 3.0), (20, 1.5)], "dev": [(20, 2.0)]},
        "accuracy": {"dev": [(20, 0.5)]},
    }
    assert pictures.seconds_of(run) == {"step": 3.0, "lost": 0.0}
    assert pictures.main(["pictures", str(tmp_path / "drawn"), str(run)]) == 0
    drawn = {path.name: path.read_text() for path in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == [
        "my.Model.curves.svg", "my.Model.time.svg", "schedules.svg", "sharding.svg",
        "step.svg",
    ]  # fmt: skip
    assert {"loss", "accuracy", "train", "dev"} <= {*texts(drawn["my.Model.curves.svg"])}
    assert "lost" not in texts(drawn["my.Model.time.svg"])


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pictures.main(["pictures", str(tmp_path), str(tmp_path / "none")]) == 1
    assert "none is not a run: it has no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert pictures.main(["pictures", str(tmp_path), str(tmp_path)]) == 1
    assert "has no curves: there are no scalars in its events" in capsys.readouterr().err
    assert pictures.main(["pictures"]) == 2
    assert pictures.main(["pictures", str(tmp_path / "metrics.jsonl")]) == 1
    assert "metrics.jsonl" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_without_runs_only_schedules_shards_and_a_step_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "schedules", lambda: "a")
    monkeypatch.setattr(pictures, "sharding", lambda: "b")
    monkeypatch.setattr(pictures, "training_step", lambda: "c")
    assert pictures.main(["pictures", str(tmp_path / "drawn")]) == 0
    found = {path.name: path.read_text() for path in (tmp_path / "drawn").iterdir()}
    assert found == {"schedules.svg": "a", "sharding.svg": "b", "step.svg": "c"}
