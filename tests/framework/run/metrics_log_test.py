"""The log of metrics: every record at once in full precision, and none of a later step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np

from tekso.framework.run.metrics_log import MetricsLog


def test_each_record_is_in_the_file_at_once_in_full_precision(tmp_path: Path) -> None:
    log = MetricsLog(str(tmp_path / "metrics.jsonl"))
    loss = float(np.float32(1.1))
    log.append({"step": 1, "split": "train", "loss": loss, "bad": math.nan})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "split": "train", "loss": loss, "bad": None}
    log.close()


def test_records_beyond_a_step_and_cut_off_lines_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(str(path))
    for step in (1, 2, 3, 4):
        log.append({"step": step, "split": "train", "loss": 1.0})
    log.append({"step": 2, "split": "dev", "loss": 1.0})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 1, "spl')
    log = MetricsLog(str(path))
    log.keep_until(2)
    assert [(r["step"], r["split"]) for r in log.read()] == [(1, "train"), (2, "train"), (2, "dev")]
    log.append({"step": 3, "split": "train", "loss": 2.0})
    assert log.read()[-1] == {"step": 3, "split": "train", "loss": 2.0}
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    log.close()


def test_lines_without_a_step_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = ["1", "-1", "true", "1.5", '"2"', "null", "9" * 400, "9" * 40, "0"]
    lines = [f'{{"step": {step}, "split": "dev", "loss": 1.0}}\n' for step in steps]
    path.write_text("".join(lines))
    log = MetricsLog(str(path))
    assert [record["step"] for record in log.read()] == [1, 0]
    assert log.left_out() == [2, 3, 4, 5, 6, 7, 8]


def test_a_log_on_another_file_system() -> None:
    log = MetricsLog("ram://report_test/metrics.jsonl")
    log.append({"step": 1, "split": "train", "loss": 1.0})
    log.append({"step": 2, "split": "train", "loss": 1.0})
    log.close()
    log.keep_until(1)
    assert [record["step"] for record in log.read()] == [1]
