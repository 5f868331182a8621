"""The number of cores is that of the cores, or of the CPU time that a container has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tekso.framework import control_groups, cores


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine of 64 cores; returns the folder of its control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    yield tmp_path / "groups"
    cores._worth.cache_clear()


def num_cores() -> int:
    cores._worth.cache_clear()
    return cores.num_cores()


def limit(folder: Path, quota: str) -> None:
    """Writes the limit of a group in both versions."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{quota} 100000\n")
    (folder / "cpu.cfs_quota_us").write_text(f"{'-1' if quota == 'max' else quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")


def test_all_cores_count_without_a_limit(groups: Path) -> None:
    assert num_cores() == 64  # no control groups
    (groups.parent / "own").write_text("0::/job\n")
    limit(groups / "job", "max")
    assert num_cores() == 64


@pytest.mark.parametrize(
    ("own", "root"),
    [("0::/slice/job\n", ""), ("5:cpu,cpuacct:/slice/job\n4:memory:/other\n0::/\n", "cpu")],
    ids=["version 2", "version 1"],
)
def test_a_limit_of_cpu_time_counts_as_the_cores_that_it_is_worth(
    groups: Path, own: str, root: str
) -> None:
    (groups.parent / "own").write_text(own)
    limit(groups / root / "other", "100000")
    limit(groups / root / "slice" / "job", "max")
    limit(groups / root / "slice", "350000")
    assert num_cores() == 4
    limit(groups / root / "slice" / "job", "50000")
    assert num_cores() == 1
    limit(groups / root / "slice" / "job", "100000000")  # of more cores than there are
    limit(groups / root / "slice", "max")
    assert num_cores() == 64
    limit(groups / root, "200000")  # the root of a container is its own group
    assert num_cores() == 2
