"""The whole report of a run: for people, programs and TensorBoard."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

from report_values import MANY, VALUES, events

from tekso.framework.run.logdir import Logdir
from tekso.framework.run.machine_load import MachineLoad
from tekso.framework.run.pace import Reading
from tekso.framework.run.report import summary
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.run.report.report import Report
from tekso.framework.task import Scored


def test_a_report_reaches_people_programs_and_tensorboard(tmp_path: Path) -> None:
    stream = io.StringIO()
    report = Report(Logdir(str(tmp_path)), PlainConsole(stream), title="lm.some.Model", steps=20)
    report.train(10, VALUES, Reading(2000.0, 0.5, 0.25), unit="tokens")
    report.evaluation("dev", 10, {"loss": 2.0}, seconds=1.0, is_best=True)
    report.draw_curves()
    report.close()
    first, second = (json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first.items() >= {"step": 10, "split": "train", "tokens_per_second": 2000.0}.items()
    assert first.items() >= VALUES.items()
    assert second["split"] == "dev" and second["loss"] == 2.0
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith(" 2.5s") and lines[1].startswith("dev at step 10  loss 2.0000")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert {tag for _, tag, _ in events(tmp_path / "events" / "train")} >= VALUES.keys()
    assert report.evaluated(10)["dev"]["loss"] == 2.0 and report.evaluated(9) == {}


def test_a_report_has_the_load_of_the_machine_over_all_processes_of_the_run(
    tmp_path: Path,
) -> None:
    def report(*readings: tuple[float, float, float]) -> Report:
        times = iter(readings)
        load = MachineLoad(lambda: next(times))
        return Report(
            Logdir(str(tmp_path)), PlainConsole(io.StringIO()), title="m", steps=20, load=load
        )

    first = report((0.0, 0.0, 0.0), (4.0, 6.0, 4.0), (6.0, 8.0, 4.0))
    first.evaluation("dev", 10, {"loss": 2.0}, seconds=1.0, is_best=True)
    first.finish(12)  # these steps are done again
    assert first.evaluated(10) == {"dev": {"loss": 2.0}}
    first.close()
    second = report((0.0, 0.0, 0.0), (10.0, 13.0, 12.0))
    second.continue_from(10)
    second.evaluation("dev", 20, {"loss": 1.0}, seconds=1.0, is_best=True)
    second.close()
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(r["machine"]["seconds"], r["machine"]["others_cpu_seconds"]) for r in records]
    assert found == [(4.0, 2.0), (16.0, 5.0)] and records[0]["machine"]["cores"] >= 1


def test_notes_of_decoded_outputs_are_wrapped(tmp_path: Path) -> None:
    stream = io.StringIO()
    report = Report(Logdir(str(tmp_path)), PlainConsole(stream), title="m", steps=20)
    report.scored("dev", 10, Scored({}, "", notes=("accuracy 0.6956; " + "another 0.97, " * 7,)))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("  accuracy 0.6956; another") and len(first) <= 80
    assert second.startswith("      another")


def test_a_report_and_a_summary_show_the_figures_that_decide(tmp_path: Path) -> None:
    stream = io.StringIO()
    deciding = frozenset({"dev/f1", "other/recall"})
    report = Report(
        Logdir(str(tmp_path)), PlainConsole(stream), title="m", steps=20, deciding=deciding
    )
    report.evaluation("dev", 10, MANY, seconds=1.0, is_best=True)
    assert " f1 0.5000" in stream.getvalue() and "recall" not in stream.getvalue()
    done = summary.finished(
        steps=20, seconds=1.0, evaluations={"dev": MANY}, references={}, deciding=deciding
    )
    assert "f1 0.5000" in " ".join(done)


def test_a_report_and_a_summary_begin_with_declared_metrics(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    declared = frozenset({"f1"})
    report = Report(Logdir(str(tmp_path)), console, title="m", steps=20, declared=declared)
    report.evaluation("dev", 10, MANY, seconds=1.0, is_best=True)
    assert "bits/byte f1 0.5000 " in " ".join(stream.getvalue().split())
    done = summary.finished(
        steps=20,
        seconds=1.0,
        evaluations={"dev": MANY},
        references={},
        declared=declared,
        skipped="2 steps were not finite",
    )
    assert done[2] == "  2 steps were not finite"
    assert "bits/byte  f1 0.5000" in " ".join(done)


def test_figures_that_are_not_finite_can_be_read_and_summarized(tmp_path: Path) -> None:
    report = Report(Logdir(str(tmp_path)), PlainConsole(io.StringIO()), title="m", steps=20)
    values = {"loss": math.nan, "accuracy": math.inf}
    report.evaluation("dev", 20, values, seconds=1.0, is_best=False)
    report.close()
    found = report.evaluated(20)
    assert all(map(math.isnan, found["dev"].values())) and len(found["dev"]) == 2
    lines = summary.finished(steps=20, seconds=1.0, evaluations=found, references={})
    assert lines[-1].split() == ["dev", "loss", "nan", "accuracy", "nan"]
