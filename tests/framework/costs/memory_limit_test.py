"""A plan compares a step with the memory that its process may use, not with all of the machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tekso.framework import control_groups, out_of_memory
from tekso.framework.costs import memory_limit, stored_speeds, this_machine
from tekso.framework.costs.this_machine import ThisMachine

GB = 1 << 30


def write(folder: Path, file: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text + "\n")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 64 GB; returns the folder of its control groups."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB))
    monkeypatch.setattr(out_of_memory, "limit_bytes", lambda: None)
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    return tmp_path / "groups"


def test_the_memory_is_that_of_the_machine_without_a_limit(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory_limit.memory_bytes() == 64 * GB  # no control groups
    write(groups.parent, "own", "0::/job")
    write(groups / "job", "memory.max", "max")
    assert memory_limit.memory_bytes() == 64 * GB
    monkeypatch.setattr(out_of_memory, "limit_bytes", lambda: 3 * GB)
    assert memory_limit.memory_bytes() == 3 * GB


@pytest.mark.parametrize(
    ("own", "place", "file"),
    [
        ("0::/slice/job", "", "memory.max"),
        ("5:cpu:/other\n4:hugetlb,memory:/slice/job\n0::/", "memory", "memory.limit_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_least_limit_of_a_group_and_of_those_above_it_counts(
    groups: Path, own: str, place: str, file: str
) -> None:
    write(groups.parent, "own", own)
    write(groups / place / "slice" / "job", file, str(9 * GB))
    write(groups / place / "other", file, str(GB))
    assert memory_limit.memory_bytes() == 9 * GB
    write(groups / place / "slice", file, str(5 * GB))
    assert memory_limit.memory_bytes() == 5 * GB
    # In a container whose group is not visible by its path, the root is the group.
    write(groups.parent, "own", own.replace("slice/job", "not/visible"))
    assert memory_limit.memory_bytes() == 64 * GB
    write(groups / place, file, str(2 * GB))
    assert memory_limit.memory_bytes() == 2 * GB


def test_the_device_of_this_machine_has_this_memory(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = this_machine.only()
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    monkeypatch.setattr(stored_speeds, "stored", lambda *_, **__: machine)
    this_machine.measured.cache_clear()
    try:
        write(groups.parent, "own", "0::/")
        write(groups, "memory.max", str(7 * GB))
        assert this_machine.find("this_machine").memory_bytes == 7 * GB
    finally:
        this_machine.measured.cache_clear()
