"""Digests of the data of a run, stored in its assets: a resumed run must have the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tekso.framework import bounded, files
from tekso.framework.input.errors import InputError


def check_digest(path: str, digest: str, data: str, *, what: str, remedy: str) -> None:
    """Stores the digest of some data, or compares it with the stored one.

    Args:
      path: JSON file of the digest; it is written if it does not exist.
      digest: digest of the data.
      data: one-line description of the data.
      what: start of the error's sentence, such as "the images differ".
      remedy: its last sentences: what to do.

    Raises:
      InputError: the digests differ, or the file is damaged.
    """
    if not files.exists(path):
        about = {"data": data, "digest": digest}
        files.write_atomically(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        return
    try:
        kept = bounded.read_json(path)
        digest_then, data_then = kept["digest"], kept["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): remove it") from error
    if digest_then == digest:
        return
    difference = f"then {data_then}; now {data}"
    if data_then == data:
        difference = f"{data}, with different values or in a different order"
    raise InputError(f"{what}: {difference}. {remedy}")


def digest_of(batches: Iterable[Any]) -> str:
    """Returns a digest of batches: names, types, shapes and values of their arrays."""
    found = hashlib.sha256()
    for batch in batches:
        if not isinstance(batch, Mapping):
            continue  # `input_checks` rejects it
        for name, values in sorted(batch.items()):
            array = np.asarray(values)
            found.update(f" {name} {array.dtype} {array.shape} ".encode())
            found.update(
                repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
            )
    return found.hexdigest()[:16]
