"""The cache of tokens: equal to memory, written by one process, whole after kill -9 and damage."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tekso.framework import files
from tekso.framework.input import columns
from tekso.framework.input.columns import Column, FileColumn
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin, Skips
from tekso.framework.input.token_cache import Place, TableWriter, obtain

IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
ROOT = Path(__file__).parents[3]
NUMBERS = np.arange(1000, dtype=np.int32)

WRITER = """
import os, signal, sys
import numpy as np
from tekso.framework.input.skips import Skips
from tekso.framework.input.token_cache import Place, obtain

folder, name, is_hanging = sys.argv[1], sys.argv[2], sys.argv[3] == "hang"


def write(writer):
    for begin in range(0, 1000, 100):
        writer.append("x", np.arange(begin, begin + 100, dtype=np.int32))
        if is_hanging and begin == 500:
            print("half", flush=True)
            signal.pause()
    open(os.path.join(folder, name), "w").close()


place = Place(os.path.join(folder, "cache"), "train", ["data"], in_memory_bytes=1000)
found = obtain(place, skips=Skips(0, what=""), write=write)
print(found.columns["x"].read().sum(), flush=True)
"""


def place(folder: Path, *made_of: str, size: int = 100) -> Place:
    return Place(str(folder / "cache"), "train", made_of or ("data",), in_memory_bytes=size)


def write(writer: TableWriter) -> None:
    for numbers in np.split(NUMBERS, 10):
        writer.append("x", numbers)
        writer.append("y", (numbers[:2] * 7).astype(np.uint16))
        writer.add("sum", numbers.sum())


def never(writer: TableWriter) -> None:
    raise AssertionError("the table must come from the cache")


def opened(where: Place, make: Any = never, limit: int = 9) -> Any:
    return obtain(where, skips=Skips(limit, what="data"), write=make)


@IN_FOLDER
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), max_size=9))
def test_ranges_of_a_file_are_those_of_memory(
    tmp_path: Path, ranges: list[tuple[int, int]]
) -> None:
    numbers = np.random.default_rng(1).integers(0, 1 << 16, 100).astype(np.uint16)
    (tmp_path / "x").write_bytes(numbers.tobytes())
    starts = np.array([start for start, _ in ranges], np.int64)
    sizes = np.array([size for _, size in ranges], np.int64)
    expected = [number for start, size in ranges for number in numbers[start : start + size]]
    for column in (Column(numbers), FileColumn(str(tmp_path / "x"), np.uint16, 100)):
        found = column.ranges(starts, sizes)
        assert found.tolist() == expected and found.dtype == np.uint16
        assert column.take(starts).tolist() == numbers[starts].tolist()
        assert column.read().tolist() == numbers.tolist()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "BLOCK", 7)
            assert np.concatenate(list(column.blocks())).tolist() == numbers.tolist()
        with pytest.raises(IndexError, match="column of 100 numbers"):
            column.ranges(np.array([95]), np.array([6]))


@pytest.mark.parametrize("size", [0, 100, 1 << 30])
def test_a_cached_table_is_that_in_memory(tmp_path: Path, size: int) -> None:
    memory = opened(None, write)  # type: ignore[arg-type]
    first = opened(place(tmp_path, size=size), write)
    again = opened(place(tmp_path, size=size), write if size == 1 << 30 else never)
    for table in (memory, first, again):
        assert table.columns["x"].read().tolist() == NUMBERS.tolist()
        assert table.columns["y"].dtype == np.uint16 and len(table.columns["y"]) == 20
        assert table.totals == {"sum": NUMBERS.sum()}
    assert (tmp_path / "cache").exists() == (size < 1 << 30)
    other = opened(place(tmp_path, "other", size=size), lambda writer: writer.append("x", NUMBERS))
    assert set(other.columns) == {"x"}


def test_skipped_data_is_counted_again_and_its_limit_holds(tmp_path: Path) -> None:
    def with_skips(writer: TableWriter) -> None:
        for offset in range(150):
            skips.add(Origin("file", offset), "malformed")
        write(writer)

    skips = Skips(150, what="data")
    obtain(place(tmp_path), skips=skips, write=with_skips)
    again = Skips(150, what="data")
    obtain(place(tmp_path), skips=again, write=never)
    assert again.report == skips.report and again.report.count == 150
    with pytest.raises(InputError, match="max_skipped=149"):
        opened(place(tmp_path), limit=149)


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "entry"])
def test_a_damaged_entry_is_named_and_written_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(place(tmp_path), write)
    (entry,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    file = entry / ("entry.json" if damage == "entry" else "x.bin")
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "bit":
        file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    else:
        file.write_bytes(data[:-4])
    with caplog.at_level(logging.WARNING):
        repaired = opened(place(tmp_path), write)
    assert repaired.columns["x"].read().tolist() == NUMBERS.tolist()
    assert "is damaged" in caplog.text
    assert damage == "entry" or str(file) in caplog.text
    assert opened(place(tmp_path)).columns["x"].read().tolist() == NUMBERS.tolist()


def test_checksums_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tekso.framework.input import token_cache

    opened(place(tmp_path), write)
    monkeypatch.setattr(token_cache, "_checksum", never)
    opened(place(tmp_path))


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.open

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            """Closes nothing."""

    def full(path: str, mode: str = "rb") -> Any:
        return Full() if path.endswith("x.bin") and mode == "wb" else real(path, mode)

    monkeypatch.setattr(files, "open", full)
    with pytest.raises(InputError, match=r"cache: No space left .* set `cache_dir`"):
        opened(place(tmp_path), write)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.undo()
    opened(place(tmp_path), write)


def test_without_a_folder_to_write_to_tokens_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    found = opened(place(tmp_path), write)
    assert found.columns["x"].read().tolist() == NUMBERS.tolist()
    assert "not cached" in caplog.text


def test_one_process_writes_while_others_wait(tmp_path: Path) -> None:
    names = ["1", "2", "3"]
    programs = [processes.start(["-c", WRITER, tmp_path, name, ""], cwd=ROOT) for name in names]
    for program in programs:
        stdout, stderr = program.communicate(timeout=60)
        assert stdout.split() == [str(NUMBERS.sum())], stderr
    assert sum((tmp_path / name).exists() for name in names) == 1


def test_an_entry_of_a_killed_process_is_written_again(tmp_path: Path) -> None:
    killed = processes.start(["-c", WRITER, tmp_path, "killed", "hang"], cwd=ROOT, live=True)
    assert killed.stdout.readline() == "half\n"
    waiting = processes.start(["-c", WRITER, tmp_path, "waiting", ""], cwd=ROOT)
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert any(".unfinished." in name for name in names)
    killed.kill()
    assert waiting.communicate(timeout=60)[0].split() == [str(NUMBERS.sum())]
    killed.wait(timeout=60)
    assert not (tmp_path / "killed").exists()
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert len(names) == 2 and not any(".unfinished." in name for name in names)
    assert opened(place(tmp_path)).columns["x"].read().tolist() == NUMBERS.tolist()
