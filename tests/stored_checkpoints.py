"""Checkpoints in pieces for tests of tekso-ckpt, and a writer of the index for made-up damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from tekso.framework.execution.shards import Shard, of_arrays
from tekso.framework.run import checkpoint_files, tensor_files
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.index_table import entries
from tekso.framework.run.process_group import ProcessGroup

RNG = np.random.default_rng(3)
STATE: dict[str, Any] = {
    "weights/model/a/w": RNG.normal(size=(6, 5)).astype(np.float32),
    "weights/model/b/half": np.asarray(tf.cast(RNG.normal(size=(4, 3)), tf.bfloat16)),
    "learner/model/a/w/momentum": RNG.normal(size=(6, 5)).astype(np.float32),
    "learner/updates/applied": np.int64(7),
}
SPLIT = "weights/model/a/w"


def save(path: Path, state: dict[str, Any] = STATE) -> Path:
    """Writes a checkpoint whose first weight is in four pieces, in two data files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts: list[list[Any]] = [[], list(of_arrays({k: v for k, v in state.items() if k != SPLIT}))]
    for rows in (slice(0, 4), slice(4, 6)):
        for columns in (slice(0, 2), slice(2, 5)):
            where, value = (rows, columns), state[SPLIT]
            shard = Shard(SPLIT, value.shape, "float32", where, lambda v=value, w=where: v[w])
            parts[rows.start // 4].append(shard)
    tensors = {
        key: {"shape": list(np.shape(v)), "dtype": v.dtype.name, "dims": ["x"] * np.ndim(v)}
        for key, v in state.items()
    }
    about = Description(step=7, model="lm.Some", params="", tensors=tensors)
    pieces = [list(map(tensor_files.on_host, part)) for part in parts]
    checkpoint_files.write_shards(str(path), pieces, about, size_bytes=1000, group=ProcessGroup())
    return path


def rewrite_index(path: Path, change: Callable[[dict[bytes, bytes]], object]) -> None:
    """Changes the entries of an index, and writes it with correct checksums."""
    index = path / "tensors.index"
    table = dict(entries(index.read_bytes()))
    change(table)

    def number(value: int) -> bytes:
        low = value & 127
        return bytes([low]) if value < 128 else bytes([low | 128]) + number(value >> 7)

    def block(pairs: dict[bytes, bytes]) -> bytes:
        text = b"".join(
            number(0) + number(len(key)) + number(len(value)) + key + value
            for key, value in sorted(pairs.items())
        )
        text += struct.pack("<II", 0, 1) + b"\0"
        crc = google_crc32c.value(text)
        return text + struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    data = block(table)
    place = number(0) + number(len(data) - 5)
    second = block({b"\xff": place})
    footer = place + number(len(data)) + number(len(second) - 5)
    magic = bytes.fromhex("57fb808b247547db")
    index.write_bytes(data + second + footer.ljust(40, b"\0") + magic)
