"""ArrayRecord files: against their own writer; truncated, corrupted, held out."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework import out_of_memory
from tekso.framework.input import array_records
from tekso.framework.input.array_records import ArrayRecords
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError

array_record_module = pytest.importorskip(
    "array_record.python.array_record_module", reason="array_record is available for Linux only"
)

RECORDS = [b"first", b"", b"the third record", b"4" * 3000]


def write(path: Path, records: list[bytes], group_size: int = 1) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), f"group_size:{group_size}")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def source(path: Path, split: Any = "train", **kwargs: Any) -> ArrayRecords:
    kwargs = {"files": str(path), "dev_fraction": 0.0, **kwargs}
    one: ArrayRecords = ArrayRecords.Params(**kwargs).instantiate(split=split)
    return one


def all_of(one: ArrayRecords) -> list[Any]:
    return [record for _, record in one.records()]


@pytest.mark.parametrize("group_size", [1, 3])
def test_records_are_read_in_order_and_by_index(tmp_path: Path, group_size: int) -> None:
    write(tmp_path / "a", RECORDS, group_size)
    write(tmp_path / "b", [b"five"], group_size)
    one = source(tmp_path / "?")
    assert all_of(one) == [*RECORDS, b"five"]
    assert [one[i] for i in (4, 0, 3, 2, 1)] == [b"five", *(RECORDS[i] for i in (0, 3, 2, 1))]
    assert (one.origin(3).file, one.origin(3).offset) == (str(tmp_path / "a"), 3)
    with pytest.raises(IndexError, match="record 5 of 5"):
        one[5]


def test_the_splits_divide_the_records(tmp_path: Path) -> None:
    records = [f"record {i}".encode() for i in range(700)]
    path = write(tmp_path / "a", records)
    for holdout in ("end", "hash"):
        kwargs = {"holdout": holdout, "dev_fraction": 0.2, "test_fraction": 0.1}
        parts = [all_of(source(path, split, **kwargs)) for split in ("train", "test", "dev")]
        assert sorted(itertools.chain(*parts)) == sorted(records)
        assert all(abs(len(part) - n) < 45 for part, n in zip(parts, (490, 70, 140), strict=True))
        if holdout == "end":
            assert list(itertools.chain(*parts)) == records
        dev = source(path, "dev", **kwargs)
        assert [dev[i] for i in range(len(dev))] == parts[2]
    own = {"dev_files": str(write(tmp_path / "own", [b"dev"]))}
    assert all_of(source(path, "dev", **own)) == [b"dev"]


def test_a_corrupted_record_is_skipped_and_named(tmp_path: Path) -> None:
    records = [np.random.default_rng(i).bytes(500) for i in range(20)]  # cannot be compressed
    path = write(tmp_path / "a", records)
    data = bytearray(path.read_bytes())
    data[data.index(records[7]) + 100] ^= 1
    path.write_bytes(data)
    one = source(path)
    assert all_of(one) == records[:7] + records[8:]
    (skip,) = one.skipped().named
    assert str(skip).startswith(f"{path}, record 7: ") and "hash mismatch" in skip.reason
    with pytest.raises(BadRecordError, match="hash mismatch"):
        one[7]
    with pytest.raises(InputError, match="max_skipped=0"):
        all_of(source(path, max_skipped=0))


@pytest.mark.parametrize("damage", ["empty", "truncated", "other", "missing"])
def test_a_file_that_cannot_be_read_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    good, bad = write(tmp_path / "a", RECORDS), tmp_path / "b"
    data = good.read_bytes()
    wrong = {"empty": b"", "truncated": data[: len(data) // 2], "other": b"hello\n" * 20_000}
    if damage == "missing":
        bad.symlink_to(tmp_path / "nowhere")
    else:
        bad.write_bytes(wrong[damage])
    one = source(tmp_path / "?")
    assert all_of(one) == RECORDS
    (skip,) = one.skipped().named
    wanted = "No such file" if damage == "missing" else "no records: not an ArrayRecord file"
    assert skip.file == str(bad) and wanted in skip.reason
    with pytest.raises(InputError, match="nothing is left"):
        source(bad)


def test_a_feature_of_an_example_is_read(tmp_path: Path) -> None:
    import tensorflow as tf

    text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"hello"]))
    example = tf.train.Example(features=tf.train.Features(feature={"text": text}))
    path = write(tmp_path / "a", [example.SerializeToString(), b"\xff\xff\xff"])
    one = source(path, feature="text")
    assert all_of(one) == [b"hello"]
    assert one.skipped().named[0].reason == "the record is not a tf.train.Example"


def test_the_fingerprint_is_that_of_the_data(tmp_path: Path) -> None:
    one = source(write(tmp_path / "a", [b"one", b"two"])).fingerprint()
    assert source(write(tmp_path / "b", [b"one", b"two"])).fingerprint() == one
    assert source(write(tmp_path / "c", [b"one", b"twe"])).fingerprint() != one
    assert source(tmp_path / "a", dev_fraction=0.5).fingerprint() != one


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(InputError, match="pip install array_record"):
        source(tmp_path / "a")


def test_too_little_address_space_for_the_threads_of_the_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", RECORDS)
    monkeypatch.setattr(array_records, "_OPENED", [])
    monkeypatch.setattr(out_of_memory, "left_bytes", lambda: 500 << 20)
    with pytest.raises(MemoryError, match="starts 64 threads, which take 629 MB of the address"):
        source(path)
    monkeypatch.setattr(out_of_memory, "left_bytes", lambda: 700 << 20)
    source(path)
    monkeypatch.setattr(out_of_memory, "left_bytes", lambda: 0)  # the threads have started
    source(path)
