"""The size and the SHA-256 of a file, as `checkpoint.json` has them."""

from __future__ import annotations

import hashlib
from typing import Any

from tekso.framework import files

_CHUNK_BYTES = 1 << 22


def checksum(path: str) -> dict[str, Any]:
    """Returns the size and the SHA-256 of a file; reads it in chunks.

    Raises:
      OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with files.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"size_bytes": size, "sha256": digest.hexdigest()}
