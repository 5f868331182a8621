"""Reads which tensors a safetensors file has, and where their bytes are, without reading them.

    8 bytes: length of the header | header, JSON | bytes of the tensors

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.run.stored_tensors import (
    StoredPiece,
    TensorInFiles,
    check_tensor,
    numpy_dtype,
    printable,
)

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


def read_header(
    path: str,
) -> tuple[dict[str, TensorInFiles], dict[str, str], tuple[int, int], list[str]]:
    """Reads the header of a safetensors file.

    Returns: the tensors by name; the metadata; the offset of the first byte of data and the size of
      the file; and what is wrong with tensors that are not among the first.

    Raises:
      ValueError: it is no safetensors file, or its header is damaged.
      OSError: it cannot be read.
    """
    size = files.size_bytes(path)
    length = int.from_bytes(files.read(path, 0, _LENGTH_BYTES), "little")
    begin = _LENGTH_BYTES + length
    if begin > size:
        raise ValueError("it is truncated, or not a safetensors file")
    if length > bounded.LONGEST:
        raise ValueError(f"its header has {length:,} bytes; at most {bounded.LONGEST:,} are read")
    header = bounded.parse_json(files.read(path, _LENGTH_BYTES, length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    texts = metadata.values() if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"its {_METADATA} are not texts")
    found, problems = {}, []
    for name, about in header.items():
        try:
            found[name] = _tensor(name, about, path, begin)
        except ValueError as error:
            problems.append(f"{printable(name)}: {error}")
    return found, metadata, (begin, size), problems


def _tensor(name: str, about: Any, path: str, begin: int) -> TensorInFiles:
    about = about if isinstance(about, Mapping) else {}
    shape, offsets, dtype = about.get("shape"), about.get("data_offsets"), about.get("dtype")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError("its shape or its data_offsets are not lists of sizes")
    check_tensor(name, shape)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"it has data type {dtype}, which cannot be read")
    length = offsets[1] - offsets[0]
    wanted = math.prod(shape) * numpy_dtype(_DTYPES[dtype]).itemsize
    if length != wanted:
        raise ValueError(f"it has {length:,} bytes, but {dtype} of shape {shape} has {wanted:,}")
    start = (0,) * len(shape)
    piece = StoredPiece(path, begin + offsets[0], length, start, tuple(shape))
    return TensorInFiles(name, _DTYPES[dtype], tuple(shape), (piece,))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
