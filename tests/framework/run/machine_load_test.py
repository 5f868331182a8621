"""Tests of what is measured of other programs during a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tekso.framework.run import machine_load
from tekso.framework.run.machine_load import Load, MachineLoad

BUSY = "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass"


def times(*readings: tuple[float, float, float] | None) -> Iterator[object]:
    return iter(readings)


def test_the_time_of_other_programs_is_that_of_all_without_its_own() -> None:
    readings = times((10.0, 100.0, 1.0), (14.0, 106.0, 3.5), (20.0, 106.0, 4.0))
    load = MachineLoad(lambda: next(readings))  # type: ignore[arg-type, return-value]
    found = load.now()
    assert found is not None and (found.seconds, found.others_cpu_seconds) == (4.0, 3.5)
    load.resume(Load(2, 100.0, 50.0))
    load.resume(Load(2, 999.0, 999.0))  # a rollback: this process has measured that time
    found = load.now()
    assert found is not None and (found.seconds, found.others_cpu_seconds) == (110.0, 53.0)


def test_only_a_machine_that_others_use_is_mentioned() -> None:
    assert Load(2, 10.0, 1.9).text() == "" and Load(2, 0.0, 0.0).text() == ""
    assert Load(2, 10.0, 2.1).text() == "beside other programs (0.2 of 2 cores)"
    assert Load(1, 10.0, 99.0).text() == "beside other programs (1.0 of 1 core)"


def test_a_running_program_is_another_and_a_child_that_ended_is_its_own() -> None:
    load, before = MachineLoad(), machine_load.reading()
    if before is None:
        pytest.skip("this system does not say how much CPU time all programs use")
    with subprocess.Popen([sys.executable, "-c", BUSY]):
        while (now := load.now()) is not None and now.others_cpu_seconds < 0.3:
            assert now.seconds < 60
            time.sleep(0.02)
    after = machine_load.reading()
    assert after is not None and after[2] - before[2] >= 0.6


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu0 a b\n"])
def test_an_unknown_load_is_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(machine_load, "_STAT", tmp_path / "stat")
    assert MachineLoad().now() is None


def test_only_cores_of_this_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 50 900 70 1 2 3 4 5\ncpu1 900 0 0 0 0 0 0 0 0 0\n"
    )
    monkeypatch.setattr(machine_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    found = machine_load.reading()
    assert found is not None and found[1] * os.sysconf("SC_CLK_TCK") == 156


@pytest.mark.parametrize(
    "record",
    [None, 3, {}, {"cores": 0, "seconds": 1.0, "others_cpu_seconds": 1.0},
               {"cores": 2, "seconds": "x", "others_cpu_seconds": 1.0},
               {"cores": 2, "seconds": -1.0, "others_cpu_seconds": 1.0}],
)  # fmt: skip
def test_damaged_records_have_no_load(record: object) -> None:
    assert machine_load.of_record(record) is None
    good = {"cores": 2, "seconds": 1.0, "others_cpu_seconds": 0.5}
    assert machine_load.longest([record, good, {**good, "seconds": 0.5}]) == Load(2, 1.0, 0.5)
