"""TFRecord files: against TensorFlow's own writer; truncated, corrupted, compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input.errors import InputError
from tekso.framework.input.record_frames import masked_checksum
from tekso.framework.input.skips import BadRecordError
from tekso.framework.input.tfrecords import TfRecords

RECORDS = [b"first", b"", b"the third record", b"4" * 3000]


def write(path: Path, records: list[bytes], compression: str = "") -> Path:
    options = tf.io.TFRecordOptions(compression_type=compression)
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)
    return path


def source(path: Path, split: Any = "train", **kwargs: Any) -> TfRecords:
    kwargs = {"files": str(path), "dev_fraction": 0.0, **kwargs}
    one: TfRecords = TfRecords.Params(**kwargs).instantiate(split=split)
    return one


def all_of(one: TfRecords) -> list[Any]:
    return [record for _, record in one.records()]


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_records_are_read_in_order_and_by_index(tmp_path: Path, compression: str) -> None:
    one = source(write(tmp_path / "a", RECORDS, compression))
    assert all_of(one) == RECORDS
    assert [one[i] for i in (3, 0, 2, 1)] == [RECORDS[i] for i in (3, 0, 2, 1)]
    assert [one.origin(i).offset for i in range(4)] == [0, 21, 37, 69]
    assert one.skipped().count == 0


def test_a_record_as_long_as_the_mark_of_gzip_is_no_gzip(tmp_path: Path) -> None:
    records = [b"x" * 0x8B1F]
    assert all_of(source(write(tmp_path / "a", records))) == records


def test_splits_share_out_the_records(tmp_path: Path) -> None:
    records = [f"{i}".encode() for i in range(20)]
    path = write(tmp_path / "a", records)
    for holdout in ("end", "hash"):
        shares = {"holdout": holdout, "dev_fraction": 0.2, "test_fraction": 0.2}
        parts = [all_of(source(path, split, **shares)) for split in ("train", "test", "dev")]
        together = [record for part in parts for record in part]
        assert sorted(together) == sorted(records)
        assert len(parts[0]) > 8
        if holdout == "end":
            assert together == records


def test_a_wrong_byte_of_data_costs_its_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a", RECORDS)
    data = bytearray(path.read_bytes())
    data[37 + 12 + 4] ^= 1
    path.write_bytes(data)
    one = source(path)
    assert all_of(one) == [RECORDS[0], RECORDS[1], RECORDS[3]]
    skip = one.skipped().named[0]
    assert (skip.file, skip.offset) == (str(path), 37)
    assert skip.reason == "the 16 bytes of data have a wrong checksum"
    with pytest.raises(BadRecordError, match=r"byte 37: .*wrong checksum"):
        one[2]


def test_a_wrong_length_costs_the_rest_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a", RECORDS)
    data = bytearray(path.read_bytes())
    data[21] = 3
    path.write_bytes(data)
    one = source(path)
    assert all_of(one) == RECORDS[:1]
    skip = one.skipped().named[0]
    assert skip.offset == 21 and "rest of the file is lost" in skip.reason


def test_a_wrong_length_beyond_the_end_is_distinguished_from_a_file_that_is_cut_off(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a", RECORDS)
    data = bytearray(path.read_bytes())
    data[69 + 3] = 1
    path.write_bytes(data)
    one = source(path)
    assert all_of(one) == RECORDS[:3]
    reason = "the length of a record has a wrong checksum: the rest of the file is lost"
    assert [skip.reason for skip in one.skipped().named] == [reason]


def test_a_file_that_disappears_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a", RECORDS)
    one = source(path)
    path.unlink()
    with pytest.raises(BadRecordError, match=r"a, byte 0: .*No such file"):
        one[0]


@given(st.integers(1, 3084))
def test_a_file_cut_off_anywhere_gives_its_whole_records(cut: int) -> None:
    # A write that was interrupted. The four records end at these bytes.
    path = Path(str(TEMPORARY / "cut"))
    ends = [21, 37, 69, 3085]
    path.write_bytes(WHOLE[:cut])
    whole = sum(end <= cut for end in ends)
    if not whole:
        with pytest.raises(InputError, match=r"nothing is left(?s:.)*truncated"):
            source(path)
        return
    one = source(path)
    assert all_of(one) == RECORDS[:whole]
    assert one.skipped().count == (cut not in ends)


@pytest.fixture(autouse=True, scope="module")
def _whole_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    global TEMPORARY, WHOLE
    TEMPORARY = tmp_path_factory.mktemp("cut")
    WHOLE = write(TEMPORARY / "whole", RECORDS).read_bytes()


TEMPORARY = Path()
WHOLE = b""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"just some text, no records at all", "not a TFRecord file"),
        (b"\x1f\x8b\x08\x00 no gzip either.....", "damaged gzip|not a TFRecord|Unknown|CRC"),
    ],
)
def test_what_is_no_tfrecord_file_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InputError, match=f"nothing is left(?s:.)*a(, byte 0)?: .*({reason})"):
        source(tmp_path / "a")


def test_a_gzip_file_that_is_cut_off_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a", RECORDS, "GZIP")
    path.write_bytes(path.read_bytes()[:-9])
    write(tmp_path / "b", RECORDS)
    one = source(tmp_path / "*")
    assert all_of(one) == RECORDS
    assert "damaged gzip" in one.skipped().named[0].reason


def test_more_than_max_skipped_is_an_error_that_lists_them(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"no records")
    with pytest.raises(InputError, match=r"more than max_skipped=1 (?s:.)*/a, (?s:.)*/b, "):
        source(tmp_path / "*", max_skipped=1)


def test_a_feature_of_an_example_is_read(tmp_path: Path) -> None:
    features = {
        "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"hello"])),
        "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=[3, 1, 2])),
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    path = write(tmp_path / "a", [example.SerializeToString()])
    assert source(path, feature="text")[0] == b"hello"
    np.testing.assert_array_equal(source(path, feature="ids")[0], [3, 1, 2])
    np.testing.assert_array_equal(source(path, feature="x")[0], np.float32([0.5]))
    with pytest.raises(BadRecordError, match="no feature 'txt', only: ids, text, x"):
        source(path, feature="txt")[0]


def test_a_record_that_is_no_example_is_skipped(tmp_path: Path) -> None:
    one = source(write(tmp_path / "a", [b"\xff\xff\xff"]), feature="text")
    with pytest.raises(InputError, match=r"nothing is left(?s:.)*not a tf\.train\.Example"):
        all_of(one)


def test_an_index_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="record 4 of 4"):
        source(write(tmp_path / "a", RECORDS))[4]


def test_the_fingerprint_is_that_of_the_data(tmp_path: Path) -> None:
    one = source(write(tmp_path / "a", [b"one", b"two"])).fingerprint()
    assert source(write(tmp_path / "b", [b"one", b"two"])).fingerprint() == one
    assert source(write(tmp_path / "c", [b"one", b"twe"])).fingerprint() != one


def test_the_checksum_of_the_standard_test_string() -> None:
    crc = 0xE3069283  # the published check value of CRC-32C
    assert masked_checksum(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
