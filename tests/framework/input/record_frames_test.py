"""The frames of TFRecord files: positions, digests that do not change, and memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework.input.record_frames import masked_checksum, walk
from tekso.framework.input.sources import digest
from tekso.framework.input.tfrecords import TfRecords


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    check = struct.pack("<I", masked_checksum(length))
    return length + check + data + struct.pack("<I", masked_checksum(data))


def test_positions_are_sums_of_lengths() -> None:
    records = [b"x" * (i * i % 71) for i in range(200)]
    ends = np.cumsum([len(frame(record)) for record in records])
    wanted = np.stack([[0, *ends[:-1]], [len(record) for record in records]], axis=1)
    data = b"".join(map(frame, records))
    frames = walk(io.BytesIO(data), len(data))
    np.testing.assert_array_equal(np.concatenate(list(frames.blocks())), wanted)
    assert [frames.offset(i) for i in range(200)] == wanted[:, 0].tolist()
    part = frames.part(67, 190)
    assert len(part) == 123
    np.testing.assert_array_equal(np.concatenate(list(part.blocks())), wanted[67:190])
    assert [part.offset(i) for i in range(123)] == wanted[67:190, 0].tolist()
    assert not list(frames.part(5, 5).blocks())


def frames_digest(data: bytes) -> bytes:
    """Returns the digest of a file, from the format of TFRecord files alone."""
    headers, footers, at = b"", b"", 0
    while at + 12 <= len(data):
        headers += data[at : at + 12]
        at += 12 + struct.unpack("<Q", data[at : at + 8])[0] + 4
        if at <= len(data):
            footers += data[at - 4 : at]
    return bytes.fromhex(digest([headers, footers]))


@pytest.mark.parametrize("settings", [{}, {"holdout": "hash", "dev_fraction": 0.4}])
def test_the_fingerprint_of_a_source_is_that_of_earlier_versions(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = b"".join(frame(b"a" * (i % 9)) for i in range(90))
    contents = [whole, frame(b"second"), whole[:-3]]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}").write_bytes(content)
    source: Any = TfRecords.Params(files=f"{tmp_path}/*", feature="f", **settings).instantiate()
    origins = [source.origin(i) for i in range(len(source))]
    assert 0 < len(origins) < 180
    file = np.array([int(Path(origin.file).name) for origin in origins])
    sizes = [
        struct.unpack("<Q", contents[i][origin.offset :][:8])[0]
        for i, origin in zip(file, origins, strict=True)
    ]
    records = np.array([(origin.offset, size) for origin, size in zip(origins, sizes, strict=True)])
    parts = [*map(frames_digest, contents), file.tobytes(), records.tobytes(), b"f"]
    assert source.fingerprint() == digest(parts)


def test_a_scan_needs_few_bytes_for_a_record() -> None:
    count = 40_000
    file = io.BytesIO(frame(b"") * count)
    tracemalloc.start()
    try:
        frames = walk(file, 16 * count)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(frames) == count
    assert kept < 6 * count
    assert peak < 30 * count
