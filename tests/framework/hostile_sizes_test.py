"""Files that claim sizes they do not have: each reader checks a size before it allocates."""

from __future__ import annotations

import gzip
import json
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import bounded, files
from tekso.framework.input import array_records, record_frames, token_cache
from tekso.framework.input.errors import InputError
from tekso.framework.input.record_frames import masked_checksum
from tekso.framework.input.skips import Skips
from tekso.framework.input.tfrecords import TfRecords
from tekso.framework.params import Params
from tekso.framework.run import index_check, index_table, tensor_files, weight_files
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoint_errors import CheckpointError, DamagedCheckpointError
from tekso.framework.run.logdir import Logdir

HUGE = [2**31, 2**40, 2**63 - 1, 2**64 - 1]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def _no_large_allocation() -> Iterator[None]:
    """Limits the address space to 4 GB more than now: a size that is believed is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("packed", [False, True])
def test_length_of_a_tfrecord(tmp_path: Path, length: int, packed: bool) -> None:
    header = struct.pack("<Q", length)
    data = header + struct.pack("<I", masked_checksum(header)) + b"data"
    path = tmp_path / "x.tfrecord"
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(InputError, match=f"a record of {length} bytes"):
        TfRecords.Params(files=str(path), dev_fraction=0.0).instantiate()


def test_record_that_gzip_would_unpack_to_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_frames, "_LONGEST", 1000)
    header, data = struct.pack("<Q", 5000), bytes(5000)
    record = header + struct.pack("<I", masked_checksum(header)) + data
    path = tmp_path / "x.tfrecord"
    path.write_bytes(gzip.compress(record + struct.pack("<I", masked_checksum(data))))
    with pytest.raises(InputError, match="longer than 1000 bytes"):
        TfRecords.Params(files=str(path), dev_fraction=0.0).instantiate()


def test_number_of_array_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.array_record"
    path.write_bytes(bytes(100))

    class Reader:
        def num_records(self) -> int:
            return 2**62

    monkeypatch.setattr(array_records, "_reader", lambda path: Reader())
    with pytest.raises(InputError, match=f"it cannot have {2**62} records"):
        array_records.ArrayRecords.Params(files=str(path), dev_fraction=0.0).instantiate()


# --- checkpoints ---


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    made = str(tmp_path / "tensors")
    values = [tf.ones([30 + i, 4]) for i in range(60)]
    names = [f"weights/some/long/path/of/layer_{i}/w" for i in range(60)]
    tf.raw_ops.SaveV2(prefix=made, tensor_names=names, shape_and_slices=[""] * 60, tensors=values)
    assert len(tensor_files.TensorFiles(made).shapes) == 60
    return made


def _varint(number: int) -> bytes:
    found = b""
    while number >= 128:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("which", [1, 3])
def test_block_of_an_index(prefix: str, length: int, which: int) -> None:
    path = Path(f"{prefix}.index")
    data = path.read_bytes()
    numbers, at = [], len(data) - 48
    for _ in range(4):
        number, at = index_table.varint(data, at)
        numbers.append(number)
    numbers[which] = length
    footer = b"".join(map(_varint, numbers)).ljust(40, b"\0") + data[-8:]
    path.write_bytes(data[:-48] + footer)
    with pytest.raises(DamagedCheckpointError, match=f"a block of {length:,} bytes"):
        tensor_files.TensorFiles(prefix)


def test_block_that_the_index_block_names(prefix: str) -> None:
    path = Path(f"{prefix}.index")
    data = path.read_bytes()
    _, (begin, length) = index_table.block_places(data)
    first = next(index_check._entries(data[begin : begin + length]))
    old = _varint(first[0]) + _varint(first[1])
    assert data.count(old, begin, begin + length) == 1
    new = _varint(first[0]) + b"\xff" * (len(_varint(first[1])) - 1) + b"\x7f"
    path.write_bytes(data[:begin] + data[begin:].replace(old, new, 1))
    with pytest.raises(DamagedCheckpointError, match="which is not in the file"):
        tensor_files.TensorFiles(prefix)


@pytest.mark.parametrize("size", [0, 10, 47, 100])
def test_truncated_index(prefix: str, size: int) -> None:
    path = Path(f"{prefix}.index")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedCheckpointError, match="not an index"):
        tensor_files.TensorFiles(prefix)


def test_tensors_that_are_larger_than_their_data_files(prefix: str) -> None:
    data = Path(f"{prefix}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match="but its data files"):
        tensor_files.TensorFiles(prefix)


@pytest.mark.parametrize("length", HUGE)
def test_header_of_safetensors(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match="truncated, damaged or not a safetensors file"):
        weight_files.open_weights(str(path))


@pytest.mark.parametrize("size", HUGE)
def test_tensor_of_safetensors(tmp_path: Path, size: int) -> None:
    about = {"w": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4]}}
    for header in (json.dumps(about), f'{{"w": {DEEP[:90_000]}'):
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
        with pytest.raises(CheckpointError, match="truncated, damaged or not a safetensors file"):
            weight_files.open_weights(str(path))


# --- JSON and the text of Params ---


def test_json_that_is_nested_or_too_long_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        bounded.parse_json(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        Description.from_json(f'{{"format": {DEEP}}}')
    with pytest.raises(ValueError, match="a number in the JSON text has 400 digits"):
        bounded.parse_json('{"loss": ' + "9" * 400 + "}")
    assert bounded.parse_json("[-12, 1e400]") == [-12, float("inf")]
    (tmp_path / "index.safetensors.index.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        weight_files._check_index(str(tmp_path / "index.safetensors.index.json"), [])
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room
    monkeypatch.setattr(files, "read", lambda *args: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=r"1,099,511,627,776 bytes; at most 67,108,864 are read"):
        bounded.read_json(str(path))


def test_params_of_a_run_that_are_too_long_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "params.txt").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="at most"):
        Logdir(str(tmp_path)).model()


@pytest.mark.parametrize(
    "literal",
    ["[" * 5000 + "]" * 5000, "-" * 100_000 + "1", "9" * 100_000, "[" * 2**21, "(" * 90, "1+" * 99],
)
def test_literal_that_is_nested_or_too_long_is_an_error(literal: str) -> None:
    with pytest.raises(ValueError, match="line 2") as error:
        Params.from_text(f'. : Params("tekso.framework.experiment:Run")\nsteps : {literal}')
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("dtype", "length"), [("object", 1), ("V8", 1), ("int64", 2**62), ("<U99999999", 1)]
)
def test_column_of_a_token_cache(tmp_path: Path, dtype: str, length: Any) -> None:
    (tmp_path / "x.bin").write_bytes(np.arange(1, 2).tobytes())
    about: dict[str, Any] = {"dtype": dtype, "length": length, "crc32": 0}
    text = json.dumps({"columns": {"x": about}, "skipped": [], "totals": {}})
    (tmp_path / token_cache._ABOUT).write_text(text)
    with pytest.raises(token_cache._DamagedError, match=r"x\.bin has|it has a column 'x' of"):
        token_cache._opened(str(tmp_path), Skips(0, what="tokens"))
